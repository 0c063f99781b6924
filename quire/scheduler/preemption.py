"""Room for what a step computes: blocks for rows that grow, and who makes way where there are none.

A shortage is met in this order: cached blocks that nobody holds are evicted; sessions without a turn give theirs back;
the policy's victim leaves its row, and is computed again later. Before there is one, sessions are put to sleep and
rows are put by in the tiers below.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kvcache.offload.manager import OffloadManager
from quire.messages.request import Request, RequestState
from quire.scheduler.draft import InFlightStep, StepBuilder
from quire.scheduler.pressure import MemoryPressure
from quire.scheduler.request_table import RequestTable
from quire.scheduler.swapping import AHEAD_STEPS, Swapper


class Preemptor:
    """Gives blocks to rows, and takes them."""

    def __init__(
        self,
        ledger: RequestTable,
        moving: Swapper | None,
        tiers: OffloadManager | None,
        flights: Sequence[InFlightStep],
    ) -> None:
        """`flights`: steps launched and not collected."""
        self.pressure = MemoryPressure()
        self._ledger = ledger
        self._tables = ledger.tables
        self._policy = ledger.policy
        self._rows = ledger.rows
        self._stats = ledger.stats
        self._moving = moving
        self._tiers = tiers
        self._flights = flights

    def grow(self, draft: StepBuilder, request: Request, tokens: int) -> None:
        """The blocks the row lacks to hold `tokens` tokens."""
        index = len(request.blocks)
        fresh = self._tables.grow(request, tokens)
        if fresh:
            draft.assign(request.row, index, fresh)
            self._rows.capacity[request.row] = len(request.blocks) * self._tables.block_size

    def reclaim(self, blocks: int, request: Request | None = None) -> bool:
        """Sessions that do not run, but for the request's own, give blocks back before anyone is kept from running."""
        name = "" if request is None else request.source.session
        return blocks > 0 and self._ledger.sessions is not None and self._ledger.sessions.kv.reclaim(blocks, name) > 0

    def make_room(self, draft: StepBuilder, request: Request, blocks: int) -> bool:
        """Preempt until `blocks` are free; False if that cost the request itself its row."""
        while self._tables.pool.free < blocks:
            if self.preempt_one(draft) in (request, None):
                return False
        return True

    def preempt_one(self, draft: StepBuilder) -> Request | None:
        """The policy names who must leave, never the best-ranked: it always goes on, so everyone finishes in turn.

        None: nobody is left to leave, but blocks are on their way, and will be free when they have arrived.
        """
        running = self._rows.running()
        first = min(running, key=self._policy.rank)
        others = [other for other in running if other is not first]
        if not others:
            if self._moving is not None and (self._moving.give_up_all() or self._moving.tiers.is_busy):
                draft.is_stalled = True  # nobody else may take what is about to be free
                return None
            pool = self._tables.pool
            raise RuntimeError(
                f"{first} runs alone and lacks blocks: {pool.free} of {pool.capacity} free, {len(first.blocks)} held"
            )
        victim = self._policy.victim(others)
        self.preempt(draft, victim)
        return victim

    def preempt(self, draft: StepBuilder, victim: Request) -> None:
        """Take row and blocks; the tokens stay, and are computed again when there is room."""
        epoch = int(self._rows.epoch[victim.row])
        victim.in_flight = sum(flight.draws_for(victim.row, epoch) for flight in self._flights)
        victim.preemptions += 1
        self._stats.preemptions += 1
        self._ledger.outputs.preempted.append(victim.key)
        draft.withdraw(victim)
        draft.preempted.append(victim)
        self._ledger.leave_row(victim)
        victim.move(RequestState.PREEMPTED)
        self._ledger.queue(victim)

    def promised(self) -> int:
        """Blocks that admitted prompts will still ask for."""
        coming = () if self._moving is None else self._moving.requests
        return sum(self._tables.missing(request, request.known) for request in (*self._ledger.prefilling, *coming))

    def relieve(self, draft: StepBuilder, step_tokens: int) -> None:
        """Past the first watermark idle sessions fall asleep and cached blocks are saved; past the second, or
        where rows will lack blocks within a few steps, the policy's victim is put by, if that is cheaper than to
        compute it again.

        `step_tokens`: the most a step has.
        """
        pool, rows = self._tables.pool, self._rows
        self.pressure.look(pool, self._tiers)
        if self.pressure.device and self._ledger.sessions is not None and self._ledger.sessions.kv.suspend_oldest():
            self.pressure.slept += 1
        if self._moving is None:
            return
        self._moving.save_idle(step_tokens // self._tables.block_size + rows.used)
        if rows.used < 2 or self._moving.is_putting_by:
            return
        growing = int(np.count_nonzero(rows.decoding & (rows.capacity - rows.bound < AHEAD_STEPS)))
        if growing + self.promised() <= pool.free and self.pressure.device < 2:
            return
        first = min(rows.running(), key=self._policy.rank)
        victim = self._policy.victim([other for other in rows.running() if other is not first])
        tokens = min(int(rows.computed[victim.row]), victim.known)
        if self._moving.is_swappable(victim, tokens):
            self._moving.put_by(victim, tokens)
            self.preempt(draft, victim)
            self._stats.swaps += 1
