"""From the frames of the log to sessions: each is restored, or marked as lost under its name."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from quire.sessions.log.catalog import Catalog, SessionEntry, Tombstone
from quire.sessions.log.chunks import ROW, ChunkTable
from quire.sessions.log.format import TIME, FileIndex, Frame, FrameKind, ScannedFrame
from quire.sessions.log.log import FrameAddress, LoadedLog, LogFile, SessionLog
from quire.sessions.log.state import CHUNK_TOKENS, SessionState

SESSION_FRAMES = np.dtype([("id", "<u8"), ("seq", "<u8"), ("kind", "u1"), ("offset", "<u4"), ("size", "<u4")])
"""What SESSION_ROW packs."""


class FoundFrame(NamedTuple):
    """A STATE or APPEND frame; `payload` is None while only the file's index was read."""

    payload: bytes | None
    address: FrameAddress


class _UnreadableError(Exception):
    """A frame that an index names is damaged."""

    def __init__(self, file: int) -> None:
        super().__init__(f"file {file}")
        self.file = file


@dataclass(eq=False)
class SessionHistory:
    """The frames of one session that were found."""

    name: str = ""
    last_seq: int = -1
    """Seq of the last frame that is known to have been written."""
    states: dict[int, FoundFrame] = field(default_factory=dict)
    appends: dict[int, FoundFrame] = field(default_factory=dict)
    deleted: tuple[int, FrameAddress] | None = None
    deleted_seq: int = -1
    """Seq of the frame that deleted the session, according to a summary."""


