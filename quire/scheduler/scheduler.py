"""The planning half's heart: what the next step computes, and what the last one means.

There is no prefill phase and no decode phase. A request has tokens and a number of them that is computed; a step moves
that number forward, by one for most rows, by a chunk for those whose prompt is not done.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.manager import OffloadManager
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.outputs import Key, StepOutputs
from quire.messages.plan import StepPlan, StepResult
from quire.messages.request import NewRequest, Request, RequestState
from quire.scheduler.admission import Admission
from quire.scheduler.beam_search import BeamRows
from quire.scheduler.draft import InFlightStep, StepBuilder
from quire.scheduler.groups import PrefixGroups
from quire.scheduler.pacing import Pacer
from quire.scheduler.policies.base import Policy
from quire.scheduler.preemption import Preemptor
from quire.scheduler.quarantine import Quarantine
from quire.scheduler.request_table import RequestTable
from quire.scheduler.results import ResultCollector
from quire.scheduler.step_builder import PlanWriter
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
        waves: int | None = None,
    ) -> None:
        """`waves`: the device is a pipeline that so many plans go through at once. A row is then in one of them, until
        what it has drawn is collected; its share of the rows decodes in each. None: one plan follows the other, and
        the next may have rows whose draws only the device knows.

        `tiers`: where blocks go that the device has no room for. `sessions`: what keeps some of them.

        `groups`: told to the device where its attention reads shared blocks once for all. `pacer`: bounds what
        prompts add to the time of a step that others wait for; without one, tokens are all that is counted."""
        self.ledger = RequestTable(tables, policy, keys, max_rows, groups)
        self.tables = tables
        self.policy = policy
        self.rows = self.ledger.rows
        self._sharing = self.ledger.sharing
        self._moving = self.ledger.moving = None if tiers is None else Swapper(self.ledger, tiers)
        self.tiers = tiers
        self.attach(sessions)
        self._flights: deque[InFlightStep] = deque()
        self._space = Preemptor(self.ledger, self._moving, tiers, self._flights)
        self._admission = Admission(self.ledger, self._space, self._moving, token_budget, chunked_prefill, clock)
        self._turn = self._admission.turn
        self._waves = waves
        self._writer = PlanWriter(self.ledger, self._moving, clock, holds=waves is not None)
        self._branching = BeamRows(self.ledger)
        self._collector = ResultCollector(self.ledger, self._branching)
        self.stats = self.ledger.stats
        self.pressure = self._space.pressure
        self._suspects = Quarantine()
        self._budget = token_budget
        self._clock = clock
        self._pacer = pacer
        self._fresh: list[Request] = []
        """Samples whose first token came with the last results."""

    # Requests come and go

    def add(self, source: NewRequest) -> None:
        """Queue a request. One that could never fit is refused, so that any other always finishes."""
        self.ledger.add(source)

    def abort(
        self,
        request_id: str,
        reason: str = "abort",
        message: str | None = None,
        error: str = "",
        parameter: str | None = None,
    ) -> None:
        """End every sample of a request, wherever it is. An unknown id is no error: it may just have finished."""
        for request in self.ledger.samples(request_id):
            if not request.is_finished:
                self.ledger.finish(request, reason, message=message, error=error, parameter=parameter)

    def end_compiling(self, request_id: str) -> None:
        """The request's grammar is there: it waits like any other."""
        self.ledger.end_compiling(request_id)

    def set_aside(self, request: Request) -> None:
        """What the request draws now does not count: its grammar is not ready for it. `end_compiling` calls it back."""
        if request.row >= 0:
            self.ledger.leave_row(request)
            request.move(RequestState.WAITING)
            request.move(RequestState.COMPILING)

    def fail(self, request: Request, message: str, error: str = "", parameter: str | None = None) -> None:
        """End one sample: it cannot go on. `error`: the class of error it is, where the request itself is at fault."""
        if not request.is_finished:
            self.ledger.finish(request, "error", message=message, error=error, parameter=parameter)

    def abort_all(self) -> None:
        """End everything that is unfinished."""
        for request_id in self.ledger.ids():
            self.abort(request_id)

    def finish(self, key: Key, at: int, stop_reason: str | None = None) -> None:
        """The caller found the end of a sample after its first `at` output tokens; what came after is forgotten."""
        request = self.ledger.sample(key)
        if request is not None:
            del request.output[at:]
            self.ledger.finish(request, "stop", stop_reason)

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return self.ledger.unfinished

    @property
    def in_flight(self) -> int:
        """Steps launched and not collected."""
        return len(self._flights)

    def requests_of(self, step: int) -> list[str]:
        """Ids of the requests that compute in a step in flight."""
        flights = [flight for flight in list(self._flights) if flight.step == step]
        return list(dict.fromkeys(request.id for flight in flights for request in flight.requests))

    def draws_of(self, step: int) -> list[Request]:
        """Whom each draw of a step in flight is for."""
        return next((flight.draws for flight in reversed(self._flights) if flight.step == step), [])

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self.policy)

    @property
    def loading(self) -> int:
        """Requests whose blocks are coming from a tier below."""
        return 0 if self._moving is None else self._moving.num_loading

    @property
    def has_outputs(self) -> bool:
        """Whether something happened that `take_outputs` has not told yet."""
        return self.ledger.has_outputs

    def take_outputs(self) -> StepOutputs:
        """What happened to requests since this was asked last."""
        return self.ledger.take_outputs()

    def attach(self, sessions: SessionKeeper | None) -> None:
        """Some requests are turns of these sessions, from now on."""
        self.sessions = self.ledger.sessions = sessions

    # A step is planned

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        draft = StepBuilder()
        self._take_turn(draft)
        self._note_streams()
        self._branching.park()
        if (suspect := self._suspects.first) is not None:
            return self._schedule_suspect(draft, suspect)
        decodes = self._schedule_decodes(draft)
        budget = self._continue_prompts(draft, self._prompt_budget(decodes))
        if not draft.preempted and not draft.is_stalled:
            budget = self._admission.admit(draft, self._admission.board_landed(draft, budget))
        decodes = decodes[self.rows.decoding[decodes]]  # some may have lost their row since
        is_idle = not len(decodes) and not draft.prompts and not draft.ready
        if is_idle and not self._flights and not draft.preempted and not draft.is_stalled:
            is_idle = not self._admission.board_coming(draft, budget)
        if is_idle and (self._flights or self.tiers is None or not self.tiers.is_moving):
            return None
        return self._launch(draft, decodes)

    @property
    def is_busy(self) -> bool:
        """Whether blocks are on their way somewhere: steps are to be made until they have arrived."""
        return self.tiers is not None and self.tiers.is_busy

    def _take_turn(self, draft: StepBuilder) -> None:
        """See what has arrived, and make room before it is needed."""
        if self.sessions is not None:
            self.sessions.tick()
        if self.tiers is not None:
            self.tiers.poll()
        if self._suspects.first is None:
            self._space.relieve(draft, self._budget)

    def _schedule_decodes(self, draft: StepBuilder) -> NDArray[np.int64]:
        """Every row that waits for its next token, each with a slot to write to."""
        rows = self.rows
        ready = np.flatnonzero(rows.decoding & ~rows.held & (rows.bound < rows.limit))
        if self._waves is not None:
            ready = self._wave_of(ready, self._waves)
        if len(ready) > self._budget:
            ready = np.array(sorted(ready.tolist(), key=self._rank_of_row)[: self._budget], np.int64)
        short = ready[rows.bound[ready] > rows.capacity[ready]]
        if not len(short) and not self.ledger.forked:
            return ready
        scheduled = {rows.requests[row] for row in ready.tolist()}
        in_need = {rows.requests[row] for row in short.tolist()} | (self.ledger.forked & scheduled)
        if not self._give_slots(draft, sorted(in_need, key=self.policy.rank)):
            return ready[:0]  # one row is left, and the blocks it needs are on their way
        return ready

    def _wave_of(self, ready: NDArray[np.int64], waves: int) -> NDArray[np.int64]:
        """Of these rows those that have waited longest, and no more than one of so many plans is to have."""
        most = -(-int(np.count_nonzero(self.rows.decoding)) // waves)
        if len(ready) <= most:
            return ready
        return np.sort(ready[np.argsort(self.rows.planned[ready], kind="stable")[:most]])

    @property
    def knows_draws(self) -> bool:
        """Whether every token before a row's next one is known when that is planned."""
        return self._waves is not None

    def _rank_of_row(self, row: int) -> Any:
        return self.policy.rank(self.rows.requests[row])  # type: ignore[arg-type]

    def _give_slots(self, draft: StepBuilder, requests: list[Request]) -> bool:
        """Room for one more token each. Whoever must leave leaves first: a block that is copied from in this step is
        then never one that is copied to, and copies need no order. False: there is none before blocks have moved."""
        if self._sharing is not None:
            growing = [request for request in requests if self._next_block(request) >= len(request.blocks)]
            for victim in self._sharing.exceeding(growing):
                self._space.preempt(draft, victim)
        while (lacking := self._slots_cost(requests) - self.tables.pool.free) > 0:
            if not self._space.reclaim(lacking) and self._space.preempt_one(draft) is None:
                return False
        for request in requests:
            if request.row >= 0:
                self._give_slot(draft, request)
        return True

    def _slots_cost(self, requests: list[Request]) -> int:
        """Blocks it takes to give each request that still has its row one more slot."""
        fresh, shared = 0, Counter[int]()
        for request in requests:
            index = self._next_block(request) if request.row >= 0 else -1
            if index >= len(request.blocks):
                fresh += 1
            elif index >= 0:
                shared[request.blocks[index]] += 1
        # The last one to hold a block need not copy it.
        return fresh + sum(min(count, self.tables.pool.refs[block] - 1) for block, count in shared.items())

    def _next_block(self, request: Request) -> int:
        """Which of its blocks the row's next decode writes to."""
        return (int(self.rows.bound[request.row]) - 1) // self.tables.block_size

    def _give_slot(self, draft: StepBuilder, request: Request) -> None:
        """The next token goes to a block that is the request's alone."""
        row, index = request.row, self._next_block(request)
        if index >= len(request.blocks):
            self._space.grow(draft, request, int(self.rows.bound[row]))
        elif self.tables.is_shared(request, index):
            source, own = self.tables.copy_on_write(request, index)
            draft.copies.append((row, source, own))
            draft.assign(row, index, [own])
        self.ledger.forked.discard(request)

    def _note_streams(self) -> None:
        """Rows that stream from now on. What has come by now was there before them, and does not slow down for them."""
        for request in self._fresh:
            if request.row >= 0:
                self.rows.began[request.row] = self.ledger.arrivals
        self._fresh.clear()

    def _prompt_budget(self, decodes: NDArray[np.int64]) -> int:
        """Prompt tokens this step may have: what the decodes leave, and no more than they can wait for."""
        budget = self._budget - len(decodes)
        if self._waves is not None and self._flights:
            decodes = np.flatnonzero(self.rows.decoding)  # those in the plans before wait for this one too
        if self._pacer is None or not len(decodes):
            return budget
        first = min(self.ledger.prefilling, key=self._turn, default=None)
        if first is None or self._sharing is not None:
            first = min(filter(None, (first, self.policy.next())), key=self._turn, default=None)
        elder = 0 if first is None else int(np.count_nonzero(self.rows.began[decodes] <= first.arrival_order))
        if first is None or not elder:
            return budget
        pending = len(self.ledger.prefilling) + min(self.waiting, self.rows.free)
        allowance = self._pacer.allowance(len(decodes), elder, pending)
        if self._sharing is not None and self._sharing.is_owed(first, decodes):
            allowance = max(allowance, first.known)
        return min(budget, allowance)

    def _continue_prompts(self, draft: StepBuilder, budget: int) -> int:
        """Rows whose known tokens are not all computed go on, best-ranked first."""
        for request in sorted(self.ledger.prefilling, key=self._turn):
            if self._sharing is not None and not draft.preempted:
                budget = self._admission.admit(draft, budget, before=request)
            if budget <= 0:
                break
            if request.row >= 0:
                budget -= self._schedule_chunk(draft, request, budget)
        for request in draft.prompts:
            self._admission.publish_chunk(draft, request)
        return budget

    def _schedule_chunk(self, draft: StepBuilder, request: Request, budget: int) -> int:
        """As many of the row's known tokens as budget and blocks allow; returns how many."""
        computed, bound = int(self.rows.computed[request.row]), int(self.rows.bound[request.row])
        count = min(bound - computed, budget)
        if self.tables.missing(request, computed + count) > self.tables.pool.free:
            self._space.reclaim(self.tables.missing(request, computed + count) - self.tables.pool.free)
            room = int(self.rows.capacity[request.row]) + self.tables.pool.free * self.tables.block_size - computed
            if room > 0:
                count = min(count, room)
            elif self._space.make_room(draft, request, 1):
                count = min(count, self.tables.block_size)
            else:
                return 0
        self._space.grow(draft, request, computed + count)
        draft.prompts[request] = count
        if self._sharing is not None:
            self._sharing.charge(request, count)
        return count

    def _launch(self, draft: StepBuilder, decodes: NDArray[np.int64]) -> StepPlan:
        decodes = np.concatenate([decodes, np.array([request.row for request in draft.ready], np.int64)])
        if self._sharing is not None:
            self._sharing.charge_decodes(decodes)
        plan, flight = self._writer.write(draft, decodes)
        self._flights.append(flight)
        if len(plan.rows):
            self.stats.note_step(plan, draft, self.ledger, self.pressure)
        if self._pacer is not None and len(plan.rows):
            self._pacer.launched(plan.num_decodes, len(plan.tokens), self._clock(), not draft.awaits_moves)
        return plan

    # A result comes back

    def update(self, result: StepResult) -> None:
        """Apply the result of the oldest step in flight."""
        flight = self._flights.popleft()
        if result.step != flight.step:
            raise RuntimeError(f"the result of step {result.step} came where that of step {flight.step} was due")
        if self._pacer is not None and flight.requests:
            self._pacer.collected(self._clock())
            self._fresh += flight.draws[flight.num_decodes :]
        if self._moving is not None:
            self._moving.collected(flight, self._clock())
            for done in result.moves_done:
                self._moving.tiers.finish_copies(done)
        self._suspects.acquit(flight.draws)
        self._collector.apply(flight, result)

    def reset(self, message: str, step: int | None = None) -> None:
        """Step `step` (if None the oldest in flight) failed: all start again from known tokens, suspects first."""
        failed = self._part_of(self._flights[0].step if step is None and self._flights else step)
        for flight in self._flights:
            self.tables.withdraw(flight.published)
        self._flights.clear()
        if self._pacer is not None:
            self._pacer.forget_flights()
        if self._moving is not None:
            self._moving.reset()
        if self.sessions is not None:
            self.sessions.kv.forget_device()
        self.ledger.start_over()
        self._writer.start_over()
        for culprit in self._suspects.accuse(failed):
            for sample in (culprit, *culprit.siblings):
                if not sample.is_finished:
                    self.ledger.finish(sample, "error", message=message)

    def lower_budget(self, tokens: int) -> int:
        """Steps have at most `tokens` tokens from now on, if that is fewer; returns how many they may have."""
        self._budget = self._admission.step_tokens = min(self._budget, tokens)
        return self._budget

    def _part_of(self, step: int | None) -> list[Request]:
        """Unfinished requests of the steps in flight up to `step`: a device may tell of a failure only a step later."""
        flights = [flight for flight in self._flights if step is not None and flight.step <= step]
        part = dict.fromkeys(request for flight in flights for request in (*flight.requests, *flight.draws))
        return [request for request in part if not request.is_finished]

    def _schedule_suspect(self, draft: StepBuilder, suspect: Request) -> StepPlan | None:
        """A suspect alone, until it has drawn a token: if a step fails again, it was the one."""
        if self._flights or suspect.state is RequestState.COMPILING:
            return None
        if suspect.row >= 0:
            self._schedule_chunk(draft, suspect, self._budget)
            self._admission.publish_chunk(draft, suspect)
        elif not (
            self.ledger.has_row_for(suspect) and self._admission.admit_one(draft, suspect, self._budget, alone=True)
        ):
            for passed in self.rows.running():
                self._space.preempt(draft, passed)
            self._admission.admit_one(draft, suspect, self._budget, alone=True)
        return self._launch(draft, np.empty(0, np.int64))

    # Housekeeping

    def reset_prefix_cache(self) -> bool:
        """Forget cached content; False if requests are running (their blocks stay, and theirs alone)."""
        self.tables.reset_prefix()
        return self.rows.used == 0

    def close(self) -> None:
        """Blocks on their way are given up, but for those that go to disk; sessions are durable."""
        if self.tiers is not None:
            self.tiers.reset()
            self.tiers.close()
        if self.sessions is not None:
            self.sessions.close()
        if self.tiers is not None and self.tiers.store is not None:
            self.tiers.store.close()

    def check_idle(self) -> None:
        """Raise unless every block and row has come back; to be called when nothing is unfinished."""
        self.ledger.check_idle()
