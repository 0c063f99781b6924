"""Which sessions and chunks there are, where their frames lie, and which frames nobody needs any more."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from quire.sessions.log.log import FrameAddress
from quire.sessions.log.names import owner_of
from quire.sessions.log.state import SessionState


@dataclass(eq=False)
class SessionEntry:
    """A session and the frames that say all of it: a STATE and the APPENDs since."""

    id: int
    seq: int
    state: SessionState
    places: list[FrameAddress]


@dataclass(eq=False)
class TokenChunk:
    """256 tokens, held by the chunks that follow and the sessions that end with it."""

    id: int
    parent: int
    digest: bytes
    place: FrameAddress
    refs: int = 0


@dataclass(eq=False)
class DiskUsage:
    """What a file still holds that matters."""

    live: int = 0
    sessions: set[int] = field(default_factory=set)
    chunks: set[int] = field(default_factory=set)
    graves: set[int] = field(default_factory=set)
    traces: set[int] = field(default_factory=set)
    """Every session with any frame in the file, outdated or not."""


class Catalog:
    """The index of the log, in memory. Everything here costs the same however many sessions there are."""

    def __init__(self) -> None:
        self.by_name: dict[str, SessionEntry] = {}
        self.by_id: dict[int, SessionEntry] = {}
        self.chunks: dict[int, TokenChunk] = {}
        self.usage: dict[int, DiskUsage] = {}
        self.live = 0
        self.graves: dict[int, tuple[int, str, FrameAddress]] = {}
        """Sessions deleted though old frames of theirs are still about: seq, name, and the frame that says so."""
        self._chunk_of: dict[tuple[int, bytes], int] = {}
        self._traces: dict[int, set[int]] = {}
        self._order: list[int] = []
        self._orders: dict[str, list[int]] = {}
        """The same, of each owner's."""
        self._next_id = 1

    # Sessions

    def new_id(self) -> int:
        """A number no frame in the log has."""
        self._next_id += 1
        return self._next_id - 1

    def name_of(self, number: int) -> str:
        """The name of a session, be it dead; empty if nobody knows it."""
        if (entry := self.by_id.get(number)) is not None:
            return entry.state.name
        return self.graves[number][1] if number in self.graves else ""

    def never_again(self, number: int) -> None:
        """The number has been used."""
        self._next_id = max(self._next_id, number + 1)

    def put(self, entry: SessionEntry) -> None:
        """A session that was not there before."""
        self.by_name[entry.state.name] = self.by_id[entry.id] = entry
        self._order.append(entry.id)
        self._orders.setdefault(owner_of(entry.state.name), []).append(entry.id)
        self._hold(entry.state.tip)
        for place in entry.places:
            self._count(entry.id, place)

    def replace(self, entry: SessionEntry, state: SessionState, place: FrameAddress) -> None:
        """One new frame says all of the session."""
        self._hold(state.tip)
        self._let_go(entry.state.tip)
        self._uncount(entry)
        entry.state, entry.places, entry.seq = state, [place], entry.seq + 1
        self._count(entry.id, place)

    def extend(self, entry: SessionEntry, state: SessionState, place: FrameAddress) -> None:
        """One more frame adds to the session."""
        entry.state, entry.seq = state, entry.seq + 1
        entry.places.append(place)
        self._count(entry.id, place)

    def remove(self, entry: SessionEntry, grave: FrameAddress) -> None:
        """The session is gone; `grave` is the frame that says so."""
        del self.by_name[entry.state.name], self.by_id[entry.id]
        self._uncount(entry)
        self._let_go(entry.state.tip)
        owner = owner_of(entry.state.name)
        for order in (self._order, self._orders[owner]):
            del order[bisect_left(order, entry.id)]
        if not self._orders[owner]:
            del self._orders[owner]
        self.trace(entry.id, grave.file)
        self.bury(entry.id, entry.seq + 1, entry.state.name, grave)

    def bury(self, number: int, seq: int, name: str, place: FrameAddress) -> None:
        """Remember a deletion for as long as older frames of the session lie in other files."""
        self._exhume(number)
        if self._traces.get(number, set()) - {place.file}:
            self.graves[number] = seq, name, place
            self._file(place.file).graves.add(number)
            self._add(place.file, place.size)

    def after(self, number: int, limit: int, owner: str | None = None) -> tuple[list[SessionEntry], bool]:
        """The next sessions (of one owner, if said) made after the one of that number, and whether there are more."""
        order = self._order if owner is None else self._orders.get(owner, [])
        start = bisect_right(order, number)
        page = order[start : start + limit]
        return [self.by_id[i] for i in page], start + limit < len(order)

    def last_made(self, when: float, owner: str | None = None) -> int:
        """The number of the last session (of one owner, if said) made at that time or before; 0: there is none."""
        order = self._order if owner is None else self._orders.get(owner, [])
        at = bisect_right(order, when, key=lambda number: self.by_id[number].state.created)
        return order[at - 1] if at else 0

    @property
    def last_created(self) -> float:
        """When the last session was made; 0: there is none."""
        return self.by_id[self._order[-1]].state.created if self._order else 0.0

    def count(self, owner: str) -> int:
        """How many sessions one owner has."""
        return len(self._orders.get(owner, ()))

    def sort(self) -> None:
        """Put sessions that came in any order into the order of their numbers."""
        for order in (self._order, *self._orders.values()):
            order.sort()

    # Chunks

    def find_chunk(self, parent: int, digest: bytes) -> int | None:
        """The chunk with these tokens after that parent."""
        return self._chunk_of.get((parent, digest))

    def put_chunk(self, chunk: TokenChunk) -> None:
        """A chunk that was not there before; it stays while something holds it."""
        self.chunks[chunk.id] = chunk
        self._chunk_of[chunk.parent, chunk.digest] = chunk.id
        self._hold(chunk.parent)
        self._file(chunk.place.file).chunks.add(chunk.id)
        self._add(chunk.place.file, chunk.place.size)

    def move_chunk(self, chunk: TokenChunk, place: FrameAddress) -> None:
        """The chunk lies elsewhere now."""
        self._file(chunk.place.file).chunks.discard(chunk.id)
        self._add(chunk.place.file, -chunk.place.size)
        chunk.place = place
        self._file(place.file).chunks.add(chunk.id)
        self._add(place.file, place.size)

    def drop_unheld(self) -> None:
        """Forget chunks that nothing holds."""
        for number in [chunk.id for chunk in self.chunks.values() if chunk.refs == 0]:
            if number in self.chunks:
                self._hold(number)
                self._let_go(number)

    def _hold(self, number: int) -> None:
        if number:
            self.chunks[number].refs += 1

    def _let_go(self, number: int) -> None:
        while number:
            chunk = self.chunks[number]
            chunk.refs -= 1
            if chunk.refs:
                return
            del self.chunks[number]
            if self._chunk_of.get((chunk.parent, chunk.digest)) == number:
                del self._chunk_of[chunk.parent, chunk.digest]
            self._file(chunk.place.file).chunks.discard(number)
            self._add(chunk.place.file, -chunk.place.size)
            number = chunk.parent

    # Files

    def trace(self, number: int, file: int) -> None:
        """A frame of the session lies in the file."""
        self._traces.setdefault(number, set()).add(file)
        self._file(file).traces.add(number)

    def forget_file(self, number: int) -> None:
        """The file is no more."""
        usage = self.usage.pop(number)
        self.live -= usage.live
        for session in usage.traces:
            traces = self._traces[session]
            traces.discard(number)
            if not traces:
                del self._traces[session]
            if (grave := self.graves.get(session)) is not None and not traces - {grave[2].file}:
                self._exhume(session)

    def _file(self, number: int) -> DiskUsage:
        usage = self.usage.get(number)
        if usage is None:
            usage = self.usage[number] = DiskUsage()
        return usage

    def _add(self, file: int, size: int) -> None:
        self._file(file).live += size
        self.live += size

    def _count(self, number: int, place: FrameAddress) -> None:
        self._file(place.file).sessions.add(number)
        self._add(place.file, place.size)
        self.trace(number, place.file)

    def _uncount(self, entry: SessionEntry) -> None:
        for place in entry.places:
            self._file(place.file).sessions.discard(entry.id)
            self._add(place.file, -place.size)

    def _exhume(self, number: int) -> None:
        grave = self.graves.pop(number, None)
        if grave is not None and (usage := self.usage.get(grave[2].file)) is not None:
            usage.graves.discard(number)
            self._add(grave[2].file, -grave[2].size)
