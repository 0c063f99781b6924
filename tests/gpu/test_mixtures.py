"""Mixtures of experts on a CUDA device: transformers' tokens from captured and eager steps, and expert counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.worker.mixed_steps import TOKENS
from tests.conftest import TINY_VOCAB
from tests.gpu.mixtures import FAMILIES, write_mixture
from tests.gpu.near_ties import NearTies, greedy
from tests.gpu.target import ON_A_GPU

pytestmark = ON_A_GPU

PROMPTS = [[(7 * i + 3 * j) % TINY_VOCAB for j in range(5 + 9 * i)] for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny mixture's folder, and the same in transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_mixture(folder, request.param)


@pytest.mark.parametrize(
    "settings", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 24}], ids=["captured", "eager", "tiny chunks"]
)
def test_greedy_tokens_equal_transformers(
    engine: Callable[..., LLM], mixture: tuple[Path, Any], settings: dict[str, Any]
) -> None:
    folder, reference = mixture
    ties = NearTies(reference)
    expected = greedy(reference, PROMPTS, 24)
    llm = engine(folder, **settings)
    for _ in range(2):  # the second time the prompts are cached
        for i, output in enumerate(llm.generate(PROMPTS, GREEDY, use_tqdm=False)):
            ties.compare(PROMPTS[i], output.outputs[0].token_ids, expected[i], f"prompt {i}")
    ties.report("greedy", most=2)


def test_counts_are_exact_for_steps_without_padding(engine: Callable[..., LLM], mixture: tuple[Path, Any]) -> None:
    llm = engine(mixture[0])
    assert total(llm, "0") == 0, "warm-up steps are not counted"
    prompt = [(5 * j) % TINY_VOCAB for j in range(TOKENS[0])]  # a separate step, without padding tokens
    llm.generate([prompt], GREEDY, use_tqdm=False)
    top_k = llm.llm_engine.info.model.raw["num_experts_per_tok"]
    computed = len(prompt) + GREEDY.max_tokens - 1
    # A step in flight when the last token came may have computed for a finished request.
    assert total(llm, "0") in (computed * top_k, (computed + 1) * top_k)


def total(llm: LLM, layer: str) -> float:
    tokens = next(metric for metric in llm.get_metrics() if metric.name == "quire:expert_tokens")
    return sum(count for (of, _), count in tokens.series if of == layer)


def test_bfloat16_runs_at_every_capture_size(engine: Callable[..., LLM], mixture: tuple[Path, Any]) -> None:
    """From one row to the maximum; the same prompt gives the same tokens alone and in a batch, except for near-ties."""
    llm = engine(mixture[0], dtype="bfloat16")
    for count in (1, 2, 5, 16):
        outputs = llm.generate([PROMPTS[1]] * count, GREEDY, use_tqdm=False)
        assert all(output.error is None and len(output.outputs[0].token_ids) == 24 for output in outputs)
    torch.cuda.synchronize()
