"""From frames back to sessions: each one whole, or lost and known by its name."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import msgspec

from quire.sessions.log.catalog import Catalog, SessionEntry, TokenChunk
from quire.sessions.log.cleaning import state_frame
from quire.sessions.log.frames import Found, Frame, FrameKind
from quire.sessions.log.log import FrameAddress, LoadedLog, LogFile, SessionLog
from quire.sessions.log.state import CHUNK_TOKENS, SessionState

TIME = struct.Struct("<d")


@dataclass(eq=False)
class Story:
    """What the log says of one session."""

    name: str = ""
    told: int = -1
    """The last frame that is known to have been written."""
    states: dict[int, tuple[bytes, FrameAddress]] = field(default_factory=dict)
    appends: dict[int, tuple[bytes, FrameAddress]] = field(default_factory=dict)
    deleted: tuple[int, FrameAddress] | None = None
    ended: int = -1
    """The frame that ended the session, by the account of a summary."""


class Recovery:
    """Reads all frames once, fills a catalog, and notes in the log what it had to conclude."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._stories: dict[int, Story] = {}
        self._chunks: dict[int, TokenChunk] = {}
        self._parents: dict[int, int] = {}
        self._depths: dict[int, int] = {0: 0}
        self.lost: list[SessionEntry] = []
        """Sessions found lost just now: their `places` are empty until `note` has written the loss down."""
        self.outlived: list[tuple[int, int, str]] = []
        """Sessions that ended, as is known from others, though the frame is damaged: what to write in its place."""
        self.damaged_bytes = 0

    def read(self, loaded: LoadedLog) -> None:
        """Take in one file, the oldest first."""
        if loaded.file is not None:
            self._read_frames(loaded.file, loaded.founds)
        for number, seq, name, ended in loaded.summary.sessions if loaded.summary else ():
            self._catalog.never_again(number)
            if loaded.file is not None:
                # A deletion is to be remembered for as long as this summary speaks of the session.
                self._catalog.trace(number, loaded.file.number)
            story = self._stories.setdefault(number, Story())
            story.told = max(story.told, seq)
            story.name = story.name or name
            if ended:
                story.ended = seq

    def _read_frames(self, file: LogFile, founds: list[Found]) -> None:
        for found in founds:
            place = FrameAddress(file.number, found.offset, found.end - found.offset)
            if not found.whole:
                self.damaged_bytes += place.size
            if found.kind is None:
                continue
            self._catalog.never_again(found.id)
            if found.kind is FrameKind.CHUNK:
                self._read_chunk(found, place)
            else:
                self._read_session(found, place)
                file.note(found)

    def finish(self) -> None:
        """Fill the catalog."""
        for number in self._chunks:
            self._depth(number)
        for chunk in sorted(self._chunks.values(), key=lambda chunk: self._depths[chunk.id]):
            if self._depths[chunk.id] > 0:
                self._catalog.put_chunk(chunk)
        # The newest first: of two that claim a name, the older one's end was lost, not its beginning.
        for number in sorted(self._stories, reverse=True):
            self._conclude(number, self._stories[number])
        self._catalog.drop_unheld()
        self._catalog.sort()

    def note(self, log: SessionLog) -> None:
        """Write down what was found out, so that it stays true when the evidence is gone."""
        for number, seq, name in self.outlived:
            (place,) = log.append([Frame(FrameKind.DELETE, number, seq, b"", name)])
            self._catalog.trace(number, place.file)
            self._catalog.bury(number, seq, name, place)
        # Nothing is cleaned before all is noted: what is still to be noted rests on the evidence.
        for entry in self.lost:
            (place,) = log.append([state_frame(entry, entry.state)])
            self._catalog.replace(entry, entry.state, place)
        log.commit()
        log.forget_missing()
        log.put_by()

    def _read_chunk(self, found: Found, place: FrameAddress) -> None:
        self._catalog.never_again(found.seq)
        self._parents[found.id] = found.seq
        if found.whole:
            self._chunks[found.id] = TokenChunk(found.id, found.seq, found.digest, place)

    def _read_session(self, found: Found, place: FrameAddress) -> None:
        self._catalog.trace(found.id, place.file)
        story = self._stories.setdefault(found.id, Story())
        story.told = max(story.told, found.seq)
        story.name = found.name or story.name
        if not found.whole:
            return
        if found.kind is FrameKind.DELETE:
            story.deleted = found.seq, place
        elif found.kind is FrameKind.STATE:
            story.states[found.seq] = found.payload, place
        else:
            story.appends[found.seq] = found.payload, place

    def _conclude(self, number: int, story: Story) -> None:
        catalog = self._catalog
        if story.deleted is not None and story.deleted[0] >= story.told:
            catalog.bury(number, story.deleted[0], story.name, story.deleted[1])
            return
        name = story.name or f"unknown-{number}"
        if name in catalog.by_name or story.ended >= story.told:
            self.outlived.append((number, story.told + 1, name))
            return
        entry = _tell(number, name, story)
        reason = entry.state.lost
        if not reason and entry.seq < story.told:
            reason = "its last tokens were damaged on disk"
        if entry.state.tip and CHUNK_TOKENS * self._depth(entry.state.tip) != entry.state.chunked:
            reason = reason or "some of its tokens were damaged on disk"
            entry.state = self._shortened(entry.state)
        entry.seq = story.told
        if not entry.places or reason != entry.state.lost:
            entry.state = msgspec.structs.replace(entry.state, lost=reason, kv_tokens=0)
            self.lost.append(entry)
        catalog.never_again(entry.state.tip)
        catalog.put(entry)

    def _depth(self, number: int) -> int:
        """How many whole chunks lead to this one, itself counted; 0 if one of them is missing."""
        path = []
        while number not in self._depths:
            path.append(number)
            if number not in self._chunks or len(path) > len(self._chunks):
                self._depths[number] = -1
            else:
                number = self._chunks[number].parent
        depth = self._depths[number]
        for number in reversed(path):
            depth = depth + 1 if depth >= 0 and number in self._chunks else -1
            self._depths[number] = depth
        return max(depth, 0)

    def _shortened(self, state: SessionState) -> SessionState:
        """What is left of a session with a damaged chunk: all before it."""
        tip, steps = state.tip, 0
        while tip and not self._depth(tip) and steps <= len(self._parents):
            tip, steps = self._parents.get(tip, 0), steps + 1
        depth = self._depth(tip)
        return msgspec.structs.replace(state, tip=tip if depth else 0, chunked=CHUNK_TOKENS * depth, tail=b"")


def _tell(number: int, name: str, story: Story) -> SessionEntry:
    """The session as far as its frames tell of it without a gap; lost if not even a beginning is left."""
    for seq in sorted(story.states, reverse=True):
        payload, place = story.states[seq]
        try:
            state = msgspec.msgpack.decode(payload, type=SessionState)
        except msgspec.DecodeError:
            continue
        return _continue(SessionEntry(number, seq, state, [place]), story)
    return SessionEntry(number, story.told, SessionState(name, 0.0, 0.0, lost="nothing of it is left on disk"), [])


def _continue(entry: SessionEntry, story: Story) -> SessionEntry:
    state, tail, used = entry.state, [entry.state.tail], entry.state.used
    while (more := story.appends.get(entry.seq + 1)) is not None:
        payload, place = more
        used = TIME.unpack_from(payload)[0]
        tail.append(payload[TIME.size :])
        entry.places.append(place)
        entry.seq += 1
    if len(tail) > 1:
        entry.state = msgspec.structs.replace(state, tail=b"".join(tail), used=used)
    return entry
