"""A shortage of blocks: which request is preempted, what it keeps, and what is done in advance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ValidationError
from quire.kvcache.block_pool import BlockPool
from quire.messages.request import NewRequest, Request, RequestState
from quire.messages.sampling import SamplingParams
from quire.scheduler.policies.base import RankedPolicy
from quire.scheduler.policies.priority import AGEING_SECONDS
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.preemption import MemoryPressure
from quire.scheduler.swapping import NoSwapper
from tests.scheduler.harness import Bench

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def until_preemption(bench: Bench, steps: int = 200) -> list[str]:
    """Step until a request is preempted; returns its id."""
    for _ in range(steps):
        bench.step()
        requests = bench.scheduler.requests
        sequences = [sequence for id in requests.ids() for sequence in requests.sequences(id)]
        lost = [sequence for sequence in sequences if sequence.preemptions]
        if lost:
            return [request.id for request in lost]
    raise AssertionError("no request was preempted")


def test_first_come_first_served_preempts_the_request_that_loses_the_least_work() -> None:
    bench = Bench(blocks=14, block_size=4)
    bench.add("old", 8, 30)
    bench.add("small", 4, 30)
    bench.add("large", 20, 30)
    assert until_preemption(bench) == ["small"], "the fewest blocks, though it came before the large one"
    bench.run()
    bench.assert_right()


def test_the_best_ranked_is_never_preempted_however_small() -> None:
    bench = Bench(blocks=14, block_size=4)
    bench.add("old", 1, 40)
    bench.add("b", 16, 30)
    bench.add("c", 16, 30)
    assert "old" not in until_preemption(bench)
    bench.run()
    assert bench.sequences[("old", 0)].finished.preemptions == 0  # type: ignore[union-attr]
    bench.assert_right()


def test_priority_preempts_the_worst_rank_however_large() -> None:
    bench = Bench(blocks=14, block_size=4, policy="priority")
    bench.add("a", 4, 30, priority=0)
    bench.add("worst", 20, 30, priority=9)
    bench.add("b", 4, 30, priority=1)
    assert until_preemption(bench) == ["worst"]
    bench.run()
    bench.assert_right()


def test_a_row_freed_by_a_preemption_is_not_reused_in_the_same_step() -> None:
    bench = Bench(blocks=10, block_size=4, max_rows=2, policy="priority")
    bench.add("urgent", 8, 28, priority=0)
    bench.add("victim", 20, 15, priority=9)
    bench.step()
    bench.add("next", 1, 2, priority=1)
    assert until_preemption(bench) == ["victim"]
    assert bench.tables.pool.free >= 1 and bench.scheduler.rows.free == 1, "there would be room"
    assert not bench.plans[-1].add
    bench.step()
    assert [row.request for row in bench.plans[-1].add] == ["next"]
    bench.run()
    bench.assert_right()


@DEPTHS
def test_a_step_that_preempts_admits_no_request(depth: int) -> None:
    bench = Bench(blocks=12, block_size=4, depth=depth, max_rows=4)
    for id in "abc":
        bench.add(id, 8, 24)
    before = 0
    for _ in range(500):
        if bench.scheduler.unfinished < 6 and len(bench.sequences) < 40:
            bench.add(f"new{len(bench.sequences)}", 3, 4)
        if not bench.core.has_work:
            break
        plans = len(bench.plans)
        bench.step()
        if bench.scheduler.stats.preemptions > before and len(bench.plans) > plans:
            assert not bench.plans[-1].add
        before = bench.scheduler.stats.preemptions
    assert before > 0
    bench.run()
    bench.assert_right()


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_in_flight_of_a_preempted_row_are_kept(depth: int) -> None:
    bench = Bench(blocks=9, block_size=4, depth=depth, prefix_caching=False)
    bench.add("a", 8, 20)
    bench.add("b", 8, 20)
    assert until_preemption(bench) == ["b"]
    request = bench.scheduler.requests.sequences("b")[0]
    assert request.state is RequestState.PREEMPTED and request.row == -1 and not request.blocks
    known, in_flight = request.known, request.in_flight
    assert in_flight == depth - 1 or in_flight == depth, "launched, not collected"
    drawn = known + in_flight
    while request.in_flight:
        assert request.state is RequestState.PREEMPTED, "it is admitted again only after its tokens are in"
        bench.step()
    assert request.known == drawn
    bench.run()
    bench.assert_right()
    again = [row for plan in bench.plans for row in plan.add if row.request == "b"][1:]
    assert again[0].num_tokens == drawn, "what was drawn is not drawn again"


def test_a_preempted_request_finds_its_own_blocks_in_the_cache() -> None:
    bench = Bench(blocks=10, block_size=4)
    bench.add("a", 8, 24)
    bench.add("b", 16, 14)
    until_preemption(bench)
    bench.run()
    bench.assert_right()
    again = [row for plan in bench.plans for row in plan.add][2:]
    assert again and all(row.num_computed > 0 for row in again)


@DEPTHS
def test_all_finish_in_a_cache_that_holds_one_at_a_time(depth: int) -> None:
    bench = Bench(blocks=8, block_size=4, depth=depth)
    for i in range(8):
        bench.add(f"r{i}", 5 + 2 * i, 32 - 5 - 2 * i)
    bench.run(2000)
    bench.assert_right()


# Policies


def endless(bench: Bench, steps: int, seconds: float) -> None:
    """A stream of urgent requests that fills the engine on its own."""
    for i in range(steps):
        while bench.scheduler.waiting < 3:
            bench.add(f"urgent{i}-{len(bench.sequences)}", 4, 2, priority=0)
        bench.step()
        bench.now += seconds


def test_lower_priority_values_go_first() -> None:
    bench = Bench(max_rows=1, policy="priority")
    for id, priority in {"a": 3, "b": 1, "c": 2, "d": 1}.items():
        bench.add(id, 4, 1, priority=priority)
    bench.run()
    assert [start.key[0] for start in bench.started] == ["b", "d", "c", "a"]


def test_a_low_priority_is_eventually_admitted_under_an_endless_stream_of_high_ones() -> None:
    bench = Bench(max_rows=2, policy="priority")
    bench.add("patient", 4, 2, priority=5)
    endless(bench, 40, seconds=AGEING_SECONDS / 10)
    assert ("patient", 0) not in [start.key for start in bench.started], "four levels' worth of waiting is not enough"
    endless(bench, 60, seconds=AGEING_SECONDS / 10)
    assert bench.sequences[("patient", 0)].finished is not None
    bench.run()
    bench.assert_right()


def test_first_come_first_served_ignores_priorities() -> None:
    bench = Bench(max_rows=1)
    for id, priority in {"a": 3, "b": 1}.items():
        bench.add(id, 4, 1, priority=priority)
    bench.run()
    assert [start.key[0] for start in bench.started] == ["a", "b"]


class ShortestFirst(RankedPolicy):
    """A custom policy."""

    def rank(self, request: Request) -> Any:
        return (len(request.prompt), request.arrival_order, request.index)

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=self.rank)


def test_a_policy_can_be_given_by_its_dotted_path() -> None:
    bench = Bench(max_rows=1, policy="tests.scheduler.test_preemption.ShortestFirst")
    for id, length in {"a": 9, "b": 3, "c": 5}.items():
        bench.add(id, length, 1)
    bench.run()
    assert [start.key[0] for start in bench.started] == ["b", "c", "a"]


@pytest.mark.parametrize("name", ["shortest", "tests.scheduler.test_preemption.Missing", "no_such_module.Policy"])
def test_an_unknown_policy_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValidationError, match="fcfs, priority"):
        make_policy(name)


@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_ranks_have_no_ties_even_among_sequences_of_a_prompt(name: str) -> None:
    policy = make_policy(name)
    source = NewRequest("a", [1], SamplingParams(n=3), limit=4)
    sequences = [Request(source, index, 0) for index in range(3)]
    assert len({policy.rank(sequence) for sequence in sequences}) == 3


@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_a_queue_stays_ordered_whatever_is_removed_and_added_again(name: str) -> None:
    policy = make_policy(name)
    waiting = [Request(NewRequest(str(i), [1], SamplingParams(), limit=4), 0, i) for i in range(6)]
    for request in reversed(waiting):
        policy.add(request)
    policy.remove(waiting[3])
    policy.remove(waiting[0])
    policy.add(waiting[0])
    policy.remove(waiting[0])
    policy.remove(waiting[0])
    policy.add(waiting[3])
    order = []
    while (request := policy.next()) is not None:
        assert policy.next() is request, "next does not remove"
        policy.remove(request)
        order.append(request.id)
    assert order == ["1", "2", "3", "4", "5"] and len(policy) == 0


# Two watermarks: past the first admission slows and idle sessions are suspended, past the second rows are swapped out.


def test_watermarks() -> None:
    pool, pressure, levels = BlockPool(101), MemoryPressure(), []
    for free in (100, 15, 14, 3, 2, 0):
        pool.allocate(pool.free - free)
        pressure.update(pool, NoSwapper())
        levels.append(pressure.device)
    assert levels == [0, 0, 1, 1, 2, 2]


def test_past_the_first_watermark_one_request_a_step_is_admitted() -> None:
    bench = Bench(blocks=100, block_size=4, max_rows=16, budget=400)
    bench.add("large", 4 * 88, 8)
    bench.step()
    for i in range(4):
        bench.add(f"r{i}", 3, 6)
    bench.step()
    assert bench.scheduler.pressure.device == 1 and len(bench.running()) == 2
    bench.step()
    assert len(bench.running()) == 3
    assert bench.scheduler.pressure.slowed >= 2
    assert "pressure 1 device" in bench.scheduler.stats.describe_step()
    bench.run()
    bench.assert_right()


def test_without_pressure_all_are_admitted_at_once() -> None:
    bench = Bench(blocks=100, block_size=4, max_rows=16, budget=400)
    for i in range(5):
        bench.add(f"r{i}", 3, 6)
    bench.step()
    assert len(bench.running()) == 5 and bench.scheduler.pressure.slowed == 0
    bench.run()


def test_idle_sessions_are_suspended_past_the_first_watermark(tmp_path: Path) -> None:
    bench = Bench(blocks=60, block_size=4, max_rows=4, budget=400, host_slots=100, sessions=tmp_path)
    keeper = bench.core.sessions
    for i in range(4):
        prompt = [2 + i] * 40
        keeper.create(f"s{i}", prompt)
        bench.put(bench.request(f"t{i}", prompt, 2, session=f"s{i}"))
        bench.run()
    assert [keeper.get(f"s{i}").phase for i in range(4)] == ["idle"] * 4
    bench.add("stranger", 4 * 14, 12)
    bench.run()
    phases = [keeper.get(f"s{i}").phase for i in range(4)]
    assert "asleep" in phases and phases == sorted(phases), "sessions idle longest are suspended first"
    assert bench.scheduler.pressure.slept or keeper.kv.dropped
    bench.assert_right("stranger")


def test_past_the_second_watermark_rows_are_swapped_out_before_blocks_run_out() -> None:
    bench = Bench(blocks=24, block_size=4, max_rows=4, budget=100, host_slots=100)
    for i in range(3):
        bench.add(f"r{i}", 20, 30)
    bench.run()
    bench.assert_right()
    stats = bench.scheduler.stats
    assert stats.swaps > stats.preemptions - stats.swaps, "most rows are swapped out in time"
    assert bench.tiers is not None and bench.tiers.loaded
