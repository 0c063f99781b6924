"""`EngineCore`: schedule → execute → update, again and again."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from quire.engine.experts import expert_figures
from quire.engine.grammar.grammars import Grammars
from quire.engine.grammar.wire import DEAD_END
from quire.engine.memory_map import map_memory
from quire.engine.stats import InfoLine, Metric, metrics_of
from quire.engine.watchdog import Watchdog
from quire.errors import (
    SHUT,
    DeviceLostError,
    EngineDeadError,
    RankLostError,
    StepError,
    StepMemoryError,
    ValidationError,
)
from quire.executor.base import Executor, Lockstep
from quire.messages.experts import Rebalanced
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import Key, StepOutputs
from quire.messages.plan import StepPlan
from quire.messages.request import NewRequest
from quire.scheduler.scheduler import Scheduler
from quire.sessions.keeper import SessionKeeper

logger = logging.getLogger(__name__)

LEAST_BUDGET = 256
"""A shortage of memory does not make steps smaller than this: what fails then is one request's fault."""
WAIT_SECONDS = 0.05
"""A step with nothing to do but wait for a grammar returns after so long, whatever comes."""
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
        grammars: Grammars | None = None,
        make_sessions: Callable[[], SessionKeeper] | None = None,
    ) -> None:
        """`grammars`: keeps outputs to the form that requests ask for; without them such requests are refused.
        `make_sessions`: what keeps sessions, made when the first is asked for."""
        self.scheduler = scheduler
        self._make_sessions = make_sessions
        self._grammars = grammars
        if grammars is not None:
            scheduler.ledger.on_guided_end = grammars.forget
        self.wakes: list[int] = []
        """Files that end the sleep of a `step` with nothing to do but wait for a grammar."""
        self._executor = executor
        self._lockstep = executor.lockstep
        self._depth = pipeline_depth
        self._launched: deque[tuple[StepPlan, Any]] = deque()
        self._info = InfoLine(scheduler) if log_stats else None
        self._watchdog = Watchdog(step_timeout, self._tell_of_hang)
        self._alive = True
        self._death = ""  # why the engine cannot go on, if it cannot

    def add(self, request: NewRequest) -> None:
        """Take a request; raises if it could never fit."""
        if not self._alive:
            raise EngineDeadError(SHUT)
        if self._death:
            raise EngineDeadError(self._death)
        if request.params.structured_outputs is None:
            self.scheduler.add(request)
        elif self._grammars is None:
            raise ValidationError("this engine has no structured output", "structured_outputs")
        else:
            self.scheduler.add(request)
            try:
                self._grammars.add(request)
            except BaseException:
                self.scheduler.abort(request.id)
                raise

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request at any moment. Its blocks are free when this returns."""
        self.scheduler.abort(request_id, reason)

    def finish(self, key: Key, at: int, stop_reason: str | None = None) -> None:
        """End a sample after its first `at` output tokens: the caller found a stop string there."""
        self.scheduler.finish(key, at, stop_reason)

    @property
    def sessions(self) -> SessionKeeper:
        """The engine's sessions."""
        if self.scheduler.sessions is None:
            if self._make_sessions is None:
                raise ValidationError("this engine keeps no sessions", "session")
            self.scheduler.attach(self._make_sessions())
        assert self.scheduler.sessions is not None
        return self.scheduler.sessions

    def rest(self) -> float | None:
        """Look after what changes by itself; returns for how many seconds nothing needs to be done, None for ever."""
        if self.has_work:
            return None
        sessions = self.scheduler.sessions
        pauses = (self._check_ranks(), None if sessions is None else sessions.tick_idle())
        return min((seconds for seconds in pauses if seconds is not None), default=None)

    def _check_ranks(self) -> float | None:
        """Whether ranks elsewhere live, also while nobody waits for them; seconds until one should look again."""
        if self._death:
            return None
        try:
            return self._executor.check()
        except DeviceLostError as error:
            self._end(f"the engine is dead: {error}, while there was nothing to do", error)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do, or something to tell."""
        scheduler = self.scheduler
        own = bool(scheduler.unfinished or self._launched or scheduler.has_outputs or scheduler.is_busy)
        return own or (self._lockstep is not None and self._lockstep.is_active)

    def begin(self) -> None:
        """Launch a step if none is in flight, and wait for nothing: the device works while more requests are added."""
        if self._depth and not self._launched and not self._death and (plan := self.scheduler.schedule()) is not None:
            self._launch(plan)

    def step(self) -> StepOutputs:
        """Launch the next step, then collect the oldest one once more than `pipeline_depth` are in flight."""
        if self._death and self.scheduler.unfinished:
            raise EngineDeadError(self._death)
        if self._is_guided:
            self._admit_compiled()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launch(plan)
        elif self._lockstep is not None and self._accompany(self._lockstep):
            pass
        elif self._grammars is not None and self.compiling and not self._launched:
            self._grammars.wait(WAIT_SECONDS, self.wakes)
        elif self.scheduler.tiers is not None and not self._launched:
            self.scheduler.tiers.wait(WAIT_SECONDS, self.wakes)
        if self._launched and (plan is None or len(self._launched) > self._depth):
            self._collect()
        if self._info is not None:
            self._info.tick()
        return self.scheduler.take_outputs()

    def _accompany(self, lockstep: Lockstep) -> bool:
        """Take a turn without a plan; whether nothing is left to wait for."""
        has_work = bool(self.scheduler.unfinished or self._launched)
        if not (lockstep.is_active or has_work):
            return False
        try:
            return lockstep.join_round(has_work) or not has_work
        except DeviceLostError as error:
            self._end(f"the engine is dead: {error}", error)

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
        if self._is_guided:
            self._supply(plan)

    def _collect(self) -> None:
        plan, handle = self._launched.popleft()
        self._watchdog.begin(plan)
        try:
            result = self._executor.collect(handle)
        except StepError as error:
            self._recover(error, plan)
        else:
            self.scheduler.update(result)
            if self._grammars is not None and self._is_guided:
                self._grammars.advance()
        finally:
            self._watchdog.end()

    # Engines that share experts

    def rouse(self, number: int) -> None:
        """There is work for one of the engines that step together."""
        if self._lockstep is not None:
            self._lockstep.wake(number)

    def rebalance_experts(self, number: int = 0) -> Rebalanced | None:
        """Move experts to where the load is. With engines that step together, once all of them were asked with this
        number: None for now, and `take_rebalanced` tells."""
        if self._lockstep is not None:
            self._lockstep.request_rebalance(number)
            return None
        try:
            outcome = self._executor.rebalance_experts()
        except DeviceLostError as error:
            self._end(f"the engine is dead: {error}, while experts were moved", error)
        if outcome is None:
            raise ValidationError("experts are moved between ranks: that needs enable_expert_parallel over several")
        return outcome

    def take_rebalanced(self) -> list[Rebalanced]:
        """What came of it, of each time since this was asked last."""
        return [] if self._lockstep is None else self._lockstep.take_rebalanced()

    # Requests whose output has a form

    @property
    def compiling(self) -> int:
        """Requests that wait for their grammar."""
        return 0 if self._grammars is None else self._grammars.num_waiting

    @property
    def _is_guided(self) -> bool:
        return self._grammars is not None and self._grammars.is_active

    def _admit_compiled(self) -> None:
        """Requests whose grammar has come wait for a row; those whose grammar never will are told so."""
        assert self._grammars is not None
        for request_id, refusal in self._grammars.poll():
            if refusal:
                self.scheduler.abort(request_id, "error", refusal, ValidationError.__name__, "structured_outputs")
            else:
                self.scheduler.end_compiling(request_id)

    def _supply(self, plan: StepPlan) -> None:
        """The step just launched has its forward pass to do; meanwhile, find out what it may draw."""
        assert self._grammars is not None
        draws = self.scheduler.draws_of(plan.step)
        if not any(request.params.structured_outputs is not None for request in draws):
            return
        while len(self._launched) > 1 and not self.scheduler.knows_draws:
            self._collect()  # what may come next depends on every token before
        if not self._launched:
            return  # a step before has failed, and everyone begins again
        masks, late, failed = self._grammars.masks(plan.step, draws)
        for request in late:
            self.scheduler.set_aside(request)
        for request, message in failed:
            if message == DEAD_END:  # the vocabulary cannot write what the form asks for
                said = f"structured_outputs: {message}"
                self.scheduler.fail(request, said, ValidationError.__name__, "structured_outputs")
            else:
                self.scheduler.fail(request, message)
        self._watchdog.begin(plan)
        try:
            self._executor.supply(self._launched[-1][1], masks)
        except StepError as error:
            self._recover(error, plan)
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
        if isinstance(error, RankLostError):
            self._end(f"the engine is dead: {error}, in {self._name(plan)}", error)
        self._end(
            f"the engine is dead: {self._name(plan)} took the device with it: {error}. Start again in a new process; "
            "CUDA_LAUNCH_BLOCKING=1 and enforce_eager show which kernel it was",
            error,
        )

    def _end(self, why: str, error: DeviceLostError) -> NoReturn:
        self._death = why
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

    def metrics(self) -> list[Metric]:
        """The engine's figures now."""
        experts = expert_figures(self._executor.expert_counts(), self._executor.balance)
        if self._grammars is None:
            return [*metrics_of(self.scheduler), *experts]
        waiting, times = self._grammars.num_waiting, self._grammars.compile_times
        return [*metrics_of(self.scheduler, waiting, times), *experts]

    def memory_map(self, block_bytes: int) -> MemoryMap:
        """Who holds what in every tier now. `block_bytes`: what a block takes on the device."""
        return map_memory(self.scheduler, self._executor.expert_counts(), block_bytes)

    def shutdown(self) -> None:
        """End everything that is unfinished and give the memory back."""
        if self._alive:
            self._alive = False
            self._watchdog.stop()
            self._launched.clear()
            self.scheduler.abort_all()
            self.scheduler.close()
            if self._grammars is not None:
                self._grammars.shutdown()
            self._executor.shutdown()
