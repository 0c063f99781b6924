"""Every architecture through the Triton kernels computes what transformers computes in float32 on the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.gpu.target import DEVICE, ON_A_GPU
from tests.models.harness import (
    Target,
    assert_same,
    in_chunks,
    loaded_model,
    mixed,
    random_reference,
    reference_logits,
)
from tests.models.test_against_transformers import PROMPTS
from tests.models.zoo import ZOO

pytestmark = ON_A_GPU


@cache
def pair(name: str) -> tuple[Any, Any]:
    from quire.kernels.triton.ops import TritonOps
    from quire.layers.attention.triton import TritonPagedAttention

    reference = random_reference(ZOO[name])
    return reference, loaded_model(reference, target=Target(DEVICE, TritonOps, TritonPagedAttention))


@pytest.fixture(params=ZOO)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return pair(request.param)


@pytest.mark.parametrize("size", [29, 7, 1], ids=["whole", "in chunks", "token by token"])
def test_a_prompt(models: tuple[Any, Any], size: int) -> None:
    reference, ours = models
    assert_same(in_chunks(ours, PROMPTS["long"], size), reference_logits(reference, PROMPTS["long"]))


def test_rows_of_different_lengths_share_steps(models: tuple[Any, Any]) -> None:
    """Whole prompts, chunks, decodes and late arrivals in the same step leave each row's logits alone."""
    reference, ours = models

    def budget(step: int, row: str) -> int:
        if row == "long":
            return 9 if step < 2 else 1  # two chunks, then decode
        if row == "middle":
            return 4 * (step >= 1)  # arrives later, chunk by chunk
        return 1 + (step % 2)

    for row, logits in mixed(ours, PROMPTS, budget).items():
        assert_same(logits, reference_logits(reference, PROMPTS[row]))
