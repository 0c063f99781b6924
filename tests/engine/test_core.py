"""The loop: schedule, execute, update, with steps in flight, failures and shutdown."""

from __future__ import annotations

import logging

import pytest

from quire.engine.core import EngineCore
from quire.errors import CacheTooSmallError, EngineDeadError, StepError
from quire.executor.null import NullExecutor
from quire.messages.plan import StepPlan, StepResult
from tests.scheduler.harness import Bench, draw

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 3])


@DEPTHS
def test_pipeline_depth_steps_are_in_flight_before_the_first_is_collected(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.add("a", 6, 20)
    for step in range(depth):
        assert bench.step().tokens == []
        assert bench.scheduler.in_flight == step + 1
    assert len(bench.step().tokens) == 1
    assert bench.scheduler.in_flight == depth
    bench.run()
    bench.assert_right("a")


@DEPTHS
def test_steps_in_flight_are_collected_when_there_is_nothing_more_to_launch(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.add("a", 6, 1)
    bench.step()
    bench.run(depth + 3)
    bench.assert_right("a")


def test_a_step_without_work_returns_nothing() -> None:
    bench = Bench()
    assert not bench.core.has_work
    outputs = bench.step()
    assert outputs.keys == [] and outputs.finished == [] and bench.plans == []


def test_a_request_that_can_never_fit_is_refused_and_leaves_nothing_behind() -> None:
    bench = Bench(blocks=2)
    with pytest.raises(CacheTooSmallError):
        bench.add("a", 100, 1)
    assert not bench.core.has_work
    bench.scheduler.check_idle()


def test_started_requests_have_their_time_and_cached_tokens() -> None:
    bench = Bench(block_size=4)
    bench.now = 12.5
    bench.add("a", list(range(2, 12)), 2)
    bench.run()
    bench.now = 20.0
    bench.add("b", list(range(2, 12)), 2)
    bench.run()
    assert [(start.key, start.at, start.num_cached) for start in bench.started] == [
        (("a", 0), 12.5, 0),
        (("b", 0), 20.0, 8),
    ]


@DEPTHS
def test_shutdown_aborts_unfinished_requests_and_the_core_accepts_no_more(depth: int) -> None:
    bench = Bench(depth=depth, max_rows=2)
    for id in "abc":
        bench.add(id, 6, 20, n=2)
    for _ in range(3):
        bench.step()
    bench.core.shutdown()
    bench.core.shutdown()
    bench.run(5)
    assert {received.reason for received in bench.sequences.values()} == {"abort"}
    with pytest.raises(EngineDeadError, match="shut down"):
        bench.core.add(bench.request("d"))


class FailsOtherwise(NullExecutor):
    """Always fails, with an error that is not a failed step."""

    def submit(self, plan: StepPlan) -> StepResult:
        raise MemoryError("not a step's failure")


def test_an_error_that_is_not_a_step_error_is_raised() -> None:
    bench = Bench()
    core = EngineCore(bench.scheduler, FailsOtherwise(8))
    core.add(bench.request("a"))
    with pytest.raises(MemoryError):
        core.step()


def test_a_failed_submit_is_attributed_to_the_failed_step_or_those_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(depth=1, fails=lambda plan, requests: "submit" if "bad" in requests else "")
    bench.add("good", 6, 12)
    bench.step()
    bench.add("bad", 6, 12)
    with caplog.at_level(logging.ERROR):
        bench.run()
    assert "cannot be launched" in caplog.text
    bench.assert_right("good")
    assert bench.sequences[("bad", 0)].reason == "error"


def test_each_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.add("a", 6, 2, n=2)
    with caplog.at_level(logging.DEBUG, logger="quire.engine.core"):
        bench.run()
    assert "step 0: 0 decodes + 1 prompts (6 tokens)" in caplog.text
    assert "step 1: 2 decodes + 0 prompts (0 tokens)" in caplog.text and "1 copied" in caplog.text


# The null executor


@DEPTHS
def test_the_null_executor_yields_the_configured_tokens(depth: int) -> None:
    bench = Bench(depth=depth, blocks=10, max_rows=4)
    bench.core = EngineCore(bench.scheduler, NullExecutor(4, draw), depth)
    for id in ("a", "b", "c"):
        bench.put(bench.request(id, 6, 15, n=2))
    bench.run()
    assert bench.scheduler.stats.preemptions > 0
    bench.assert_right()


def test_the_null_executor_refuses_a_gap() -> None:
    bench = Bench()
    bench.core.add(bench.request("a"))
    bench.scheduler.schedule()
    plan = bench.scheduler.schedule()
    assert plan is not None
    with pytest.raises(RuntimeError, match="expected plan 0, got plan 1"):
        NullExecutor(8).submit(plan)


def test_step_error_is_the_only_error_a_device_reports() -> None:
    assert issubclass(StepError, RuntimeError)
