"""Plans in a pipeline: which rows decode in which plan, and what may be launched before a draw is known."""

from __future__ import annotations

from tests.scheduler.harness import Bench


def decoding(bench: Bench) -> list[set[int]]:
    """The rows that decode in each plan so far."""
    return [set(plan.rows[: plan.num_decodes].tolist()) for plan in bench.plans]


def test_rows_decode_in_as_many_plans_as_there_are_stages_and_each_in_one_at_a_time() -> None:
    bench = Bench(depth=2, microbatches=3, max_rows=9)
    for i in range(9):
        bench.add(f"r{i}", output=30)
    for _ in range(14):
        bench.step()
    plans = decoding(bench)[-6:]
    assert [len(plan) for plan in plans] == [3] * 6
    assert set.union(*plans[:3]) == set(range(9)) == set.union(*plans[3:])
    assert bench.scheduler.in_flight == 2
    bench.run()
    bench.assert_right()


def test_remaining_rows_spread_out_again_and_none_waits_for_long() -> None:
    bench = Bench(depth=1, microbatches=2, max_rows=8)
    for i in range(8):
        bench.add(f"r{i}", output=40 if i % 4 else 10)
    for _ in range(60):
        bench.step()
    plans = [plan for plan in decoding(bench) if plan]
    assert {len(plan) for plan in plans[-8:]} == {3}, "six are left, three in each plan"
    since = dict.fromkeys(plans[-1] | plans[-2], len(plans) - 8)
    for index, plan in enumerate(plans[-8:], start=len(plans) - 8):
        assert all(index - since[row] <= 2 for row in plan)
        since |= dict.fromkeys(plan, index)
    bench.run()
    bench.assert_right()


def test_the_chunks_of_a_prompt_follow_each_other_at_once() -> None:
    bench = Bench(depth=2, microbatches=3, budget=8)
    bench.add("long", prompt=40)
    bench.step(), bench.step()
    assert [plan.counts.tolist() for plan in bench.plans] == [[8], [8]]
    assert bench.scheduler.in_flight == 2, "nothing was waited for"
    bench.run()
    bench.assert_right()


def test_one_row_is_planned_when_its_last_token_is_known() -> None:
    bench = Bench(depth=3, microbatches=4)
    bench.add("alone", output=6)
    bench.run()
    bench.assert_right()
    last = [plan.forced for plan in bench.plans if plan.num_decodes]
    assert [token for ((_, token),) in last] == bench.device.truth("alone", 0).output[:-1]
