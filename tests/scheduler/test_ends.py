"""How requests end early: aborts, stop strings, failed steps, invalid logits, unusual results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.messages.caches import FULL, CacheGroup
from quire.messages.outputs import Key
from quire.messages.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from quire.messages.request import Request, RequestState
from quire.messages.speculation import DeviceDrafts
from quire.scheduler.drafting import Drafting
from tests.scheduler.harness import STOP, Bench, draw

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def only(bench: Bench, id: str) -> Request:
    return bench.scheduler.requests.sequences(id)[0]


# Aborts


def waiting(bench: Bench) -> str:
    for i in range(8):
        bench.add(f"filler{i}", 4, 4)
    bench.step()
    bench.add("x", 4, 4)
    assert only(bench, "x").state is RequestState.WAITING
    return "x"


def waiting_and_never_seen(bench: Bench) -> str:
    bench.add("x", 4, 4)
    return "x"


def prefilling(bench: Bench) -> str:
    bench.add("x", 60, 4)
    bench.step()
    assert only(bench, "x") in bench.scheduler.requests.prefilling
    return "x"


def decoding(bench: Bench) -> str:
    bench.add("x", 4, 20)
    for _ in range(5):
        bench.step()
    assert bench.scheduler.rows.decoding[only(bench, "x").row]
    return "x"


def preempted(bench: Bench) -> str:
    bench.add("filler", 30, 60)
    bench.add("x", 30, 60)
    while only(bench, "x").state is not RequestState.PREEMPTED:
        bench.step()
    return "x"


def with_sequences_not_yet_forked(bench: Bench) -> str:
    bench.add("x", 60, 4, n=5)
    bench.step()
    assert len(only(bench, "x").siblings) == 4
    return "x"


def with_sequences_beyond_the_rows(bench: Bench) -> str:
    bench.add("x", 6, 30, n=12)
    for _ in range(4):
        bench.step()
    assert bench.scheduler.waiting == 4
    return "x"


@DEPTHS
@pytest.mark.parametrize(
    "reach",
    [
        waiting,
        waiting_and_never_seen,
        prefilling,
        decoding,
        preempted,
        with_sequences_not_yet_forked,
        with_sequences_beyond_the_rows,
    ],
)
def test_an_abort_in_any_state_frees_everything_at_once(reach: Callable[[Bench], str], depth: int) -> None:
    bench = Bench(blocks=24, block_size=4, max_rows=8, budget=40, depth=depth)
    id = reach(bench)
    bench.core.abort(id)
    assert id not in bench.scheduler.requests.ids()
    assert id not in {key[0] for key in bench.running()}
    bench.audit()
    outputs = bench.step()
    samples = bench.device.sources[id].params.n
    assert sorted(end.key for end in outputs.finished if end.key[0] == id) == [(id, i) for i in range(samples)]
    assert {end.reason for end in outputs.finished if end.key[0] == id} == {"abort"}
    bench.run()
    bench.assert_right(but=(id,))


@DEPTHS
def test_the_id_of_an_aborted_request_can_be_used_again_while_its_old_step_is_in_flight(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.add("x", 6, 9)
    bench.step()
    bench.step()
    bench.core.abort("x")
    bench.step()
    bench.add("x", 6, 9)
    bench.run()
    bench.assert_right("x")


def test_an_abort_of_an_unknown_or_finished_request_does_nothing() -> None:
    bench = Bench()
    bench.add("a")
    bench.core.abort("unknown")
    bench.run()
    bench.core.abort("a")
    assert not bench.core.has_work


def test_an_abort_while_nothing_runs_is_still_reported() -> None:
    bench = Bench()
    bench.add("a")
    bench.core.abort("a")
    assert bench.core.has_work
    bench.run()
    assert bench.sequences[("a", 0)].reason == "abort"


# Stop strings


@DEPTHS
def test_finish_drops_later_tokens(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.add("a", 6, 30)
    bench.add("b", 6, 12)
    while len(bench.sequences[("a", 0)].tokens) < 5:
        bench.step()
    request = only(bench, "a")
    bench.core.finish(("a", 0), 3, "###")
    assert request.output == bench.sequences[("a", 0)].tokens[:3]
    bench.run()
    end = bench.sequences[("a", 0)].finished
    assert end is not None and (end.reason, end.stop_reason) == ("stop", "###")
    bench.assert_right("b")


@DEPTHS
def test_finish_ends_one_sequence_only(depth: int) -> None:
    bench = Bench(depth=depth, blocks=200)
    bench.add("a", 6, 12, n=3)
    while len(bench.sequences[("a", 1)].tokens) < 2:
        bench.step()
    bench.core.finish(("a", 1), 2)
    bench.core.finish(("a", 1), 2)
    bench.core.finish(("unknown", 0), 2)
    bench.run()
    assert bench.sequences[("a", 1)].reason == "stop"
    for index in (0, 2):
        assert bench.sequences[("a", index)].tokens == bench.device.truth("a", index).output


@pytest.mark.parametrize("index", [0, 1, 2])
def test_finish_of_a_sequence_that_has_not_forked_leaves_the_others(index: int) -> None:
    bench = Bench(budget=4, blocks=200)
    bench.add("a", 10, 5, n=3)
    bench.step()
    bench.core.finish(("a", index), 0)
    bench.run()
    for other in {0, 1, 2} - {index}:
        assert bench.sequences[("a", other)].tokens == bench.device.truth("a", other).output
    assert bench.sequences[("a", index)].tokens == []


# Failed steps


def culprit_at(id: str, where: str, least_computed: int = 0) -> Callable[[StepPlan, set[str]], str]:
    """Every step that has `id` in it fails."""
    return lambda plan, requests: where if id in requests and plan.max_context > least_computed else ""


@DEPTHS
@pytest.mark.parametrize("where", ["submit", "collect"])
@pytest.mark.parametrize("blocks", [12, 100])
def test_the_culprit_of_a_failed_step_ends_and_other_requests_finish(depth: int, where: str, blocks: int) -> None:
    bench = Bench(depth=depth, blocks=blocks, fails=culprit_at("bad", where))
    for id in ("a", "b", "bad", "c"):
        bench.add(id, 6, 12)
    bench.run(400)
    bench.assert_right("a", "b", "c")
    end = bench.sequences[("bad", 0)].finished
    assert end is not None and end.reason == "error" and "a step failed: step" in str(end.message)
    assert sum(plan.reset for plan in bench.plans) == 2, "once with others, once alone"


@DEPTHS
def test_a_culprit_that_fails_in_a_later_chunk_is_found_too(depth: int) -> None:
    bench = Bench(depth=depth, budget=8, blocks=100)
    ids = ["a", "b", "bad", "c"]

    def fails(plan: StepPlan, requests: set[str]) -> str:
        rows = [row for row, state in bench.device.rows.items() if state.request == "bad"]
        computing = [row for row in plan.rows.tolist() if row in rows and bench.device.rows[row].num_computed >= 16]
        return "collect" if computing else ""

    bench.device.fails = fails
    for id in ids:
        bench.add(id, 30 if id == "bad" else 5, 12)
    bench.run(500)
    bench.assert_right("a", "b", "c")
    assert bench.sequences[("bad", 0)].reason == "error"


def test_many_culprits_one_after_another_do_not_end_another_request() -> None:
    bench = Bench(blocks=100, fails=lambda plan, requests: "collect" if any("bad" in id for id in requests) else "")
    bench.add("long", 6, 60)
    for i in range(8):
        for _ in range(3):
            bench.step()
        bench.add(f"bad{i}", 5, 3)
    bench.run(400)
    bench.assert_right("long")
    assert all(bench.sequences[(f"bad{i}", 0)].reason == "error" for i in range(8))


def test_a_request_that_passed_alone_is_cleared_of_its_earlier_failure() -> None:
    bench = Bench(fails=lambda plan, requests: "collect" if plan.step in (2, 12) else "")
    bench.add("a", 6, 30)
    bench.add("b", 6, 5)
    while bench.sequences[("b", 0)].finished is None:
        bench.step()
    assert bench.device.next_step < 12
    bench.run()
    assert bench.device.failures["a"] == 2
    bench.assert_right()


def test_when_steps_of_several_requests_fail_all_still_finish() -> None:
    bench = Bench(fails=lambda plan, requests: "collect" if len(requests) > 1 else "")
    for id in "abc":
        bench.add(id, 6, 6)
    bench.run(200)
    bench.assert_right()


@DEPTHS
def test_one_failure_loses_no_token(depth: int) -> None:
    bench = Bench(depth=depth, fails=lambda plan, requests: "collect" if plan.step == 6 else "")
    for id in "abc":
        bench.add(id, 6, 12)
    bench.run()
    bench.assert_right()
    assert sum(plan.reset for plan in bench.plans) == 1


@pytest.mark.parametrize("n", [1, 5, 12])
def test_a_culprit_ends_with_all_its_sequences(n: int) -> None:
    bench = Bench(fails=culprit_at("bad", "collect"))
    bench.add("a", 6, 12)
    bench.add("bad", 6, 12, n=n)
    bench.run(200)
    bench.assert_right("a")
    assert {bench.sequences[("bad", i)].reason for i in range(n)} == {"error"}


@DEPTHS
def test_blocks_published_by_a_failed_step_are_withdrawn(depth: int) -> None:
    bench = Bench(depth=depth, block_size=4, fails=lambda plan, requests: "collect" if plan.step == 0 else "")
    prompt = list(range(2, 15))
    bench.add("a", prompt, 2)
    while not any(plan.reset for plan in bench.plans):
        bench.step()
    again = next(plan for plan in bench.plans if plan.reset)
    assert again.add[0].num_computed == 0, "nothing of it may be hit"
    bench.add("b", prompt, 2)
    bench.run()
    bench.assert_right()


def test_an_abort_of_a_quarantined_request_leaves_the_others() -> None:
    bench = Bench(fails=lambda plan, requests: "collect" if plan.step == 2 else "")
    for id in "abc":
        bench.add(id, 6, 9)
    while not bench.device.failures:
        bench.step()
    bench.core.abort("a")
    bench.run()
    bench.assert_right("b", "c")


# Unusual results


@DEPTHS
def test_invalid_logits_end_one_request_only(depth: int) -> None:
    bench = Bench(depth=depth, is_invalid=lambda key, position: key[0] == "bad" and position == 9)
    for id in ("a", "bad", "b"):
        bench.add(id, 6, 12)
    bench.run()
    bench.assert_right("a", "b")
    end = bench.sequences[("bad", 0)].finished
    assert end is not None and end.reason == "error" and "NaN" in str(end.message)
    assert bench.sequences[("bad", 0)].tokens == bench.device.truth("bad", 0).output[:3]


@DEPTHS
@pytest.mark.parametrize("groups", [(FULL,), (FULL, CacheGroup("state", (), pages=1))], ids=["full", "states"])
@pytest.mark.parametrize("at", [7, 9, 12, 17])
def test_invalid_logits_behind_drafts_end_the_request_as_without_drafts(
    depth: int, at: int, groups: tuple[CacheGroup, ...]
) -> None:
    """Tokens before the invalid place are delivered, whether they were drawn in the same step or not."""
    bench = Bench(
        depth=depth, is_invalid=lambda key, position: key[0] == "bad" and position == at, groups=groups,
        drafting=Drafting(device=DeviceDrafts(proposes=True)),
        guess=lambda key, truth, position, count: truth[position : position + count],
    )  # fmt: skip
    for id in ("a", "bad", "b"):
        bench.add(id, 6, 14)
    bench.run()
    bench.assert_right("a", "b")
    bad = bench.sequences[("bad", 0)]
    assert bad.finished is not None and bad.finished.reason == "error" and "NaN" in str(bad.finished.message)
    assert bad.tokens == bench.device.truth("bad", 0).output[: at - 6]
    assert bench.device.accepted > 4
    bench.add("good", bench.device.sources["bad"].prompt, 4)
    bench.run()
    assert bench.started[-1].num_cached == 0, "what led there is cached"


def test_blocks_that_led_to_nan_are_not_cached() -> None:
    bench = Bench(block_size=4, is_invalid=lambda key, position: key[0] == "bad")
    prompt = list(range(2, 15))
    bench.add("bad", prompt, 4)
    bench.run()
    bench.add("good", prompt, 4)
    bench.run()
    assert bench.started[-1].num_cached == 0
    bench.assert_right("good")


@DEPTHS
def test_draws_that_yield_nothing_are_repeated(depth: int) -> None:
    seen: set[tuple[Key, int]] = set()

    def yields_nothing(key: Key, position: int) -> bool:
        is_first = (key, position) not in seen
        seen.add((key, position))
        return is_first

    bench = Bench(depth=depth, yields_nothing=yields_nothing)
    bench.add("a", 6, 12, n=2)
    bench.add("b", 8, 3)
    bench.run()
    bench.assert_right()


def result_of(plan: StepPlan, tokens: list[list[int]], stopped: bool = False) -> StepResult:
    return StepResult(
        plan.step,
        np.array([token for each in tokens for token in each], np.int32),
        np.array([len(each) for each in tokens], np.int32),
        np.array([stopped] * len(tokens)),
        np.zeros(len(tokens), np.bool_),
    )


def test_several_tokens_of_one_draw_all_count() -> None:
    bench = Bench(block_size=4)
    scheduler = bench.scheduler
    bench.core.add(bench.request("a", 6, 10))
    bench.core.add(bench.request("b", 6, 10))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(result_of(plan, [[5, 6, 7], [8]]))
    outputs = scheduler.take_outputs()
    assert (outputs.keys, outputs.counts, outputs.tokens) == ([("a", 0), ("b", 0)], [3, 1], [5, 6, 7, 8])
    rows, request = scheduler.rows, only(bench, "a")
    assert request.output == [5, 6, 7]
    assert (rows.known[request.row], rows.bound[request.row], rows.computed[request.row]) == (9, 9, 8)
    plan = scheduler.schedule()
    assert plan is not None and plan.num_decodes == 2
    assert len(request.blocks) == 3, "the ninth token has a slot"
    scheduler.update(result_of(plan, [[1, 2, 3, 4, 5, 6, 7], [9]]))
    (end,) = scheduler.take_outputs().finished
    assert (end.key, end.reason) == (("a", 0), "length")


def test_several_tokens_that_end_with_a_stop_token_stop_there() -> None:
    bench = Bench()
    bench.core.add(bench.request("a", 6, 10))
    plan = bench.scheduler.schedule()
    assert plan is not None
    bench.scheduler.update(result_of(plan, [[5, STOP]], stopped=True))
    (end,) = bench.scheduler.take_outputs().finished
    assert (end.reason, end.stop_reason) == ("stop", STOP)
    bench.scheduler.check_idle()


def test_outputs_of_steps_with_and_without_counts_add_up() -> None:
    bench = Bench()
    scheduler = bench.scheduler
    bench.core.add(bench.request("a", 6, 20))
    for tokens in ([[3]], [[4, 5]], [[]], [[6]]):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(result_of(plan, tokens))
    outputs = scheduler.take_outputs()
    assert outputs.tokens == [3, 4, 5, 6] and outputs.counts == [1, 2, 0, 1]
    assert scheduler.stats.generated_tokens == 4


def test_a_result_for_an_earlier_owner_of_a_row_is_dropped() -> None:
    bench = Bench(max_rows=1)
    scheduler = bench.scheduler
    bench.core.add(bench.request("old", 6, 20))
    first = scheduler.schedule()
    scheduler.abort("old")
    bench.core.add(bench.request("new", 6, 20))
    second = scheduler.schedule()
    assert first is not None and second is not None
    assert first.sample_rows.tolist() == second.sample_rows.tolist(), "the same row"
    assert second.drop == first.sample_rows.tolist()
    scheduler.take_outputs()
    scheduler.update(result_of(first, [[33]]))
    assert scheduler.take_outputs().tokens == []
    scheduler.update(result_of(second, [[44]]))
    assert scheduler.take_outputs().tokens == [44]
    assert only(bench, "new").output == [44]


def test_results_out_of_order_are_refused() -> None:
    bench = Bench()
    bench.core.add(bench.request("a", 6, 20))
    first, second = bench.scheduler.schedule(), bench.scheduler.schedule()
    assert first is not None and second is not None
    with pytest.raises(RuntimeError, match="expected the result of step 0, got that of step 1"):
        bench.scheduler.update(result_of(second, [[1]]))


def test_logprobs_belong_to_their_token() -> None:
    bench = Bench()
    scheduler = bench.scheduler
    for id in "ab":
        bench.core.add(bench.request(id, 6, 20))
    entry, other = TokenLogprobs([1], [-0.5], 1), TokenLogprobs([2], [-0.1], 2)
    plan = scheduler.schedule()
    assert plan is not None
    result = result_of(plan, [[1], [2]])
    result.logprobs = {1: entry}
    result.prompt_logprobs = {0: PromptLogprobs(1, [other]), 1: PromptLogprobs(1, [entry])}
    scheduler.abort("a")
    scheduler.update(result)
    outputs = scheduler.take_outputs()
    assert outputs.keys == [("b", 0)] and outputs.logprobs == {0: entry}
    assert outputs.prompt_logprobs == [(("b", 0), PromptLogprobs(1, [entry]))], "nothing about a request that has ended"


def test_the_harness_notices_a_wrong_slot() -> None:
    bench = Bench(block_size=4, draws=draw)
    bench.add("a", 6, 12)
    for _ in range(3):
        bench.step()
    bench.device.content[only(bench, "a").blocks[0] * 4 + 1] ^= 1
    with pytest.raises(AssertionError, match=r"reads wrong KV of group 0 at positions \[1\]"):
        bench.run()
