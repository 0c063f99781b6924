"""Recurrent states of rows: where a live state starts from, and which snapshots of it are kept.

A row's live state is in pages of its own, and every step changes it. It can only be resumed where a snapshot was taken,
so snapshots are taken at block boundaries that later requests are likely to share: the last one before the end of a
prompt, one where the cached keys and values of another request end (a *branch point*), and the last one of the output,
which moves on with the row. A chunk of a prompt ends where a snapshot is due, because only the end of a chunk has a
state to copy.

A snapshot of known tokens enters the prefix cache when its step is planned, one of generated tokens when these are
collected. Either way no request holds its pages from then on: it is evicted when others need them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.kvcache.groups import is_snapshot_worth, rolling_interval
from quire.kvcache.prefix_cache import index_key
from quire.messages.plan import MAX_WIDTH
from quire.messages.request import Request

if TYPE_CHECKING:
    from quire.scheduler.request_table import RequestTable
    from quire.scheduler.step_builder import StepBuilder

NONE_DUE = 1 << 40
"""Tokens. A row that takes no snapshot of its output has one due after so many."""
Pages = list[list[int]]
"""Pages of a state or a snapshot, by state group."""


@dataclass
class _Row:
    """A row's snapshots."""

    last: int
    """Tokens up to which a state was cached when it was last looked at: computing these again can be avoided."""
    points: list[int] = field(default_factory=list)
    """Numbers of tokens, rising, at which the prompt's snapshots are due."""
    rolling: bytes | None = None
    """Content key of the row's last snapshot that the next one replaces."""
    pending: tuple[int, Pages] | None = None
    """Tokens and pages of a snapshot whose tokens are not collected yet."""


class NoRowStates:
    """The model has no recurrent layers: the methods of `RowStates`, doing nothing."""

    has_room = True

    def start(self, builder: StepBuilder, request: Request, cached: int, reach: int, spare: int) -> None: ...

    def cut(self, request: Request, start: int, count: int) -> int:
        return count

    def plan(self, builder: StepBuilder, decodes: NDArray[np.int64]) -> None: ...

    def most_drafts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.full(len(rows), MAX_WIDTH - 1)

    def fork(self, parent: Request, child: Request) -> None: ...

    def branch(self, parent: Request, child: Request) -> None: ...

    def write(self, builder: StepBuilder) -> None: ...

    def written(self) -> None: ...

    def publish(self, request: Request) -> None: ...

    def leave(self, request: Request) -> None: ...

    def drop_pending(self) -> bool:
        return False

    def page_refs(self) -> list[int]:
        return []


