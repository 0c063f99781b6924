"""Keeps the log short: moves live frames out of the files with the most garbage, a few at a time, and removes them."""

from __future__ import annotations

import itertools
import logging

from quire.errors import StoreError
from quire.sessions.log.catalog import Catalog
from quire.sessions.log.format import Frame, FrameKind
from quire.sessions.log.log import SessionLog

logger = logging.getLogger(__name__)

FRAMES_AT_ONCE = 64
"""Frames of each kind moved with one operation, so that no operation takes long."""
FILES_AT_ONCE = 4
"""Files removed with one operation, for the same reason: each needs a sync."""
MOST_LIVE = 0.75
"""On a full disk, files with at most this share of live bytes are emptied: moving frames needs space too."""


class Cleaner:
    """Empties files of the log, one after another. Needs the store's lock."""

    def __init__(self, log: SessionLog, catalog: Catalog) -> None:
        self._log, self._catalog = log, catalog
        self._victim = 0
        """The file that is being emptied; 0: none."""
        self._uncleanable: set[int] = set()
        """Files with damaged frames."""

    def clean(self, hard: bool = False) -> bool:
        """If half of the log is garbage, move some live frames or remove files; False if there is nothing to do.
        `hard`: also if less is garbage."""
        for _ in range(FILES_AT_ONCE):
            if not self._victim and not self._choose(hard):
                return False
            try:
                if self._move_some(self._victim):
                    return True
                self._victim = 0
            except (OSError, StoreError) as error:
                logger.warning("cannot clean the log in %s now: %s", self._log.folder, error)
                return False
        return True

    def reclaim(self) -> bool:
        """On a full disk: clean as much as possible; returns whether the log became shorter."""
        before = self._log.size
        while self.clean(hard=True):
            pass
        return self._log.size < before

    def _choose(self, hard: bool) -> bool:
        if not hard and self._log.size <= 2 * self._catalog.live + 2 * self._log.roll_bytes:
            return False
        files = [f for f in self._log.files.values() if f.number not in (self._log.active, *self._uncleanable)]
        usage = self._catalog.usage
        victim = min(files, key=lambda f: usage[f.number].live / f.end if f.number in usage else 0.0, default=None)
        if victim is None or (hard and victim.number in usage and usage[victim.number].live > MOST_LIVE * victim.end):
            return False
        self._victim = victim.number
        return True

    def _move_some(self, file: int) -> bool:
        """Move some live frames of the file. False if there were none and it was removed, or if it is damaged."""
        catalog = self._catalog
        usage = catalog.usage.get(file)
        if usage is not None:
            entries = [catalog.by_id[number] for number in _first_few(usage.sessions)]
            chunks = [catalog.chunks[number] for number in catalog.chunks.in_file(file, FRAMES_AT_ONCE)]
            tombstones = {number: catalog.tombstones[number] for number in _first_few(usage.tombstones)}
            frames = [entry.state_frame(entry.state) for entry in entries]
            for chunk in chunks:
                found = self._log.read(chunk.address)
                if found is None:
                    self._uncleanable.add(file)  # the damage is reported when the session is read; keep the evidence
                    return False
                frames.append(Frame(FrameKind.CHUNK, chunk.id, chunk.parent, found.payload))
            frames += [Frame(FrameKind.DELETE, number, old.seq, b"", old.name) for number, old in tombstones.items()]
            if frames:
                # The reserve is used for a file only if that certainly empties it.
                addresses = iter(self._log.append(frames, freeing=usage.live <= self._log.reserve_bytes // 2))
                for entry in entries:
                    catalog.replace(entry, entry.state, next(addresses))
                for chunk in chunks:
                    catalog.move_chunk(chunk, next(addresses))
                for (number, old), address in zip(tombstones.items(), addresses, strict=True):
                    catalog.add_tombstone(number, old._replace(address=address))
                return True
        self._log.remove(file)
        if usage is not None:
            catalog.forget_file(file)
        return False


def _first_few(numbers: set[int]) -> list[int]:
    return list(itertools.islice(numbers, FRAMES_AT_ONCE))
