"""From the frames of the log to sessions: each is restored, or marked as lost under its name."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from quire.sessions.log.catalog import Catalog, SessionEntry, TokenChunk, Tombstone
from quire.sessions.log.format import TIME, Frame, FrameKind, ScannedFrame
from quire.sessions.log.log import FrameAddress, LoadedLog, LogFile, SessionLog
from quire.sessions.log.state import CHUNK_TOKENS, SessionState


@dataclass(eq=False)
class SessionHistory:
    """The frames of one session that were found."""

    name: str = ""
    last_seq: int = -1
    """Seq of the last frame that is known to have been written."""
    states: dict[int, tuple[bytes, FrameAddress]] = field(default_factory=dict)
    appends: dict[int, tuple[bytes, FrameAddress]] = field(default_factory=dict)
    deleted: tuple[int, FrameAddress] | None = None
    deleted_seq: int = -1
    """Seq of the frame that deleted the session, according to a summary."""


class Recovery:
    """Reads all frames once, fills a catalog, and writes its findings about damage to the log."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._histories: dict[int, SessionHistory] = {}
        self._chunks: dict[int, TokenChunk] = {}
        self._parents: dict[int, int] = {}
        self._depths: dict[int, int] = {0: 0}
        self.lost: list[SessionEntry] = []
        """Sessions newly found to be lost: `write_findings` writes their frames."""
        self.deleted: list[tuple[int, int, str]] = []
        """Sessions whose DELETE frame is damaged though other data shows that they were deleted: id, seq, name."""
        self.damaged_bytes = 0

    def read(self, loaded: LoadedLog) -> None:
        """Read one file; files are read oldest first."""
        if loaded.file is not None:
            self._read_frames(loaded.file, loaded.frames)
        for number, seq, name, was_deleted in loaded.summary.sessions if loaded.summary else ():
            self._catalog.mark_used(number)
            if loaded.file is not None:
                # A deletion must be kept for as long as this summary mentions the session.
                self._catalog.mention(number, loaded.file.number)
            history = self._histories.setdefault(number, SessionHistory())
            history.last_seq = max(history.last_seq, seq)
            history.name = history.name or name
            if was_deleted:
                history.deleted_seq = seq

    def _read_frames(self, file: LogFile, frames: list[ScannedFrame]) -> None:
        """Note every frame of a file, and count damaged bytes."""
        for frame in frames:
            address = FrameAddress(file.number, frame.offset, frame.end - frame.offset)
            if not frame.whole:
                self.damaged_bytes += address.size
            if frame.kind is None:
                continue
            self._catalog.mark_used(frame.id)
            if frame.kind is FrameKind.CHUNK:
                self._read_chunk(frame, address)
            else:
                self._read_session(frame, address)
                file.record(frame)

    def finish(self) -> None:
        """Fill the catalog."""
        for number in self._chunks:
            self._depth(number)
        for chunk in sorted(self._chunks.values(), key=lambda chunk: self._depths[chunk.id]):
            if self._depths[chunk.id] > 0:
                self._catalog.add_chunk(chunk)
        # Newest first: if two sessions have the same name, the older one's deletion was lost.
        for number in sorted(self._histories, reverse=True):
            self._restore(number, self._histories[number])
        self._catalog.drop_unused_chunks()
        self._catalog.sort()

    def write_findings(self, log: SessionLog) -> None:
        """Write the findings, so that they stay known when the damaged files are removed."""
        for number, seq, name in self.deleted:
            (address,) = log.append([Frame(FrameKind.DELETE, number, seq, b"", name)])
            self._catalog.add_tombstone(number, Tombstone(seq, name, address))
        # Nothing is cleaned before everything is written: the findings depend on the damaged files.
        for entry in self.lost:
            (address,) = log.append([entry.state_frame(entry.state)])
            self._catalog.replace(entry, entry.state, address)
        log.commit()
        log.remove_orphaned_summaries()
        log.fill_reserve()

    def _read_chunk(self, frame: ScannedFrame, address: FrameAddress) -> None:
        self._catalog.mark_used(frame.seq)
        self._parents[frame.id] = frame.seq
        if frame.whole:
            self._chunks[frame.id] = TokenChunk(frame.id, frame.seq, frame.digest, address)

    def _read_session(self, frame: ScannedFrame, address: FrameAddress) -> None:
        """Note a STATE, APPEND or DELETE frame in the session's history."""
        self._catalog.mention(frame.id, address.file)
        history = self._histories.setdefault(frame.id, SessionHistory())
        history.last_seq = max(history.last_seq, frame.seq)
        history.name = frame.name or history.name
        if not frame.whole:
            return
        if frame.kind is FrameKind.DELETE:
            history.deleted = frame.seq, address
        elif frame.kind is FrameKind.STATE:
            history.states[frame.seq] = frame.payload, address
        else:
            history.appends[frame.seq] = frame.payload, address

    def _restore(self, number: int, history: SessionHistory) -> None:
        """Add the session to the catalog, whole or lost, unless it was deleted."""
        catalog = self._catalog
        if history.deleted is not None and history.deleted[0] >= history.last_seq:
            seq, address = history.deleted
            catalog.add_tombstone(number, Tombstone(seq, history.name, address))
            return
        name = history.name or f"unknown-{number}"
        if name in catalog.by_name or history.deleted_seq >= history.last_seq:
            self.deleted.append((number, history.last_seq + 1, name))
            return
        entry = _rebuild(number, name, history)
        reason = entry.state.lost
        if not reason and entry.seq < history.last_seq:
            reason = "its last tokens were damaged on disk"
        if entry.state.tip and CHUNK_TOKENS * self._depth(entry.state.tip) != entry.state.chunked:
            reason = reason or "some of its tokens were damaged on disk"
            entry.state = self._shortened(entry.state)
        entry.seq = history.last_seq
        if not entry.frames or reason != entry.state.lost:
            entry.state = msgspec.structs.replace(entry.state, lost=reason, kv_tokens=0)
            self.lost.append(entry)
        catalog.mark_used(entry.state.tip)
        catalog.add(entry)

    def _depth(self, number: int) -> int:
        """How many intact chunks lead to this one, including itself; 0 if one of them is missing."""
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
        """The part of a session before its first damaged chunk."""
        tip, steps = state.tip, 0
        while tip and not self._depth(tip) and steps <= len(self._parents):
            tip, steps = self._parents.get(tip, 0), steps + 1
        depth = self._depth(tip)
        return msgspec.structs.replace(state, tip=tip if depth else 0, chunked=CHUNK_TOKENS * depth, tail=b"")


def _rebuild(number: int, name: str, history: SessionHistory) -> SessionEntry:
    """The session from its newest intact STATE and the APPENDs after it; lost if there is no intact STATE."""
    for seq in sorted(history.states, reverse=True):
        payload, address = history.states[seq]
        try:
            state = msgspec.msgpack.decode(payload, type=SessionState)
        except msgspec.DecodeError:
            continue
        return _with_appends(SessionEntry(number, seq, state, [address]), history)
    lost = SessionState(name, 0.0, 0.0, lost="nothing of it is left on disk")
    return SessionEntry(number, history.last_seq, lost, [])


def _with_appends(entry: SessionEntry, history: SessionHistory) -> SessionEntry:
    """Apply the APPENDs after the session's STATE, up to the first missing one."""
    state, tail, used = entry.state, [entry.state.tail], entry.state.used
    while (append := history.appends.get(entry.seq + 1)) is not None:
        payload, address = append
        used = TIME.unpack_from(payload)[0]
        tail.append(payload[TIME.size :])
        entry.frames.append(address)
        entry.seq += 1
    if len(tail) > 1:
        entry.state = msgspec.structs.replace(state, tail=b"".join(tail), used=used)
    return entry
