"""Segments: files of many KV blocks each, and the set of them that a store may use within its budget of bytes.

A segment has a header, a table, and slots of one size:

    header   64 B   magic, version, number of slots, bytes of a block, identity of the store, check
    table    64 B a slot: content key (32), checksum (16), stamp (8), spare (8); all zeros when never used
    slots    bytes of a block each, aligned to 4 KiB (64 B for small blocks)

A block is written to its slot, then entered in the table. The checksum (blake3 keyed by the identity, over the key and
the bytes) detects whatever a crash leaves: at no moment can the table lead to wrong bytes.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from blake3 import blake3

from quire.kvcache.offload.disk.files import make_private, open_new, open_own, read_into, reserve, write_all

logger = logging.getLogger(__name__)

VERSION = 1
MAGIC = b"quireKV\n"
HEADER = struct.Struct("<8sIIQ32s8s")
ENTRY = np.dtype([("key", "V32"), ("checksum", "V16"), ("stamp", "<u8"), ("spare", "<u8")])
ENTRY_BYTES = ENTRY.itemsize
KEY_BYTES = 32
NO_KEY = bytes(KEY_BYTES)
PIECE_BYTES = 128 << 10
_PAGE = 4096

SEGMENT_BYTES = 64 << 20
LARGEST_SEGMENT_BYTES = 4 << 30
FEWEST_SEGMENTS = 64
"""A budget is split into at least this many segments, once they have SEGMENT_BYTES each."""
MOST_SEGMENTS = 512
"""Each segment is an open file."""
RETRY_SECONDS = 30.0
"""How long nothing is written to a disk after it was full or failed."""


class DamagedSegmentError(Exception):
    """The file is not a segment of this store, or its header is damaged."""


class Segment:
    """An open segment file. Knows slots and bytes, not which blocks to keep."""

    def __init__(self, path: Path, fd: int, identity: bytes, block_bytes: int, slots: int) -> None:
        self.path = path
        self.block_bytes = block_bytes
        self.slots = slots
        self.busy = 0
        """Reads and writes in flight: the file must not be removed before they end."""
        self._fd = fd
        self._identity = identity
        self._stride, self._base = _geometry(block_bytes, slots)

    @classmethod
    def create(cls, path: Path, identity: bytes, block_bytes: int, slots: int) -> Segment:
        """A new, empty file, all of it allocated on the disk. Leaves nothing behind if the disk is full."""
        draft = path.with_name(path.name + ".new")
        fd = open_new(draft)
        try:
            reserve(fd, file_bytes(block_bytes, slots))
            write_all(fd, _header(identity, block_bytes, slots), 0)
            os.replace(draft, path)
        except OSError:
            os.close(fd)
            draft.unlink(missing_ok=True)
            raise
        return cls(path, fd, identity, block_bytes, slots)

    @classmethod
    def open(cls, path: Path, identity: bytes, block_bytes: int) -> Segment:
        """A file of an earlier run; a truncated one gets its length back."""
        fd = open_own(path)
        try:
            head = os.pread(fd, HEADER.size, 0)
            slots = HEADER.unpack(head)[2] if len(head) == HEADER.size else 0
            if not slots or head != _header(identity, block_bytes, slots):
                raise DamagedSegmentError(f"{path} is not a segment of this store")
            if os.fstat(fd).st_size != file_bytes(block_bytes, slots):
                os.ftruncate(fd, min(os.fstat(fd).st_size, file_bytes(block_bytes, slots)))
                reserve(fd, file_bytes(block_bytes, slots))
        except (OSError, DamagedSegmentError):
            os.close(fd)
            raise
        return cls(path, fd, identity, block_bytes, slots)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return file_bytes(self.block_bytes, self.slots)

    def table(self) -> np.ndarray:
        """The table: one entry per slot, not verified."""
        raw = bytearray(ENTRY_BYTES * self.slots)
        read_into(self._fd, memoryview(raw), HEADER.size)
        return np.frombuffer(raw, ENTRY)

    def write_table(self, table: np.ndarray) -> None:
        """Replace the table."""
        write_all(self._fd, table.tobytes(), HEADER.size)

    def write(self, slot: int, key: bytes, payload: memoryview, stamp: int) -> bytes:
        """Write a block to a slot; returns its checksum."""
        hasher, offset = blake3(key, key=self._identity), self._base + self._stride * slot
        for piece in _pieces(payload):
            hasher.update(piece)
            write_all(self._fd, piece, offset)
            offset += len(piece)
        checksum = hasher.digest(16)
        write_all(self._fd, struct.pack("<32s16sQQ", key, checksum, stamp, 0), HEADER.size + ENTRY_BYTES * slot)
        return checksum

    def read(self, slot: int, key: bytes, checksum: bytes, into: memoryview) -> bool:
        """Fill `into` with the block; False if the slot does not hold it undamaged."""
        hasher, offset = blake3(key, key=self._identity), self._base + self._stride * slot
        for piece in _pieces(into):
            if not read_into(self._fd, piece, offset):
                return False
            hasher.update(piece)
            offset += len(piece)
        return hasher.digest(16) == checksum

    def clear(self, slot: int) -> None:
        """Clear the slot's entry in the table."""
        write_all(self._fd, bytes(ENTRY_BYTES), HEADER.size + ENTRY_BYTES * slot)

    def sync(self) -> None:
        """Make all writes durable."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class SegmentFiles:
    """Segments of one model within a budget, in a folder that may hold files of other models. Not thread-safe."""

    def __init__(self, parent: Path, identity: bytes, block_bytes: int, capacity: int) -> None:
        self.folder = parent / identity.hex()[:32]
        self.segments: list[Segment] = []
        self.full_until = 0.0
        """No new segment is created before this time."""
        self.failed = 0
        """How often the disk was full."""
        self.damaged = 0
        """Files removed because they were damaged."""
        self._identity, self._block_bytes, self._capacity = identity, block_bytes, capacity
        self._free: list[tuple[Segment, int]] = []
        self._others: list[tuple[Path, int]] = []
        self._next_file = 0

    @property
    def size(self) -> int:
        """Bytes of all segments, including those of other models."""
        return self.own_size + sum(size for _, size in self._others)

    @property
    def own_size(self) -> int:
        """Bytes of this model's segments."""
        return sum(segment.size for segment in self.segments)

    # Slots

    def take(self) -> tuple[Segment, int] | None:
        """An empty slot, in a new segment if needed; None if the budget is used up or the disk is full."""
        if not self._free:
            self._grow()
        return self._free.pop() if self._free else None

    def give(self, segment: Segment, slot: int) -> None:
        """The slot is empty again."""
        self._free.append((segment, slot))

    def give_all_except(self, taken: set[tuple[Path, int]]) -> None:
        """After a start: all other slots are empty."""
        for segment in reversed(self.segments):
            self._free.extend((segment, i) for i in reversed(range(segment.slots)) if (segment.path, i) not in taken)

    def _grow(self) -> None:
        """Create a segment if the budget and the disk have room for it. Files of other models are removed first."""
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
        # On a disk that is nearly full, try smaller segments.
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
        self.pause()
        self.failed += 1
        logger.warning(
            "the KV store in %s cannot grow beyond %d of its %d MiB: %s",
            self.folder, self.own_size >> 20, self._capacity >> 20, reason.strerror or reason,
        )  # fmt: skip

    def pause(self) -> None:
        """Create no segment for RETRY_SECONDS."""
        self.full_until = time.monotonic() + RETRY_SECONDS

    # Files

    def load(self) -> None:
        """Open the segments of earlier runs; remove other and damaged files from this model's folder."""
        make_private(self.folder)
        self._find_others()
        for path in sorted(self.folder.iterdir()):
            if path.suffix != ".kv" or not path.stem.isdigit():
                _unlink(path)
                continue
            self._next_file = max(self._next_file, int(path.stem) + 1)
            try:
                self.segments.append(Segment.open(path, self._identity, self._block_bytes))
            except (OSError, DamagedSegmentError) as error:
                logger.warning("removing the KV blocks in %s: %s", path, error)
                self.damaged += 1
                _unlink(path)

    def remove(self, segment: Segment) -> None:
        """Delete the segment's file. The caller has dropped its blocks."""
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
        """Close the files."""
        for segment in self.segments:
            segment.close()
        self.segments.clear()

    def _find_others(self) -> None:
        """List other models' files: they count against the budget, and are removed before any block of this model."""
        others = []
        for folder in self.folder.parent.iterdir():
            if folder == self.folder or not _is_identity(folder.name) or not folder.is_dir():
                continue
            files = [path for path in folder.iterdir() if path.suffix == ".kv"]
            others += [(path.stat().st_mtime, path, path.stat().st_size) for path in files]
            if not files:
                shutil.rmtree(folder, ignore_errors=True)
        self._others = [(path, size) for _, path, size in sorted(others)]


