"""State of each tenant, in columns: with thousands of tenants a choice is still a few array operations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.messages.request import Request
from quire.scheduler.policies.priority import PriorityWithAgeing
from quire.scheduler.policies.sharing import Shares

FEWEST = 16
"""Places in a new table."""


class Tenant:
    """One tenant's place in the table, and its waiting requests."""

    def __init__(self, name: str, place: int) -> None:
        self.name = name
        self.place = place
        self.queue = PriorityWithAgeing()


class Tenants:
    """Tenants that have requests, or had some recently. Users choose the names, so idle tenants are dropped."""

    def __init__(self, shares: Shares, rows: int, blocks: int) -> None:
        self._shares, self._num_rows, self._num_blocks = shares, rows, blocks
        self._by_name: dict[str, Tenant] = {}
        self._by_place: list[Tenant | None] = []
        self._free: list[int] = []
        self.floor = 0.0
        """Least virtual time of a tenant that begins to wait."""
        self.served = np.zeros(0)
        """Virtual time: tokens computed for the tenant ÷ its weight, since the queue was last empty."""
        self.weight = np.zeros(0)
        self.waiting = np.zeros(0, np.int64)
        """Waiting requests."""
        self.since = np.zeros(0, np.int64)
        """A number that is lower for tenants that have waited longer."""
        self.rows = np.zeros(0, np.int64)
        """Rows held."""
        self.max_rows = np.zeros(0, np.int64)
        self.max_blocks = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, place: int) -> Tenant:
        tenant = self._by_place[place]
        assert tenant is not None
        return tenant

    @property
    def active(self) -> NDArray[np.bool_]:
        """Tenants with waiting or running requests."""
        return (self.waiting > 0) | (self.rows > 0)

    def of(self, request: Request) -> Tenant:
        """The request's tenant."""
        name = request.source.tenant
        tenant = self._by_name.get(name)
        if tenant is None:
            if not self._free:
                self._make_places()
            tenant = Tenant(name, self._free.pop())
            self._by_name[name] = self._by_place[tenant.place] = tenant
            self.served[tenant.place] = 0.0
            self.weight[tenant.place] = self._shares.weight(name)
            self.max_rows[tenant.place] = self._shares.row_cap(name, self._num_rows)
            self.max_blocks[tenant.place] = self._shares.block_cap(name, self._num_blocks)
        return tenant

    def forget_idle(self) -> None:
        """Drop tenants without requests whose virtual time is not above a newcomer's."""
        for place in np.flatnonzero(~self.active & (self.served <= self.floor)).tolist():
            tenant = self._by_place[place]
            if tenant is not None:
                self._by_place[place] = None
                del self._by_name[tenant.name]
                self._free.append(place)

    def _make_places(self) -> None:
        """Drop idle tenants; double the table if that frees too few places."""
        self.forget_idle()
        size = len(self._by_place)
        if len(self._free) > size // 4:
            return
        grown = max(FEWEST, 2 * size)
        for name in ("served", "weight", "waiting", "since", "rows", "max_rows", "max_blocks"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(grown - size, column.dtype)]))
        self._by_place += [None] * (grown - size)
        self._free += range(grown - 1, size - 1, -1)
