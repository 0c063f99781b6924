"""Swapping helps where a cache is too small, and rows do not thrash."""

from __future__ import annotations

import pytest

from benchmarks.swap_simulation import Load, simulate

LOADS = [
    Load(),
    Load(requests=48, prompt=6000, output=800, rows=64, cache_tokens=90_000),
    Load(requests=300, prompt=1000, output=500, rows=256, cache_tokens=200_000),
]


@pytest.mark.parametrize("load", LOADS, ids=["long prompts", "few rows", "many rows"])
def test_swapping_beats_recomputing(load: Load) -> None:
    again, swapped = simulate(load), simulate(load, host_tokens=load.cache_tokens)
    assert swapped.rate > 1.01 * again.rate
    assert again.preempted > 0 and again.swapped == 0
    assert swapped.preempted < 2 * again.preempted, "a swapped row returns when there is room to stay"
    assert swapped.prompt_tokens < again.prompt_tokens


def test_the_formula_matches_the_measurements() -> None:
    assert simulate(Load()).rate == pytest.approx(3596, rel=0.05)
