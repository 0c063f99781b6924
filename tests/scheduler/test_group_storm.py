"""Storms over models of several cache groups: full, window and state groups in one small pool."""

from __future__ import annotations

import pytest

from quire.messages.caches import FULL, CacheGroup
from tests.scheduler.test_storm import EngineShape, Storm, rng_of


def window(tokens: int) -> CacheGroup:
    return CacheGroup("window", (), window=tokens)


def state(pages: int) -> CacheGroup:
    return CacheGroup("state", (), pages=pages)


GROUPS = {
    "window": (FULL, window(6)),
    "windows": (FULL, window(1), window(9), window(9)),
    "only window": (window(7),),
    "two full": (FULL, FULL, window(5)),
    "state": (FULL, state(2)),
    "states": (FULL, state(1), state(3)),
    "only state": (state(2),),
    "window and state": (window(8), state(2)),
    "all": (FULL, FULL, window(3), window(10), state(2), state(1)),
}
SHAPES = [
    EngineShape(blocks=140),
    EngineShape(blocks=60, depth=1, longest=20),
    EngineShape(blocks=110, depth=2, policy="priority"),
    EngineShape(blocks=90, chunked=False, depth=1, budget=9, longest=20),
    EngineShape(blocks=200, block_size=1, depth=1, longest=20),
    EngineShape(blocks=60, block_size=16, rows=24, budget=512, depth=1),
    EngineShape(blocks=150, failure_rate=0.02, depth=1),
    EngineShape(blocks=150, empty_rate=0.05, depth=1),
    EngineShape(blocks=120, prefix_caching=False, depth=1),
    EngineShape(blocks=120, microbatches=True, depth=2),
]


def grouped(shape: EngineShape, kind: str) -> EngineShape:
    return EngineShape(**{**vars(shape), "groups": GROUPS[kind]})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", GROUPS)
def test_every_page_holds_what_each_group_needs(kind: str, shape: EngineShape) -> None:
    Storm(grouped(shape, kind), requests=40, seed=rng_of(kind).randint(0, 99)).run()
