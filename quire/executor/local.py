"""The worker in this process."""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import StepError
from quire.messages.plan import StepPlan, StepResult
from quire.worker.runner import PendingStep
from quire.worker.worker import Worker


class LocalExecutor:
    """Calls the worker directly. On a GPU `submit` only launches; on a CPU the step is done when it returns."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def submit(self, plan: StepPlan) -> PendingStep | StepError:
        try:
            return self._worker.launch(plan)
        except (RuntimeError, torch.OutOfMemoryError, IndexError) as error:
            return _failed(error)

    def collect(self, handle: Any) -> StepResult:
        if isinstance(handle, StepError):
            raise handle
        try:
            return handle.result()
        except RuntimeError as error:  # an asynchronous device error surfaces where it is waited for
            raise _failed(error) from error

    def shutdown(self) -> None:
        self._worker.shutdown()


def _failed(error: Exception) -> StepError:
    failure = StepError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
