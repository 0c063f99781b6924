"""Images together with what else an engine does: ranks, drafts, beams, grammars, other processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from quire.messages.beams import BeamSearchParams
from quire.messages.sampling import SamplingParams
from tests.vision.engine_harness import Case
from tests.vision.test_engine_families import PICTURES, make

__all__ = ["make"]

RANKS = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "gemma-3", "llava"])
@pytest.mark.parametrize("ranks", RANKS, ids=["tp", "pp"])
def test_ranks(make: Callable[[str], Case], name: str, ranks: dict[str, Any]) -> None:
    case = make(name)
    engine = case.sighted.engine(**ranks, max_num_batched_tokens=60, max_num_seqs=4, threads=1)
    prompts = [(PICTURES[:count], case.prompt(PICTURES[:count], count)) for count in (1, 2)]
    names = [engine.add(prepared, 6) for _, prepared in prompts]
    engine.run()
    for each, (images, prepared) in zip(names, prompts, strict=True):
        assert engine.outputs[each, 0] == case.theirs(images, prepared)
    for images, prepared in prompts:
        assert engine.answer(prepared) == case.theirs(images, prepared)
    engine.close()


@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma-3"])
def test_drafts(make: Callable[[str], Case], name: str) -> None:
    """Drafts from the tokens themselves, placeholders among them."""
    case = make(name)
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    engine = case.sighted.engine(speculative_config=speculation)
    prompts = [(PICTURES[:count], case.prompt(PICTURES[:count], count)) for count in (1, 2)]
    names = [engine.add(prepared, 20) for _, prepared in prompts]
    engine.run()
    for each, (images, prepared) in zip(names, prompts, strict=True):
        assert engine.outputs[each, 0] == case.theirs(images, prepared, 20)
    assert engine.scheduler.stats.drafts.tokens > 0
    engine.close()


def test_penalties_and_logprobs_of_prompts_with_placeholders(make: Callable[[str], Case]) -> None:
    case = make("qwen2.5-vl")
    engine = case.sighted.engine()
    prepared = case.prompt(PICTURES[:1], 1)
    params = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5, prompt_logprobs=2,
        bad_words=None, logprobs=2,
    )  # fmt: skip
    tokens = engine.answer(prepared, 5, params=params, reads_cache=False)
    assert len(tokens) == 5
    engine.close()


def test_beams(make: Callable[[str], Case]) -> None:
    """A search of one beam is the likeliest continuation; wider ones end with all blocks given back."""
    case = make("qwen2.5-vl")
    engine = case.sighted.engine()
    prepared = case.prompt(PICTURES[:1], 1)
    for width in (1, 3):
        search = BeamSearchParams(beam_width=width, max_tokens=5, ignore_eos=True)
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2 * width)
        name = engine.add(prepared, 5, params=params, beams=search)
        engine.run()
        assert len(engine.beams[name]) == width
        if width == 1:
            assert engine.beams[name][0].tokens == case.theirs(PICTURES[:1], prepared, 5)
    assert engine.stats.encoded == 1
    engine.close()


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "gemma-3"])
def test_a_draft_model_that_sees_nothing(make: Callable[[str], Case], tmp_path: Path, name: str) -> None:
    """It reads placeholders as tokens: its drafts are worse, the tokens are the same."""
    shape = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**shape)).save_pretrained(tmp_path)
    case = make(name)
    speculation = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    engine = case.sighted.engine(speculative_config=speculation, max_num_batched_tokens=60, max_num_seqs=4)
    prompts = [(PICTURES[:count], case.prompt(PICTURES[:count], count)) for count in (1, 2)]
    names = [engine.add(prepared, 12) for _, prepared in prompts]
    engine.run()
    for each, (images, prepared) in zip(names, prompts, strict=True):
        assert engine.outputs[each, 0] == case.theirs(images, prepared, 12)
    assert engine.scheduler.stats.drafts.tokens > 0
    assert engine.core._executor._worker._runner.batch.proposer_error is None
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-3", "qwen3.5", "qwen3-vl", "llava"])
@pytest.mark.parametrize("swap", [0.0, 0.01])
@pytest.mark.parametrize("depth", [0, 1])
def test_storm(make: Callable[[str], Case], name: str, swap: float, depth: int) -> None:
    """Requests that come, are preempted and leave at any time, over caches that hold few of them."""
    case, random = make(name), np.random.default_rng(7)
    blocks = {"gemma-3": 70, "qwen3.5": 40}.get(name, 16)
    engine = case.sighted.engine(
        num_gpu_blocks_override=blocks, encoder_cache_tokens=110, max_num_batched_tokens=64, pipeline_depth=depth,
        swap_space=swap, max_num_seqs=5,
    )  # fmt: skip
    if swap:
        engine.swap_always()
    images = [[PICTURES[at] for at in random.permutation(3)[: i % 2 + 1]] for i in range(5)]
    prompts = [case.prompt(each, i, before=3 + 7 * i) for i, each in enumerate(images)]
    names: dict[str, int] = {}
    for _ in range(80):
        index = int(random.integers(5))
        names[engine.add(prompts[index], 10, salt=str(random.integers(2)))] = index
        for _ in range(int(random.integers(4))):
            engine.step()
        chosen = str(random.choice(list(names)))
        if random.random() < 0.1:
            engine.core.abort(chosen)
        elif random.random() < 0.3 and not depth:
            engine.preempt(chosen, swap=swap > 0)
    engine.run()
    for each, index in names.items():
        found, wanted = engine.outputs.get((each, 0), []), case.theirs(images[index], prompts[index], 10)
        assert found == wanted[: len(found)]
        assert engine.ends[each, 0].reason == "abort" or len(found) == 10, engine.ends[each, 0]
    engine.close()
