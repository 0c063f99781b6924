"""Gives rows to waiting requests, in the policy's order, and to those whose blocks were loaded from a lower tier."""

from __future__ import annotations

from collections.abc import Callable

from quire.kvcache.groups import Hit
from quire.messages.request import Request
from quire.scheduler.encoding import Encoding, NoEncoding
from quire.scheduler.preemption import Preemptor
from quire.scheduler.request_table import RequestTable
from quire.scheduler.step_builder import StepBuilder


class Admission:
    """Gives rows to requests."""

    def __init__(
        self,
        requests: RequestTable,
        preemptor: Preemptor,
        step_tokens: int,
        chunked: bool,
        clock: Callable[[], float],
    ) -> None:
        """`step_tokens`: the most a step computes. `chunked`: a prompt may be split so that part of it fits a step."""
        self.step_tokens = step_tokens
        self._requests = requests
        self._tables = requests.tables
        self._policy = requests.policy
        self._rows = requests.rows
        self._sharing = requests.sharing
        self._swapper = requests.swapper
        self._preemptor = preemptor
        self._chunked = chunked
        self._clock = clock

    @property
    def _encoding(self) -> Encoding | NoEncoding:
        return self._requests.encoding

    # Waiting requests

    def admit(self, builder: StepBuilder, budget: int, before: Request | None = None) -> int:
        """Admit waiting requests in the policy's order while rows, blocks and budget last; with `before`, only those
        that come before that one. Returns what is left of the budget."""
        order, pressure, loading = self._sharing.order, self._preemptor.pressure, self._swapper.num_loading
        while budget > 0:
            request = self._policy.next()
            if request is None or request.in_flight:
                break
            if before is not None and order(request) > order(before):
                break
            if self._rows.free <= loading:
                self._preempt_for(builder, request)
                break
            if (pressure.device or pressure.memory > 1) and builder.admitted:
                pressure.slowed += 1
                break
            admitted = self.admit_one(builder, request, budget)
            if admitted is None:
                break
            budget -= admitted + self._encoding.cost(request)
        return budget

    def admit_one(self, builder: StepBuilder, request: Request, budget: int, alone: bool = False) -> int | None:
        """Give the request a row and schedule its first chunk; returns the chunk's tokens, None if it does not fit.

        A request with blocks in a lower tier waits for them first and costs the step nothing. `alone`: it runs alone,
        and computes everything.
        """
        tables, known, sessions = self._tables, request.known, self._requests.sessions
        self._requests.extend_keys(request)
        own = sessions.kv.tokens_for(request)
        hit = self._find(request if request.source.reads_cache and not own else None, known)
        cached = own or len(hit.blocks) * tables.block_size
        spare = 0 if alone else self._preemptor.promised() + self._preemptor.headroom()
        # Again after each reclaim: it may free a block that was hit, which then costs, or drop only a shared reference.
        while (lacking := self._cost(request, own, hit) + spare - tables.pool.free) > 0:
            if not self._preemptor.reclaim(lacking, request):
                break
        if lacking > 0:
            if not alone:
                self._preempt_for(builder, request, tables.pages_for(known))
            return None
        count = min(known - cached, budget)
        if count < known - cached <= self.step_tokens and not self._chunked:
            return None  # a later step has room for all of it; a prompt longer than any step is split in any case
        lower = None if alone or own else self._swapper.find(request, hit)
        if lower is not None and self._swapper.load(request, hit, lower, tables.pool.free - spare):
            return 0
        if self._encoding.is_on and request.source.spans:
            if lower is not None and self._encoding.lacks_arrays(request.source):
                return None  # a later step has blocks for what cannot be computed
            if not self._encoding.cut(request, cached, count, budget):
                return None  # a later step has room in the encoder's cache
        if own:
            sessions.kv.take(request)
        else:
            tables.adopt(request, hit)
        self._policy.remove(request)
        return self._start(builder, request, cached, budget, hit.reach)

    def _find(self, request: Request | None, known: int) -> Hit:
        """What the prefix cache has of a request from which it can go on; None: of nothing."""
        keys = [] if request is None else request.keys
        hit = self._tables.find(keys, known)
        if request is not None and self._encoding.unsplit and request.source.spans:
            size = self._tables.block_size
            while (allowed := self._encoding.boundary(request, len(hit.blocks) * size, size)) < len(hit.blocks) * size:
                hit = self._tables.find(keys[: allowed // size], known)
        return hit

    def _cost(self, request: Request, own: int, hit: Hit) -> int:
        """Free blocks it takes to hold the request's known tokens, the first `own` of which its session has."""
        tables = self._tables
        if own:
            cost = self._requests.sessions.kv.cost_of_taking(request)
        else:
            cost = tables.cost_of_hit(hit, request.known)
        if tables.others and self._encoding.unsplit:  # windows give no pages back within the first image
            cached = own or len(hit.blocks) * tables.block_size
            ends = (span.stop for span in self._encoding.unsplit_spans(request.source) if span.stop > cached)
            blocks = tables.blocks_for(next(ends, cached)) - tables.blocks_for(cached)
            cost = max(cost, tables.pages_per_block * blocks + tables.cost_of_sharing(hit.blocks))
        return cost

    def _preempt_for(self, builder: StepBuilder, request: Request, blocks: int = 0) -> None:
        """Preempt a tenant above its share, if the request's tenant is below its own and lacks a row or `blocks`. The
        request is admitted in a later step: a step that preempts admits none, and preempts none it has admitted."""
        if builder.admitted or builder.preempted:
            return
        victim = self._sharing.victim_for(request, blocks)
        if victim is not None:
            # The prefix cache may list blocks that the victim was to write in this step; no request has hit them yet.
            self._tables.withdraw(builder.unpublish(self._tables.every_page(victim)))
            self._preemptor.preempt(builder, victim)

    # Loaded requests

    def admit_loaded(self, builder: StepBuilder, budget: int) -> int:
        """Give rows to requests whose loads have ended; returns what is left of the budget."""
        for request, cached in self._swapper.loaded():
            if budget <= 0 or not self._rows.free:
                break
            if not self._requests.has_row_for(request):
                continue  # its tenant is at its cap
            room = self._room(request, cached)
            if room > 0 and not self._can_compute(request, cached, budget, room):
                continue
            if room <= 0:
                if not self._preemptor.reclaim(1, request) and not self._rows.used:
                    self._swapper.cancel_all(but=request)  # the others that load hold the blocks it needs
                break
            self._swapper.end_load(request)
            self._tables.publish(request, request.keys, cached // self._tables.block_size)
            budget -= self._start(builder, request, cached, min(budget, room))
        return budget

    def admit_arriving(self, builder: StepBuilder, budget: int) -> bool:
        """With nothing else to compute: admit a request whose blocks are in host memory to the step that copies them,
        so that the device waits for the copies and not the host. Returns whether there was one."""
        arriving = self._swapper.arriving() if budget > 0 and self._rows.free else None
        if arriving is None:
            return False
        request, cached = arriving
        room = self._room(request, cached)
        if room <= 0 or not self._requests.has_row_for(request):
            return False
        if not self._can_compute(request, cached, budget, room):
            return False
        builder.awaits_moves = True
        self._swapper.end_load(request)
        builder.publish(self._tables.publish(request, request.keys, cached // self._tables.block_size))
        self._start(builder, request, cached, min(budget, room))
        return True

    def _can_compute(self, request: Request, cached: int, budget: int, room: int) -> bool:
        """Whether some tokens after the first `cached` can be computed: there is room for the image that they begin
        with, in the encoder's cache and in `room`."""
        if not self._encoding.is_on or not request.source.spans:
            return True
        count = min(request.known - cached, budget, room)
        count = self._encoding.cut(request, cached, count, budget)
        return count > 0 and (count <= room or self._encoding.whole(request, cached, room) > 0)

    def _room(self, request: Request, cached: int) -> int:
        """Tokens after the first `cached` that fit into the request's blocks and the free ones."""
        return self._tables.room(request, self._tables.pool.free) - cached

    # Joining a step

    def _start(self, builder: StepBuilder, request: Request, cached: int, budget: int, reach: int = 0) -> int:
        """The request, whose blocks hold its first `cached` tokens, takes a row and computes its first chunk. `reach`:
        blocks that the prefix cache has of the full groups."""
        tables, count = self._tables, min(request.known - cached, budget)
        self._requests.start(request, cached, self._clock())
        self._make_writable(builder, request, cached)
        if tables.has_full:
            builder.assign(request.row, 0, request.blocks)
        if tables.others:
            spare = self._preemptor.promised() + self._preemptor.headroom()
            self._requests.states.start(builder, request, cached, reach, spare)
            for group, index, pages in tables.assigned(request):
                builder.assign(request.row, index, pages, group)
            count = min(count, self._room(request, cached))
            count = self._requests.states.cut(request, cached, count)
        if self._encoding.is_on and request.source.spans:
            count = self._encoding.cut(request, cached, count, budget)
            if tables.others and count > (room := self._room(request, cached)):
                count = self._encoding.whole(request, cached, room)
        self._preemptor.grow(builder, request, cached + count)
        builder.admit(request, cached)
        if cached == request.known - 1 and _can_decode(request):
            builder.decode(request)
            self._rows.start_stream(request.row, self._requests.arrivals)
            self._requests.start_decoding(request)
            return 1
        builder.prompt(request, count)
        self._sharing.charge(request, count)
        if count < request.known - cached:
            self._requests.start_prefill(request)
        self.publish_chunk(builder, request)
        return count

    def _make_writable(self, builder: StepBuilder, request: Request, cached: int) -> None:
        """Make a partly filled last block, which the next token is written to, the request's own."""
        index, filled = divmod(cached, self._tables.block_size)
        if not filled:
            return
        # A block in transfer counts as shared, but the transfer ends before anything is written.
        if self._tables.is_shared(request, index) and not builder.awaits_moves:
            for _, source, own in self._tables.copy_on_write_all(request, index):
                builder.copy(request.row, source, own)
        self._tables.withdraw(self._tables.pages_at(request, index))

    def publish_chunk(self, builder: StepBuilder, request: Request) -> None:
        """Publish the blocks that the chunk fills, for requests of this step too: KV is written before it is read."""
        filled = int(self._rows.computed[request.row]) + builder.prompts[request]
        builder.publish(self._tables.publish(request, request.keys, filled // self._tables.block_size))


def _can_decode(request: Request) -> bool:
    """Whether the request's last token, the only one to compute, can be computed as a decode."""
    if (spans := request.source.spans) and spans[-1].stop >= request.known:
        return False  # decodes read token ids alone
    return request.source.pooling is None and request.beam is None and not request.siblings
