"""Every architecture computes what transformers computes, however its tokens are chunked into steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from tests.models.harness import (
    PagedRun,
    assert_same,
    in_chunks,
    loaded_model,
    mixed,
    random_reference,
    reference_logits,
)
from tests.models.zoo import ZOO

PROMPTS = {
    name: torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for name, length in {"long": 29, "middle": 14, "short": 6, "one": 1}.items()
}


@cache
def pair(name: str) -> tuple[Any, Any]:
    reference = random_reference(ZOO[name])
    return reference, loaded_model(reference)


def assert_rows_share_steps(reference: Any, ours: Any) -> None:
    """Whole prompts, chunks, decodes and late arrivals in the same step do not affect each other's logits."""

    def budget(step: int, row: str) -> int:
        if row == "long":
            return 9 if step < 2 else 1  # two chunks, then decode
        if row == "middle":
            return 4 * (step >= 1)  # arrives later, in chunks
        return 1 + (step % 2)

    for row, logits in mixed(ours, PROMPTS, budget).items():
        assert_same(logits, reference_logits(reference, PROMPTS[row]))


@pytest.fixture(params=ZOO)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return pair(request.param)


def test_a_whole_prompt_in_one_step(models: tuple[Any, Any]) -> None:
    reference, ours = models
    assert_same(in_chunks(ours, PROMPTS["long"], 29), reference_logits(reference, PROMPTS["long"]))


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_prompt_in_chunks(models: tuple[Any, Any], size: int) -> None:
    reference, ours = models
    assert_same(in_chunks(ours, PROMPTS["long"], size), reference_logits(reference, PROMPTS["long"]))


def test_rows_of_different_lengths_share_steps(models: tuple[Any, Any]) -> None:
    assert_rows_share_steps(*models)


def test_dynamic_rope_past_the_original_length_equals_decoding_token_by_token() -> None:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=8,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
    )
    reference = random_reference(config)
    tokens = PROMPTS["long"]
    cache = DynamicCache()
    with torch.no_grad():
        theirs = torch.cat([reference(torch.tensor([[t]]), past_key_values=cache).logits[0] for t in tokens])
    ours = loaded_model(reference)
    for size in (1, 5, 29):
        assert_same(in_chunks(ours, tokens, size), theirs)


def test_bfloat16_stays_near_float32() -> None:
    reference, _ = pair("qwen3")
    expected = reference_logits(reference, PROMPTS["long"])
    half = loaded_model(reference).to(torch.bfloat16)
    run = PagedRun(half)
    run.caches = [[layer.to(torch.bfloat16) for layer in stage] for stage in run.caches]
    logits = run.step({"row": PROMPTS["long"]})["row"]
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - expected).abs().mean() / expected.abs().mean()
    assert error < 0.05
