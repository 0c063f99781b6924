"""Steps that run out of memory, lose the device, or never end."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.core import LEAST_BUDGET, EngineCore
from quire.engine.watchdog import Watchdog
from quire.errors import DeviceLostError, EngineDeadError, StepMemoryError
from quire.executor.null import NullExecutor
from quire.messages.plan import StepPlan, StepResult
from tests.scheduler.harness import Bench

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


class Failing(NullExecutor):
    """Raises what `fails` returns for a step, when the step is collected."""

    def __init__(self, fails: Callable[[StepPlan], Exception | None]) -> None:
        super().__init__(64)
        self.plans: list[StepPlan] = []
        self._fails = fails

    def submit(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return super().submit(plan)

    def collect(self, handle: StepResult) -> StepResult:
        error = self._fails(self.plans[handle.step])
        if error is not None:
            raise error
        return handle


class Hanging(NullExecutor):
    """Step `at` never ends, unless it is given up."""

    def __init__(self, at: int) -> None:
        super().__init__(64)
        self._at = at
        self._message = ""
        self._given_up = threading.Event()

    def collect(self, handle: StepResult) -> StepResult:
        if handle.step == self._at:
            assert self._given_up.wait(30)
            raise DeviceLostError(self._message)
        return handle

    def give_up(self, message: str) -> None:
        self._message = message
        self._given_up.set()


def run(core: EngineCore, steps: int = 500) -> None:
    while core.has_work and steps:
        core.step()
        steps -= 1
    assert not core.has_work


# Out of memory


@DEPTHS
def test_out_of_memory_makes_steps_smaller_and_fails_no_request(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(blocks=2000, max_rows=16, budget=4096)
    failing = Failing(lambda plan: StepMemoryError("no memory") if plan.num_tokens > 700 else None)
    core = EngineCore(bench.scheduler, failing, depth)
    for id in "abcdefgh":
        core.add(bench.request(id, 400, 5))
    with caplog.at_level(logging.WARNING):
        run(core)
    sizes = [plan.num_tokens for plan in failing.plans]
    assert sizes[0] == 8 * 400 and max(sizes[-10:]) <= 700
    assert (
        "step 0 (0 decodes + 8 prompts, 3200 tokens; requests a, b, c, d, e, f, g, h) ran out of memory" in caplog.text
    )
    assert bench.scheduler.stats.finished == 8
    bench.scheduler.check_idle()


def test_steps_do_not_become_tiny_and_a_request_that_fails_alone_gets_an_error() -> None:
    bench = Bench(blocks=2000, max_rows=16, budget=4096)
    core = EngineCore(bench.scheduler, Failing(lambda plan: StepMemoryError("no memory")))
    core.add(bench.request("a", 400, 5))
    outputs = [core.step() for _ in range(4)]
    finished = [end for output in outputs for end in output.finished]
    assert [(end.reason, end.message) for end in finished] == [("error", "a step failed: no memory")]
    assert bench.scheduler.lower_budget(10**6) == LEAST_BUDGET
    bench.scheduler.check_idle()


@DEPTHS
def test_an_engine_survives_a_step_that_runs_out_of_memory(make_llm: Callable[..., LLM], depth: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5 + i, 9, 11] for i in range(6)]
    expected = [out.outputs[0].token_ids for out in make_llm().generate(prompts, params, use_tqdm=False)]
    llm = make_llm(pipeline_depth=depth)
    worker = llm.llm_engine.core._executor._worker  # type: ignore[attr-defined]
    launch, steps = worker.launch, []

    def short_of_memory(plan: StepPlan) -> object:
        steps.append(plan.step)
        if len(steps) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return launch(plan)

    worker.launch = short_of_memory
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outputs] == expected
    assert all(out.error is None for out in outputs)


# The device is lost


@DEPTHS
def test_a_lost_device_ends_the_engine_and_names_the_step(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    lost = DeviceLostError("AcceleratorError: CUDA error: an illegal memory access was encountered")
    failing = Failing(lambda plan: lost if plan.step == 3 else None)
    core = EngineCore(bench.scheduler, failing, depth)
    for id in "ab":
        core.add(bench.request(id, 6, 20))
    with caplog.at_level(logging.ERROR), pytest.raises(EngineDeadError, match="illegal memory access") as caught:
        run(core)
    assert "step 3 (2 decodes + 0 prompts, 2 tokens; requests a, b)" in str(caught.value)
    assert "\n" not in str(caught.value) and str(caught.value) in caplog.text
    launched = len(failing.plans)
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        core.step()
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        core.add(bench.request("c"))
    assert len(failing.plans) == launched, "nothing is tried again"
    for id in "ab":
        core.abort(id)
    assert {end.reason for end in core.step().finished} == {"abort"}
    bench.scheduler.check_idle()
    core.shutdown()


def test_a_long_list_of_requests_is_shortened() -> None:
    bench = Bench(blocks=200, max_rows=32)
    core = EngineCore(bench.scheduler, Failing(lambda plan: DeviceLostError("gone")))
    for i in range(12):
        core.add(bench.request(f"r{i}", 2, 4))
    with pytest.raises(EngineDeadError, match="requests r0, r1, r2, r3, r4, r5, r6, r7 and 4 more"):
        core.step()


# A step that hangs


@DEPTHS
def test_a_hanging_step_is_named_and_ends_the_engine(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    core = EngineCore(bench.scheduler, Hanging(at=2), depth, step_timeout=0.1)
    core.add(bench.request("slow", 6, 20))
    begin = time.monotonic()
    with caplog.at_level(logging.ERROR), pytest.raises(EngineDeadError, match=r"not ended after 0.1 s \(step_timeout"):
        run(core)
    assert time.monotonic() - begin < 5
    assert "step 2 (1 decodes + 0 prompts, 1 tokens; requests slow) hangs" in caplog.text
    core.shutdown()


def test_no_timeout_means_no_thread() -> None:
    before = set(threading.enumerate())
    bench = Bench()
    core = EngineCore(bench.scheduler, NullExecutor(64), step_timeout=0)
    core.add(bench.request("a"))
    run(core)
    assert set(threading.enumerate()) <= before


def test_short_steps_never_trigger_the_timeout() -> None:
    reported: list[StepPlan] = []
    watchdog = Watchdog(0.2, reported.append)
    plan = object()
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        watchdog.begin(plan)  # type: ignore[arg-type]
        time.sleep(0.001)
        watchdog.end()
    watchdog.stop()
    assert reported == []


def test_a_hang_is_reported_once() -> None:
    reported: list[StepPlan] = []
    watchdog = Watchdog(0.05, reported.append)
    watchdog.begin("plan")  # type: ignore[arg-type]
    time.sleep(0.4)
    watchdog.stop()
    assert reported == ["plan"]


def test_the_watchdog_keeps_no_engine_alive() -> None:
    bench = Bench()
    core = EngineCore(bench.scheduler, NullExecutor(64), step_timeout=0.2)
    alive = weakref.ref(core)
    del core
    gc.collect()
    assert alive() is None
