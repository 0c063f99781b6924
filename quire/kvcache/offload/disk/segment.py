"""One file of many KV blocks: a header, a table, and slots of one size.

    header   64 B   magic, version, slots, bytes of a block, identity of the store, check
    table    64 B a slot: content key (32), checksum (16), stamp (8), spare (8); all zeros when never used
    slots    bytes of a block each, aligned to 4 KiB (64 B for small blocks)

A block is written to its slot, then named in the table. Whatever a crash leaves is told apart by the checksum (blake3
keyed by the identity, over the key and the bytes): there is no moment at which the table could lead to wrong bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from blake3 import blake3

from quire.kvcache.offload.disk.files import read_into, reserve, write_all

VERSION = 1
MAGIC = b"quireKV\n"
HEADER = struct.Struct("<8sIIQ32s8s")
ENTRY = np.dtype([("key", "V32"), ("checksum", "V16"), ("stamp", "<u8"), ("spare", "<u8")])
ENTRY_BYTES = ENTRY.itemsize
KEY_BYTES = 32
NO_KEY = bytes(KEY_BYTES)
PIECE_BYTES = 128 << 10
_PAGE = 4096


class DamagedSegmentError(Exception):
    """The file is no segment of this store, or its header is damaged."""


class Segment:
    """An open segment. Knows slots and bytes, not which block is worth keeping."""

    def __init__(self, path: Path, fd: int, identity: bytes, block_bytes: int, slots: int) -> None:
        self.path = path
        self.block_bytes = block_bytes
        self.slots = slots
        self.busy = 0
        """Transfers under way: the file must not go before they have ended."""
        self._fd = fd
        self._identity = identity
        self._stride, self._base = _geometry(block_bytes, slots)

    @classmethod
    def create(cls, path: Path, identity: bytes, block_bytes: int, slots: int) -> Segment:
        """A new, empty file with its room on the disk reserved. Leaves nothing behind if there is none."""
        draft = path.with_name(path.name + ".new")
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
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
        """A file of an earlier run; one that was cut short gets its length back."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
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
        """Room the file takes on the disk."""
        return file_bytes(self.block_bytes, self.slots)

    def table(self) -> np.ndarray:
        """What each slot holds, if the table is to be believed."""
        raw = bytearray(ENTRY_BYTES * self.slots)
        read_into(self._fd, memoryview(raw), HEADER.size)
        return np.frombuffer(raw, ENTRY)

    def write_table(self, table: np.ndarray) -> None:
        """Say anew what each slot holds."""
        write_all(self._fd, table.tobytes(), HEADER.size)

    def write(self, slot: int, key: bytes, payload: memoryview, stamp: int) -> bytes:
        """Put a block into a slot; returns its checksum."""
        hasher, offset = blake3(key, key=self._identity), self._base + self._stride * slot
        for piece in _pieces(payload):
            hasher.update(piece)
            write_all(self._fd, piece, offset)
            offset += len(piece)
        checksum = hasher.digest(16)
        write_all(self._fd, struct.pack("<32s16sQQ", key, checksum, stamp, 0), HEADER.size + ENTRY_BYTES * slot)
        return checksum

    def read(self, slot: int, key: bytes, checksum: bytes, into: memoryview) -> bool:
        """Fill `into` with the block; False if the slot does not hold it whole."""
        hasher, offset = blake3(key, key=self._identity), self._base + self._stride * slot
        for piece in _pieces(into):
            if not read_into(self._fd, piece, offset):
                return False
            hasher.update(piece)
            offset += len(piece)
        return hasher.digest(16) == checksum

    def clear(self, slot: int) -> None:
        """The slot holds nothing that could be found again."""
        write_all(self._fd, bytes(ENTRY_BYTES), HEADER.size + ENTRY_BYTES * slot)

    def sync(self) -> None:
        """All that was written stays after a loss of power."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """No more transfers."""
        os.close(self._fd)


def file_bytes(block_bytes: int, slots: int) -> int:
    """Length of a segment of so many slots."""
    stride, base = _geometry(block_bytes, slots)
    return base + stride * slots


def slots_within(block_bytes: int, size: int) -> int:
    """Slots of the largest segment of at most `size` bytes."""
    slots = max(0, size // (block_bytes + ENTRY_BYTES))
    while slots and file_bytes(block_bytes, slots) > size:
        slots -= 1
    return slots


def _geometry(block_bytes: int, slots: int) -> tuple[int, int]:
    """Bytes from one slot to the next, and where the first begins."""
    # Whole pages, where that costs little: a write then never has to read what surrounds it.
    unit = _PAGE if block_bytes >= 4 * _PAGE else ENTRY_BYTES
    return _rounded(block_bytes, unit), _rounded(HEADER.size + ENTRY_BYTES * slots, unit)


def _pieces(buffer: memoryview) -> Iterator[memoryview]:
    """The buffer in parts that stay in the processor's cache between the copy and the checksum."""
    view = buffer.cast("B")
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _header(identity: bytes, block_bytes: int, slots: int) -> bytes:
    fields = HEADER.pack(MAGIC, VERSION, slots, block_bytes, identity, bytes(8))[:-8]
    return fields + blake3(fields).digest(8)
