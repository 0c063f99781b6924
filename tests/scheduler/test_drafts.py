"""Decodes of several tokens: storms with drafts from the device and the host, and single cases."""

from __future__ import annotations

import pytest

from tests.scheduler.test_group_storm import grouped, random_grouped
from tests.scheduler.test_storm import EngineShape, Storm, describe, random_shape

SHAPES = [
    EngineShape(drafts="device"),
    EngineShape(drafts="device", depth=1),
    EngineShape(drafts="device", depth=2, most_drafts=3),
    EngineShape(drafts="host"),
    EngineShape(drafts="host", depth=1),
    EngineShape(drafts="host", depth=2, blocks=22, rows=3),
    EngineShape(drafts="both", depth=1, policy="priority"),
    EngineShape(drafts="device", depth=1, block_size=1, blocks=90),
    EngineShape(drafts="both", depth=1, block_size=16, blocks=12),
    EngineShape(drafts="device", depth=1, budget=3, rows=6),
    EngineShape(drafts="device", depth=1, chunked=False, budget=9),
    EngineShape(drafts="device", depth=1, verifies_with_prompts=False),
    EngineShape(drafts="device", depth=1, failure_rate=0.02),
    EngineShape(drafts="both", depth=1, empty_rate=0.1),
    EngineShape(drafts="device", invalid_rate=0.01),
    EngineShape(drafts="both", depth=1, invalid_rate=0.01, blocks=25, host=60),
    EngineShape(drafts="host", depth=2, microbatches=True, invalid_rate=0.01, failure_rate=0.01),
    EngineShape(drafts="device", depth=1, prefix_caching=False, skill=0.95),
    EngineShape(drafts="device", depth=1, host=60, blocks=25),
    EngineShape(drafts="both", depth=2, host=8, disk=500, blocks=30),
    EngineShape(drafts="device", depth=1, tunes=True),
    EngineShape(drafts="both", tunes=True, skill=0.9),
    EngineShape(drafts="host", depth=1, tunes=True, block_size=1, blocks=120, skill=0.9),
    EngineShape(drafts="host", microbatches=True, depth=1),
    EngineShape(drafts="host", microbatches=True, depth=2, blocks=22, failure_rate=0.01),
]


@pytest.mark.parametrize("shape", SHAPES, ids=describe)
def test_tokens_are_those_without_drafts(shape: EngineShape) -> None:
    storm = Storm(shape, requests=60, seed=11)
    storm.run()
    device = storm.bench.device
    assert 0 < device.accepted < device.verified
    assert storm.invalid or not shape.invalid_rate


GROUPED = [
    EngineShape(blocks=140, drafts="device", depth=1),
    EngineShape(blocks=60, drafts="both", depth=1, longest=20),
    EngineShape(blocks=200, block_size=1, drafts="device", depth=2, longest=20),
    EngineShape(blocks=150, drafts="device", depth=1, empty_rate=0.05, failure_rate=0.01),
    EngineShape(blocks=90, drafts="host", depth=2, microbatches=True),
    EngineShape(blocks=80, drafts="device", depth=1, host=60, disk=900),
    EngineShape(blocks=80, drafts="device", depth=1, invalid_rate=0.005),
]


@pytest.mark.parametrize("kind", ["window", "only window", "states", "only state", "all"])
@pytest.mark.parametrize("shape", GROUPED, ids=describe)
def test_every_group_has_what_it_needs(shape: EngineShape, kind: str) -> None:
    Storm(grouped(shape, kind), requests=30, seed=12).run()


def with_drafts(shape: EngineShape, seed: int) -> EngineShape:
    drafts = ("device", "host", "both")[seed % 3]
    return EngineShape(**{**vars(shape), "drafts": drafts, "most_drafts": 1 + seed % 7, "tunes": seed % 5 == 0})


@pytest.mark.parametrize("seed", range(200, 212))
def test_any_engine_shape(seed: int) -> None:
    Storm(with_drafts(random_shape(seed, tiered=seed % 2 == 0), seed), requests=40, seed=seed).run()


@pytest.mark.parametrize("seed", range(300, 312))
def test_any_groups(seed: int) -> None:
    Storm(with_drafts(random_grouped(seed, tiered=seed % 2 == 0), seed), requests=30, seed=seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2200))
def test_long_storms(seed: int) -> None:
    shape = random_grouped(seed, tiered=seed % 4 == 0) if seed % 2 else random_shape(seed, tiered=seed % 4 == 0)
    Storm(with_drafts(shape, seed), requests=200, seed=seed).run()
