"""Plans steps and applies their results.

There is no prefill phase and no decode phase. A request has tokens and a number of them that is computed; a step moves
that number forward, by one for most rows, by a chunk for those whose prompt is not done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.adapters.slots import AdapterSlots
from quire.errors import AdapterError
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.manager import OffloadManager
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.media import EncoderLimits
from quire.messages.outputs import Key, StepOutputs
from quire.messages.plan import StepPlan, StepResult
from quire.messages.request import NewRequest, Request, RequestState
from quire.scheduler.admission import Admission
from quire.scheduler.beam_search import BeamRows
from quire.scheduler.drafting import Drafting
from quire.scheduler.encoding import PIXELS_GONE, Encoding
from quire.scheduler.pacing import NoPacer, Pacer
from quire.scheduler.policies.base import Policy
from quire.scheduler.preemption import Preemptor
from quire.scheduler.prefix_groups import PrefixGroups
from quire.scheduler.quarantine import Quarantine
from quire.scheduler.request_table import RequestTable
from quire.scheduler.results import ResultCollector
from quire.scheduler.sessions import Sessions
from quire.scheduler.step_builder import InFlightStep, PlanWriter, StepBuilder
from quire.scheduler.swapping import Swapper
from quire.sessions.keeper import SessionKeeper


class Scheduler:
    """Plans steps under a token budget and a row budget, and applies their results."""

    def __init__(
        self,
        tables: BlockTables,
        policy: Policy,
        keys: ContentKeys,
        max_rows: int,
        token_budget: int,
        chunked_prefill: bool = True,
        clock: Callable[[], float] = time.monotonic,
        groups: PrefixGroups | None = None,
        pacer: Pacer | None = None,
        tiers: OffloadManager | None = None,
        sessions: SessionKeeper | None = None,
        microbatches: int | None = None,
        drafting: Drafting | None = None,
        encoder: EncoderLimits | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """`groups`: for a device whose attention reads shared blocks once per group. `pacer`: bounds what prompts add
        to the time of a step; without one, only tokens are bounded. `tiers`: host memory and disk for blocks.

        `microbatches`: the device is a pipeline with this many plans in flight. A row is then in one of them until its
        draw is collected, and each plan has its share of the decoding rows. None: a plan may have rows whose last token
        only the device has. `drafting`: decodes verify drafts; without it, none do. `encoder`: what requests may have
        beside token ids; without it, nothing. `adapters`: slots for the adapters that requests name."""
        self.requests = RequestTable(tables, policy, keys, max_rows, groups)
        if encoder is not None and encoder.cache_rows:
            self.requests.encoding = Encoding(encoder, token_budget, max_rows)
        self._encoding = self.requests.encoding
        if tiers is not None:
            self.requests.swapper = Swapper(self.requests, tiers)
        if sessions is not None:
            self.attach(sessions)
        if adapters is not None:
            self.requests.adapters = adapters
        self._adapters = self.requests.adapters
        self.tables = tables
        self.policy = policy
        self.rows = self.requests.rows
        self.stats = self.requests.stats
        self._sharing = self.requests.sharing
        self._swapper = self.requests.swapper
        self._in_flight: deque[InFlightStep] = deque()
        if drafting is not None:
            drafting.attach(self.requests, self._in_flight, clock)
            self.requests.drafting = drafting
        self._drafting = self.requests.drafting
        self._preemptor = Preemptor(self.requests, self._in_flight)
        self.pressure = self._preemptor.pressure
        self._admission = Admission(self.requests, self._preemptor, token_budget, chunked_prefill, clock)
        self._writer = PlanWriter(
            self.requests, clock, holds_rows=microbatches is not None, with_following=self._drafting.needs_following
        )
        self._beams = BeamRows(self.requests)
        self._collector = ResultCollector(self.requests, self._beams, self._in_flight)
        self._quarantine = Quarantine()
        self._pacer = pacer or NoPacer()
        self._microbatches = microbatches
        self._budget = token_budget
        self._clock = clock
        self._new_streams: list[Request] = []
        """Requests whose first token came with the results since the last plan."""

    # Requests

    def add(self, source: NewRequest) -> None:
        """Queue a request. One that could never fit is refused, so that all others finish."""
        self.requests.add(source)

    def abort(
        self,
        request_id: str,
        reason: str = "abort",
        message: str | None = None,
        error: str = "",
        parameter: str | None = None,
    ) -> None:
        """End every sequence of a request. An unknown id is no error: it may just have finished."""
        for request in self.requests.sequences(request_id):
            if not request.is_finished:
                self.requests.finish(request, reason, message=message, error=error, parameter=parameter)

    def abort_all(self) -> None:
        """End everything that is unfinished."""
        for request_id in self.requests.ids():
            self.abort(request_id)

    def fail(self, request: Request, message: str, error: str = "", parameter: str | None = None) -> None:
        """End one sequence with an error. `error` and `parameter`: its class and the field at fault, if the request
        caused it."""
        if not request.is_finished:
            self.requests.finish(request, "error", message=message, error=error, parameter=parameter)

    def finish(self, key: Key, at: int, stop_reason: str | None = None) -> None:
        """The caller found the end of a sequence after its first `at` output tokens; later ones are dropped."""
        request = self.requests.sequence(key)
        if request is not None:
            self.requests.finish_at(request, at, stop_reason)

    def end_compiling(self, request_id: str) -> None:
        """The request's grammar is compiled, or its late mask has come: the request waits for a row."""
        self.requests.end_compiling(request_id)

    def await_mask(self, request: Request) -> None:
        """The grammar's mask is late: draws in flight are ignored, and the request waits for `end_compiling`."""
        self.requests.await_mask(request)

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return self.requests.unfinished

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self.policy)

    @property
    def loading(self) -> int:
        """Requests whose blocks are being loaded from a lower tier."""
        return self._swapper.num_loading

    @property
    def has_outputs(self) -> bool:
        """Whether `take_outputs` has something to return."""
        return self.requests.has_outputs

    def take_outputs(self) -> StepOutputs:
        """What happened to requests since the last call."""
        return self.requests.take_outputs()

    # Steps in flight

    @property
    def in_flight(self) -> int:
        """Steps launched and not collected."""
        return len(self._in_flight)

    def requests_of(self, step: int) -> list[str]:
        """Ids of the requests that compute in a step in flight."""
        steps = [other for other in list(self._in_flight) if other.step == step]
        return list(dict.fromkeys(request.id for other in steps for request in other.requests))

    def draws_of(self, step: int) -> list[Request]:
        """The request of each draw of a step in flight."""
        return next((other.draws for other in reversed(self._in_flight) if other.step == step), [])

    def computed_in(self, step: int) -> list[Request]:
        """The request of each row of a step in flight."""
        return next((other.requests for other in self._in_flight if other.step == step), [])

    @property
    def waits_for_draws(self) -> bool:
        """Whether a row is planned again only when its draw is collected: all its tokens are known then."""
        return self._microbatches is not None

    # Drafts, tiers and sessions

    @property
    def drafting(self) -> Drafting | None:
        """Chooses how many drafts decodes verify; None: there are no drafts."""
        return self._drafting if isinstance(self._drafting, Drafting) else None

    @property
    def tiers(self) -> OffloadManager | None:
        """Host memory and disk, if the engine has them."""
        return self._swapper.tiers

    @property
    def sessions(self) -> Sessions:
        """The engine's sessions, or `NoSessions` before the first is used."""
        return self.requests.sessions

    def attach(self, sessions: SessionKeeper) -> None:
        """Requests may be turns of these sessions from now on."""
        self.requests.sessions = sessions

    @property
    def is_busy(self) -> bool:
        """Whether transfers between tiers are in progress, which only steps complete."""
        return self._swapper.is_busy

    def wait(self, seconds: float, wakes: list[int]) -> None:
        """Sleep until a transfer from or to disk is done, or one of the descriptors `wakes` is readable."""
        self._swapper.wait(seconds, wakes)

    # Planning a step

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        builder = StepBuilder()
        self._prepare(builder)
        if (quarantined := self._quarantine.first) is not None:
            return self._schedule_alone(builder, quarantined)
        decodes = self._schedule_decodes(builder)
        if self._encoding.is_on:
            self._encoding.splits = self._pacer.is_on and len(decodes) > 0
        budget = self._continue_prompts(builder, self._prompt_budget(decodes))
        if builder.can_admit:
            budget = self._admission.admit(builder, self._admission.admit_loaded(builder, budget))
        decodes = decodes[self.rows.decoding[decodes]]  # some may have been preempted since
        is_needed = (
            len(decodes) or not builder.is_empty or self._admit_arriving(builder, budget) or self._waits_for_moves
        )
        return self._launch(builder, decodes) if is_needed else None

    def _prepare(self, builder: StepBuilder) -> None:
        """Apply what changed since the last step, and free blocks before they run out."""
        self.sessions.tick()
        self._swapper.poll()
        if self._encoding.is_on:
            self._begin_encoding()
        if self._adapters.is_on:
            self.requests.end_adapting()
        if self._quarantine.first is None:
            self._preemptor.relieve(builder, self._budget)
        for request in self._new_streams:
            if request.row >= 0:
                self.rows.start_stream(request.row, self.requests.arrivals)
        self._new_streams.clear()
        self._beams.park()
        if self.tables.has_windows:
            self.requests.trim_computed()

    def _begin_encoding(self) -> None:
        """End requests whose images are neither cached nor given."""
        self._encoding.begin()
        for request in self._encoding.take_lacking():
            for sequence in (request, *request.siblings):
                self.fail(sequence, PIXELS_GONE, "ValidationError", "media")

    # Decodes

    def _schedule_decodes(self, builder: StepBuilder) -> NDArray[np.int64]:
        """Rows that compute their next token in this step, each with a slot to write to."""
        rows = self.rows
        ready = rows.ready()
        if self._microbatches is not None:
            share = -(-int(np.count_nonzero(rows.decoding)) // self._microbatches)
            ready = ready if len(ready) <= share else rows.longest_waiting(ready, share)
        if len(ready) > self._budget:
            ready = np.array(sorted(ready.tolist(), key=self._rank_of_row)[: self._budget], np.int64)
        if self._drafting.is_on:
            ready = self._drafting.plan(builder, ready, self._budget)
        in_need = {rows.requests[row] for row in rows.out_of_slots(ready).tolist()}
        if self.requests.forked:
            in_need |= self.requests.forked.intersection(rows.requests[row] for row in ready.tolist())
        if in_need and not self._preemptor.give_slots(builder, sorted(in_need, key=self.policy.rank)):
            return ready[:0]  # one row is left, and transfers will free the blocks it needs
        return ready

    def _rank_of_row(self, row: int) -> Any:
        return self.policy.rank(self.rows.requests[row])  # type: ignore[arg-type]

    # Prompts

    def _prompt_budget(self, decodes: NDArray[np.int64]) -> int:
        """Prompt tokens this step may have: what the decodes leave, and no more than the pacer allows."""
        drafts = int(self.rows.width[decodes].sum()) - len(decodes) if self.rows.is_wide else 0
        budget = self._budget - len(decodes) - drafts
        if self._microbatches is not None and self._in_flight:
            decodes = np.flatnonzero(self.rows.decoding)  # rows of the plans in flight wait for this one too
        if not self._pacer.is_on or not len(decodes):
            return budget
        first = min(self.requests.prefilling, key=self._sharing.order, default=None)
        if first is None or self._sharing.interleaves:
            first = min(filter(None, (first, self.policy.next())), key=self._sharing.order, default=None)
        older = 0 if first is None else int(np.count_nonzero(self.rows.stream_start[decodes] <= first.arrival_order))
        if first is None or not older:
            return budget
        pending = len(self.requests.prefilling) + min(self.waiting, self.rows.free)
        allowance = self._pacer.allowance(len(decodes), older, pending, drafts)
        if self._sharing.is_owed(first, decodes):
            allowance = max(allowance, first.known)
        return min(budget, allowance)

    def _continue_prompts(self, builder: StepBuilder, budget: int) -> int:
        """Schedule the next chunks of partly computed prompts, in order; returns what is left of the budget."""
        for request in sorted(self.requests.prefilling, key=self._sharing.order):
            if self._sharing.interleaves and not builder.preempted:
                budget = self._admission.admit(builder, budget, before=request)
            if budget <= 0:
                break
            if request.row >= 0:
                budget -= self._schedule_chunk(builder, request, budget) + self._encoding.cost(request)
        for request in builder.prompts:
            self._admission.publish_chunk(builder, request)
        return budget

    def _schedule_chunk(self, builder: StepBuilder, request: Request, budget: int) -> int:
        """Schedule as many of the row's known tokens as budget and blocks allow; returns how many."""
        computed, bound = int(self.rows.computed[request.row]), int(self.rows.bound[request.row])
        count = self.requests.states.cut(request, computed, min(bound - computed, budget))
        if self._encoding.is_on and (count := self._encoding.cut(request, computed, count, budget)) <= 0:
            return 0
        if self.tables.missing(request, computed + count) > self.tables.pool.free:
            self._preemptor.reclaim(self.tables.missing(request, computed + count) - self.tables.pool.free)
            room = self.tables.room(request, self.tables.pool.free) - computed
            if (fitting := self._encoding.whole(request, computed, min(count, room))) > 0:
                count = fitting
            elif self._encoding.unsplit_spans(request.source):
                if not self._preemptor.make_room(builder, request, self.tables.missing(request, computed + count)):
                    return 0
            elif self._preemptor.make_room(builder, request, self.tables.pages_per_block):
                count = min(count, self.tables.block_size)
            else:
                return 0
        self._preemptor.grow(builder, request, computed + count)
        builder.prompt(request, count)
        self._sharing.charge(request, count)
        return count

    # Launching

    def _admit_arriving(self, builder: StepBuilder, budget: int) -> bool:
        """The device is idle: a request whose blocks are in host memory joins the step that copies them."""
        return not self._in_flight and builder.can_admit and self._admission.admit_arriving(builder, budget)

    @property
    def _waits_for_moves(self) -> bool:
        """Only copies between tiers, or loads of adapters, are in progress: a step without rows waits for them."""
        return not self._in_flight and (self._swapper.is_moving or self._adapters.is_loading)

    def _launch(self, builder: StepBuilder, decodes: NDArray[np.int64]) -> StepPlan:
        decodes = np.concatenate([decodes, np.array([request.row for request in builder.ready], np.int64)])
        self._sharing.charge_decodes(decodes)
        self._drafting.settle(builder)
        if builder.proposals:
            self._preemptor.give_proposal_slots(builder)
        self.requests.states.plan(builder, decodes)
        plan, in_flight = self._writer.write(builder, decodes)
        self._in_flight.append(in_flight)
        if len(plan.rows):
            self.stats.note_step(plan, builder, self.requests, self.pressure)
            self.requests.timelines.launched(plan, in_flight.launched)
            decoded = plan.num_decodes + plan.num_drafts
            worked = len(plan.tokens) + self._encoding.spent
            self._pacer.launched(decoded, worked, in_flight.launched, not builder.awaits_moves)
            self._drafting.launched(plan, in_flight)
        return plan

    # Applying a result

    def update(self, result: StepResult) -> None:
        """Apply the result of the oldest step in flight."""
        step = self._in_flight.popleft()
        if result.step != step.step:
            raise RuntimeError(f"expected the result of step {step.step}, got that of step {result.step}")
        if step.requests:
            self._pacer.collected(self._clock())
            self._new_streams += step.draws[step.num_decodes :]
        self._swapper.collect(step, result.moves_done, self._clock())
        if result.encode_errors:
            for request, message in self._encoding.take_failed(result.encode_errors):
                self._collector.fail(request, message, "ValidationError")
        if result.adapters_done:
            self._collect_adapters(result)
        self._quarantine.release(step.draws)
        self._drafting.collected(step, result, self._clock())
        self.requests.timelines.collected(step.step, result, step.prompts_drawn, self._clock())
        prompts, generated = self.stats.end_prompts(step.prompts_drawn), self.stats.generated_tokens
        self._collector.apply(step, result)
        self.stats.note_results(prompts + self.stats.generated_tokens - generated)

    def _collect_adapters(self, result: StepResult) -> None:
        """Adapters were loaded, or could not be, which ends the requests that name them."""
        for request_id, error in self._adapters.collect(result.adapters_done):
            self.abort(request_id, "error", error, AdapterError.__name__, "lora_request")

    # When a step fails

    def reset(self, message: str, step: int | None = None) -> None:
        """Step `step` (if None the oldest in flight) failed: all requests start again from their known tokens, those of
        the failed step one at a time."""
        failed = self._requests_up_to(self._in_flight[0].step if step is None and self._in_flight else step)
        for in_flight in self._in_flight:
            self.tables.withdraw(in_flight.published)
        self._in_flight.clear()
        self._pacer.forget_in_flight()
        self.requests.timelines.forget_in_flight()
        self._drafting.forget_in_flight()
        self._swapper.reset()
        self._encoding.reset()
        self._adapters.reset()
        self.sessions.kv.forget_device()
        self.requests.start_over()
        self._writer.reset()
        for culprit in self._quarantine.add(failed):
            for sequence in (culprit, *culprit.siblings):
                self.fail(sequence, message)

    def _requests_up_to(self, step: int | None) -> list[Request]:
        """Unfinished requests of the steps in flight up to `step`: a device may report a failure a step late."""
        steps = [other for other in self._in_flight if step is not None and other.step <= step]
        part = dict.fromkeys(request for other in steps for request in (*other.requests, *other.draws))
        return [request for request in part if not request.is_finished]

    def _schedule_alone(self, builder: StepBuilder, request: Request) -> StepPlan | None:
        """Run a quarantined request alone until it has drawn a token: if a step fails again, it is the cause."""
        if self._in_flight or request.state is RequestState.COMPILING:
            return None
        if request.state is RequestState.ADAPTING:
            return self._launch(builder, np.empty(0, np.int64)) if self._adapters.is_loading else None
        if request.row >= 0:
            self._schedule_chunk(builder, request, self._budget)
            self._admission.publish_chunk(builder, request)
        elif not (
            self.requests.has_row_for(request) and self._admission.admit_one(builder, request, self._budget, alone=True)
        ):
            for other in self.rows.running():
                self._preemptor.preempt(builder, other)
            self._admission.admit_one(builder, request, self._budget, alone=True)
        return self._launch(builder, np.empty(0, np.int64))

    @property
    def quarantined(self) -> Request | None:
        """The request that runs alone now, after a failed step."""
        return self._quarantine.first

    @property
    def budget(self) -> int:
        """The most tokens of a step."""
        return self._budget

    @budget.setter
    def budget(self, tokens: int) -> None:
        self._budget = self._admission.step_tokens = tokens

    # Housekeeping

    def reset_prefix_cache(self) -> bool:
        """Forget cached content; False if requests are running (they keep their blocks)."""
        self.tables.reset_prefix()
        return self.rows.used == 0

    def close(self) -> None:
        """End transfers (writes to disk are completed first), and make sessions durable."""
        self._swapper.close_transfers()
        self.sessions.close()
        self._swapper.close_store()

    def check_idle(self) -> None:
        """Raise unless every block and row was given back. Call it when no request is unfinished."""
        self.requests.check_idle()
