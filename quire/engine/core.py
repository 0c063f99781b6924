"""`EngineCore`: schedule → execute → update, again and again."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from quire.engine.stats import InfoLine
from quire.errors import EngineDeadError, StepError
from quire.executor.base import Executor
from quire.messages.outputs import Key, StepOutputs
from quire.messages.plan import StepPlan
from quire.messages.request import NewRequest
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineCore:
    """Owns the loop. Knows neither text nor tensors."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, pipeline_depth: int = 0, log_stats: bool = True
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._depth = pipeline_depth
        self._launched: deque[tuple[StepPlan, Any]] = deque()
        self._info = InfoLine(scheduler) if log_stats else None
        self._alive = True

    def add(self, request: NewRequest) -> None:
        """Take a request; raises if it could never fit."""
        if not self._alive:
            raise EngineDeadError("the engine has been shut down; make a new one")
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request at any moment. Its blocks are free when this returns."""
        self.scheduler.abort(request_id, reason)

    def finish(self, key: Key, at: int, stop_reason: str | None = None) -> None:
        """End a sample after its first `at` output tokens: the caller found a stop string there."""
        self.scheduler.finish(key, at, stop_reason)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do, or something to tell."""
        return bool(self.scheduler.unfinished or self._launched or self.scheduler.has_outputs)

    def step(self) -> StepOutputs:
        """Launch the next step, then collect the oldest one once more than `pipeline_depth` are in flight."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launch(plan)
        if self._launched and (plan is None or len(self._launched) > self._depth):
            self._collect()
        if self._info is not None:
            self._info.tick()
        return self.scheduler.take_outputs()

    def _launch(self, plan: StepPlan) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", self.scheduler.stats.describe_step())
        try:
            self._launched.append((plan, self._executor.submit(plan)))
        except StepError as error:
            self._recover(error, plan.step)

    def _collect(self) -> None:
        plan, handle = self._launched.popleft()
        try:
            result = self._executor.collect(handle)
        except StepError as error:
            self._recover(error, plan.step)
        else:
            self.scheduler.update(result)

    def _recover(self, error: StepError, step: int) -> None:
        """A failed step leaves unknown state on the device: drop what is in flight, begin again from known tokens."""
        logger.error("a step failed: %s; every request starts again from the tokens it has", error)
        self._launched.clear()
        self.scheduler.reset(f"a step failed: {error}", step)

    def shutdown(self) -> None:
        """End everything that is unfinished and give the memory back."""
        if self._alive:
            self._alive = False
            self._launched.clear()
            self.scheduler.abort_all()
            self._executor.shutdown()
