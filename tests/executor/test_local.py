"""The executor distinguishes running out of memory, a failed step and a lost device."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import DeviceLostError, StepError, StepMemoryError
from quire.executor import base
from quire.executor.local import LocalExecutor
from quire.messages.plan import StepResult

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation …")
RESULT = StepResult(0, *(np.zeros(0, np.int32),) * 4)


class Step:
    """A launched step that is done after `polls` polls."""

    def __init__(self, polls: int = 0, error: Exception | None = None) -> None:
        self.polls = polls
        self._error = error

    def ready(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def result(self) -> StepResult:
        if self._error is not None:
            raise self._error
        return RESULT


class FakeWorker:
    """Launches `step`, or raises it."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self.is_shut_down = False
        self.working_memory: weakref.ref[Any] | None = None

    def launch(self, plan: Any) -> Any:
        activations = torch.zeros(10)
        self.working_memory = weakref.ref(activations)
        if isinstance(self._step, Exception):
            raise self._step
        return self._step

    def shutdown(self) -> None:
        self.is_shut_down = True


class FakeCuda:
    """Counts calls to the device; on a lost one every call fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_lost: bool = False) -> None:
        self.emptied = 0
        self.is_lost = is_lost
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", self._answer)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)

    def _answer(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def _empty(self) -> None:
        self._answer()
        self.emptied += 1


def executor(step: Any, **options: Any) -> tuple[LocalExecutor, FakeWorker]:
    worker = FakeWorker(step)
    return LocalExecutor(worker, **options), worker  # type: ignore[arg-type]


@pytest.mark.parametrize("when", ["launched", "waited for"])
def test_running_out_of_memory_empties_torchs_cache_and_is_recoverable(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    cuda = FakeCuda(monkeypatch)
    runs, worker = executor(NO_MEMORY if when == "launched" else Step(error=NO_MEMORY))
    handle = runs.submit(None)  # type: ignore[arg-type]
    with pytest.raises(StepMemoryError, match="Tried to allocate 2.00 GiB") as caught:
        runs.collect(handle)
    assert "\n" not in str(caught.value)
    assert cuda.emptied == 1
    assert worker.working_memory is not None and worker.working_memory() is None, "the traceback holds tensors"
    runs.shutdown()
    assert worker.is_shut_down


def test_an_error_the_device_survives_is_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    runs, _ = executor(RuntimeError("CUDA error: invalid configuration argument\nmore"))
    with pytest.raises(StepError, match="RuntimeError: CUDA error: invalid configuration argument$") as caught:
        runs.collect(runs.submit(None))  # type: ignore[arg-type]
    assert type(caught.value) is StepError
    assert cuda.emptied == 0


@pytest.mark.parametrize("when", ["launched", "waited for"])
def test_a_device_that_fails_afterwards_is_lost_and_not_used_again(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    FakeCuda(monkeypatch, is_lost=True)
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    runs, worker = executor(error if when == "launched" else Step(error=error))
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        runs.collect(runs.submit(None))  # type: ignore[arg-type]
    runs.shutdown()
    assert not worker.is_shut_down


def test_on_a_cpu_every_error_is_a_failed_step() -> None:
    runs, _ = executor(IndexError("index 7 is out of range"))
    with pytest.raises(StepError, match="IndexError: index 7"):
        runs.collect(runs.submit(None))  # type: ignore[arg-type]


@pytest.mark.parametrize("can_give_up", [True, False])
def test_waiting_ends_when_the_step_does(can_give_up: bool) -> None:
    step = Step(polls=20)
    runs, _ = executor(step, can_give_up=can_give_up)
    assert runs.collect(step) is RESULT
    assert step.polls == (-1 if can_give_up else 20), "one blocking call if it cannot be given up"


def test_a_wait_can_be_given_up_from_another_thread() -> None:
    runs, worker = executor(None)
    threading.Timer(0.1, runs.give_up, ["it hangs"]).start()
    begin = time.monotonic()
    with pytest.raises(DeviceLostError, match="it hangs"):
        runs.collect(Step(polls=10**12))
    assert time.monotonic() - begin < 5
    runs.shutdown()
    assert not worker.is_shut_down, "shutting down would wait for the step as well"


def test_a_slow_step_that_ends_is_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, worker = executor(None)
    runs.give_up("it hangs")
    assert runs.collect(Step()) is RESULT
    monkeypatch.setattr(base, "SPIN_SECONDS", 0.0)
    assert runs.collect(Step()) is RESULT
    runs.shutdown()
    assert worker.is_shut_down
