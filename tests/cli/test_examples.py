"""The examples run, on a tiny model with random weights."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.layers.attention.base import AttentionSpec
from tests.layers.test_torch_paged import ROWS, Case

EXAMPLES = Path(__file__).parents[2] / "examples"
OTHERS = ("nano_engine", "bounding_boxes")
"""They have tests of their own."""
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in OTHERS)


@pytest.fixture
def example(monkeypatch):
    """An example as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str):
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    yield load
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def settings(byte_llama):
    """A context long enough for the examples' prompts, with one token per byte."""
    return {
        "model": str(byte_llama),
        "hf_overrides": {"max_position_embeddings": 1024},
        "kv_cache_memory_bytes": 4 << 20,
    }


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(example, settings, capsys, name):
    example(name).main(max_tokens=4, **settings)
    assert capsys.readouterr().out


def test_the_policy_lets_short_prompts_go_first(example, settings, capsys):
    order = example("custom_policy").main(max_tokens=2, **settings)
    assert [len(prompt) < 20 for prompt in order] == [True, True, False]


def test_the_routing_policy_keeps_tenants_apart(example, settings, capsys):
    assert example("custom_routing_policy").main(max_tokens=2, **settings) == [1, 3]


def test_the_processor_forbids_repeated_ngrams(example, settings, capsys):
    _, tokens = example("custom_logits_processor").main(max_tokens=24, **settings)
    prompt_pairs = len("la la la la") - 1
    pairs = list(itertools.pairwise(tokens))
    assert len(set(pairs[prompt_pairs:])) == 24
    assert not set(pairs[:prompt_pairs]) & set(pairs[prompt_pairs:])


def test_the_attention_backend_agrees_with_the_engines_own(example, settings, capsys):
    own, textbook = example("custom_attention_backend").main(max_tokens=12, **settings)
    assert own == textbook


@pytest.mark.parametrize("window", [None, 1, 5])
def test_the_attention_backend_attends_to_the_right_tokens(example, window):
    case = Case(4, 2, ROWS, torch.float32)
    backend = example("custom_attention_backend").TextbookAttention()
    backend.prepare(4, case.kv, case.inputs, AttentionSpec(0.3, window))
    out = backend.attend(case.q, case.kv.nan_to_num(0.0), case.inputs, AttentionSpec(0.3, window))
    torch.testing.assert_close(out.double(), case.exact(0.3, window), rtol=1e-5, atol=1e-5)


def test_the_registered_model_is_the_one_that_runs(example, settings, capsys, monkeypatch):
    module = example("custom_model")
    as_it_is = module.main(max_tokens=4, **settings)
    monkeypatch.setattr(module, "CAP", 1e-6)  # all logits equal: four draws from 257 tokens
    flat = module.main(max_tokens=4, **settings)
    assert flat == pytest.approx(-4 * math.log(257), abs=1e-3)
    assert as_it_is > flat


def test_the_block_store_restores_a_session(example, settings, capsys, tmp_path, monkeypatch):
    module = example("custom_block_store")
    monkeypatch.setattr(module.tempfile, "TemporaryDirectory", lambda: contextlib.nullcontext(str(tmp_path)))
    stored = module.main(max_tokens=12, **settings)
    assert stored == len([path for path in (tmp_path / "blocks").rglob("*") if path.is_file()]) > 2
    tiers = {"kv_disk": str(tmp_path), "kv_store": "custom_block_store.CompressedFiles", "swap_space": 0.25}
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(**settings, **tiers) as llm:
        session = llm.sessions.resume("agent-7")
        output = session.generate(params)
        assert len(output.prompt_token_ids) - output.num_cached_tokens == 1, "the rest came from the store"
    with LLM(**settings) as llm:
        again = llm.generate({"prompt_token_ids": output.prompt_token_ids}, params, use_tqdm=False)[0]
    assert again.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short(name):
    most = 60 if name == "custom_block_store" else 40
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most
