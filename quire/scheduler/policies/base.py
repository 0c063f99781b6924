"""What a policy decides: the order of admission, and the victim of a shortage."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from quire.messages.request import Request


class Policy(Protocol):
    """Owns the waiting requests and ranks the running ones.

    A policy must be fair in one point only, and the engine's promise that everyone finishes rests on it: a waiting
    request is outranked by finitely many others.
    """

    def add(self, request: Request) -> None:
        """The request waits (again)."""
        ...

    def next(self) -> Request | None:
        """Who is admitted next; it stays in the queue until `remove`."""
        ...

    def remove(self, request: Request) -> None:
        """The request no longer waits."""
        ...

    def __len__(self) -> int: ...

    def rank(self, request: Request) -> Any:
        """A sort key: lower goes first. The running request with the lowest is never preempted."""
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Whom to preempt; `running` excludes the one with the lowest rank."""
        ...


class RankedPolicy:
    """A policy whose order follows from a rank that does not change while a request waits."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Request]] = []
        self._waiting: set[Request] = set()
        self._entries = itertools.count()

    def rank(self, request: Request) -> Any:
        """Lower goes first. No two are equal: a tie would let two samples of a prompt preempt each other in turn."""
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
        # The entry itself leaves the heap when it reaches the top, or at once if it is there.
        if self._heap and self._heap[0][2] is request:
            heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._waiting)