class RowStates:
    """Live states and snapshots of all rows."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._tables = tables = requests.tables
        self._pool = tables.pool
        self._size = tables.block_size
        self._groups = [number for number, group in tables.others if group.kind == "state"]
        self._interval = rolling_interval(tables.state_pages, tables.pages_per_block, tables.block_size)
        self._rows: dict[Request, _Row] = {}
        self._due_from = np.full(requests.rows.size, NONE_DUE, np.int64)
        """By row: the next snapshot of its output is due at the first block boundary from so many tokens on."""
        self._held: list[int] = []
        """Pages that copies of the plan being made read or write; released when it is written."""
        self._forked: list[Request] = []
        """Sequences that fork in the plan being made…"""
        self._copies: list[tuple[int, int]] = []
        """…and the copies of their states."""
        self._untold: list[Request] = []
        """Sequences that forked in the last plan: the device's table of the state groups is still their parent's."""
        self._branches: dict[Request, list[tuple[int, int]]] = {}
        """Beams that the device does not have yet, and the copies of their states. Holds the pages copied from."""

    @property
    def has_room(self) -> bool:
        """Whether there are pages for one more live state."""
        return self._pool.free >= self._tables.state_pages

    # Live states

    def start(self, builder: StepBuilder, request: Request, cached: int, reach: int, spare: int) -> None:
        """The request takes a row with the state after `cached` tokens in its table: make that the row's own.

        `reach`: blocks of its keys and values that are cached. `spare`: pages that others need.
        """
        row = self._rows[request] = _Row(cached)
        if self._tables.prefix_caching:
            last = (request.known - 1) // self._size * self._size
            row.points = sorted({point for point in (reach * self._size, last) if point > cached})
        self._update_due(request)
        for table in self._tables.states_of(request):
            if table.blocks and self._is_to_be_copied(builder, request, table.blocks, spare):
                own = self._pool.allocate(len(table.blocks))
                for source, target in zip(table.blocks, own, strict=True):
                    builder.copy(request.row, source, target)
                self._held += table.blocks
                table.blocks = own
            self._tables.withdraw(table.blocks)  # with too few pages for a copy, the snapshot becomes the live state

    def _is_to_be_copied(self, builder: StepBuilder, request: Request, pages: list[int], spare: int) -> bool:
        """Whether the row may not write to these pages, or there is room to let the prefix cache keep them."""
        is_cached = self._tables.prefix_cache.key_of(pages[0]) is not None
        if any(self._pool.refs[page] > 1 for page in pages):
            # Pages in transfer count as shared, but the transfer ends before anything is written.
            return is_cached or not builder.awaits_moves
        needed = spare + len(pages) + self._tables.missing_finally(request, request.known)
        return is_cached and self._pool.free >= needed

    def _copy_live(self, parent: Request, child: Request) -> list[tuple[int, int]]:
        """Give the child pages for a state; returns the copies that fill them from the parent's."""
        self._rows[child] = _Row(self._rows[parent].last)
        self._update_due(child)
        copies: list[tuple[int, int]] = []
        for table, source in zip(self._tables.states_of(child), self._tables.states_of(parent), strict=True):
            table.blocks = self._pool.allocate(len(source.blocks))
            copies += zip(source.blocks, table.blocks, strict=True)
        return copies

    def fork(self, parent: Request, child: Request) -> None:
        """The child's state is what the parent's will be when the step is computed."""
        self._copies += self._copy_live(parent, child)
        self._forked.append(child)

    def branch(self, parent: Request, child: Request) -> None:
        """The child's state is the parent's before the next step."""
        copies = self._copy_live(parent, child)
        self._pool.share(source for source, _ in copies)
        self._branches[child] = copies

    def write(self, builder: StepBuilder) -> None:
        """Add what forked and branched rows need to the plan."""
        for child in (*self._untold, *self._branches):
            if child.row >= 0:
                for group, table in zip(self._groups, self._tables.states_of(child), strict=True):
                    builder.assign(child.row, 0, table.blocks, group)
        for child, copies in self._branches.items():
            for source, target in copies:
                builder.copy(child.row, source, target)
                self._held.append(source)
        builder.snapshots += self._copies
        # A forked row's table is a copy of its parent's: what differs is told with the next plan.
        self._untold, self._forked, self._copies, self._branches = self._forked, [], [], {}

    def written(self) -> None:
        """The plan is written, with its transfers: its copies come before whatever reuses their pages."""
        self._pool.release(self._held)
        self._held = []

    def leave(self, request: Request) -> None:
        """The request leaves its row; its snapshots in the prefix cache stay."""
        row = self._rows.pop(request, None)
        if row is not None and row.pending is not None:
            self._release(row.pending[1])
        if (copies := self._branches.pop(request, None)) is not None:
            self._pool.release([source for source, _ in copies])

    # Snapshots

    def cut(self, request: Request, start: int, count: int) -> int:
        """How many of `count` tokens from `start` on to compute, so that the chunk ends where a snapshot is due."""
        row = self._rows[request]
        while row.points and row.points[0] < start + count:
            if row.points[0] > start and self._is_worth(row.points[0] - row.last):
                return row.points[0] - start
            row.points.pop(0)
        return count

    def _is_worth(self, tokens: int) -> bool:
        tables, pool = self._tables, self._pool
        pages = tables.state_pages
        return is_snapshot_worth(tokens, pages, tables.pages_per_block, self._size, pool.empty, pool.free)

    def plan(self, builder: StepBuilder, decodes: NDArray[np.int64]) -> None:
        """Everything else in the step is planned: take the snapshots that are due at its end."""
        if not self._tables.prefix_caching:
            return
        rows = self._requests.rows
        for request, count in builder.prompts.items():
            end = int(rows.computed[request.row]) + count
            if end % self._size == 0:
                self._snapshot_prompt(builder, request, end)
        is_certain = (rows.width[decodes] == 1) & (rows.uncertain[decodes] == 0)
        for number in decodes[is_certain & ((rows.computed[decodes] + 1) % self._size == 0)].tolist():
            request = rows.requests[number]
            assert request is not None
            self._snapshot_output(builder, request, int(rows.computed[number]) + 1)

    def most_drafts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Drafts that each of these rows may verify now; -1: it waits until those in flight are collected.

        A snapshot is taken where a row is known to be at the end of a step. So where one is due, the last two tokens
        before it are computed one by one, the second of them with nothing uncertain in flight.
        """
        most = np.full(len(rows), MAX_WIDTH - 1)
        if not self._tables.prefix_caching or self._pool.empty < self._tables.state_pages:
            return most
        columns, size = self._requests.rows, self._size
        computed = columns.computed[rows]
        due = -(-np.maximum(self._due_from[rows], computed + 1) // size) * size
        waits = (computed == due - 1) & (columns.uncertain[rows] > 0)
        return np.where(waits, -1, np.clip(due - 3 - computed, 0, most))

    def _update_due(self, request: Request) -> None:
        """Note from how many tokens on the row's next snapshot is due."""
        row = self._rows[request]
        is_none = row.pending is not None or request.beam is not None
        self._due_from[request.row] = NONE_DUE if is_none else row.last + self._interval

    def _snapshot_prompt(self, builder: StepBuilder, request: Request, end: int) -> None:
        """The row's state after `end` known tokens enters the prefix cache."""
        row, key = self._rows[request], request.keys[end // self._size - 1]
        is_point = end in row.points
        if is_point:
            row.points.remove(end)
        if self._is_cached(key):
            row.last = end
        elif is_point and self._is_worth(end - row.last):
            pages = self._allocate()
            self._copy(builder, request, pages)
            self._publish(key, pages, builder)
            row.last = end
        elif not is_point and (rolled := self._roll(row, end)) is not None:
            self._copy(builder, request, rolled)
            self._publish(key, rolled, builder)
            row.last, row.rolling = end, key
        self._update_due(request)

    def _snapshot_output(self, builder: StepBuilder, request: Request, end: int) -> None:
        """The row's state after `end` tokens, the last of them not collected, is copied."""
        row = self._rows[request]
        if request.beam is None and row.pending is None and (pages := self._roll(row, end)) is not None:
            self._copy(builder, request, pages)
            row.pending = end, pages
            self._update_due(request)

    def _roll(self, row: _Row, end: int) -> Pages | None:
        """Pages for the row's next rolling snapshot: those of the last one, or empty ones. None: it is not due, or
        there are none."""
        if end - row.last < self._interval:
            return None
        if row.rolling is not None:
            former = self._cached_pages(row.rolling)
            row.rolling = None
            if former and not any(self._pool.refs[page] for pages in former for page in pages):
                for pages in former:
                    self._pool.share(pages)
                    self._tables.withdraw(pages)
                return former
        return self._allocate() if self._pool.empty >= self._tables.state_pages else None

    def publish(self, request: Request) -> None:
        """The request's tokens were collected: a snapshot of them enters the prefix cache."""
        row = self._rows.get(request)
        if row is None or row.pending is None or row.pending[0] >= request.known:
            return
        (end, pages), row.pending = row.pending, None
        self._requests.extend_keys(request)
        row.last, row.rolling = end, request.keys[end // self._size - 1]
        if request.row >= 0:
            self._update_due(request)
        self._publish(row.rolling, pages)
        self._release(pages)

    def _publish(self, key: bytes, pages: Pages, builder: StepBuilder | None = None) -> None:
        """Add a snapshot to the prefix cache, which may have it already."""
        for group, own in zip(self._groups, pages, strict=True):
            if self._tables.prefix_cache.add_object(index_key(key, group), own):
                for page in own:
                    self._pool.keep(page)
                if builder is not None:
                    builder.publish(own)

    def _copy(self, builder: StepBuilder, request: Request, pages: Pages) -> None:
        """Copy the live state when the step is computed. A prompt's snapshot is held until the plan is written."""
        for table, own in zip(self._tables.states_of(request), pages, strict=True):
            builder.snapshots += zip(table.blocks, own, strict=True)
            if request in builder.prompts:
                self._held += own

    def _allocate(self) -> Pages:
        return [self._pool.allocate(self._tables.groups[group].pages) for group in self._groups]

    def _release(self, pages: Pages) -> None:
        for own in pages:
            self._pool.release(own)

    def _is_cached(self, key: bytes) -> bool:
        return all(index_key(key, group) in self._tables.prefix_cache for group in self._groups)

    def _cached_pages(self, key: bytes) -> Pages:
        """The pages of a snapshot; none if a part of it is not cached."""
        pages = [list(self._tables.prefix_cache.blocks_of(index_key(key, group))) for group in self._groups]
        return pages if all(pages) else []

    # When pages are short

    def drop_pending(self) -> bool:
        """Give back the pages of snapshots that are not in the prefix cache yet; False if there are none."""
        dropped = False
        for request, row in self._rows.items():
            if row.pending is not None:
                self._release(row.pending[1])
                row.pending, dropped = None, True
                self._update_due(request)
        return dropped

    def page_refs(self) -> list[int]:
        """Pages that states hold beside the rows' tables, once for each reference."""
        pending = [page for row in self._rows.values() if row.pending for pages in row.pending[1] for page in pages]
        branched = [source for copies in self._branches.values() for source, _ in copies]
        return [*pending, *branched, *self._held]
