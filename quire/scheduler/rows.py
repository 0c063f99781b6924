"""The scheduler's mirror of the device batch: a few numbers per row, in columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.messages.request import Request
from quire.scheduler.policies.sharing import SharingPolicy

NEVER = np.iinfo(np.int64).max
RowNumbers = NDArray[np.int64] | NDArray[np.int32]


class Rows:
    """One row per running request. Columns are arrays, so that a decode step needs no Python loop over rows."""

    def __init__(self, size: int, sharing: SharingPolicy) -> None:
        """`sharing` is notified when a request takes or leaves a row."""
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
        self.width = np.ones(size, np.int64)
        """Tokens that the row's next decode computes: its last token, and the drafts to verify."""
        self.ahead = np.zeros(size, np.int64)
        """Slots that the next decode needs after the one of the row's last token: for drafts, and for what a proposer
        computes after drawing."""
        self.uncertain = np.zeros(size, np.int64)
        """Drafts in flight: of the tokens that `bound` and `computed` count, so many may be rejected."""
        self.rewinds = np.zeros(size, np.bool_)
        """The row's last decode verified drafts, so that only the device that has drawn knows how many count."""
        self.decoding = np.zeros(size, np.bool_)
        """All known tokens are computed or in flight: from here on it draws."""
        self.is_beam = np.zeros(size, np.bool_)
        """The host chooses the row's next token, after each draw."""
        self.is_wide = self.is_ahead = False
        """Whether any decode of the step being planned verifies drafts, and whether any needs slots ahead."""
        self.held = np.zeros(size, np.bool_)
        """A beam that has drawn: there is nothing to compute until the host has chosen. In a pipeline, any row with a
        draw that is not collected."""
        self.planned = np.zeros(size, np.int64)
        """The last step the row has drawn in."""
        self.stream_start = np.full(size, NEVER, np.int64)
        """Requests that had arrived when the row's first token was collected."""
        self.epoch = np.zeros(size, np.int64)
        """Incremented with each owner, so that a result for an earlier one is recognised."""
        self._sharing = sharing
        self._free = list(range(size - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def running(self) -> list[Request]:
        """Requests that have a row."""
        return [request for request in self.requests if request is not None]

    # Owners

    def take(self, request: Request, computed: int, bound: int, capacity: int) -> int:
        """Give the request a row."""
        row = self._free.pop()
        self.requests[row] = request
        self.known[row] = request.known
        self.bound[row] = bound
        self.computed[row] = computed
        self.capacity[row] = capacity
        self.limit[row] = request.source.limit
        self.width[row] = 1
        self.ahead[row] = self.uncertain[row] = 0
        self.rewinds[row] = self.decoding[row] = False
        self.is_beam[row] = request.beam is not None
        self.held[row] = False
        self.stream_start[row] = NEVER
        request.row = row
        self._sharing.took_row(request)
        return row

    def fork(self, parent: Request, child: Request, capacity: int) -> int:
        """Give `child` a row that decodes from `parent`'s known tokens, all of them computed."""
        row = self.take(child, parent.known, parent.known + 1, capacity)
        self.stream_start[row] = self.stream_start[parent.row]
        self.decoding[row] = True
        return row

    def give_back(self, request: Request) -> int:
        """The request leaves its row."""
        self._sharing.left_row(request)
        row = request.row
        self.requests[row] = None
        self.decoding[row] = False
        self.capacity[row] = 0
        self.computed[row] = 0
        self.epoch[row] += 1
        self._free.append(row)
        request.row = -1
        return row

    # Planning a step

    def ready(self) -> NDArray[np.int64]:
        """Rows that can compute their next token."""
        return np.flatnonzero(self.decoding & ~self.held & (self.bound < self.limit))

    def longest_waiting(self, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """The `count` of these rows whose last draw was longest ago, in row order."""
        return np.sort(rows[np.argsort(self.planned[rows], kind="stable")[:count]])

    def out_of_slots(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of these rows that need another block for their next decode."""
        wanted = self.bound[rows] + self.ahead[rows] if self.is_ahead else self.bound[rows]
        return rows[wanted > self.capacity[rows]]

    def widen(self, rows: NDArray[np.int64], widths: NDArray[np.int64], proposals: int) -> None:
        """The next decode of each row computes so many tokens, and then has `proposals` drafts made."""
        self.width[rows] = widths
        self.is_wide = bool((widths > 1).any())
        # What is proposed beyond the row's end is never drawn, and the device does not keep it.
        most = self.limit[rows] - self.bound[rows]
        self.ahead[rows] = np.minimum(widths - 1 + proposals, most)
        self.is_ahead = True

    def narrow(self) -> bool:
        """All decodes compute one token after all; returns whether that needs fewer slots."""
        is_less = bool(self.ahead.any())
        self.width[:] = 1
        self.ahead[:] = 0
        self.is_wide = self.is_ahead = False
        return is_less

    def set_capacity(self, row: int, tokens: int) -> None:
        """The row's blocks hold this many tokens now."""
        self.capacity[row] = tokens

    def start_decoding(self, row: int) -> None:
        """All of the row's known tokens are computed or in flight."""
        self.decoding[row] = True

    def start_stream(self, row: int, arrivals: int) -> None:
        """The row's first token was collected when `arrivals` requests had arrived."""
        self.stream_start[row] = arrivals

    def plan_decodes(self, rows: NDArray[np.int64], widths: NDArray[np.int64] | None = None) -> None:
        """Each row computes one token and draws the next; with `widths` it computes so many, and may yield as many."""
        if widths is None:
            self.computed[rows] += 1
            self.bound[rows] += 1
            return
        self.computed[rows] += widths
        self.bound[rows] += widths
        self.uncertain[rows] += widths - 1
        self.rewinds[rows] = widths > 1

    def plan_prompt(self, row: int, count: int) -> bool:
        """The row computes `count` more known tokens; returns whether these are the last, so that it draws."""
        self.computed[row] += count
        if self.computed[row] < self.bound[row]:
            return False
        self.bound[row] += 1
        self.decoding[row] = True
        return True

    def plan_draws(self, rows: RowNumbers, step: int, hold: bool) -> bool:
        """These rows draw in `step`; beams, or with `hold` all, wait until that is collected. Returns whether any row
        is a beam."""
        beams = self.is_beam[rows]
        self.held[rows] = beams | hold
        self.planned[rows] = step
        return bool(beams.any())

    # Collecting a result

    def collect_one_each(self, rows: RowNumbers) -> NDArray[np.int64]:
        """Each row has drawn one token; returns how many tokens each has now."""
        known: NDArray[np.int64] = self.known[rows] + 1
        self.known[rows] = known
        self.held[rows] = False
        return known

    def collect_each(
        self, rows: RowNumbers, counts: NDArray[np.int64] | NDArray[np.int32], widths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Each row has so many more tokens, of the `widths` that were planned; returns how many it has now."""
        known: NDArray[np.int64] = self.known[rows] + counts
        rejected = counts - widths
        self.known[rows] = known
        self.bound[rows] += rejected
        self.computed[rows] += rejected
        self.uncertain[rows] -= widths - 1
        self.held[rows] = False
        return known

    def collect(self, row: int, count: int, width: int = 1) -> None:
        """The row has `count` more tokens, of the `width` that were planned."""
        self.known[row] += count
        self.held[row] = False
        # Launching counted `width` tokens as bound and computed. All but a row's last token are computed, however many
        # came.
        self.bound[row] += count - width
        self.computed[row] += count - width
        self.uncertain[row] -= width - 1

    def draw_again(self, row: int) -> None:
        """The draw yielded nothing: compute the row's last token once more."""
        self.collect(row, 0)
