"""After a failed step: finds the request that caused it by running each one alone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from quire.messages.request import Request


class Quarantine:
    """Requests that were part of a failed step. Each runs alone until it has drawn a token or failed again."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()
        self._failures = Counter[Request]()
        """Failed steps that each queued request was part of."""

    @property
    def first(self) -> Request | None:
        """The request that runs alone next."""
        while self._queue and self._queue[0].is_finished:
            self._remove_first()
        return self._queue[0] if self._queue else None

    def release(self, drew: Iterable[Request]) -> None:
        """A step succeeded; if the first quarantined request drew in it, that request is released."""
        if self.first is not None and self.first in drew:
            self._remove_first()

    def add(self, failed: list[Request]) -> list[Request]:
        """Quarantine the requests of a failed step. Returns those to fail: if only one request was in the step, and it
        had been part of an earlier failed step."""
        self._failures.update(failed)
        self._queue.extend(request for request in failed if request not in self._queue)
        is_proven = len({request.id for request in failed}) == 1 and any(self._failures[one] > 1 for one in failed)
        return failed if is_proven else []

    def _remove_first(self) -> None:
        del self._failures[self._queue.popleft()]
