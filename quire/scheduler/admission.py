"""Who joins a step: waiting requests in the policy's order, and those whose blocks have come from a tier below."""

from __future__ import annotations

from collections.abc import Callable

from quire.messages.outputs import Started
from quire.messages.request import Request, RequestState
from quire.scheduler.draft import StepBuilder
from quire.scheduler.preemption import Preemptor
from quire.scheduler.pressure import reserve
from quire.scheduler.request_table import RequestTable
from quire.scheduler.swapping import Swapper


class Admission:
    """Gives rows to requests."""

    def __init__(
        self,
        ledger: RequestTable,
        space: Preemptor,
        moving: Swapper | None,
        step_tokens: int,
        chunked: bool,
        clock: Callable[[], float],
    ) -> None:
        """`step_tokens`: the most a step has. `chunked`: a prompt may be cut where the rest of it fits a later step."""
        self.step_tokens = step_tokens
        self.turn = ledger.policy.rank if ledger.sharing is None else ledger.sharing.turn
        """Whose turn it is, as a sort key: the policy's rank, or what it makes of tenants' shares."""
        self._ledger = ledger
        self._tables = ledger.tables
        self._policy = ledger.policy
        self._rows = ledger.rows
        self._sharing = ledger.sharing
        self._space = space
        self._moving = moving
        self._chunked = chunked
        self._clock = clock

    def admit(self, draft: StepBuilder, budget: int, before: Request | None = None) -> int:
        """Waiting requests join in the policy's order, as long as rows, blocks and budget last; given `before`, only
        those whose turn comes before that one's. Returns what is left of the budget."""
        loading = 0 if self._moving is None else self._moving.num_loading
        while budget > 0 and (self._rows.free > loading or self._sharing is not None):
            request = self._policy.next()
            if request is None or request.in_flight:
                break
            if self._space.pressure.device and draft.admitted:
                self._space.pressure.slowed += 1
                break
            if before is not None and self.turn(request) > self.turn(before):
                break
            if self._rows.free <= loading:
                self._make_way(draft, request)
                break
            admitted = self.admit_one(draft, request, budget)
            if admitted is None:
                break
            budget -= admitted
        return budget

    def _make_way(self, draft: StepBuilder, request: Request, blocks: int = 0) -> None:
        """A tenant above its share may have to give a row to one below it, which takes it in a later step: who has
        joined in this one is not preempted, and a step that preempts admits nobody."""
        if self._sharing is not None and not draft.admitted and not draft.preempted:
            victim = self._sharing.makes_way(request, blocks)
            if victim is not None:
                # What it was to write in this step may be findable already, and nobody has found it yet.
                own = set(victim.blocks)
                self._tables.withdraw([block for block in draft.published if block in own])
                draft.published = [block for block in draft.published if block not in own]
                self._space.preempt(draft, victim)

    def admit_one(self, draft: StepBuilder, request: Request, budget: int, alone: bool = False) -> int | None:
        """Give the request a row and schedule its first chunk; returns the chunk's tokens, None if it does not fit.

        One whose blocks lie in a tier below waits for them first: it costs the step nothing.
        """
        tables, known = self._tables, request.known
        self._ledger.extend_keys(request)
        own = 0 if self._ledger.sessions is None else self._ledger.sessions.kv.tokens_for(request)
        hit = tables.match(request.keys, known) if request.source.reads_cache and not own else []
        cached = own or len(hit) * tables.block_size
        spare = 0 if alone else self._space.promised() + self._headroom()
        # What sessions give back may be what was hit: it costs from then on; or what they share with the request's own.
        while (lacking := self._cost(request, own, hit) + spare - tables.pool.free) > 0:
            if not self._space.reclaim(lacking, request):
                break
        if lacking > 0:
            if not alone:
                self._make_way(draft, request, tables.blocks_for(known))
            return None
        count = min(known - cached, budget)
        if count < known - cached <= self.step_tokens and not self._chunked:
            return None  # a later step has room for all of it; what exceeds any step goes in chunks all the same
        if own and self._ledger.sessions is not None:
            self._ledger.sessions.kv.take(request)
        else:
            tables.adopt(request, hit)
            if self._moving is not None and not alone and (arrival := self._moving.find(request, len(hit))):
                self._moving.load(request, arrival)
                return 0
        self._policy.remove(request)
        return self._board(draft, request, cached, budget)

    def _cost(self, request: Request, own: int, hit: list[int]) -> int:
        """Free blocks it takes to hold the request's known tokens, of which its session has the first `own`."""
        if own and self._ledger.sessions is not None:
            return self._ledger.sessions.kv.cost_of_taking(request)
        return self._tables.blocks_for(request.known) - len(hit) + self._tables.cost_of_sharing(hit)

    def _board(self, draft: StepBuilder, request: Request, cached: int, budget: int) -> int:
        """The request, whose blocks hold its first `cached` tokens, takes a row and computes its first chunk."""
        count = min(request.known - cached, budget)
        request.move(RequestState.RUNNING)
        row = self._rows.take(request, computed=cached, bound=request.known)
        self._rows.capacity[row] = len(request.blocks) * self._tables.block_size
        self._own_last(draft, request, cached)
        draft.assign(row, 0, request.blocks)
        self._space.grow(draft, request, cached + count)
        draft.admitted.append(request)
        self._note_start(draft, request, cached)
        if cached == request.known - 1 and _can_decode(request):
            draft.ready.append(request)
            self._rows.decoding[row] = True
            self._rows.began[row] = self._ledger.arrivals
            self._ledger.note_decoding(request)
            return 1
        draft.prompts[request] = count
        if self._sharing is not None:
            self._sharing.charge(request, count)
        if count < request.known - cached:
            self._ledger.prefilling[request] = None
        self.publish_chunk(draft, request)
        return count

    def board_landed(self, draft: StepBuilder, budget: int) -> int:
        """Requests whose blocks have come from a tier below take their rows; returns what is left of the budget."""
        if self._moving is None or not self._moving.num_loading:
            return budget
        for request, cached in self._moving.landed():
            if budget <= 0 or not self._rows.free:
                break
            if not self._ledger.has_row_for(request):
                continue  # its tenant has as many as it may
            room = self._room(request, cached)
            if room <= 0:
                if not self._space.reclaim(1, request) and not self._rows.used:
                    self._moving.give_up_all(but=request)  # those that wait with it hold what it needs
                break
            self._moving.board(request)
            self._tables.publish(request, request.keys, cached // self._tables.block_size)
            budget -= self._board(draft, request, cached, min(budget, room))
        return budget

    def board_coming(self, draft: StepBuilder, budget: int) -> bool:
        """Nobody has anything to compute, and one request waits for blocks in host memory: it joins the step that
        brings them, and the device waits for the copies instead of us. Whether there is such a request."""
        coming = None if self._moving is None or budget <= 0 else self._moving.coming()
        if self._moving is None or coming is None or not self._rows.free:
            return False
        request, cached = coming
        room = self._room(request, cached)
        if room <= 0 or not self._ledger.has_row_for(request):
            return False
        draft.awaits_moves = True
        self._moving.board(request)
        draft.published += self._tables.publish(request, request.keys, cached // self._tables.block_size)
        self._board(draft, request, cached, min(budget, room))
        return True

    def _room(self, request: Request, cached: int) -> int:
        """Tokens that fit after its first `cached`, into its blocks and those that are free."""
        return (len(request.blocks) + self._tables.pool.free) * self._tables.block_size - cached

    def _own_last(self, draft: StepBuilder, request: Request, cached: int) -> None:
        """The next token goes into a block that holds some: one that is the request's alone, and that nobody finds."""
        index, filled = divmod(cached, self._tables.block_size)
        if not filled:
            return
        # One that is on its way is held by its journey too, which is over before anything is written.
        if self._tables.is_shared(request, index) and not draft.awaits_moves:
            draft.copies.append((request.row, *self._tables.copy_on_write(request, index)))
        else:
            self._tables.withdraw([request.blocks[index]])

    def _headroom(self) -> int:
        """Blocks left alone at admission, so that running rows can grow a while before anyone must be preempted.

        Where rows are put by past a watermark, nobody joins below it: who did would be the next to go, and come back.
        """
        capacity = self._tables.pool.capacity
        growth = min(self._rows.used, capacity // 16)
        return growth + reserve(capacity) if growth and self._moving is not None else growth

    def publish_chunk(self, draft: StepBuilder, request: Request) -> None:
        """Blocks this step fills can be hit by requests of this very step: all KV is written before it is read."""
        filled = int(self._rows.computed[request.row]) + draft.prompts[request]
        draft.published += self._tables.publish(request, request.keys, filled // self._tables.block_size)

    def _note_start(self, draft: StepBuilder, request: Request, cached: int) -> None:
        draft.cached_tokens += cached
        draft.queried_tokens += request.known
        if request.first_scheduled is None:
            request.first_scheduled = self._clock()
            request.num_cached = cached
            self._ledger.outputs.started.append(Started(request.key, request.first_scheduled, cached))


def _can_decode(request: Request) -> bool:
    """Whether the request's last token, the only one to compute, can go the way of tokens that were drawn."""
    return request.source.pooling is None and request.beam is None and not request.siblings