class Recovery:
    """Reads the frames of the log, or their index, once; fills a catalog, and writes its findings about damage."""

    def __init__(self, catalog: Catalog, log: SessionLog) -> None:
        self._catalog = catalog
        self._log = log
        self._histories: dict[int, SessionHistory] = {}
        self._chunks: list[np.ndarray] = []
        """Rows of the chunks of each file."""
        self._damaged_parents: dict[int, int] = {}
        """Damaged chunks, and the chunk before each."""
        self.lost: list[SessionEntry] = []
        """Sessions newly found to be lost: `write_findings` writes their frames."""
        self.deleted: list[tuple[int, int, str]] = []
        """Sessions whose DELETE frame is damaged though other data shows that they were deleted: id, seq, name."""
        self.damaged_bytes = 0

    def read(self, loaded: LoadedLog) -> None:
        """Read one file; files are read oldest first."""
        if loaded.file is not None and loaded.indexed is not None:
            self._read_index(loaded.file, loaded.indexed)
        elif loaded.file is not None:
            self._read_frames(loaded.file, loaded.frames)
            self._chunks.append(np.frombuffer(bytes(loaded.file.chunks), ROW))
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
                file.is_damaged = True
            if frame.kind is None:
                continue
            self._catalog.mark_used(frame.id)
            if frame.kind is FrameKind.CHUNK:
                self._catalog.mark_used(frame.seq)
                if not frame.whole:
                    self._damaged_parents[frame.id] = frame.seq
                    continue
            else:
                self._read_session(frame, address)
            file.record(frame, address.offset, address.size)

    def _read_index(self, file: LogFile, index: FileIndex) -> None:
        """Note what the index of a file names; payloads are read when they are needed."""
        rows = np.frombuffer(index.chunks, ROW)
        self._chunks.append(rows)
        self._catalog.mark_used(int(rows["id"].max(initial=0)))
        for number, seq, kind, offset, size in _latest(np.frombuffer(index.sessions, SESSION_FRAMES)).tolist():
            history = self._histories.setdefault(number, SessionHistory())
            address = FrameAddress(file.number, offset, size)
            if kind == FrameKind.DELETE:
                history.deleted = seq, address
            elif kind == FrameKind.STATE:
                history.states[seq] = FoundFrame(None, address)
            else:
                history.appends[seq] = FoundFrame(None, address)

    def finish(self) -> None:
        """Fill the catalog."""
        self._catalog.load_chunks(ChunkTable(self._chunks))
        # Newest first: if two sessions have the same name, the older one's deletion was lost.
        for number in sorted(self._histories, reverse=True):
            self._restore(number, self._histories[number])
        self._catalog.drop_unused_chunks()
        self._catalog.sort()

    def write_findings(self) -> None:
        """Write the findings, so that they stay known when the damaged files are removed."""
        log = self._log
        for number, seq, name in self.deleted:
            (address,) = log.append([Frame(FrameKind.DELETE, number, seq, b"", name)])
            self._catalog.add_tombstone(number, Tombstone(seq, name, address))
        # Nothing is cleaned before everything is written: the findings depend on the damaged files.
        for entry in self.lost:
            (address,) = log.append([entry.state_frame(entry.state)])
            self._catalog.replace(entry, entry.state, address)
        log.commit()
        log.remove_orphaned_summaries()
        log.write_missing_indexes()
        log.fill_reserve()

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
            history.states[frame.seq] = FoundFrame(frame.payload, address)
        else:
            history.appends[frame.seq] = FoundFrame(frame.payload, address)

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
        entry = self._rebuild(number, name, history)
        reason = entry.state.lost
        if not reason and entry.seq < history.last_seq:
            reason = "its last tokens were damaged on disk"
        if entry.state.tip and CHUNK_TOKENS * catalog.chunks.depth(entry.state.tip) != entry.state.chunked:
            reason = reason or "some of its tokens were damaged on disk"
            entry.state = self._shortened(entry.state)
        entry.seq = history.last_seq
        if not entry.frames or reason != entry.state.lost:
            entry.state = msgspec.structs.replace(entry.state, lost=reason, kv_tokens=0)
            self.lost.append(entry)
        catalog.mark_used(entry.state.tip)
        catalog.add(entry)

    def _shortened(self, state: SessionState) -> SessionState:
        """The part of a session before its first damaged chunk."""
        chunks, tip, steps = self._catalog.chunks, state.tip, 0
        while tip and not chunks.depth(tip) and steps <= len(self._parents):
            tip, steps = self._parents.get(tip, 0), steps + 1
        depth = chunks.depth(tip)
        return msgspec.structs.replace(state, tip=tip if depth else 0, chunked=CHUNK_TOKENS * depth, tail=b"")

    @functools.cached_property
    def _parents(self) -> dict[int, int]:
        """Every chunk that is known to have been there, and the chunk before it."""
        found = dict(self._damaged_parents)
        for rows in self._chunks:
            found |= zip(rows["id"].tolist(), rows["parent"].tolist(), strict=True)
        return found

    def _rebuild(self, number: int, name: str, history: SessionHistory) -> SessionEntry:
        """The session from its newest intact STATE and the APPENDs after it; lost if there is no intact STATE."""
        try:
            for seq in sorted(history.states, reverse=True):
                try:
                    state = msgspec.msgpack.decode(self._payload(history.states[seq]), type=SessionState)
                except msgspec.DecodeError:
                    continue
                entry = SessionEntry(number, seq, state, [history.states[seq].address])
                return self._with_appends(entry, history)
        except _UnreadableError as error:
            self._scan(error.file)
            return self._rebuild(number, name, history)
        lost = SessionState(name, 0.0, 0.0, lost="nothing of it is left on disk")
        return SessionEntry(number, history.last_seq, lost, [])

    def _with_appends(self, entry: SessionEntry, history: SessionHistory) -> SessionEntry:
        """Apply the APPENDs after the session's STATE, up to the first missing one."""
        state, tail, used = entry.state, [entry.state.tail], entry.state.used
        while (append := history.appends.get(entry.seq + 1)) is not None:
            payload = self._payload(append)
            used = TIME.unpack_from(payload)[0]
            tail.append(payload[TIME.size :])
            entry.frames.append(append.address)
            entry.seq += 1
        if len(tail) > 1:
            entry.state = msgspec.structs.replace(state, tail=b"".join(tail), used=used)
        return entry

    def _payload(self, found: FoundFrame) -> bytes:
        if found.payload is not None:
            return found.payload
        frame = self._log.read(found.address)
        if frame is None:
            raise _UnreadableError(found.address.file)
        return frame.payload

    def _scan(self, number: int) -> None:
        """A frame in the file's index is damaged: forget what the index named, and read every frame of the file."""
        for history in self._histories.values():
            for frames in (history.states, history.appends):
                for seq in [s for s, one in frames.items() if one.payload is None and one.address.file == number]:
                    del frames[seq]
        file = self._log.files[number]
        self._read_frames(file, self._log.scan_file(file))


def _latest(rows: np.ndarray) -> np.ndarray:
    """Of each session's frames in a file, the last STATE or DELETE and what follows it: no others are read."""
    if not len(rows):
        return rows
    rows = rows[np.lexsort((rows["seq"], rows["id"]))]
    starts = np.flatnonzero(np.append(True, rows["id"][1:] != rows["id"][:-1]))
    at = np.arange(len(rows))
    last = np.maximum.reduceat(np.where(rows["kind"] == FrameKind.APPEND, -1, at), starts)
    return rows[at >= np.repeat(last, np.diff(np.append(starts, len(rows))))]
