"""The index of the log in memory: sessions and chunks, where their frames are, and which frames are garbage."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from quire.sessions.log.chunks import ChunkTable, TokenChunk
from quire.sessions.log.format import Frame, FrameKind
from quire.sessions.log.log import FrameAddress
from quire.sessions.log.state import (
    CHUNK_FRAME_BYTES,
    CHUNK_TOKENS,
    SessionState,
    SessionUse,
    expiry,
    num_tokens,
    owner_of,
)


@dataclass(eq=False)
class SessionEntry:
    """A session and the frames it consists of: a STATE and the APPENDs after it."""

    id: int
    seq: int
    state: SessionState
    frames: list[FrameAddress]
    due: float | None = None
    """The earliest time at which the expiry queue looks at it; None: the queue does not have it."""

    @property
    def size(self) -> int:
        """Bytes of its frames and of its chunks, shared or not."""
        chunks = self.state.chunked // CHUNK_TOKENS
        return sum(address.size for address in self.frames) + chunks * CHUNK_FRAME_BYTES

    def state_frame(self, state: SessionState) -> Frame:
        """The next STATE frame of the session."""
        return Frame(FrameKind.STATE, self.id, self.seq + 1, msgspec.msgpack.encode(state), state.name)


class Tombstone(NamedTuple):
    """The deletion of a session of which older frames still exist."""

    seq: int
    name: str
    address: FrameAddress


@dataclass(eq=False)
class FileUsage:
    """What one file of the log holds."""

    alone: frozenset[int]
    """The set of its number."""
    live: int = 0
    """Bytes of frames that are not garbage."""
    sessions: set[int] = field(default_factory=set)
    tombstones: set[int] = field(default_factory=set)
    mentioned: set[int] = field(default_factory=set)
    """Every session with any frame in the file, garbage or not."""


class Catalog:
    """All operations cost the same however many sessions there are."""

    def __init__(self) -> None:
        self.by_name: dict[str, SessionEntry] = {}
        self.by_id: dict[int, SessionEntry] = {}
        self.chunks = ChunkTable()
        self.usage: dict[int, FileUsage] = {}
        self.live = 0
        """Bytes of frames that are not garbage."""
        self.tombstones: dict[int, Tombstone] = {}
        self._files_of: dict[int, frozenset[int]] = {}
        """Files with any frame of a session. Most have one, and share the set of it: deleted ones are kept too."""
        self._order: list[int] = []
        self._order_of: dict[str, list[int]] = {}
        """Ids in order of creation, by owner."""
        self._uses: dict[str, SessionUse] = {}
        self.total = SessionUse()
        """What all sessions use."""
        self._next_id = 1

    # Sessions

    def new_id(self) -> int:
        """A number that no frame in the log has."""
        self._next_id += 1
        return self._next_id - 1

    def mark_used(self, number: int) -> None:
        """Never assign this number again."""
        self._next_id = max(self._next_id, number + 1)

    def name_of(self, number: int) -> str:
        """The name of a session, which may be deleted; empty if it is not known."""
        if (entry := self.by_id.get(number)) is not None:
            return entry.state.name
        return self.tombstones[number].name if number in self.tombstones else ""

    def add(self, entry: SessionEntry) -> None:
        """Add a new session."""
        self.by_name[entry.state.name] = self.by_id[entry.id] = entry
        self._order.append(entry.id)
        self._order_of.setdefault(owner_of(entry.state.name), []).append(entry.id)
        self.chunks.ref(entry.state.tip)
        for address in entry.frames:
            self._count_frame(entry.id, address)
        self._charge(entry, 1)

    def replace(self, entry: SessionEntry, state: SessionState, address: FrameAddress) -> None:
        """The session now consists of one new STATE frame."""
        self._charge(entry, -1)
        self.chunks.ref(state.tip)
        self._unref_chunk(entry.state.tip)
        self._uncount_frames(entry)
        entry.state, entry.frames, entry.seq = state, [address], entry.seq + 1
        self._count_frame(entry.id, address)
        self._charge(entry, 1)

    def extend(self, entry: SessionEntry, state: SessionState, address: FrameAddress) -> None:
        """The session has one more APPEND frame."""
        self._charge(entry, -1)
        entry.state, entry.seq = state, entry.seq + 1
        entry.frames.append(address)
        self._count_frame(entry.id, address)
        self._charge(entry, 1)

    def remove(self, entry: SessionEntry, address: FrameAddress) -> None:
        """The session was deleted by the DELETE frame at `address`."""
        del self.by_name[entry.state.name], self.by_id[entry.id]
        self._uncount_frames(entry)
        self._unref_chunk(entry.state.tip)
        owner = owner_of(entry.state.name)
        for order in (self._order, self._order_of[owner]):
            del order[bisect_left(order, entry.id)]
        if not self._order_of[owner]:
            del self._order_of[owner]
        self._charge(entry, -1)
        self.add_tombstone(entry.id, Tombstone(entry.seq + 1, entry.state.name, address))

    def add_tombstone(self, number: int, tombstone: Tombstone) -> None:
        """Keep a deletion for as long as other files have older frames of the session."""
        file = tombstone.address.file
        self.mention(number, file)
        self._drop_tombstone(number)
        if self._files_of[number] - {file}:
            self.tombstones[number] = tombstone
            self._usage_of(file).tombstones.add(number)
            self._add_live(file, tombstone.address.size)

    def page(self, after: int, limit: int, owner: str | None = None) -> tuple[list[SessionEntry], bool]:
        """Up to `limit` sessions created after the one with id `after`, and whether there are more."""
        order = self._order if owner is None else self._order_of.get(owner, [])
        start = bisect_right(order, after)
        page = order[start : start + limit]
        return [self.by_id[i] for i in page], start + limit < len(order)

    def last_id_at(self, when: float, owner: str | None = None) -> int:
        """The id of the last session created at that time or before; 0: none."""
        order = self._order if owner is None else self._order_of.get(owner, [])
        at = bisect_right(order, when, key=lambda number: self.by_id[number].state.created)
        return order[at - 1] if at else 0

    @property
    def last_created(self) -> float:
        """When the newest session was created; 0: there is none."""
        return self.by_id[self._order[-1]].state.created if self._order else 0.0

    def count(self, owner: str) -> int:
        """How many sessions the owner has."""
        return len(self._order_of.get(owner, ()))

    def use(self, owner: str) -> SessionUse:
        """What the owner's sessions use now."""
        return self._uses.get(owner, SessionUse())

    def _charge(self, entry: SessionEntry, sign: int) -> None:
        """Count the session as its owner's, or no more."""
        owner = owner_of(entry.state.name)
        use = self._uses.setdefault(owner, SessionUse())
        tokens, size = sign * num_tokens(entry.state), sign * entry.size
        for one in (use, self.total):
            one.sessions += sign
            one.tokens += tokens
            one.bytes += size
        if not use.sessions and owner not in self._order_of:
            del self._uses[owner]

    def sort(self) -> None:
        """Restore the order of creation after sessions were added in any order."""
        for order in (self._order, *self._order_of.values()):
            order.sort()

    # Chunks

    def load_chunks(self, chunks: ChunkTable) -> None:
        """The chunks of earlier runs; those that no session refers to are dropped by `drop_unused_chunks`."""
        self.chunks = chunks

    def add_chunk(self, chunk: TokenChunk) -> None:
        """Add a new chunk; it stays while it has references."""
        self.chunks.add(chunk)
        self._add_live(chunk.address.file, chunk.address.size)

    def move_chunk(self, chunk: TokenChunk, address: FrameAddress) -> None:
        """The chunk was written to another place."""
        self._add_live(chunk.address.file, -chunk.address.size)
        self.chunks.move(chunk.id, address)
        self._add_live(address.file, address.size)

    def drop_unused_chunks(self) -> None:
        """After all sessions were added: drop loaded chunks without references, and count the others."""
        self.chunks.drop_unused()
        for file, size in self.chunks.bytes_by_file().items():
            self._add_live(file, size)

    def _unref_chunk(self, number: int) -> None:
        for address in self.chunks.unref(number):
            self._add_live(address.file, -address.size)

    # Files

    def mention(self, number: int, file: int) -> None:
        """The file has a frame of the session."""
        usage = self._usage_of(file)
        before = self._files_of.get(number)
        if before is None or file not in before:
            self._files_of[number] = usage.alone if before is None else before | usage.alone
        usage.mentioned.add(number)

    def forget_file(self, number: int) -> None:
        """The file was removed."""
        usage = self.usage.pop(number)
        self.live -= usage.live
        for session in usage.mentioned:
            files = self._files_of.pop(session) - {number}
            if files:
                self._files_of[session] = files
            if (tombstone := self.tombstones.get(session)) is not None and not files - {tombstone.address.file}:
                self._drop_tombstone(session)

    def _usage_of(self, number: int) -> FileUsage:
        """What the file holds; created empty if needed."""
        usage = self.usage.get(number)
        if usage is None:
            usage = self.usage[number] = FileUsage(frozenset((number,)))
        return usage

    def _add_live(self, file: int, size: int) -> None:
        self._usage_of(file).live += size
        self.live += size

    def _count_frame(self, number: int, address: FrameAddress) -> None:
        self._usage_of(address.file).sessions.add(number)
        self._add_live(address.file, address.size)
        self.mention(number, address.file)

    def _uncount_frames(self, entry: SessionEntry) -> None:
        for address in entry.frames:
            self._usage_of(address.file).sessions.discard(entry.id)
            self._add_live(address.file, -address.size)

    def _drop_tombstone(self, number: int) -> None:
        tombstone = self.tombstones.pop(number, None)
        if tombstone is not None and (usage := self.usage.get(tombstone.address.file)) is not None:
            usage.tombstones.discard(number)
            self._add_live(tombstone.address.file, -tombstone.address.size)


