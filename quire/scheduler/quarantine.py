"""After a step failed: who is to blame?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from quire.messages.request import Request


class Quarantine:
    """Requests that were part of a failed step. Each runs alone until it has drawn a token or failed again."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    @property
    def first(self) -> Request | None:
        """Whose turn it is to run alone."""
        while self._queue and self._queue[0].is_finished:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def acquit(self, drew: Iterable[Request]) -> None:
        """A step went well; if it drew for the first suspect, that one is no longer one."""
        if self.first is not None and self.first in drew:
            self._queue.popleft().failures = 0

    def accuse(self, failed: list[Request]) -> list[Request]:
        """These were part of a failed step; returns those who failed alone after they had failed before."""
        for request in failed:
            request.failures += 1
        if len({request.id for request in failed}) == 1 and any(request.failures > 1 for request in failed):
            return failed
        self._queue.extend(request for request in failed if request not in self._queue)
        return []