def file_bytes(block_bytes: int, slots: int) -> int:
    """Length of a segment with `slots` slots."""
    stride, base = _geometry(block_bytes, slots)
    return base + stride * slots


def slots_within(block_bytes: int, size: int) -> int:
    """Slots of the largest segment of at most `size` bytes."""
    slots = max(0, size // (block_bytes + ENTRY_BYTES))
    while slots and file_bytes(block_bytes, slots) > size:
        slots -= 1
    return slots


def _geometry(block_bytes: int, slots: int) -> tuple[int, int]:
    """Bytes from one slot to the next, and the offset of the first."""
    # Whole pages where that costs little: a write then never reads the rest of its page.
    unit = _PAGE if block_bytes >= 4 * _PAGE else ENTRY_BYTES
    return _rounded(block_bytes, unit), _rounded(HEADER.size + ENTRY_BYTES * slots, unit)


def _pieces(buffer: memoryview) -> Iterator[memoryview]:
    """The buffer in parts that stay in the CPU's cache between the copy and the checksum."""
    view = buffer.cast("B")
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _header(identity: bytes, block_bytes: int, slots: int) -> bytes:
    fields = HEADER.pack(MAGIC, VERSION, slots, block_bytes, identity, bytes(8))[:-8]
    return fields + blake3(fields).digest(8)


def _is_identity(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
