"""Steps that run out of memory, lose the device, or never end."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.core import EngineCore
from quire.engine.memory_watch import (
    LEAST_BUDGET,
    LONGEST_PAUSE_SECONDS,
    RAISE_SECONDS,
    HeapReturns,
    MemoryWatch,
    StepMemory,
)
from quire.engine.watchdog import Watchdog
from quire.errors import DeviceLostError, EngineDeadError, StepMemoryError
from quire.executor.null import NullExecutor
from quire.messages.memory_use import MemoryUse
from quire.messages.plan import StepPlan, StepResult
from quire.platforms import cpu
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
    assert bench.scheduler.budget == LEAST_BUDGET
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


GIB = 2**30


class Memory:
    """A device of 80 GiB: 40 of weights and cache, 20 for the largest step, and what `others` take."""

    def __init__(self, budget: int = 4096) -> None:
        self.now, self.others, self.host_free, self.trims = 0.0, 0, 100 * GIB, 0
        self.bench = Bench(blocks=2000, max_rows=16, budget=budget)
        self.watch = MemoryWatch(
            self.bench.scheduler, self.measure, StepMemory(40 * GIB, 20 * GIB, budget), self.trim, lambda: self.now
        )

    def measure(self) -> MemoryUse:
        return MemoryUse(40 * GIB - self.others, 80 * GIB, self.host_free, 1000 * GIB)

    def trim(self) -> None:
        self.trims += 1

    def after(self, seconds: float) -> int:
        """Steps are made for so long; returns the most tokens of a step then."""
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            self.watch.tick()
        return self.bench.scheduler.budget


def test_steps_become_smaller_before_memory_runs_out_and_larger_when_there_is_some_again() -> None:
    memory = Memory()
    assert memory.after(5) == 4096 and (memory.watch.device_used, memory.watch.device_level) == (0.5, 0)
    memory.others = 17 * GIB  # 3 GiB would be left of 40
    assert memory.after(1.1) == 2048 and memory.watch.device_level == 1
    assert memory.after(100) == 2048 and memory.watch.device_level == 0  # 13 left with half a step; 3 with a whole one
    memory.others = 39 * GIB
    assert memory.after(1) < 2048 and memory.watch.device_level == 2
    assert memory.after(10) == LEAST_BUDGET  # and not below
    lowered = memory.watch.lowered
    memory.others = 0
    assert memory.after(RAISE_SECONDS + 3) == 2 * LEAST_BUDGET
    assert memory.after(5 * RAISE_SECONDS) == 4096
    assert (memory.watch.lowered, memory.watch.raised) == (lowered, 4)
    assert memory.watch.device_level == 0


def test_the_budget_comes_back_after_a_step_that_ran_out_of_memory() -> None:
    memory = Memory()
    assert memory.watch.step_failed(4096) == 2048
    assert memory.after(RAISE_SECONDS - 1) == 2048
    assert memory.after(2) == 4096
    # It fails again whenever steps are large: they stay small longer each time.
    pauses = []
    for _ in range(12):
        memory.watch.step_failed(4096)
        begin = memory.now
        while memory.bench.scheduler.budget < 4096:
            memory.now += 1.0
            memory.watch.tick()
        pauses.append(memory.now - begin)
    assert pauses == sorted(pauses) and pauses[0] > RAISE_SECONDS and pauses[-1] <= LONGEST_PAUSE_SECONDS + 2
    memory.now += LONGEST_PAUSE_SECONDS + 1
    memory.watch.step_failed(4096)
    assert memory.after(RAISE_SECONDS + 3) == 4096
    assert memory.watch.failed == 14


def test_without_a_measure_the_budget_comes_back_after_a_while() -> None:
    bench = Bench(blocks=2000, max_rows=16, budget=4096)
    now = 0.0
    watch = MemoryWatch(bench.scheduler, clock=lambda: now)
    assert watch.step_failed(3000) == 1500
    for _ in range(300):
        now += 0.1
        watch.tick()
    assert bench.scheduler.budget == 4096 and watch.device_level == 0


def test_a_full_machine_trims_and_slows_admission() -> None:
    memory = Memory()
    memory.host_free = 99 * GIB
    assert memory.after(100) == 4096  # the steps' memory is the device's
    assert memory.watch.host_level == 1 and 3 <= memory.trims <= 5
    assert memory.bench.scheduler.pressure.memory == 1
    core = EngineCore(memory.bench.scheduler, NullExecutor(16), memory=memory.watch)
    memory.host_free = 10 * GIB
    memory.after(2)
    for id in "abcd":
        core.add(memory.bench.request(id, 40, 20))
    core.step()
    assert memory.watch.host_level == 2 and memory.bench.scheduler.rows.used == 1
    memory.host_free = 500 * GIB
    memory.after(2)
    core.step()
    assert memory.bench.scheduler.rows.used == 4 and memory.watch.host_level == 0
    run(core)
    memory.bench.scheduler.check_idle()


def test_freed_heap_is_given_back_once_in_a_while_and_not_while_nothing_happens() -> None:
    now, calls, takes = 0.0, 0, 0.001

    def give_back() -> None:
        nonlocal calls, now
        calls, now = calls + 1, now + takes

    heap = HeapReturns(give_back, lambda: now)
    assert heap.tick_idle() is None, "nothing was done"
    for _ in range(2 * 60 * 60 + 10):
        now += 0.5
        heap.tick()
    assert calls == 60
    now, takes = now + 100, 0.2
    assert heap.tick_idle() is None and calls == 61, "all is given back"
    heap.tick()
    assert heap.tick_idle() == pytest.approx(2000), "a ten-thousandth of the time at most"
    now += 3000
    heap.tick()
    assert calls == 61, "it takes long: not while requests run"
    assert heap.tick_idle() is None and calls == 62


def test_memory_is_reported_in_metrics(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    values = {metric.name: metric.value for metric in llm.get_metrics()}
    assert 0 < values["quire:memory_used_host"] < 1
    assert values["quire:step_token_budget"] == llm.llm_engine.info.max_num_batched_tokens
    llm.llm_engine.core.memory.step_failed(512)
    values = {metric.name: metric.value for metric in llm.get_metrics()}
    assert (values["quire:steps_out_of_memory"], values["quire:step_token_budget"]) == (1, LEAST_BUDGET)


def test_files_that_a_container_has_read_are_not_memory_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 600\ninactive_file 550\nactive_file 50\n")
    platform = cpu.CpuPlatform()
    assert (platform.free_memory(), platform.usable_memory()) == (650, 1000)
    (tmp_path / "memory.max").write_text("max\n")
    assert platform.usable_memory() == platform.total_memory() and platform.free_memory() > 10**6


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
