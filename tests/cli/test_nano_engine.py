"""examples/nano_engine.py: generates the tokens of quire and of transformers."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from quire import LLM, SamplingParams
from tests.kernels.triton_target import DEVICE, HALF
from tests.models.harness import random_reference

FILE = Path(__file__).parents[2] / "examples" / "nano_engine.py"
SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
STRETCHED = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama 3 positions, tied": LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=STRETCHED),
    "qwen3": Qwen3Config(**SHAPE),
}


@pytest.fixture(scope="module")
def nano() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nano_engine", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nano_engine"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def prompts(count: int = 9) -> list[list[int]]:
    """Some share a beginning, some are one token long."""
    rnd = random.Random(0)
    beginning = [rnd.randrange(97) for _ in range(40)]
    return [
        beginning[: rnd.randrange(40)] + [rnd.randrange(97) for _ in range(rnd.randrange(1, 20))] for _ in range(count)
    ]


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A tiny checkpoint, and quire's greedy tokens."""
    config: PretrainedConfig = CONFIGS[request.param]
    folder = tmp_path_factory.mktemp("nano")
    random_reference(config).save_pretrained(folder)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20}
    with LLM(str(folder), **settings) as llm:  # type: ignore[arg-type]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params, use_tqdm=False)
    return folder, [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 7}, {"cache_tokens": 160}, {"max_num_seqs": 2}],
    ids=["all at once", "tiny chunks", "preempted", "two rows"],
)
def test_greedy_tokens_are_quires(nano: ModuleType, model: tuple[Path, list[list[int]]], settings: dict) -> None:
    folder, expected = model
    params = nano.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    settings = {"cache_tokens": 4096, "dtype": "float32", "skip_tokenizer_init": True} | settings
    llm = nano.LLM(str(folder), **settings)
    for _ in range(2):  # the second time the prefix cache has all that fits
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len(llm.blocks.free) == len(llm.blocks.refs) - 1
    assert len(llm.scheduler.free_rows) == settings.get("max_num_seqs", 256)


def test_the_prefix_cache_computes_only_what_is_new(nano: ModuleType, model: tuple[Path, list[list[int]]]) -> None:
    llm = nano.LLM(str(model[0]), cache_tokens=4096, dtype="float32", skip_tokenizer_init=True)
    prompt = list(range(70))
    params = nano.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    computed: list[int] = []
    run = llm.runner.run
    llm.runner.run = lambda step: computed.append(sum(work.count for work in step)) or run(step)
    llm.generate([prompt], params)
    llm.generate([[*prompt, 5]], params)
    assert computed == [70, 71 - 64]


def test_draws_follow_the_softmax_and_end_tokens_end(nano: ModuleType, model: tuple[Path, list[list[int]]]) -> None:
    folder, _ = model
    llm = nano.LLM(str(folder), cache_tokens=65536, dtype="float32", skip_tokenizer_init=True, seed=1)
    outputs = llm.generate([[7, 8, 9]] * 4000, nano.SamplingParams(temperature=1.3, max_tokens=1, ignore_eos=True))
    seen = torch.bincount(torch.tensor([output.outputs[0].token_ids[0] for output in outputs]), minlength=97) / 4000
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = (reference(torch.tensor([[7, 8, 9]])).logits[0, -1] / 1.3).softmax(-1)
    assert (seen - expected).abs().max() < 0.04
    llm.eos = set(range(97))
    assert len(llm.generate([[7]], nano.SamplingParams(max_tokens=9))[0].outputs[0].token_ids) == 1


def test_what_cannot_fit_is_refused(nano: ModuleType, model: tuple[Path, list[list[int]]]) -> None:
    llm = nano.LLM(str(model[0]), cache_tokens=32, dtype="float32", skip_tokenizer_init=True)
    for prompt, most in (([], 4), ([1] * 100, 64), ([1] * 20, 20)):
        with pytest.raises(ValueError, match="tokens"):
            llm.generate([prompt], nano.SamplingParams(max_tokens=most))
    assert not llm.scheduler.waiting


@pytest.mark.parametrize("tile", [1, 8], ids=["decodes", "prompts"])
def test_the_kernel_computes_what_plain_torch_does(nano: ModuleType, tile: int) -> None:
    generator = torch.Generator().manual_seed(tile)
    lengths = [(1, 1), (16, 1), (75, 1), (130, 1)] if tile == 1 else [(5, 5), (40, 17), (75, 1), (130, 66)]
    cache = torch.randn(2, 40, nano.BLOCK, 2, 16, generator=generator)
    tables = torch.randperm(39, generator=generator)[:36].add(1).view(4, 9).int()
    starts = torch.tensor([0, *(count for _, count in lengths)]).cumsum(0)
    tiles = [(index, first) for index, (_, count) in enumerate(lengths) for first in range(0, count, tile)]
    inputs = nano.Inputs(
        tokens=None, positions=None, slots=None, rows=torch.tensor([2, 0, 3, 1]), query_starts=starts,
        contexts=torch.tensor([length for length, _ in lengths]), tables=tables,
        tile_sequences=torch.tensor([index for index, _ in tiles]),
        tile_queries=torch.tensor([first for _, first in tiles]), queries_a_tile=tile,
    )  # fmt: skip
    q = torch.randn(int(starts[-1]), 4, 16, generator=generator)
    expected = nano._plain_attention(q.double(), cache.double(), inputs, 0.3)
    for name in ("rows", "query_starts", "contexts", "tables", "tile_sequences", "tile_queries"):
        setattr(inputs, name, getattr(inputs, name).to(DEVICE))
    for dtype, tolerance in ((torch.float32, 1e-5), (HALF, 2e-2)):
        out = nano._kernel_attention(q.to(DEVICE, dtype), cache.to(DEVICE, dtype), inputs, 0.3)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def test_it_is_one_file_of_an_evening_without_quire() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) <= 700
    assert not re.search(r"^\s*(from|import)\s+quire\b", text, re.MULTILINE)
