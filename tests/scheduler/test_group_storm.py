"""Storms over models of several cache groups: full, window and state groups in one small pool."""

from __future__ import annotations

import pytest

from quire.config import EngineConfig
from quire.kvcache.block_tables import BlockTables
from quire.messages.caches import FULL, CacheGroup
from tests.scheduler.harness import rng_of
from tests.scheduler.test_storm import EngineShape, Storm, describe, random_shape


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
    EngineShape(
        blocks=150,
        depth=1,
        policy="fair",
        tenants=("a", "b"),
        config=EngineConfig(scheduling_policy="fair", tenant_max_blocks={"a": 120}),
    ),
]


def grouped(shape: EngineShape, kind: str) -> EngineShape:
    return EngineShape(**{**vars(shape), "groups": GROUPS[kind]})


def some(shapes: list[EngineShape]) -> list[object]:
    """Each shape with every third of the groups."""
    pairs = [(shape, kind) for i, shape in enumerate(shapes) for kind in list(GROUPS)[i % 3 :: 3]]
    return [pytest.param(shape, kind, id=f"{kind}-{describe(shape)}") for shape, kind in pairs]


@pytest.mark.parametrize(("shape", "kind"), some(SHAPES))
def test_every_page_holds_what_each_group_needs(shape: EngineShape, kind: str) -> None:
    Storm(grouped(shape, kind), requests=40, seed=rng_of(kind).randint(0, 99)).run()


def random_grouped(seed: int, tiered: bool = False) -> EngineShape:
    """Any groups, in an engine that can barely hold its longest request, or in a larger one."""
    rng = rng_of("groups", seed)
    groups = [FULL] * rng.choice([0, 1, 1, 1, 2])
    groups += [window(rng.choice([1, 2, 5, 8, 17])) for _ in range(rng.choice([0, 1, 1, 2]))]
    groups += [state(rng.choice([1, 2, 5])) for _ in range(rng.choice([0, 1, 1, 2]))]
    shape = random_shape(seed, tiered)
    tables = BlockTables(10, shape.block_size, groups=groups or [FULL])
    most = tables.pages_for(3 * shape.longest) + tables.state_pages
    blocks = max(2, int(most * rng.choice([0.6, 1, 1, 1.3, 3])))
    return EngineShape(**{**vars(shape), "groups": tuple(groups or [FULL]), "blocks": blocks})


@pytest.mark.parametrize("seed", range(8))
def test_any_groups(seed: int) -> None:
    Storm(random_grouped(seed), requests=40, seed=seed).run()


TIERED = [
    EngineShape(host=400, blocks=60, longest=20),
    EngineShape(host=60, disk=900, blocks=80, depth=1, policy="priority"),
    EngineShape(host=100, disk=400, blocks=70, depth=2, failure_rate=0.01),
    EngineShape(host=300, blocks=60, depth=1, prefix_caching=False),
]


@pytest.mark.parametrize(("shape", "kind"), some(TIERED))
def test_pages_move_through_tiers(shape: EngineShape, kind: str) -> None:
    Storm(grouped(shape, kind), requests=40, seed=3).run()


@pytest.mark.parametrize("seed", range(100, 105))
def test_any_groups_with_tiers(seed: int) -> None:
    Storm(random_grouped(seed, tiered=True), requests=40, seed=seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("tiered", [False, True], ids=["one tier", "tiers"])
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_long_storms_of_any_groups(seed: int, tiered: bool) -> None:
    Storm(random_grouped(seed, tiered), requests=200, seed=seed).run()
