"""Beam search on a CUDA device: transformers' sequences, with beams that fork, through graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from tests.conftest import TINY_VOCAB
from tests.engine.beam_reference import ENDS, Model, params_of
from tests.gpu.target import ON_A_GPU

pytestmark = ON_A_GPU

PROMPTS = [[(7 * i + 3 * j) % TINY_VOCAB for j in range(5 + 40 * i)] for i in range(4)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"num_gpu_blocks_override": 30, "block_size": 8}], ids=["plain", "preempted"])
def test_beams_equal_transformers(
    engine: Callable[..., LLM], folder: Path, reference: Any, settings: dict[str, Any], depth: int, small_groups: None
) -> None:
    llm = engine(pipeline_depth=depth, **settings)
    model = Model(folder, reference)
    for width in (2, 5, 8):
        params = params_of(width, 20, length_penalty=0.8)
        for output, prompt in zip(llm.beam_search(PROMPTS, params), PROMPTS, strict=True):
            model.assert_found(output, prompt, params, ENDS)
