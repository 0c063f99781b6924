"""Every architecture with the Triton kernels computes what transformers computes in float32 on the CPU."""

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
    random_reference,
    reference_logits,
)
from tests.models.relatives import RELATIVES
from tests.models.test_against_transformers import PROMPTS, assert_rows_share_steps
from tests.models.zoo import ZOO

pytestmark = ON_A_GPU
EVERY = ZOO | RELATIVES


@cache
def pair(name: str) -> tuple[Any, Any]:
    from quire.kernels.triton.ops import TritonOps
    from quire.layers.attention.triton import TritonPagedAttention

    reference = random_reference(EVERY[name])
    return reference, loaded_model(reference, target=Target(DEVICE, TritonOps, TritonPagedAttention))


@pytest.fixture(params=EVERY)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return pair(request.param)


@pytest.mark.parametrize("size", [29, 7, 1], ids=["whole", "in chunks", "token by token"])
def test_a_prompt(models: tuple[Any, Any], size: int) -> None:
    reference, ours = models
    assert_same(in_chunks(ours, PROMPTS["long"], size), reference_logits(reference, PROMPTS["long"]))


def test_rows_of_different_lengths_share_steps(models: tuple[Any, Any]) -> None:
    assert_rows_share_steps(*models)
