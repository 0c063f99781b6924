"""What a policy decides: the order of admission, and which request is preempted."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from quire.messages.request import Request


class Policy(Protocol):
    """Owns the waiting requests and ranks the running ones.

    One rule is required, because the guarantee that all requests finish depends on it: a waiting request is outranked
    by finitely many others.
    """

    def add(self, request: Request) -> None:
        """The request waits (again)."""
        ...

    def next(self) -> Request | None:
        """The request to admit next; it stays in the queue until `remove`."""
        ...

    def remove(self, request: Request) -> None:
        """The request no longer waits."""
        ...

    def __len__(self) -> int: ...

    def rank(self, request: Request) -> Any:
        """A sort key: lower goes first. The running request with the lowest is never preempted."""
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """The request to preempt; `running` excludes the one with the lowest rank."""
        ...


class RankedPolicy:
    """A policy that orders by a rank which does not change while a request waits."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Request]] = []
        self._waiting: set[Request] = set()
        self._entries = itertools.count()

    def rank(self, request: Request) -> Any:
        """Lower goes first. No two are equal: with a tie two sequences could preempt each other endlessly."""
        return (request.arrival_order, request.index)

    def victim(self, running: Sequence[Request]) -> Request:
        """The worst-ranked."""
        return max(running, key=self.rank)

    def add(self, request: Request) -> None:
        self._waiting.add(request)
        heapq.heappush(self._heap, (self.rank(request), next(self._entries), request))

    def next(self) -> Request | None:
        while self._heap:
            request = self._heap[0][2]
            if request in self._waiting:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        self._waiting.discard(request)
        # Entries are popped at the top of the heap only; `next` skips stale ones.
        if self._heap and self._heap[0][2] is request:
            heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._waiting)
