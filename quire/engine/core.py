"""`EngineCore`: schedule → execute → update, again and again."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, NoReturn

from quire.engine.stats import InfoLine
from quire.engine.watchdog import Watchdog
from quire.errors import DeviceLostError, EngineDeadError, StepError, StepMemoryError
from quire.executor.base import Executor
from quire.messages.outputs import Key, StepOutputs
from quire.messages.plan import StepPlan
from quire.messages.request import NewRequest
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

LEAST_BUDGET = 256
"""A shortage of memory does not make steps smaller than this: what fails then is one request's fault."""
NAMED_REQUESTS = 8
"""So many are named where a step is described."""


class EngineCore:
    """Owns the loop. Knows neither text nor tensors."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        pipeline_depth: int = 0,
        log_stats: bool = True,
        step_timeout: float = 0,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._depth = pipeline_depth
        self._launched: deque[tuple[StepPlan, Any]] = deque()
        self._info = InfoLine(scheduler) if log_stats else None
        self._watchdog = Watchdog(step_timeout, self._tell_of_hang)
        self._alive = True
        self._death = ""  # why the engine cannot go on, if it cannot

    def add(self, request: NewRequest) -> None:
        """Take a request; raises if it could never fit."""
        if not self._alive:
            raise EngineDeadError("the engine has been shut down; make a new one")
        if self._death:
            raise EngineDeadError(self._death)
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

    def begin(self) -> None:
        """Launch a step if none is in flight, and wait for nothing: the device works while more requests are added."""
        if self._depth and not self._launched and not self._death and (plan := self.scheduler.schedule()) is not None:
            self._launch(plan)

    def step(self) -> StepOutputs:
        """Launch the next step, then collect the oldest one once more than `pipeline_depth` are in flight."""
        if self._death and self.scheduler.unfinished:
            raise EngineDeadError(self._death)
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
        self._watchdog.begin(plan)
        try:
            self._launched.append((plan, self._executor.submit(plan)))
        except StepError as error:
            self._recover(error, plan)
        finally:
            self._watchdog.end()

    def _collect(self) -> None:
        plan, handle = self._launched.popleft()
        self._watchdog.begin(plan)
        try:
            result = self._executor.collect(handle)
        except StepError as error:
            self._recover(error, plan)
        else:
            self.scheduler.update(result)
        finally:
            self._watchdog.end()

    # When a step fails

    def _recover(self, error: StepError, plan: StepPlan) -> None:
        """A failed step leaves unknown state on the device: drop what is in flight, begin again from known tokens."""
        self._launched.clear()
        if isinstance(error, DeviceLostError):
            self._die(error, plan)
        logger.error("a step failed: %s; every request starts again from the tokens it has", error)
        if isinstance(error, StepMemoryError):
            budget = self.scheduler.lower_budget(max(LEAST_BUDGET, plan.num_tokens // 2))
            logger.warning("%s ran out of memory: steps have at most %d tokens now", self._name(plan), budget)
        self.scheduler.reset(f"a step failed: {error}", plan.step)

    def _die(self, error: DeviceLostError, plan: StepPlan) -> NoReturn:
        """Nothing can run on the device any more: the engine is over, and says so to everyone who asks."""
        self._death = (
            f"the engine is dead: {self._name(plan)} took the device with it: {error}. Start again in a new process; "
            "CUDA_LAUNCH_BLOCKING=1 and enforce_eager show which kernel it was"
        )
        logger.error("%s", self._death)
        self._watchdog.stop()
        raise EngineDeadError(self._death) from error

    def _tell_of_hang(self, plan: StepPlan) -> None:
        """In the watchdog's thread: name the step, and call the loop back from waiting for it."""
        message = f"it has not ended after {self._watchdog.seconds:g} s (step_timeout)"
        logger.error("%s hangs: %s", self._name(plan), message)
        self._executor.give_up(message)

    def _name(self, plan: StepPlan) -> str:
        ids = self.scheduler.requests_of(plan.step)
        more = f" and {len(ids) - NAMED_REQUESTS} more" if len(ids) > NAMED_REQUESTS else ""
        return (
            f"step {plan.step} ({plan.num_decodes} decodes + {len(plan.rows) - plan.num_decodes} prompts, "
            f"{plan.num_tokens} tokens; requests {', '.join(ids[:NAMED_REQUESTS])}{more})"
        )

    def shutdown(self) -> None:
        """End everything that is unfinished and give the memory back."""
        if self._alive:
            self._alive = False
            self._watchdog.stop()
            self._launched.clear()
            self.scheduler.abort_all()
            self._executor.shutdown()
