"""The files of a block store: segments of one model within a budget of bytes, and which of their slots are free."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

from quire.kvcache.offload.disk.segment import DamagedSegmentError, Segment, file_bytes, slots_within

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
LARGEST_SEGMENT_BYTES = 4 << 30
FEWEST_SEGMENTS = 64
"""A budget is cut into at least this many segments, once they are of a decent size."""
MOST_SEGMENTS = 512
"""Each is an open file."""
REST_SECONDS = 30.0
"""How long a disk that was full or failing is left alone."""


class SegmentFiles:
    """Segments of one model in a folder that other models may have files in too. One thread's at a time."""

    def __init__(self, parent: Path, identity: bytes, block_bytes: int, capacity: int) -> None:
        self.folder = parent / identity.hex()[:32]
        self.segments: list[Segment] = []
        self.full_until = 0.0
        """Until then the disk is not asked for more."""
        self.failed = 0
        """How often it had no more."""
        self.damaged = 0
        """Files that had to be given up."""
        self._identity, self._block_bytes, self._capacity = identity, block_bytes, capacity
        self._free: list[tuple[Segment, int]] = []
        self._others: list[tuple[Path, int]] = []
        self._next_file = 0

    @property
    def size(self) -> int:
        """Bytes of all segments, those of other models too."""
        return self.own_size + sum(size for _, size in self._others)

    @property
    def own_size(self) -> int:
        """Bytes of this model's segments."""
        return sum(segment.size for segment in self.segments)

    # Slots

    def take(self) -> tuple[Segment, int] | None:
        """A slot that holds nothing, in a new segment if need be; None where budget or disk have no room for one."""
        if not self._free:
            self._grow()
        return self._free.pop() if self._free else None

    def give(self, segment: Segment, slot: int) -> None:
        """The slot holds nothing any more."""
        self._free.append((segment, slot))

    def give_all_but(self, taken: set[tuple[Path, int]]) -> None:
        """After a start: every other slot is free."""
        for segment in reversed(self.segments):
            self._free.extend((segment, i) for i in reversed(range(segment.slots)) if (segment.path, i) not in taken)

    def _grow(self) -> None:
        """Another segment, if the budget and the disk have room for it. Blocks of other models go first."""
        if time.monotonic() < self.full_until or len(self.segments) >= MOST_SEGMENTS:
            return
        wanted = min(max(SEGMENT_BYTES, self._capacity // FEWEST_SEGMENTS), LARGEST_SEGMENT_BYTES)
        within = min(max(wanted, file_bytes(self._block_bytes, 1)), self._capacity - self.own_size)
        slots = slots_within(self._block_bytes, within)
        if not slots:
            return
        size = file_bytes(self._block_bytes, slots)
        while self.size + size > self._capacity and self.drop_others():
            pass
        reason = OSError()
        # A disk with little room gets small files rather than none.
        while slots:
            path = self.folder / f"{self._next_file:08d}.kv"
            self._next_file += 1
            try:
                segment = Segment.create(path, self._identity, self._block_bytes, slots)
            except OSError as error:
                reason, slots = error, slots // 4
            else:
                self.segments.append(segment)
                self._free.extend((segment, slot) for slot in reversed(range(slots)))
                return
        self.rest()
        self.failed += 1
        logger.warning(
            "the KV store in %s stays at %d MiB of its %d: %s",
            self.folder, self.own_size >> 20, self._capacity >> 20, reason.strerror or reason,
        )  # fmt: skip

    def rest(self) -> None:
        """Ask the disk for nothing more for a while."""
        self.full_until = time.monotonic() + REST_SECONDS

    # Files

    def load(self) -> None:
        """Open what earlier runs left; what is no whole segment of this model goes."""
        self.folder.mkdir(exist_ok=True)
        self._find_others()
        for path in sorted(self.folder.iterdir()):
            if path.suffix != ".kv" or not path.stem.isdigit():
                _unlink(path)
                continue
            self._next_file = max(self._next_file, int(path.stem) + 1)
            try:
                self.segments.append(Segment.open(path, self._identity, self._block_bytes))
            except (OSError, DamagedSegmentError) as error:
                logger.warning("KV blocks in %s are given up: %s", path, error)
                self.damaged += 1
                _unlink(path)

    def remove(self, segment: Segment) -> None:
        """The segment's bytes go back to the disk. What lies there is to be forgotten before."""
        self._free = [(other, slot) for other, slot in self._free if other is not segment]
        self.segments.remove(segment)
        segment.close()
        _unlink(segment.path)

    def drop_others(self) -> bool:
        """Remove the oldest file of another model; False if there is none."""
        if not self._others:
            return False
        path, _ = self._others.pop(0)
        _unlink(path)
        return True

    def close(self) -> None:
        """Close the files; they stay."""
        for segment in self.segments:
            segment.close()
        self.segments.clear()

    def _find_others(self) -> None:
        """Files of other models in the folder: they count against the budget, and go before any block of ours."""
        others = []
        for folder in self.folder.parent.iterdir():
            if folder == self.folder or not _is_identity(folder.name) or not folder.is_dir():
                continue
            files = [path for path in folder.iterdir() if path.suffix == ".kv"]
            others += [(path.stat().st_mtime, path, path.stat().st_size) for path in files]
            if not files:
                shutil.rmtree(folder, ignore_errors=True)
        self._others = [(path, size) for _, path, size in sorted(others)]


def _is_identity(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
