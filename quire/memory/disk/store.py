"""KV blocks on disk, found by content: what the card and the host have no room for, kept over restarts and crashes.

    FOLDER/lock                    one process owns the folder
    FOLDER/<identity>/00000000.kv  segments (`segment.py`): a table of keys and checksums, and slots for blocks

The identity is a hash of the model's fingerprint, the block's size and the version of the format: blocks of anything
else lie in another folder, have another header and fail the checksum. Segments are made under another name and
renamed. The index lives in memory, rebuilt from the tables at every start.

Nothing is synced to the disk before `close`: KV is best effort. After a loss of power, blocks that had not reached the
disk fail their checksum, as damaged ones do, and are computed again.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from quire.errors import ConfigError
from quire.memory.disk.errors import unavailable
from quire.memory.disk.owner import Ownership
from quire.memory.disk.segment import (
    ENTRY_BYTES,
    KEY_BYTES,
    NO_KEY,
    VERSION,
    DamagedSegmentError,
    Segment,
    file_bytes,
    slots_within,
)

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
LARGEST_SEGMENT_BYTES = 4 << 30
FEWEST_SEGMENTS = 64
"""A store's budget is cut into at least this many segments, once they are of a decent size."""
MOST_SEGMENTS = 512
"""Each is an open file."""
REST_SECONDS = 30.0
"""How long a disk that was full or failing is left alone."""


class Place(NamedTuple):
    """Where a block lies."""

    segment: Segment
    slot: int
    checksum: bytes


class DiskStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the store holds and what it did since it was opened."""

    blocks: int
    owned_blocks: int
    block_bytes: int
    disk_bytes: int
    capacity: int
    hits: int
    misses: int
    damaged: int
    written: int
    refused: int
    evicted: int
    failed: int
    resting: bool


class DiskStore:
    """Blocks of one model, by content key, within a budget of bytes. Safe to call from many threads.

    A block that sessions own (`pin`) goes only when no anonymous block is left to go, and only for another owned one.
    Among equals the least recently used goes first. Nothing here raises once the store is open: a block that cannot
    be written is not kept, one that cannot be read is absent.
    """

    def __init__(self, owner: Ownership, identity: bytes, block_bytes: int, capacity: int) -> None:
        self.block_bytes = block_bytes
        self.capacity = capacity
        self._owner = owner
        self._identity = identity
        self._folder = owner.folder / identity.hex()[:32]
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._free: list[tuple[Segment, int]] = []
        self._anonymous: OrderedDict[bytes, Place] = OrderedDict()
        self._owned: OrderedDict[bytes, Place] = OrderedDict()
        self._pins: dict[bytes, int] = {}
        self._writing: set[bytes] = set()
        self._reading: dict[bytes, int] = {}
        self._others: list[tuple[Path, int]] = []
        self._next_file = 0
        self._stamp = 0
        self._rest_until = 0.0
        self._full_until = 0.0
        self._closed = False
        self._counts = dict.fromkeys(("hits", "misses", "damaged", "written", "refused", "evicted", "failed"), 0)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], fingerprint: bytes, block_bytes: int, capacity: int) -> DiskStore:
        """The store in `folder`, with the blocks of this model that earlier runs left there."""
        path = Path(folder).expanduser().absolute()
        if block_bytes < 1:
            raise ConfigError(f"a block of {block_bytes} bytes cannot be kept on disk", "block_bytes", block_bytes)
        if capacity < (least := file_bytes(block_bytes, 1)):
            raise ConfigError(
                f"kv_disk_size is {capacity} bytes: not enough for one block, which takes {least}. Make it larger",
                "kv_disk_size",
                capacity,
            )
        identity = blake3(b"quire KV store %d %d " % (VERSION, block_bytes) + fingerprint).digest()
        owner = Ownership(path)
        store = cls(owner, identity, block_bytes, capacity)
        try:
            store._load()
        except OSError as error:
            store._close_segments()
            owner.release()
            raise unavailable(path, error) from None
        return store

    @property
    def folder(self) -> Path:
        """Where the blocks of this model lie."""
        return self._folder

    @property
    def room(self) -> tuple[int, int]:
        """Blocks that no session owns, or that could be there, and all there could be."""
        most = max(1, self.capacity // self.block_bytes)
        return most - len(self._owned), most

    # What is there

    def __len__(self) -> int:
        return len(self._anonymous) + len(self._owned)

    def has(self, key: bytes) -> bool:
        """Whether the block is likely there: only reading it tells for sure."""
        return key in self._owned or key in self._anonymous

    def match(self, keys: Iterable[bytes]) -> int:
        """How many of the first `keys` are there, without a gap."""
        count = 0
        for key in keys:
            if not self.has(key):
                break
            count += 1
        return count

    def touch(self, keys: Sequence[bytes]) -> None:
        """The blocks of a sequence were used just now. Tails go before heads: a prefix is useless without its head."""
        with self._lock:
            for key in reversed(keys):
                self._touch(key)

    def pin(self, keys: Iterable[bytes]) -> None:
        """A session owns these blocks, those to be written later too. Counted: to be unpinned as often."""
        with self._lock:
            for key in keys:
                self._pins[key] = self._pins.get(key, 0) + 1
                if (place := self._anonymous.pop(key, None)) is not None:
                    self._owned[key] = place

    def unpin(self, keys: Iterable[bytes]) -> None:
        """A session owns these blocks no longer; they stay, as anonymous ones."""
        with self._lock:
            for key in keys:
                left = self._pins.get(key, 0) - 1
                if left < 0:
                    raise RuntimeError(f"block {key.hex()[:16]} is unpinned more often than it was pinned")
                if left:
                    self._pins[key] = left
                    continue
                del self._pins[key]
                if (place := self._owned.pop(key, None)) is not None:
                    self._anonymous[key] = place

    def stats(self) -> DiskStats:
        """What the store holds and what it did."""
        with self._lock:
            return DiskStats(
                blocks=len(self), owned_blocks=len(self._owned), block_bytes=self.block_bytes,
                disk_bytes=self._bytes_here(), capacity=self.capacity,
                resting=time.monotonic() < max(self._rest_until, self._full_until), **self._counts,
            )  # fmt: skip

    # Moving blocks

    def read(self, key: bytes, into: memoryview) -> bool:
        """Fill `into` with the block. False if it is absent or damaged: `into` then holds nothing of use."""
        self._check_size(into)
        with self._lock:
            place = None if self._closed else self._owned.get(key) or self._anonymous.get(key)
            if place is None:
                self._counts["misses"] += 1
                return False
            self._touch(key)
            self._reading[key] = self._reading.get(key, 0) + 1
            place.segment.busy += 1
        try:
            whole = place.segment.read(place.slot, key, place.checksum, into)
        except OSError as error:
            logger.warning("a KV block could not be read from %s: %s", place.segment.path, error)
            whole = False
        with self._lock:
            place.segment.busy -= 1
            if self._reading[key] == 1:
                del self._reading[key]
            else:
                self._reading[key] -= 1
            self._counts["hits" if whole else "damaged"] += 1
            if not whole:
                self._forget(key, place)
        return whole

    def write(self, key: bytes, payload: memoryview) -> bool:
        """Keep a block. False if it is not kept: no room, a failing disk. The bytes must not change meanwhile."""
        self._check_size(payload)
        if len(key) != KEY_BYTES or key == NO_KEY:
            raise ValueError(f"a content key has {KEY_BYTES} bytes, this one {len(key)}")
        with self._lock:
            if self._closed or key in self._writing:
                return False
            if self.has(key):
                self._touch(key)
                return True
            taken = self._take_slot(owned=key in self._pins) if time.monotonic() >= self._rest_until else None
            if taken is None:
                self._counts["refused"] += 1
                return False
            self._writing.add(key)
            segment, slot = taken
            segment.busy += 1
            self._stamp = stamp = max(self._stamp + 1, time.time_ns())
        try:
            checksum = segment.write(slot, key, payload, stamp)
        except OSError as error:
            self._write_failed(key, segment, slot, error)
            return False
        with self._lock:
            self._writing.discard(key)
            segment.busy -= 1
            self._queue_of(key)[key] = Place(segment, slot, checksum)
            self._counts["written"] += 1
        return True

    def discard(self, keys: Iterable[bytes]) -> None:
        """These blocks are to be found no more, after a restart neither."""
        with self._lock:
            for key in keys:
                if (place := self._owned.get(key) or self._anonymous.get(key)) is not None:
                    self._forget(key, place)

    def give_back(self, size: int) -> int:
        """Return at least `size` bytes of disk, if the store has as many, and the blocks there; returns how many."""
        with self._lock:
            before = self._bytes_here()
            self._full_until = time.monotonic() + REST_SECONDS
            while before - self._bytes_here() < size and self._drop_others():
                pass
            for segment in sorted(self._segments, key=self._worth):
                if before - self._bytes_here() >= size:
                    break
                if not segment.busy:
                    self._remove(segment)
            return before - self._bytes_here()

    def sync(self) -> None:
        """What was written so far stays after a loss of power, as far as the disk obeys."""
        with self._lock:
            segments = list(self._segments)
            for segment in segments:
                segment.busy += 1
        for segment in segments:
            try:
                segment.sync()
            except OSError as error:
                logger.warning("%s could not be synced: %s", segment.path, error)
            with self._lock:
                segment.busy -= 1

    def close(self) -> None:
        """Note how recently each block was used, sync, and let others have the folder. No transfer may be under way."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._write_tables()
            except OSError as error:
                logger.warning("the order of KV blocks in %s could not be noted: %s", self._folder, error)
        self.sync()
        self._close_segments()
        self._owner.release()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside, with the lock held

    def _queue_of(self, key: bytes) -> OrderedDict[bytes, Place]:
        return self._owned if key in self._pins else self._anonymous

    def _touch(self, key: bytes) -> None:
        if key in self._owned:
            self._owned.move_to_end(key)
        elif key in self._anonymous:
            self._anonymous.move_to_end(key)

    def _bytes_here(self) -> int:
        return sum(segment.size for segment in self._segments) + sum(size for _, size in self._others)

    def _take_slot(self, owned: bool) -> tuple[Segment, int] | None:
        if not self._free:
            self._grow()
        if not self._free and not self._evict(self._anonymous) and not (owned and self._evict(self._owned)):
            return None
        return self._free.pop()

    def _evict(self, queue: OrderedDict[bytes, Place]) -> bool:
        for key, place in queue.items():
            if key not in self._reading:
                del queue[key]
                self._free.append((place.segment, place.slot))
                self._counts["evicted"] += 1
                return True
        return False

    def _forget(self, key: bytes, place: Place) -> None:
        """Drop a block for good, unless it is another by now, or somebody still reads it."""
        queue = self._queue_of(key)
        if queue.get(key) is not place or key in self._reading:
            return
        del queue[key]
        try:
            place.segment.clear(place.slot)
        except OSError as error:
            logger.warning("%s cannot be written: %s", place.segment.path, error)
        self._free.append((place.segment, place.slot))

    def _grow(self) -> None:
        """Another segment, if the budget and the disk have room for it. Blocks of other models go first."""
        if time.monotonic() < self._full_until or len(self._segments) >= MOST_SEGMENTS:
            return
        wanted = min(max(SEGMENT_BYTES, self.capacity // FEWEST_SEGMENTS), LARGEST_SEGMENT_BYTES)
        own = sum(segment.size for segment in self._segments)
        slots = slots_within(self.block_bytes, min(max(wanted, file_bytes(self.block_bytes, 1)), self.capacity - own))
        if not slots:
            return
        size = file_bytes(self.block_bytes, slots)
        while self._bytes_here() + size > self.capacity and self._drop_others():
            pass
        reason = OSError()
        # A disk with little room gets small files rather than none.
        while slots:
            path = self._folder / f"{self._next_file:08d}.kv"
            self._next_file += 1
            try:
                segment = Segment.create(path, self._identity, self.block_bytes, slots)
            except OSError as error:
                reason, slots = error, slots // 4
            else:
                self._segments.append(segment)
                self._free.extend((segment, slot) for slot in reversed(range(slots)))
                return
        self._full_until = time.monotonic() + REST_SECONDS
        self._counts["failed"] += 1
        logger.warning(
            "the KV store in %s stays at %d MiB of its %d: %s",
            self._folder, own >> 20, self.capacity >> 20, reason.strerror or reason,
        )  # fmt: skip

    def _write_failed(self, key: bytes, segment: Segment, slot: int, error: OSError) -> None:
        with self._lock:
            self._writing.discard(key)
            segment.busy -= 1
            self._free.append((segment, slot))
            self._rest_until = time.monotonic() + REST_SECONDS
            self._counts["failed"] += 1
        logger.warning(
            "a KV block could not be written to %s; resting for %.0f s: %s", segment.path, REST_SECONDS, error
        )

    def _worth(self, segment: Segment) -> tuple[int, int]:
        owned = sum(place.segment is segment for place in self._owned.values())
        return owned, sum(place.segment is segment for place in self._anonymous.values())

    def _remove(self, segment: Segment) -> None:
        for queue in (self._anonymous, self._owned):
            gone = [key for key, place in queue.items() if place.segment is segment]
            self._counts["evicted"] += len(gone)
            for key in gone:
                del queue[key]
        self._free = [(other, slot) for other, slot in self._free if other is not segment]
        self._segments.remove(segment)
        segment.close()
        _unlink(segment.path)

    def _drop_others(self) -> bool:
        """Remove the oldest file of another model."""
        if not self._others:
            return False
        path, _ = self._others.pop(0)
        _unlink(path)
        return True

    # Opening and closing

    def _load(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._find_others()
        found: dict[bytes, tuple[int, Place]] = {}
        for path in sorted(self._folder.iterdir()):
            if path.suffix != ".kv" or not path.stem.isdigit():
                _unlink(path)
                continue
            self._next_file = max(self._next_file, int(path.stem) + 1)
            try:
                segment = Segment.open(path, self._identity, self.block_bytes)
            except (OSError, DamagedSegmentError) as error:
                logger.warning("KV blocks in %s are given up: %s", path, error)
                self._counts["damaged"] += 1
                _unlink(path)
                continue
            self._segments.append(segment)
            self._read_table(segment, found)
        for key, (stamp, place) in sorted(found.items(), key=lambda item: item[1][0]):
            self._anonymous[key] = place
            self._stamp = max(self._stamp, stamp)
        self._find_free()
        self._shrink()

    def _read_table(self, segment: Segment, found: dict[bytes, tuple[int, Place]]) -> None:
        try:
            table = segment.table()
        except OSError as error:
            logger.warning("the table of %s cannot be read: %s", segment.path, error)
            return
        now = time.time_ns()
        for slot, (key, checksum, stamp, _) in enumerate(table.tolist()):
            # A stamp from the future is a damaged one, or a clock set back: it must not outrank all others.
            stamp = min(stamp, now)
            if key != NO_KEY and (key not in found or found[key][0] <= stamp):
                found[key] = stamp, Place(segment, slot, checksum)

    def _find_free(self) -> None:
        taken = {(place.segment.path, place.slot) for place in self._anonymous.values()}
        for segment in reversed(self._segments):
            self._free.extend((segment, i) for i in reversed(range(segment.slots)) if (segment.path, i) not in taken)

    def _shrink(self) -> None:
        """Fit into a budget that became smaller."""
        while sum(segment.size for segment in self._segments) > self.capacity:
            self._remove(min(self._segments, key=self._worth))
        while self._bytes_here() > self.capacity and self._drop_others():
            pass

    def _find_others(self) -> None:
        """Files of other models in the folder: they count against the budget, and go before any block of ours."""
        others = []
        for folder in self._owner.folder.iterdir():
            if folder == self._folder or not _is_identity(folder.name) or not folder.is_dir():
                continue
            files = [path for path in folder.iterdir() if path.suffix == ".kv"]
            others += [(path.stat().st_mtime, path, path.stat().st_size) for path in files]
            if not files:
                shutil.rmtree(folder, ignore_errors=True)
        self._others = [(path, size) for _, path, size in sorted(others)]

    def _write_tables(self) -> None:
        order = {place: rank for rank, place in enumerate((*self._anonymous.values(), *self._owned.values()))}
        keys = {place: key for queue in (self._anonymous, self._owned) for key, place in queue.items()}
        newest = max(self._stamp, time.time_ns())
        by_segment: dict[Path, list[Place]] = {}
        for place in order:
            by_segment.setdefault(place.segment.path, []).append(place)
        for segment in self._segments:
            table = bytearray(ENTRY_BYTES * segment.slots)
            for place in by_segment.get(segment.path, ()):
                entry = keys[place] + place.checksum + (newest - len(order) + order[place]).to_bytes(8, "little")
                table[ENTRY_BYTES * place.slot : ENTRY_BYTES * place.slot + len(entry)] = entry
            segment.write_table(np.frombuffer(table, np.uint8))

    def _close_segments(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments.clear()

    def _check_size(self, buffer: memoryview) -> None:
        if buffer.nbytes != self.block_bytes:
            raise ValueError(f"a block of this store has {self.block_bytes} bytes, not {buffer.nbytes}")


def _is_identity(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
