"""Finds blocks for a step; preempts requests when there are not enough.

A shortage is met in this order: cached blocks that no request holds are evicted; sessions between turns give theirs
back; the policy's victim is preempted, and computed again later. To avoid that, blocks are freed early, below two
watermarks of free blocks. Below the first, admission slows to one request a step and idle sessions are suspended, one
a step. Below the second, or when rows will lack blocks within a few steps, the policy's victim is swapped out.

In lower tiers only owned blocks count: other cached blocks are evicted as needed. A full tier replaces its oldest
blocks; a full disk drops KV, never a session's tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from quire.kvcache.block_pool import BlockPool
from quire.messages.request import Request
from quire.scheduler.request_table import RequestTable
from quire.scheduler.step_builder import InFlightStep, StepBuilder
from quire.scheduler.swapping import NoSwapper, Swapper

FIRST_WATERMARK = 0.15
"""Share of a tier's blocks. With fewer free, admission slows and idle sessions are suspended."""
SECOND_WATERMARK = 0.03
"""With fewer free, rows are swapped out."""
AHEAD_STEPS = 8
"""Rows that need a block within this many steps count as needing it now: a copy takes time."""


class MemoryPressure:
    """How many watermarks each tier is below (0 to 2), and counts of the reactions."""

    def __init__(self) -> None:
        self.device = self.host = self.disk = 0
        self.memory = 0
        """Thresholds exceeded by bytes in use, on the device or its machine; see `engine/memory_watch.py`."""
        self.slowed = 0
        """Steps in which requests waited although there was room for them."""
        self.slept = 0
        """Sessions suspended to free blocks."""

    def update(self, pool: BlockPool, swapper: Swapper | NoSwapper) -> None:
        """Measure how full the tiers are now."""
        self.device = _level(pool.free, pool.capacity)
        self.host = _level(*swapper.host_room)
        self.disk = _level(*swapper.disk_room)

    def __str__(self) -> str:
        return f"pressure {self.device} device, {self.host} host, {self.disk} disk"


def _level(free: int, capacity: int) -> int:
    """Number of watermarks the free blocks are below."""
    return (free < FIRST_WATERMARK * capacity) + (free < SECOND_WATERMARK * capacity)


