"""The worker in this process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quire.errors import DeviceLostError, StepError, StepMemoryError
from quire.executor.base import pause_after
from quire.layers.expert_placement import Placement
from quire.messages.plan import StepMasks, StepPlan, StepResult
from quire.worker.runner import PendingStep
from quire.worker.worker import Worker


class LocalExecutor:
    """Calls the worker directly. On a GPU `submit` only launches; on a CPU the step is done when it returns."""

    balance = lockstep = None

    def __init__(self, worker: Worker, can_give_up: bool = True) -> None:
        """`can_give_up`: a wait can be ended by `give_up`; if not, it is one call that blocks."""
        self._worker = worker
        self._can_give_up = can_give_up
        self._given_up = ""
        self._lost = False

    def submit(self, plan: StepPlan) -> PendingStep | StepError:
        try:
            return self._worker.launch(plan)
        except Exception as error:  # whatever it is, the loop must learn that the step has not begun
            return self._failure(error)
        finally:
            self._given_up = ""  # it took long, and came to its end

    def supply(self, handle: Any, masks: StepMasks) -> None:
        if isinstance(handle, StepError):
            return  # `collect` tells
        try:
            self._worker.supply(handle, masks)
        except Exception as error:  # as in `submit`
            raise self._failure(error) from error

    def collect(self, handle: Any) -> StepResult:
        if isinstance(handle, StepError):
            raise handle
        try:
            if self._can_give_up:
                self._wait(handle)
            return handle.result()
        except StepError:
            raise
        except RuntimeError as error:  # an asynchronous device error surfaces where it is waited for
            raise self._failure(error) from error

    def expert_counts(self) -> Mapping[int, Sequence[int]]:
        try:
            return {} if self._lost else self._worker.expert_counts()
        except RuntimeError:  # a step has failed on the device; who waits for it will tell
            return {}

    def place_experts(self, placements: Mapping[int, Placement]) -> None:
        """Hold other experts from the next step on."""
        self._worker.place_experts(placements)

    def rebalance_experts(self) -> None:
        return None  # a rank that is alone has them all

    def check(self) -> None:
        return None

    def give_up(self, message: str) -> None:
        """Whoever waits for a step is to wait no longer. May be called from any thread."""
        self._given_up = message

    def shutdown(self) -> None:
        if not self._lost:  # a lost device answers nothing, or never: its memory goes with the process
            self._worker.shutdown()

    def _wait(self, handle: Any) -> None:
        """Until the step is done. By asking, because nobody can be called back from a wait inside the driver."""
        begin = time.monotonic()
        self._given_up = ""
        while not handle.ready():
            pause = pause_after(time.monotonic() - begin)
            if not pause:
                continue
            if self._given_up:
                self._lost = True
                raise DeviceLostError(self._given_up)
            time.sleep(pause)
        self._given_up = ""  # it was slow, and no more than that

    def _failure(self, error: Exception) -> StepError:
        """What the loop is to make of an error: the device is lost, had no memory, or can go on."""
        said = f"{type(error).__name__}: {_first_line(error)}"
        no_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in said
        # The frames hold the step's tensors, which are in the way of whatever comes next.
        traceback.clear_frames(error.__traceback__)
        failure = StepMemoryError(said) if no_memory else StepError(said)
        if not _device_answers(free_memory=no_memory):
            self._lost = True
            failure = DeviceLostError(said)
        failure.__cause__ = error
        return failure


def _device_answers(free_memory: bool) -> bool:
    """Whether the device can go on. After a fault inside a kernel every later call fails, whatever it asks for."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        if free_memory:
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
