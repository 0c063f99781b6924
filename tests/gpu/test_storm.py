"""Storms on the device: a cache far too small, bursts, aborts, rows of every kind; every request gets its own
tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM
from tests.gpu.near_ties import NearTies
from tests.gpu.storm import check, interrupted, make_requests, uninterrupted
from tests.gpu.target import ON_A_GPU

pytestmark = ON_A_GPU

CALM: dict[str, Any] = {
    "enforce_eager": True, "pipeline_depth": 0, "enable_prefix_caching": False, "num_gpu_blocks_override": 4096,
    "max_num_seqs": 64,
}  # fmt: skip
TIGHT: dict[str, Any] = {
    "block_size": 8, "num_gpu_blocks_override": 40, "max_num_seqs": 12, "max_num_batched_tokens": 48
}  # fmt: skip


def storm(
    engine: Callable[..., LLM], ties: NearTies, requests: int, seed: int, aborts: float, settings: dict[str, Any]
) -> None:
    rng = random.Random(seed)
    sent = make_requests(requests, rng)
    expected = uninterrupted(engine(**CALM), sent)
    llm = engine(**settings)
    ours = interrupted(llm, sent, rng, aborts)
    llm.llm_engine.check_idle()
    flips = check(sent, ours, expected, ties)
    stats = llm.llm_engine.core.scheduler.stats
    print(
        f"\n{len(ours)} of {len(sent)} finished, {stats.preemptions} preemptions, {stats.cached_tokens} tokens cached, "
        f"{flips} seeded samples differ"
    )
    ties.report(f"storm {seed}", most=max(1, requests // 100))
    assert len(ours) > 0.5 * len(sent)
    assert stats.preemptions > 0
    assert (stats.cached_tokens > 0) == settings.get("enable_prefix_caching", True)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_storm(engine: Callable[..., LLM], ties: NearTies, depth: int) -> None:
    storm(engine, ties, 200, 40 + depth, 0.03, TIGHT | {"pipeline_depth": depth})


@pytest.mark.slow
@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"enable_prefix_caching": False},
        {"block_size": 16, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 200},
        {"max_num_seqs": 100, "num_gpu_blocks_override": 150, "max_num_batched_tokens": 512},
    ],
    ids=["tight", "uncached", "blocks of 16", "many rows"],
)
def test_a_long_storm(
    engine: Callable[..., LLM], ties: NearTies, shape: dict[str, Any], depth: int, eager: bool, seed: int
) -> None:
    storm(engine, ties, 1500, 1000 + seed, 0.02, TIGHT | shape | {"pipeline_depth": depth, "enforce_eager": eager})
