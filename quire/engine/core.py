"""`EngineCore`, the loop: schedule → execute → update."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from quire.engine.energy import EngineEnergy, NoEnergy
from quire.engine.engine_view import view_engine
from quire.engine.grammar.grammars import Grammars, Unavailable
from quire.engine.grammar.wire import DEAD_END
from quire.engine.memory_map import map_memory
from quire.engine.memory_watch import MemoryWatch
from quire.engine.optional import NoGrammars, NoLockstep
from quire.engine.stats import InfoLine, Metric, expert_metrics, memory_metrics, scheduler_metrics
from quire.engine.watchdog import Watchdog
from quire.errors import (
    SHUT_DOWN,
    DeviceLostError,
    EngineDeadError,
    OutOfResourcesError,
    RankLostError,
    StepError,
    StepMemoryError,
    ValidationError,
)
from quire.executor.base import Executor
from quire.messages.engine_view import EngineView
from quire.messages.experts import Rebalanced
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import Key, StepOutputs
from quire.messages.plan import StepPlan
from quire.messages.request import NewRequest
from quire.scheduler.scheduler import Scheduler
from quire.sessions.keeper import SessionKeeper

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.05
"""A step with nothing to do but wait for a grammar or the disk returns after this long."""
NAMED_REQUESTS = 8
"""Request ids listed in the description of a step."""


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
        memory: MemoryWatch | None = None,
        energy: EngineEnergy | NoEnergy | None = None,
    ) -> None:
        """`grammars`: constrain structured outputs; without them such requests are refused. `make_sessions`: called
        when a session is used for the first time. `memory`: measures bytes; without it, steps that ran out of memory
        are made smaller for a while. `energy`: measures joules, and may hold steps back."""
        self.scheduler = scheduler
        self.memory = memory or MemoryWatch(scheduler)
        self._energy = energy or NoEnergy()
        self._make_sessions = make_sessions
        self._grammars = grammars or NoGrammars()
        scheduler.requests.on_structured_end = self._grammars.forget
        self.wakes: list[int] = []
        """File descriptors that wake a `step` which only waits for a grammar or the disk."""
        self._executor = executor
        self._lockstep = executor.lockstep or NoLockstep()
        self.pipeline_depth = pipeline_depth
        """Steps in flight beside the one that is collected."""
        self._launched: deque[tuple[StepPlan, Any]] = deque()
        self._info = InfoLine(scheduler, is_on=log_stats)
        self._watchdog = Watchdog(step_timeout, self._abandon)
        self._alive = True
        self.death = ""
        """Why the engine is dead; empty while it is alive."""
        self.has_lost_ranks = False
        """Whether it is dead because of its ranks' processes: another engine can be made in this process."""

    def wrap_executor(self, wrap: Callable[[Executor], Executor]) -> None:
        """Put a layer between the loop and its executor, to watch steps. Only before the first step."""
        self._executor = wrap(self._executor)

    # Requests

    def add(self, request: NewRequest) -> None:
        """Take a request; raises if it could never fit."""
        if not self._alive:
            raise EngineDeadError(SHUT_DOWN)
        if self.death:
            raise EngineDeadError(self.death)
        self.scheduler.add(request)
        if request.params.structured_outputs is not None:
            try:
                self._grammars.add(request)
            except BaseException:
                self.scheduler.abort(request.id)
                raise
        if request.drawn:
            self.scheduler.requests.finish_complete(request.id)
        self._energy.arrived()

    def prepare_grammars(self, end_ids: Sequence[int]) -> None:
        """A request with a grammar may come: get ready to compile it. `end_ids`: the end-of-sequence tokens."""
        self._grammars.prepare(end_ids)

    @property
    def grammar_ends(self) -> list[int]:
        """The end-of-sequence tokens of requests with a grammar; empty: there has been none."""
        return self._grammars.end_ids

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request at any moment. Its blocks are free when this returns."""
        self.scheduler.abort(request_id, reason)

    def finish(self, key: Key, at: int, stop_reason: str | None = None) -> None:
        """End a sequence after its first `at` output tokens: the caller found a stop string there."""
        self.scheduler.finish(key, at, stop_reason)

    @property
    def sessions(self) -> SessionKeeper:
        """The engine's sessions, made on first use."""
        sessions = self.scheduler.sessions
        if isinstance(sessions, SessionKeeper):
            return sessions
        if self._make_sessions is None:
            raise ValidationError("this engine keeps no sessions", "session")
        sessions = self._make_sessions()
        self.scheduler.attach(sessions)
        return sessions

    # The loop

    def tick_idle(self) -> float | None:
        """While idle: check ranks, expire and suspend sessions. Returns after how many seconds to call this again;
        None: not before there is work."""
        if self.has_work:
            return None
        pauses = (self._check_ranks(), self.scheduler.sessions.tick_idle(), self._energy.tick_idle())
        return min((seconds for seconds in pauses if seconds is not None), default=None)

    def _check_ranks(self) -> float | None:
        """Check whether a rank has died while the engine was idle; returns after how many seconds to check again."""
        if self.death:
            return None
        try:
            return self._executor.check()
        except DeviceLostError as error:
            self._mark_dead(f"the engine is dead: {error}, while there was nothing to do", error)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to return."""
        scheduler = self.scheduler
        is_busy = scheduler.has_outputs or scheduler.is_busy or self._lockstep.is_active
        return bool(scheduler.unfinished or self._launched or is_busy)

    def begin(self) -> None:
        """Launch a step if none is in flight, without waiting: the device works while more requests are added."""
        if (
            self.pipeline_depth
            and not self._launched
            and not self.death
            and not self._energy.hold()
            and (plan := self.scheduler.schedule()) is not None
        ):
            self._launch(plan)

    def step(self) -> StepOutputs:
        """Launch the next step, then collect the oldest one once more than `pipeline_depth` are in flight."""
        if self.death and self.scheduler.unfinished:
            raise EngineDeadError(self.death)
        self.memory.tick()
        if self._energy.is_on and (seconds := self._energy.hold()):
            return self._hold_back(seconds)
        if self._grammars.is_active:
            self._admit_compiled()
            if not self._launched:
                self._grammars.await_certain()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launch(plan)
        elif not self._join_round() and not self._launched:
            self._wait()
        if self._launched and (plan is None or len(self._launched) > self.pipeline_depth):
            self._collect()
        self._info.tick()
        return self._take_outputs()

    def _take_outputs(self) -> StepOutputs:
        outputs = self.scheduler.take_outputs()
        if self._energy.is_on:
            self._energy.finish(outputs)
        return outputs

    def _hold_back(self, seconds: float) -> StepOutputs:
        """To save energy no step is launched yet: collect what is in flight, or sleep."""
        if self._launched:
            self._collect()
        elif not self.scheduler.has_outputs:
            self._energy.wait(min(seconds, WAIT_SECONDS), self.wakes)
        return self._take_outputs()

    def _wait(self) -> None:
        """Nothing to launch or collect: sleep until a grammar is compiled or a disk transfer is done."""
        if self.compiling:
            self._grammars.wait(WAIT_SECONDS, self.wakes)
        else:
            self.scheduler.wait(WAIT_SECONDS, self.wakes)

    def _join_round(self) -> bool:
        """Take part in a lockstep round without a plan; returns whether there is nothing to wait for."""
        has_work = bool(self.scheduler.unfinished or self._launched)
        if not (self._lockstep.is_active or has_work):
            return False
        try:
            return self._lockstep.join_round(has_work) or not has_work
        except DeviceLostError as error:
            self._mark_dead(f"the engine is dead: {error}", error)

    def _launch(self, plan: StepPlan) -> None:
        """Submit the plan, and make the masks that its draws need."""
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", self.scheduler.stats.describe_step())
        self._watchdog.begin(plan)
        try:
            if self._energy.is_on:
                self._energy.launched()
            self._launched.append((plan, self._executor.submit(plan)))
        except StepError as error:
            self._recover(error, plan)
        finally:
            self._watchdog.end()
        if self._grammars.is_active:
            self._supply_masks(plan)

    def _collect(self) -> None:
        """Wait for the oldest step, and apply its result."""
        plan, handle = self._launched.popleft()
        self._watchdog.begin(plan)
        try:
            result = self._executor.collect(handle)
        except StepError as error:
            self._recover(error, plan)
        else:
            if self._grammars.is_active:
                self._grammars.note_proposed(self.scheduler.draws_of(plan.step), result.drafts)
            if self._energy.is_on:
                self._energy.collected(self.scheduler.computed_in(plan.step), plan.counts.tolist(), plan.num_decodes)
            self.scheduler.update(result)
            if self._grammars.is_active:
                self._grammars.advance()
        finally:
            self._watchdog.end()

    # Engines that share experts

    def wake(self, number: int) -> None:
        """Request `number` was sent to one of the engines in lockstep: join their rounds."""
        self._lockstep.wake(number)

    def rebalance_experts(self, number: int = 0) -> Rebalanced | None:
        """Move experts to where the load is. Engines in lockstep do so when all of them were called with this number:
        they return None, and `take_rebalanced` has the outcome."""
        if self._executor.lockstep is not None:
            self._executor.lockstep.request_rebalance(number)
            return None
        try:
            outcome = self._executor.rebalance_experts()
        except DeviceLostError as error:
            self._mark_dead(f"the engine is dead: {error}, while experts were moved", error)
        if outcome is None:
            raise ValidationError("experts move between ranks only: set enable_expert_parallel, with several ranks")
        return outcome

    def take_rebalanced(self) -> list[Rebalanced]:
        """Outcomes of rebalancing since the last call."""
        return self._lockstep.take_rebalanced()

    # Structured output

    @property
    def compiling(self) -> int:
        """Requests that wait for their grammar."""
        return self._grammars.num_waiting

    def _admit_compiled(self) -> None:
        """Requests whose grammar is compiled wait for a row; those whose grammar does not compile end with an error."""
        for request_id, refusal in self._grammars.poll():
            if refusal:
                kind = OutOfResourcesError if isinstance(refusal, Unavailable) else ValidationError
                self.scheduler.abort(request_id, "error", str(refusal), kind.__name__, "structured_outputs")
            else:
                self.scheduler.end_compiling(request_id)

    def _supply_masks(self, plan: StepPlan) -> None:
        """While the step just launched runs its forward pass, make the masks for its draws."""
        draws = self.scheduler.draws_of(plan.step)
        if not any(request.params.structured_outputs is not None for request in draws):
            return
        while len(self._launched) > 1 and not self.scheduler.waits_for_draws:
            self._collect()  # a mask depends on every token before it
        if not self._launched:
            return  # an earlier step has failed, and all requests start again
        masks, late, failed = self._grammars.masks(plan, draws)
        for request in late:
            self.scheduler.await_mask(request)
        for request, message in failed:
            if message == DEAD_END:  # the vocabulary cannot express what the grammar requires
                reason = f"structured_outputs: {message}"
                self.scheduler.fail(request, reason, ValidationError.__name__, "structured_outputs")
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
        """A failed step leaves unknown state on the device: drop what is in flight, start again from known tokens."""
        self._launched.clear()
        self._energy.forget_in_flight()
        if isinstance(error, DeviceLostError):
            self._die(error, plan)
        logger.error("a step failed: %s; every request starts again from the tokens it has", error)
        if isinstance(error, StepMemoryError):
            budget = self.memory.step_failed(plan.num_tokens)
            logger.warning("%s ran out of memory: steps have at most %d tokens now", self._describe(plan), budget)
        self.scheduler.reset(f"a step failed: {error}", plan.step)

    def _die(self, error: DeviceLostError, plan: StepPlan) -> NoReturn:
        """Nothing can run on the device any more: from now on all requests are refused."""
        if isinstance(error, RankLostError):
            self._mark_dead(f"the engine is dead: {error}, in {self._describe(plan)}", error)
        self._mark_dead(
            f"the engine is dead: the device was lost in {self._describe(plan)}: {error}. Start a new process; "
            "CUDA_LAUNCH_BLOCKING=1 and enforce_eager show which kernel failed",
            error,
        )

    def _mark_dead(self, reason: str, error: DeviceLostError) -> NoReturn:
        self.death = reason
        self.has_lost_ranks = isinstance(error, RankLostError)
        logger.error("%s", self.death)
        self._watchdog.stop()
        raise EngineDeadError(self.death) from error

    def _abandon(self, plan: StepPlan) -> None:
        """In the watchdog's thread: log which step hangs, and make the loop stop waiting for it."""
        message = f"it has not ended after {self._watchdog.seconds:g} s (step_timeout)"
        logger.error("%s hangs: %s", self._describe(plan), message)
        self._executor.give_up(message)

    def _describe(self, plan: StepPlan) -> str:
        """The step's number, size and requests, for logs and errors."""
        ids = self.scheduler.requests_of(plan.step)
        more = f" and {len(ids) - NAMED_REQUESTS} more" if len(ids) > NAMED_REQUESTS else ""
        return (
            f"step {plan.step} ({plan.num_decodes} decodes + {len(plan.rows) - plan.num_decodes} prompts, "
            f"{plan.num_tokens} tokens; requests {', '.join(ids[:NAMED_REQUESTS])}{more})"
        )

    def metrics(self) -> list[Metric]:
        """The engine's metrics now."""
        experts = expert_metrics(self._executor.expert_counts(), self._executor.balance)
        scheduled = scheduler_metrics(self.scheduler, self.compiling, self._grammars.compile_times)
        memory = memory_metrics(self.memory, self.scheduler.budget)
        return [*scheduled, *memory, *experts, *self._energy.metrics()]

    def memory_map(self, block_bytes: int) -> MemoryMap:
        """The use of memory in every tier now. `block_bytes`: size of a block on the device."""
        return map_memory(self.scheduler, self._executor.expert_counts(), block_bytes)

    def view(self) -> EngineView:
        """What the page shows of the engine now."""
        return view_engine(self.scheduler, self.compiling)

    def shutdown(self) -> None:
        """End everything that is unfinished and free the memory."""
        if self._alive:
            self._alive = False
            self._watchdog.stop()
            self._launched.clear()
            self.scheduler.abort_all()
            self.scheduler.close()
            self._grammars.shutdown()
            self._executor.shutdown()
            self._energy.close()