class Preemptor:
    """Gives blocks to rows, and takes them away."""

    def __init__(self, requests: RequestTable, in_flight: Sequence[InFlightStep]) -> None:
        self.pressure = MemoryPressure()
        self._requests = requests
        self._tables = requests.tables
        self._policy = requests.policy
        self._rows = requests.rows
        self._sharing = requests.sharing
        self._swapper = requests.swapper
        self._in_flight = in_flight

    def grow(self, builder: StepBuilder, request: Request, tokens: int) -> None:
        """Allocate the blocks the row lacks to hold `tokens` tokens."""
        index, tables = len(request.blocks), self._tables
        fresh = self._requests.grow(request, tokens)
        if tables.has_full:
            builder.assign(request.row, index, fresh)
        if tables.others:
            for group, at, pages in tables.grow_others(request):
                builder.assign(request.row, at, pages, group)

    def give_slots(self, builder: StepBuilder, requests: list[Request]) -> bool:
        """Give each request slots for its next decode. All preemptions come first: a block that is copied from in this
        step is then never one that is copied to, and copies need no order. False: blocks are free only after
        transfers."""
        if self._tables.has_windows:
            for request in requests:
                self._requests.trim(request)
        growing = (request for request in requests if self._first_block(request) >= len(request.blocks))
        for victim in self._sharing.exceeding(growing):
            self.preempt(builder, victim)
        writes = self._writes(requests)
        while (lacking := self._slots_cost(writes) - self._tables.pool.free) > 0:
            if not self._drop_drafts(builder) and not self.reclaim(lacking) and self.preempt_one(builder) is None:
                return False
            writes = self._writes(requests)
        for request, first, tokens in writes:
            self._give_slots(builder, request, first, tokens)
        self._requests.own_last_blocks(requests)
        return True

    def give_proposal_slots(self, builder: StepBuilder) -> None:
        """Requests whose prompt ends in this step, or that have just joined, need slots for the drafts that the device
        makes for them; if there are not enough blocks, it makes none."""
        rows, more = self._rows, dict[Request, int]()
        for request in (*builder.prompts, *builder.ready):
            end = int(rows.computed[request.row]) + builder.prompts.get(request, 1)
            if end >= request.known:
                more[request] = max(end, min(end + builder.proposals, request.source.limit))
        if sum(self._tables.missing(request, tokens) for request, tokens in more.items()) > self._tables.pool.free:
            builder.proposals = 0
            return
        for request, tokens in more.items():
            self.grow(builder, request, tokens)

    def _drop_drafts(self, builder: StepBuilder) -> bool:
        """Blocks are short: verify and make no drafts in this step, and take back what was reserved for earlier ones.
        Returns whether that helps."""
        rows, size = self._rows, self._tables.block_size
        if not self._requests.drafting.is_on:
            return False
        builder.proposals = 0
        is_less = rows.narrow()
        spare = rows.decoding & (rows.capacity - rows.bound >= size)
        for row in np.flatnonzero(spare).tolist():
            request = rows.requests[row]
            assert request is not None
            self._tables.shed(request, int(rows.bound[row]))
            rows.set_capacity(row, len(request.blocks) * size)
        return is_less or bool(spare.any())

    def _writes(self, requests: list[Request]) -> list[tuple[Request, int, int]]:
        """(request, first block that its next decode writes to, tokens it needs slots for) of those that still have
        their row. Several blocks are written if there are drafts."""
        running = [request for request in requests if request.row >= 0]
        at = [request.row for request in running]
        bound = self._rows.bound[at]
        tokens = bound + self._rows.ahead[at]
        first = (bound - 1) // self._tables.block_size
        return list(zip(running, first.tolist(), tokens.tolist(), strict=True))

    def _slots_cost(self, writes: list[tuple[Request, int, int]]) -> int:
        """Blocks that it takes to give these requests their slots."""
        fresh, shared, size = 0, Counter[int](), self._tables.block_size
        for request, first, tokens in writes:
            held = len(request.blocks)
            fresh += max(0, -(-tokens // size) - held)
            if first < held:  # blocks after this one are never shared
                shared.update(self._tables.pages_at(request, first))
        # The last sequence that holds a shared block need not copy it.
        copied = sum(min(count, self._tables.pool.refs[block] - 1) for block, count in shared.items())
        return fresh * self._tables.pages_per_block + copied

    def _first_block(self, request: Request) -> int:
        """Index of the first block that the row's next decode writes to."""
        return (int(self._rows.bound[request.row]) - 1) // self._tables.block_size

    def _give_slots(self, builder: StepBuilder, request: Request, first: int, tokens: int) -> None:
        """Allocate the blocks that the next decode writes to, and copy the first if it is shared."""
        row, held = request.row, len(request.blocks)
        if first < held and self._tables.is_shared(request, first):
            for group, source, own in self._tables.copy_on_write_all(request, first):
                builder.copy(row, source, own)
                builder.assign(row, first, [own], group)
        if tokens > held * self._tables.block_size:
            self.grow(builder, request, tokens)

    # When blocks run out

    def reclaim(self, blocks: int, request: Request | None = None) -> bool:
        """Take blocks from snapshots in the making, and from idle sessions other than the request's own; False if they
        gave none."""
        if blocks > 0 and self._requests.states.drop_pending():
            return True
        session = "" if request is None else request.source.session
        return blocks > 0 and self._requests.sessions.kv.reclaim(blocks, session) > 0

    def make_room(self, builder: StepBuilder, request: Request, blocks: int) -> bool:
        """Preempt until `blocks` are free; False if the request itself was preempted, or blocks are in transfer."""
        while self._tables.pool.free < blocks:
            if self.preempt_one(builder) in (request, None):
                return False
        return True

    def preempt_one(self, builder: StepBuilder) -> Request | None:
        """Preempt the policy's victim, never the best-ranked request: that one always runs, so all finish eventually.

        None: no other request is left, but transfers are in progress that will free blocks.
        """
        running = self._rows.running()
        first = min(running, key=self._policy.rank)
        others = [other for other in running if other is not first]
        if not others:
            # Steps in flight may reach pages that the window leaves behind once they are collected.
            is_reached = self._tables.has_windows and len(self._in_flight) > 0
            if is_reached or self._swapper.cancel_all() or self._swapper.is_busy:
                builder.is_stalled = True
                return None
            pool = self._tables.pool
            raise RuntimeError(
                f"{first} runs alone and lacks blocks: {pool.free} of {pool.capacity} free, {len(first.blocks)} held"
            )
        victim = self._policy.victim(others)
        self.preempt(builder, victim)
        return victim

    def preempt(self, builder: StepBuilder, victim: Request) -> None:
        """Take row and blocks; the tokens stay, and are computed again when there is room."""
        epoch = int(self._rows.epoch[victim.row])
        in_flight = sum(step.draws_for(victim.row, epoch) for step in self._in_flight)
        builder.preempt(victim)
        self._requests.preempt(victim, in_flight)

    # Before blocks run out

    def promised(self) -> int:
        """Blocks that admitted prompts will still need."""
        admitted = (*self._requests.prefilling, *self._swapper.requests)
        return sum(self._tables.missing_finally(request, request.known) for request in admitted)

    def headroom(self) -> int:
        """Blocks that admission leaves free, so that running rows can grow before one must be preempted.

        If rows are swapped out below a watermark, none is admitted below it: it would be swapped out next.
        """
        capacity = self._tables.pool.capacity
        growth = min(self._rows.used * self._tables.pages_per_block, capacity // 16)
        return growth + math.ceil(SECOND_WATERMARK * capacity) if growth and self._swapper.is_on else growth

    def relieve(self, builder: StepBuilder, step_tokens: int) -> None:
        """Below the watermarks: suspend a session, save cached blocks, swap a row out. `step_tokens`: the most a step
        computes."""
        pool, rows = self._tables.pool, self._rows
        self.pressure.update(pool, self._swapper)
        if self.pressure.device and self._requests.sessions.kv.suspend_oldest():
            self.pressure.slept += 1
        if not self._swapper.is_on:
            return
        blocks = step_tokens // self._tables.block_size + rows.used
        self._swapper.save_evictable(blocks * max(1, self._tables.pages_per_block))
        if rows.used < 2 or self._swapper.is_swapping_out:
            return
        growing = int(np.count_nonzero(rows.decoding & (rows.capacity - rows.bound < AHEAD_STEPS)))
        growing *= self._tables.pages_per_block
        if growing + self.promised() <= pool.free and self.pressure.device < 2:
            return
        first = min(rows.running(), key=self._policy.rank)
        victim = self._policy.victim([other for other in rows.running() if other is not first])
        computed = int(rows.computed[victim.row])
        tokens = min(computed, victim.known)
        if self._tables.state_pages and computed > tokens:
            return  # its state has consumed tokens that are not collected: there is no key for it
        if self._swapper.is_swappable(victim, tokens):
            self._requests.timelines.note(victim, "swapped", tokens)
            self._swapper.swap_out(victim, tokens)
            self.preempt(builder, victim)
            self._requests.stats.swaps += 1
