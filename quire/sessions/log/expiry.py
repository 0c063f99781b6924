"""Which sessions end by themselves, and when."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire.sessions.log.catalog import Catalog, SessionEntry
from quire.sessions.log.state import expiry


class Expiry:
    """Sessions with a time to live, the next one to end first. Works under the store's lock."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._due: list[tuple[float, int]] = []

    def watch(self, entry: SessionEntry) -> None:
        """The session may have a time to live, or another one than before."""
        due = expiry(entry.state)
        if due is not None:
            heapq.heappush(self._due, (due, entry.id))

    @property
    def next(self) -> float | None:
        """When something may be due; None: never."""
        return self._due[0][0] if self._due else None

    def over(self, now: float) -> Iterator[SessionEntry]:
        """Sessions whose time is over, each once: who does not end one has it watched again."""
        while self._due and self._due[0][0] <= now:
            entry = self._catalog.by_id.get(heapq.heappop(self._due)[1])
            if entry is None:
                continue
            due = expiry(entry.state)
            if due is None or due > now:
                self.watch(entry)
            else:
                yield entry
