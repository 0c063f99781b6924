"""Rules of cache groups, one at a time: what a hit needs, what a window gives back, which states are kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.engine.memory_map import map_memory
from quire.errors import CacheTooSmallError
from quire.executor.null import NullExecutor
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.groups import GroupTable, is_snapshot_worth, rolling_interval
from quire.kvcache.prefix_cache import ContentKeys, index_key
from quire.messages.caches import FULL, CacheGroup
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.harness import Bench, MemoryDisk, rng_of


def window(tokens: int) -> CacheGroup:
    return CacheGroup("window", (), window=tokens)


def state(pages: int) -> CacheGroup:
    return CacheGroup("state", (), pages=pages)


def cached_of(bench: Bench, id: str) -> int:
    """Tokens that a request found in the cache when it started."""
    return next(one.num_cached for one in bench.started if one.key == (id, 0))


# Hits


@dataclass
class Owner:
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    tables: list[GroupTable] = field(default_factory=list)


KEYS = [bytes([i]) * 32 for i in range(8)]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from([FULL, window(1), window(2), window(5), window(6), window(9), state(1), state(3)]), max_size=4
    ),
    st.sets(st.tuples(st.integers(0, 9), st.integers(0, 7))),
    st.integers(1, 40),
)
def test_a_hit_is_the_longest_boundary_that_every_group_can_serve(
    groups: list[CacheGroup], absent: set[tuple[int, int]], tokens: int
) -> None:
    groups, size = sorted(groups, key=lambda group: group.kind != "full") or [FULL], 4
    tables = BlockTables(400, size, groups=groups)
    for number, group in enumerate(groups):
        for i, key in enumerate(KEYS):
            if (number, i) not in absent:
                pages = tables.pool.allocate(group.pages or 1)
                tables.prefix_cache.add_object(index_key(key, number), pages)

    def serves(number: int, end: int) -> bool:
        """By what a query at the boundary reads."""
        group, position = groups[number], end * size
        if group.kind == "state":
            return not end or (number, end - 1) not in absent
        first = 0 if group.kind == "full" else max(0, position - group.window + 1)
        return all((number, read // size) not in absent for read in range(first, position))

    most = min(len(KEYS), (tokens - 1) // size)
    longest = max(end for end in range(most + 1) if all(serves(n, end) for n in range(len(groups))))
    hit = tables.find(KEYS, tokens)
    assert len(hit.blocks) == longest
    owner = Owner()
    tables.adopt(owner, hit)
    for number, group in enumerate(groups):
        table = (
            owner.blocks
            if number == 0 and group.kind == "full"
            else tables.tables_of(owner)[number - tables.has_full].blocks
        )
        if group.kind == "state":
            assert tuple(table) == (
                tables.prefix_cache.blocks_of(index_key(KEYS[longest - 1], number)) if longest else ()
            )
        else:
            first = 0 if group.kind == "full" else max(0, longest * size - group.window + 1)
            for read in range(first, longest * size):
                assert table[read // size] == tables.prefix_cache.get(index_key(KEYS[read // size], number))


def test_a_snapshot_is_evicted_whole() -> None:
    tables = BlockTables(8, 4, groups=(FULL, state(3)))
    pages = tables.pool.allocate(3)
    tables.prefix_cache.add_object(index_key(KEYS[0], 1), pages)
    for page in pages:
        tables.pool.keep(page)
    tables.pool.release(pages)
    assert (tables.pool.idle, tables.pool.empty) == (3, 4)
    tables.pool.allocate(5)
    assert index_key(KEYS[0], 1) not in tables.prefix_cache
    assert (tables.pool.idle, tables.pool.free) == (0, 2)


# Windows


def test_a_long_request_holds_a_window_of_pages_in_a_window_group() -> None:
    """100,000 tokens, prompt and output, in a model with layers that keep every token, 128 tokens and 1,024."""
    size, budget, length = 16, 8192, 100_000
    groups = (CacheGroup("full", (0, 1)), CacheGroup("window", (2, 3), 128), CacheGroup("window", (4,), 1024))
    tables = BlockTables(9000, size, groups=groups)
    keys = ContentKeys(size)
    scheduler = Scheduler(tables, make_policy("fcfs"), keys, max_rows=4, token_budget=budget)
    executor = NullExecutor(4)
    prompt = [i % 997 for i in range(length - 400)]
    scheduler.add(NewRequest("long", prompt, SamplingParams(ignore_eos=True), limit=length, keys=keys.of(prompt)))
    most = Counter[tuple[str, int]]()
    while scheduler.unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        found = map_memory(scheduler, {}, block_bytes=1)
        (owner,) = found.owners.largest
        assert owner.blocks == sum(owner.by_group) == sum(group.held for group in found.groups) == tables.pool.used
        assert not found.sharing.unaccounted
        kind = "decode" if plan.num_decodes else "prompt"
        for group, pages in enumerate(owner.by_group):
            most[kind, group] = max(most[kind, group], pages)
        scheduler.update(executor.submit(plan))  # type: ignore[arg-type]
        scheduler.take_outputs()
    scheduler.check_idle()
    assert most["decode", 0] == -(-(length - 1) // size)
    for group, tokens in ((1, 128), (2, 1024)):
        assert most["prompt", group] <= (tokens + budget) // size + 2
        assert most["decode", group] <= tokens // size + 2
    assert tables.pages_for(length - 1) == 6250 + 10 + 66


def test_a_model_of_windows_alone_holds_any_request_in_a_few_pages() -> None:
    bench = Bench(blocks=6, block_size=4, budget=8, groups=(window(8),))
    bench.add("long", 300, 200)
    bench.run()
    bench.assert_right()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 9])
def test_windows_of_any_size(tokens: int, depth: int) -> None:
    bench = Bench(blocks=40, block_size=4, budget=16, depth=depth, groups=(FULL, window(tokens)))
    bench.add("a", 30, 20)
    bench.add("b", 9, 30)
    bench.run()
    bench.assert_right()


def test_pages_behind_the_window_stay_cached_for_earlier_boundaries() -> None:
    bench = Bench(blocks=100, block_size=4, groups=(FULL, window(6)))
    prompt = [2 + i % 30 for i in range(40)]
    bench.add("a", prompt, 8)
    bench.run()
    bench.add("b", [*prompt[:21], 7, 7, 7], 4)
    bench.run()
    bench.assert_right()
    assert cached_of(bench, "b") == 20


@pytest.mark.parametrize(
    ("groups", "fitting", "pages"),
    [((FULL, window(4)), 29, 11), ((FULL, state(4)), 25, 11), ((FULL, FULL), 21, 12), ((window(4), state(6)), 500, 0)],
)
def test_a_request_that_can_never_fit_is_refused_and_one_that_just_fits_runs(
    groups: tuple[CacheGroup, ...], fitting: int, pages: int
) -> None:
    """In ten pages of four tokens. The last token is never stored."""
    bench = Bench(blocks=10, block_size=4, groups=groups)
    bench.add("fits", fitting - 5, 5)
    bench.run()
    bench.assert_right()
    if pages:
        with pytest.raises(CacheTooSmallError, match=f"{pages} blocks"):
            bench.add("large", fitting - 4, 5)


def test_a_model_of_one_group_names_no_groups() -> None:
    bench = Bench()
    bench.add("a", 20, 20, n=3)
    bench.run()
    assert all(not len(plan.block_groups) and not plan.snapshots for plan in bench.plans)


# States


def test_a_repeated_prompt_starts_from_the_snapshot_at_its_last_boundary() -> None:
    bench = Bench(blocks=60, block_size=4, groups=(FULL, state(3)))
    prompt = [2 + i % 30 for i in range(23)]
    bench.add("first", prompt, 2)
    bench.run()
    assert [plan.num_tokens for plan in bench.plans[:2]] == [20, 3], "the chunk ends where the snapshot is due"
    assert len(bench.plans[0].snapshots) == 3
    bench.plans.clear()
    bench.add("again", prompt, 2)
    bench.run()
    bench.assert_right()
    assert cached_of(bench, "again") == 20
    assert len(bench.plans[0].copies) == 3, "the live state changes: it is a copy"
    assert bench.plans[0].num_tokens == 3


def test_a_third_request_starts_where_the_first_two_part() -> None:
    bench = Bench(blocks=100, block_size=4, groups=(FULL, state(2)))
    common = [2 + i % 30 for i in range(17)]
    for id, own, expected in (("one", 5, 0), ("two", 6, 0), ("three", 7, 16)):
        bench.add(id, [*common, *[own] * 12], 2)
        bench.run()
        assert cached_of(bench, id) == expected
    bench.assert_right()


def test_without_layers_that_keep_tokens_too() -> None:
    bench = Bench(blocks=100, block_size=4, groups=(state(2),))
    common = [2 + i % 30 for i in range(17)]
    for id, own, expected in (("one", 5, 0), ("two", 6, 0), ("three", 7, 16)):
        bench.add(id, [*common, *[own] * 12], 2)
        bench.run()
        assert cached_of(bench, id) == expected
    bench.assert_right()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_conversation_continues_from_the_last_boundary_of_the_output(depth: int) -> None:
    bench = Bench(blocks=100, block_size=4, depth=depth, groups=(FULL, window(5), state(2)))
    first = bench.add("first", 10, 21)
    bench.run()
    turn = [*first.prompt, *bench.sequences[("first", 0)].tokens]
    bench.add("second", [*turn, 5, 5, 5], 4)
    bench.run()
    bench.assert_right()
    assert cached_of(bench, "second") == 28, "of 31 tokens, all but the last of which were computed"


def test_output_has_one_snapshot_that_moves_on() -> None:
    bench = Bench(blocks=100, block_size=4, groups=(FULL, state(2)))
    bench.add("a", 6, 60)
    bench.run()
    # One at the prompt's last boundary, one at the output's.
    assert sum(len(key) == 33 for key in bench.tables.prefix_cache._block_of) == 2
    assert bench.device.snapshots >= 2 * 10


@pytest.mark.parametrize("depth", [0, 1])
def test_a_preempted_request_resumes_from_its_last_snapshot(depth: int) -> None:
    """If it lost its row to a tenant below its share. Where blocks are short, cached content is evicted first."""
    config = EngineConfig(scheduling_policy="fair")
    bench = Bench(
        blocks=200,
        block_size=4,
        max_rows=2,
        depth=depth,
        policy="fair",
        config=config,
        groups=(FULL, window(5), state(2)),
    )
    for id in ("a", "b"):
        bench.add(id, 20, 60, tenant="greedy")
    for _ in range(25):
        bench.step()
    bench.add("c", 6, 30, tenant="modest")
    bench.run()
    bench.assert_right()
    stats = bench.scheduler.stats
    assert stats.preemptions == 1
    assert stats.cached_tokens >= 36, "no prefix is shared: what is cached is its own prompt and output"


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_that_are_preempted_for_want_of_pages(depth: int) -> None:
    bench = Bench(blocks=34, block_size=4, max_rows=4, depth=depth, groups=(FULL, state(2)))
    for id in ("a", "b", "c"):
        bench.add(id, 20, 24)
    bench.run()
    bench.assert_right()
    assert bench.scheduler.stats.preemptions


def test_snapshots_take_no_page_that_requests_need() -> None:
    """A pool that holds the rows exactly: they run without preemption, and snapshots are only taken of free pages."""
    plain = Bench(blocks=2 * (10 + 3), block_size=4, max_rows=2, groups=(FULL, state(3)), prefix_caching=False)
    cached = Bench(blocks=2 * (10 + 3), block_size=4, max_rows=2, groups=(FULL, state(3)))
    for bench in (plain, cached):
        for id in ("a", "b"):
            bench.add(id, 20, 21)
        bench.run()
        bench.assert_right()
        assert not bench.scheduler.stats.preemptions
    assert cached.device.snapshots > 0


@pytest.mark.parametrize("kind", ["submit", "collect"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_step_withdraws_the_snapshots_it_was_to_write(kind: str, depth: int) -> None:
    prompt = [2 + i % 30 for i in range(23)]
    bench = Bench(
        blocks=60, block_size=4, depth=depth, groups=(FULL, state(2)),
        fails=lambda plan, requests: kind if plan.step == 0 else "",
    )  # fmt: skip
    bench.add("a", prompt, 9)
    bench.add("b", prompt, 9)
    bench.run()
    bench.assert_right()


@pytest.mark.parametrize("depth", [0, 1])
def test_samples_of_a_prompt_copy_its_state_once_each(depth: int) -> None:
    bench = Bench(blocks=80, block_size=4, depth=depth, groups=(FULL, window(6), state(2)))
    bench.add("a", 10, 12, n=4)
    bench.run()
    bench.assert_right()
    (forking,) = [plan for plan in bench.plans if plan.forks]
    assert len(forking.forks) == 3 and len(forking.snapshots) == 3 * 2
    assert bench.device.computed_tokens == 10 + 4 * 11, "the prompt is computed once"


def test_samples_without_pages_for_a_state_wait() -> None:
    bench = Bench(blocks=14, block_size=4, groups=(FULL, state(4)))
    bench.add("a", 10, 6, n=3)
    bench.run()
    bench.assert_right()


def test_what_a_snapshot_is_worth() -> None:
    price = {"pages": 200, "pages_per_block": 1, "block_size": 16}
    assert not is_snapshot_worth(15, **price, empty=500, free=500), "less than a block"
    assert is_snapshot_worth(16, **price, empty=200, free=500), "empty pages cost nothing"
    assert not is_snapshot_worth(16, **price, empty=199, free=500), "the keys and values of 3,200 tokens"
    assert is_snapshot_worth(800, **price, empty=0, free=500)
    assert not is_snapshot_worth(100_000, **price, empty=0, free=199), "requests hold the pages"
    assert rolling_interval(200, 1, 16) == 192 and rolling_interval(2, 1, 16) == 16


# Tiers and sessions

GROUPS = [(FULL, window(6)), (FULL, state(2)), (state(3),), (FULL, FULL, window(3), state(1))]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("length", [21, 22, 24])
def test_a_session_wakes_in_another_process(tmp_path: Path, groups: tuple[CacheGroup, ...], length: int) -> None:
    """At its exact end, wherever in a block that is: only what was added is computed."""
    disk = MemoryDisk(failing=0.0)
    prompt = [2 + i % 30 for i in range(length)]
    settings = {"blocks": 80, "block_size": 4, "host_slots": 60, "disk": disk, "sessions": tmp_path, "groups": groups}
    first = Bench(**settings)  # type: ignore[arg-type]
    first.core.sessions.create("s", prompt)
    first.put(first.request("before", prompt, 5, session="s"))
    first.run()
    first.core.sessions.suspend("s")
    first.run()
    assert first.tables.pool.used == 0
    first.core.shutdown()

    second = Bench(**settings)  # type: ignore[arg-type]
    keeper = second.core.sessions
    keeper.append("s", [9] * 7)
    tokens = list(keeper.tokens("s"))
    second.put(second.request("after", tokens, 5, session="s"))
    second.run()
    second.assert_right()
    assert cached_of(second, "after") == length + 5 - 1
    assert second.tiers is not None and second.tiers.loaded > 0


@pytest.mark.parametrize("groups", GROUPS)
def test_forks_of_a_session_continue_from_its_state(tmp_path: Path, groups: tuple[CacheGroup, ...]) -> None:
    bench = Bench(blocks=120, block_size=4, sessions=tmp_path, groups=groups)
    prompt = [2 + i % 30 for i in range(21)]
    keeper = bench.core.sessions
    keeper.create("s", prompt)
    bench.put(bench.request("before", prompt, 5, session="s"))
    bench.run()
    keeper.fork("s", "t")
    for name, own in (("s", 5), ("t", 6)):
        keeper.append(name, [own] * 3)
        bench.put(bench.request(f"after {name}", list(keeper.tokens(name)), 4, session=name))
    bench.run()
    bench.assert_right()
    assert cached_of(bench, "after s") == cached_of(bench, "after t") == 25


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("way", ["fork", "cut"])
def test_a_session_goes_on_from_an_earlier_token(tmp_path: Path, groups: tuple[CacheGroup, ...], way: str) -> None:
    """Its window has moved on and its state has consumed more: it starts from what the prefix cache has."""
    bench = Bench(blocks=120, block_size=4, host_slots=100, sessions=tmp_path, groups=groups)
    prompt = [2 + i % 30 for i in range(22)]
    keeper = bench.core.sessions
    keeper.create("s", prompt)
    bench.put(bench.request("before", prompt, 15, session="s"))
    bench.run()
    name = "t" if way == "fork" else "s"
    if way == "fork":
        keeper.fork("s", "t", 22)
    else:
        keeper.cut("s", 22)
    keeper.suspend(name)
    bench.run()
    bench.tables.reset_prefix()
    bench.put(bench.request("after", list(keeper.tokens(name)), 4, session=name))
    bench.run()
    bench.assert_right()
    assert cached_of(bench, "after") == 20


@pytest.mark.parametrize("groups", GROUPS)
def test_a_swapped_row_continues_where_it_was(groups: tuple[CacheGroup, ...]) -> None:
    rng = rng_of("swap")
    tables = BlockTables(9, 4, groups=groups)
    bench = Bench(
        blocks=2 * tables.pages_for(50), block_size=4, max_rows=6, depth=1, host_slots=400, groups=groups,
        prefix_caching=False,
    )  # fmt: skip
    for i in range(8):
        bench.add(f"r{i}", 10 + rng.randint(0, 9), 30)
    bench.run()
    bench.assert_right()
    stats = bench.scheduler.stats
    if len(groups) > 1:
        assert stats.swaps and stats.cached_tokens > 0
