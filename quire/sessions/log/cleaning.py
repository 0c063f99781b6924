"""Keeps the sessions' log short: live frames are moved out of the emptiest files, a few at a time, and those go."""

from __future__ import annotations

import logging

import msgspec

from quire.errors import StoreError
from quire.sessions.log.catalog import Catalog, SessionEntry
from quire.sessions.log.frames import Frame, FrameKind
from quire.sessions.log.log import SessionLog
from quire.sessions.log.state import SessionState

logger = logging.getLogger(__name__)

FRAMES_AT_ONCE = 64
"""Frames of a kind moved with one operation, so that none of them takes long."""
FILES_AT_ONCE = 4
"""Files removed with one operation, for the same reason: each is a sync."""
FULL = 0.75
"""On a full disk a file is emptied if no more than this share of it is live: moving takes room too."""


def state_frame(entry: SessionEntry, state: SessionState) -> Frame:
    """All of a session in one frame."""
    return Frame(FrameKind.STATE, entry.id, entry.seq + 1, msgspec.msgpack.encode(state), state.name)


class Cleaner:
    """Empties files of the log one after another. Works under the store's lock."""

    def __init__(self, log: SessionLog, catalog: Catalog) -> None:
        self._log, self._catalog = log, catalog
        self._victim = 0
        """The file that is being emptied; 0: none."""
        self._uncleanable: set[int] = set()
        """Files with damage in them."""

    def clean(self, hard: bool = False) -> bool:
        """If half of the log is dead, move some of what is live, or remove files; False if there is nothing to do.
        `hard`: whatever gives room, however little of it is dead."""
        for _ in range(FILES_AT_ONCE):
            if not self._victim and not self._choose(hard):
                return False
            try:
                if self._move_some(self._victim):
                    return True
                self._victim = 0
            except (OSError, StoreError) as error:
                logger.warning("%s cannot be cleaned for now: %s", self._log.folder, error)
                return False
        return True

    def reclaim(self) -> bool:
        """On a full disk: clean whatever gives room; whether anything did."""
        before = self._log.size
        while self.clean(hard=True):
            pass
        return self._log.size < before

    def _choose(self, hard: bool) -> bool:
        if not hard and self._log.size <= 2 * self._catalog.live + 2 * self._log.file_bytes:
            return False
        files = [f for f in self._log.files.values() if f.number not in (self._log.active, *self._uncleanable)]
        usage = self._catalog.usage
        victim = min(files, key=lambda f: usage[f.number].live / f.end if f.number in usage else 0.0, default=None)
        if victim is None or (hard and victim.number in usage and usage[victim.number].live > FULL * victim.end):
            return False
        self._victim = victim.number
        return True

    def _move_some(self, file: int) -> bool:
        """Move some of what the file holds; where that is nothing, or damaged, the file is done with: False."""
        catalog = self._catalog
        usage = catalog.usage.get(file)
        if usage is not None:
            entries = [catalog.by_id[number] for number in _some(usage.sessions)]
            chunks = [catalog.chunks[number] for number in _some(usage.chunks)]
            graves = [(number, *catalog.graves[number]) for number in _some(usage.graves)]
            founds = [self._log.read(chunk.place) for chunk in chunks]
            frames = [state_frame(entry, entry.state) for entry in entries]
            for chunk, found in zip(chunks, founds, strict=True):
                if found is None:
                    self._uncleanable.add(file)  # whoever reads it will learn; the evidence stays
                    return False
                frames.append(Frame(FrameKind.CHUNK, chunk.id, chunk.parent, found.payload))
            frames += [Frame(FrameKind.DELETE, number, seq, b"", name) for number, seq, name, _ in graves]
            if frames:
                # What is put by for a full disk is spent on a file only if that surely empties it.
                places = iter(self._log.append(frames, freeing=usage.live <= self._log.reserve_bytes // 2))
                for entry in entries:
                    catalog.replace(entry, entry.state, next(places))
                for chunk in chunks:
                    catalog.move_chunk(chunk, next(places))
                for (number, seq, name, _), place in zip(graves, places, strict=True):
                    catalog.trace(number, place.file)
                    catalog.bury(number, seq, name, place)
                return True
        self._log.remove(file)
        if usage is not None:
            catalog.forget_file(file)
        return False


def _some(numbers: set[int]) -> list[int]:
    return [number for number, _ in zip(numbers, range(FRAMES_AT_ONCE), strict=False)]
