"""Rows that begin with the same blocks form groups: which rows, and when the device gets them. That every group shares
full blocks that are not written to is checked by the harness's device in every test that drives a bench, including the
storms."""

from __future__ import annotations

import itertools

import pytest

from quire.messages.plan import PrefixGroup
from quire.scheduler.prefix_groups import PrefixGroups
from tests.scheduler.harness import Bench, rng_of


def make(least_tokens: int = 2, least_saved: int = 0) -> PrefixGroups:
    """Groups over blocks of one token."""
    return PrefixGroups(1, least_tokens, least_saved)


def changes_of(groups: PrefixGroups) -> dict[frozenset[int], int] | None:
    changes = groups.changes()
    return None if changes is None else {frozenset(group.rows): group.shared_tokens for group in changes}


def test_two_rows_share_their_common_prefix() -> None:
    groups = make()
    groups.join(5, [1, 2, 3, 4])
    assert groups.changes() is None
    groups.join(9, [1, 2, 3, 7, 8])
    assert groups.changes() == [PrefixGroup([5, 9], 3)]
    assert groups.changes() is None


def test_a_short_common_prefix_makes_no_group() -> None:
    groups = make(least_tokens=3)
    groups.join(0, [1, 2, 3, 4])
    groups.join(1, [1, 2, 5, 6])
    groups.join(2, [1, 2])
    assert groups.changes() is None


def test_small_savings_make_no_group() -> None:
    groups = make(least_saved=9)
    for row in range(5):
        groups.join(row, [1, 2, 3, 10 + row])
        assert changes_of(groups) == ({frozenset(range(row + 1)): 3} if row >= 3 else None)
    groups.leave(2)
    assert changes_of(groups) == {frozenset({0, 1, 3, 4}): 3}
    groups.leave(0)
    assert changes_of(groups) == {}
    groups.leave(1)
    assert groups.changes() is None


def test_equal_blocks_at_other_positions_are_not_shared() -> None:
    groups = make()
    groups.join(0, [1, 2, 3])
    groups.join(1, [4, 2, 3])
    assert groups.changes() is None


def test_a_row_that_shares_little_does_not_spoil_a_group_that_shares_much() -> None:
    groups = make()
    for row in range(4):
        groups.join(row, [1, 2, *range(10, 40), 50 + row])
    groups.join(4, [1, 2, 60])
    groups.join(5, [1, 2, 61])
    assert changes_of(groups) == {frozenset(range(4)): 32, frozenset({4, 5}): 2}


def test_rows_that_share_more_among_themselves_leave_a_group_that_shares_less() -> None:
    groups = make()
    for row in range(10):
        groups.join(row, [1, 2, 100 + row])
    deep = [1, 2, *range(10, 40)]
    groups.join(10, [*deep, 50])
    assert changes_of(groups) == {frozenset(range(11)): 2}
    groups.join(11, [*deep, 51])
    groups.join(12, [*deep, 52])
    assert changes_of(groups) == {frozenset(range(10)): 2, frozenset({10, 11, 12}): 32}


def test_a_row_left_alone_groups_with_the_next() -> None:
    groups = make()
    groups.join(0, [1, 2, 3, 4, 5, 6])
    groups.join(1, [1, 2, 9])
    groups.leave(1)
    groups.join(2, [1, 2, 3, 4, 5, 7])
    assert changes_of(groups) == {frozenset({0, 2}): 5}


def test_any_order_of_arrivals_and_ends() -> None:
    """Checked against the rows' own blocks: groups are disjoint, share what they say, and miss no row that could
    share."""
    rng = rng_of("groups")
    for _ in range(60):
        groups, rows, latest = make(), dict[int, list[int]](), dict[frozenset[int], int]()
        for _ in range(80):
            if rows and rng.random() < 0.4:
                row = rng.choice(list(rows))
                del rows[row]
                groups.leave(row)
            else:
                row = next(row for row in itertools.count() if row not in rows)
                # Blocks of a tree: what follows a block depends on all blocks before it.
                path = [rng.randint(0, 1) for _ in range(rng.randint(1, 7))]
                rows[row] = [hash(tuple(path[:depth])) for depth in range(1, len(path) + 1)]
                groups.join(row, rows[row])
            latest = _newest(groups, latest)
            members = [row for group in latest for row in group]
            assert len(members) == len(set(members)) and set(members) <= set(rows)
            for group, shared in latest.items():
                assert len(group) > 1 and shared >= 2
                assert len({tuple(rows[row][:shared]) for row in group}) == 1
            alone = [row for row in rows if row not in members and len(rows[row]) >= 2]
            for one, other in itertools.combinations(alone, 2):
                assert rows[one][:2] != rows[other][:2], "two rows could share and do not"
        for row in rows:
            groups.leave(row)
        assert _newest(groups, latest) == {}
        assert not groups._near and not groups._blocks and not groups._group_of


def _newest(groups: PrefixGroups, before: dict[frozenset[int], int]) -> dict[frozenset[int], int]:
    changes = changes_of(groups)
    return before if changes is None else changes


# In the engine

SHARED = list(range(2, 26))


def test_sequences_of_one_prompt_are_a_group_until_they_end() -> None:
    bench = Bench(blocks=200, block_size=4, max_rows=16)
    bench.add("a", SHARED, output=6, n=5)
    bench.run()
    bench.assert_right()
    tellings = [plan.groups for plan in bench.plans if plan.groups is not None]
    assert len(tellings) == 1  # no plan has groups while nothing changes; the end of all needs no step
    assert [(len(group.rows), group.shared_tokens) for group in tellings[0]] == [(5, 20)]


def test_a_common_prefix_found_in_the_cache_makes_a_group() -> None:
    bench = Bench(blocks=200, block_size=4, max_rows=16, budget=200)
    for i in range(6):
        bench.add(f"r{i}", [*SHARED, 30 + i], output=8 + i)
    bench.run()
    bench.assert_right()
    assert bench.device.grouped_rows > 30
    sizes = [
        max((len(group.rows) for group in plan.groups), default=0) for plan in bench.plans if plan.groups is not None
    ]
    assert sizes == [6, 5, 4, 3, 2, 0]


def test_a_preempted_row_leaves_its_group_and_rejoins() -> None:
    bench = Bench(blocks=20, block_size=4, max_rows=8)
    bench.add("a", SHARED, output=30, n=4)
    bench.run()
    bench.assert_right()
    assert bench.scheduler.stats.preemptions > 0
    sizes = [sum(len(group.rows) for group in plan.groups) for plan in bench.plans if plan.groups is not None]
    assert sizes[0] == 4 and any(later > sooner for sooner, later in itertools.pairwise(sizes))


def test_a_reset_plan_clears_the_groups() -> None:
    failed = []

    def fails(plan: object, requests: set[str]) -> str:
        if bench.device.grouped_rows and not failed:
            failed.append(plan)
            return "collect"
        return ""

    bench = Bench(blocks=200, block_size=4, max_rows=16, fails=fails)
    bench.add("a", SHARED, output=8, n=3)
    bench.run()
    bench.assert_right()
    after = next(plan for plan in bench.plans if plan.reset)
    assert failed and after.groups == []


@pytest.mark.parametrize("depth", [0, 1])
def test_small_savings_are_not_sent(depth: int) -> None:
    bench = Bench(blocks=200, block_size=4, max_rows=16, depth=depth, least_shared=64)
    bench.add("a", SHARED, output=6, n=3)
    bench.run()
    bench.assert_right()
    assert not any(plan.groups for plan in bench.plans)
