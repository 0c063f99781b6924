"""The planning half's mirror of the device batch: a few numbers a row, in columns."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quire.messages.request import Request

NEVER = np.iinfo(np.int64).max


class RowWatcher(Protocol):
    """Told who has a row."""

    def took_row(self, request: Request) -> None: ...
    def left_row(self, request: Request) -> None: ...


class Rows:
    """One row per running request. Columns are arrays, so that a decode step needs no Python loop over rows."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.requests: list[Request | None] = [None] * size
        self.known = np.zeros(size, np.int64)
        """Tokens collected."""
        self.bound = np.zeros(size, np.int64)
        """Tokens there will be if everything in flight is accepted."""
        self.computed = np.zeros(size, np.int64)
        """Tokens whose KV is computed once everything in flight is done."""
        self.capacity = np.zeros(size, np.int64)
        """Tokens the row's blocks can hold."""
        self.limit = np.zeros(size, np.int64)
        """The request ends at this many tokens."""
        self.decoding = np.zeros(size, np.bool_)
        """All known tokens are computed or in flight: from here on one at a time."""
        self.is_beam = np.zeros(size, np.bool_)
        """What follows the row's tokens is chosen by the host, after each draw."""
        self.held = np.zeros(size, np.bool_)
        """…and it has drawn: there is nothing to compute until the choice is made. With waves, the same for any row:
        until its draw is collected."""
        self.planned = np.zeros(size, np.int64)
        """The last step the row has drawn in."""
        self.began = np.full(size, NEVER, np.int64)
        """Requests that had come in all when the row's first token was there."""
        self.epoch = np.zeros(size, np.int64)
        """Goes up with each owner: a result for an earlier one is recognised."""
        self.watcher: RowWatcher | None = None
        self._free = list(range(size - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def take(self, request: Request, computed: int, bound: int) -> int:
        """Give the request a row."""
        row = self._free.pop()
        self.requests[row] = request
        self.known[row] = request.known
        self.bound[row] = bound
        self.computed[row] = computed
        self.limit[row] = request.source.limit
        self.decoding[row] = False
        self.is_beam[row] = request.beam is not None
        self.held[row] = False
        self.began[row] = NEVER
        request.row = row
        if self.watcher is not None:
            self.watcher.took_row(request)
        return row

    def give_back(self, request: Request) -> int:
        """The request leaves its row."""
        if self.watcher is not None:
            self.watcher.left_row(request)
        row = request.row
        self.requests[row] = None
        self.decoding[row] = False
        self.capacity[row] = 0
        self.computed[row] = 0
        self.epoch[row] += 1
        self._free.append(row)
        request.row = -1
        return row

    def running(self) -> list[Request]:
        """Requests that have a row."""
        return [request for request in self.requests if request is not None]
