"""Fair shares between tenants: the tenant that was served least for its weight goes first.

Service is counted in computed tokens, of prompts and outputs alike, like the budget of a step. Prefix cache hits are
free; tokens computed again after a preemption are charged again. A tenant's count divided by its weight is its virtual
time, and the waiting tenant with the lowest is next (start-time fair queueing). Tenants cannot save up: one that begins
to wait is raised to a little behind those that already wait, and behind the clock, the virtual time of a tenant that
always had its share. When no request waits all count from zero again.

Three orders, kept apart so that they cannot conflict:

- Between tenants: virtual time. It changes with every step, and decides which request is admitted and which prompt
  is continued.
- Within a tenant: priority with ageing, then arrival. Priorities mean nothing to other tenants.
- The rank, which decides which request is never preempted: arrival, over all tenants. It never changes, so the oldest
  running request always continues, and all requests finish however virtual times change.

Weights are soft: a tenant may use what others leave. If another then returns for its share of rows or blocks and there
are none, a tenant that holds more than its own share is preempted. Both count their shares alike, so the preempted one
cannot claim the place back. Caps are hard, even if rows or blocks are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import ValidationError
from quire.messages.request import NewRequest, Request, RequestState
from quire.scheduler.policies.sharing import Shares, SharingPolicy
from quire.scheduler.policies.tenants import Tenant, Tenants

if TYPE_CHECKING:
    from quire.scheduler.request_table import RequestTable

NO_TENANT = -1
"""Owner of a free row."""
LEEWAY = 2048.0
"""Tokens, at weight 1, that a tenant which begins to wait may be behind. A tenant with one request at a time
begins to wait again and again, and must not lose each time the lead that others gained by one long request."""


class FairShare(SharingPolicy):
    """Start-time fair queueing over tenants, with caps on rows and blocks."""

    def __init__(self, shares: Shares | None = None) -> None:
        super().__init__(shares)
        self._clock = 0.0
        """Virtual time of a tenant that has always had its share. It advances whichever tenant is served, so newcomers,
        however many, cannot keep a waiting tenant back indefinitely."""
        self._waiting: dict[Request, Tenant] = {}
        self._num_began = 0
        """How often a tenant has begun to wait."""

    def attach(self, requests: RequestTable) -> None:
        self._requests, self._rows, self._tables = requests, requests.rows, requests.tables
        self._tenants = Tenants(self.shares, self._rows.size, self._tables.pool.capacity)
        self._owner = np.full(self._rows.size, NO_TENANT, np.int64)
        """By row: its tenant's place."""

    # Waiting

    def add(self, request: Request) -> None:
        if request in self._waiting:
            return
        if not self._waiting:
            self._start_over()
        tenants = self._tenants
        tenant = tenants.of(request)
        place = tenant.place
        if not tenants.waiting[place]:
            self._raise_floor()
            tenants.served[place] = max(tenants.served[place], tenants.floor)
            tenants.since[place] = self._num_began
            self._num_began += 1
        tenants.waiting[place] += 1
        tenant.queue.add(request)
        self._waiting[request] = tenant

    def next(self) -> Request | None:
        if not self._waiting:
            return None
        tenants = self._tenants
        is_full = self._rows_held() >= tenants.max_rows
        waits = tenants.waiting > 0
        # A tenant that a cap keeps from using its share does not save it up either.
        held_back = waits & is_full
        tenants.served[held_back] = np.maximum(tenants.served[held_back], tenants.floor)
        places = np.flatnonzero(waits & ~is_full)
        for place in places[np.lexsort((tenants.since[places], tenants.served[places]))].tolist():
            request = tenants[place].queue.next()
            if request is not None and self._has_blocks_for(request, place):
                return request
        return None

    def remove(self, request: Request) -> None:
        tenant = self._waiting.pop(request, None)
        if tenant is not None:
            tenant.queue.remove(request)
            self._tenants.waiting[tenant.place] -= 1

    def __len__(self) -> int:
        return len(self._waiting)

    def _start_over(self) -> None:
        """No request waited, so every tenant had its share: all count from zero."""
        self._clock = 0.0
        self._tenants.served[:] = 0.0
        self._tenants.floor = 0.0
        self._tenants.forget_idle()

    def _raise_floor(self) -> None:
        tenants = self._tenants
        waiting = tenants.served[(tenants.waiting > 0) & (tenants.rows < tenants.max_rows)]
        # The clock assumes that every tenant uses all of its share: where some do not, it is behind those that wait.
        ahead = max(self._clock, float(waiting.min())) if len(waiting) else self._clock
        tenants.floor = max(tenants.floor, ahead - LEEWAY)

    # Charging

    def took_row(self, request: Request) -> None:
        tenants = self._tenants
        place = tenants.of(request).place
        self._owner[request.row] = place
        tenants.rows[place] += 1

    def left_row(self, request: Request) -> None:
        self._tenants.rows[self._owner[request.row]] -= 1
        self._owner[request.row] = NO_TENANT

    def charge(self, request: Request, tokens: int) -> None:
        place = self._owner[request.row]
        self._tenants.served[place] += tokens / self._tenants.weight[place]
        self._advance(tokens)

    def charge_decodes(self, rows: NDArray[np.int64]) -> None:
        tenants = self._tenants
        counts = np.bincount(self._owner[rows], minlength=len(tenants.served))
        (served,) = counts.nonzero()
        tenants.served[served] += counts[served] / tenants.weight[served]
        self._advance(len(rows))

    def _advance(self, tokens: int) -> None:
        if tokens:
            self._clock += tokens / float(self._tenants.weight[self._tenants.active].sum())

    # Order

    def rank(self, request: Request) -> Any:
        return (request.arrival_order, request.index)

    def order(self, request: Request) -> Any:
        tenant = self._tenants.of(request)
        return (self._tenants.served[tenant.place], request.row < 0, tenant.queue.rank(request))

    def is_owed(self, request: Request, decodes: NDArray[np.int64]) -> bool:
        """Whether all of them belong to other tenants, which were served more."""
        own, owners = self._tenants.of(request).place, self._owner[decodes]
        served = self._tenants.served
        return bool(((owners != own) & (served[owners] >= served[own])).all())

    def victim(self, running: Sequence[Request]) -> Request:
        """The last request of the tenant that holds the most blocks for its weight."""
        held = self._blocks_held() / np.maximum(self._tenants.weight, 1e-300)
        most = max({int(self._owner[request.row]) for request in running}, key=lambda place: (held[place], place))
        return max((r for r in running if self._owner[r.row] == most), key=self._tenants[most].queue.rank)

    def victim_for(self, request: Request, blocks: int = 0) -> Request | None:
        tenants = self._tenants
        own = self._waiting[request].place
        active = tenants.active
        whole = self._tables.pool.capacity if blocks else self._rows.size
        held = self._blocks_held() if blocks else tenants.rows
        share = np.maximum(1, np.floor(whole * tenants.weight / tenants.weight[active].sum()))
        if held[own] + (blocks or 1) > share[own]:
            return None
        above = np.flatnonzero((held > share) & (tenants.served >= tenants.served[own]))
        for place in sorted(above.tolist(), key=lambda place: held[place] / share[place], reverse=True):
            last = self._last_of(place)
            if last:
                return last[0]
        return None

    def _last_of(self, place: int) -> list[Request]:
        """A tenant's requests that may be preempted, lowest in its order first. The oldest request of all is exempt."""
        oldest = min(self._rows.running(), key=self.rank, default=None)
        requests = [self._rows.requests[row] for row in np.flatnonzero(self._owner == place).tolist()]
        others = [request for request in requests if request is not None and request is not oldest]
        return sorted(others, key=self._tenants[place].queue.rank, reverse=True)

    # Caps

    def accept(self, source: NewRequest) -> None:
        """Refuse a request that may outgrow its tenant's cap. One without `max_tokens` ends at the cap."""
        cap = self.shares.block_cap(source.tenant, self._tables.pool.capacity)
        if self._tables.pages_for(source.limit - 1) <= cap:
            return
        longest = self._tables.tokens_in(cap) + 1  # the last token needs no slot
        if source.params.max_tokens is None and source.pooling is None and len(source.prompt) < longest:
            source.limit = longest
            return
        raise ValidationError(
            f"request {source.id} may grow to {source.limit} tokens (prompt {len(source.prompt)}); its tenant "
            f"{source.tenant!r} may hold {cap} blocks of {self._tables.block_size}, enough for {longest} "
            "(tenant_max_blocks). Lower max_tokens or shorten the prompt",
            "max_tokens",
            source.params.max_tokens,
        )

    def allows(self, request: Request) -> bool:
        place = self._tenants.of(request).place
        is_counted = request.state is RequestState.LOADING
        is_full = self._rows_held()[place] - is_counted >= self._tenants.max_rows[place]
        return not is_full and (is_counted or self._has_blocks_for(request, place))

    def exceeding(self, growing: Iterable[Request]) -> Iterator[Request]:
        if not self.shares.max_blocks:
            return
        tenants, growing = self._tenants, list(growing)
        more = self._sum_by_tenant([request.row for request in growing]) * self._tables.pages_per_block
        held = self._blocks_held()
        for place in np.flatnonzero((more > 0) & (held + more > tenants.max_blocks)).tolist():
            leaving = self._last_of(place)
            if len(leaving) == tenants.rows[place]:
                leaving.pop()  # one stays: `accept` has checked that it fits alone
            for request in leaving:
                if held[place] + more[place] <= tenants.max_blocks[place]:
                    break
                held[place] -= self._blocks_of(request)
                more[place] -= self._tables.pages_per_block * (request in growing)
                yield request

    def _has_blocks_for(self, request: Request, place: int) -> bool:
        if not self.shares.max_blocks:
            return True
        needed = self._tables.pages_for(request.known)
        return bool(self._blocks_held()[place] + needed <= self._tenants.max_blocks[place])

    def _rows_held(self) -> NDArray[np.int64]:
        """By tenant: its rows, and those its loading requests will take."""
        loading = self._requests.swapper.requests
        if not loading:
            return self._tenants.rows
        places = [self._tenants.of(request).place for request in loading]
        return self._tenants.rows + np.bincount(places, minlength=len(self._tenants.served))

    def _blocks_held(self) -> NDArray[np.float64]:
        """By tenant: blocks its rows hold, or will when their known tokens are computed. A block that several rows
        share counts for each."""
        rows = np.flatnonzero(self._owner != NO_TENANT)
        tokens = np.maximum(self._rows.capacity[rows], self._rows.known[rows])
        if self._tables.others:
            held = self._sum_by_tenant(rows, np.array([self._tables.pages_for(int(one)) for one in tokens], np.int64))
        else:
            held = self._sum_by_tenant(rows, -(-tokens // self._tables.block_size))
        for request in self._requests.swapper.requests:
            held[self._tenants.of(request).place] += self._blocks_of(request)
        return held

    def _blocks_of(self, request: Request) -> int:
        return self._tables.pages_for(max(len(request.blocks) * self._tables.block_size, request.known))

    def _sum_by_tenant(
        self, rows: Sequence[int] | NDArray[np.int64], each: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """By tenant: how many of these rows it has, or the sum of `each` over them."""
        places = self._owner[np.asarray(rows, np.int64)]
        return np.bincount(places, each, minlength=len(self._tenants.served)).astype(np.float64)

    def check_idle(self) -> None:
        tenants = self._tenants
        if self._waiting or tenants.waiting.any() or tenants.rows.any() or (self._owner != NO_TENANT).any():
            raise RuntimeError(
                f"not idle: tenants have {tenants.rows.sum()} rows and {tenants.waiting.sum()} waiting requests "
                f"({len(self._waiting)} known)"
            )