SPARE_DUE = 64
"""Entries of the expiry queue that may be out of date, besides one for each session."""


class ExpiryQueue:
    """Sessions with a time to live, the next to expire first."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._due: list[tuple[float, int]] = []

    def watch(self, entry: SessionEntry) -> None:
        """Add the session if it has a time to live; again when that changes."""
        due = expiry(entry.state)
        if due is None or (entry.due is not None and entry.due <= due):
            return  # it never expires, or is looked at before it does
        entry.due = due
        heapq.heappush(self._due, (due, entry.id))
        if len(self._due) > 2 * len(self._catalog.by_id) + SPARE_DUE:
            # Sessions that were deleted, or whose time was brought forward, left entries behind.
            self._due = [(kept.due, kept.id) for kept in self._catalog.by_id.values() if kept.due is not None]
            heapq.heapify(self._due)

    @property
    def next(self) -> float | None:
        """The earliest time at which a session may expire; None: never."""
        return self._due[0][0] if self._due else None

    def expired(self, now: float) -> Iterator[SessionEntry]:
        """Expired sessions, each once. The caller deletes a session or watches it again."""
        while self._due and self._due[0][0] <= now:
            at, number = heapq.heappop(self._due)
            entry = self._catalog.by_id.get(number)
            if entry is None or entry.due != at:
                continue
            entry.due, due = None, expiry(entry.state)
            if due is None or due > now:
                self.watch(entry)
            else:
                yield entry
