"""KV blocks on disk, found by content key, kept over restarts and crashes.

    FOLDER/lock                    one process owns the folder
    FOLDER/<identity>/00000000.kv  segments (`segments.py`): a table of keys and checksums, and slots for blocks

The identity is a hash of the model's fingerprint, the block's size and the version of the format: blocks of anything
else are in another folder, have another header and fail the checksum. Segments are created under another name and
renamed. The index is in memory, rebuilt from the tables at every start.

Nothing is synced before `close`: KV can be computed again. After a power loss, blocks that had not reached the disk
fail their checksum like damaged ones.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from quire.errors import ConfigError
from quire.kvcache.offload.block_store import BlockStore, StoreStats
from quire.kvcache.offload.disk.files import FolderLock, unavailable
from quire.kvcache.offload.disk.segments import (
    ENTRY_BYTES,
    KEY_BYTES,
    NO_KEY,
    RETRY_SECONDS,
    VERSION,
    Segment,
    SegmentFiles,
    file_bytes,
)
from quire.kvcache.offload.eviction_order import EvictionOrder

logger = logging.getLogger(__name__)


class SlotAddress(NamedTuple):
    """Where a block is stored."""

    segment: Segment
    slot: int
    checksum: bytes


class DiskStore(BlockStore):
    """Blocks of one model, by content key, within a budget of bytes. Thread-safe.

    Unpinned blocks are evicted first; a pinned one is evicted only for another pinned one. Among equals the least
    recently used goes first.
    """

    def __init__(self, lock: FolderLock, identity: bytes, block_bytes: int, capacity: int) -> None:
        self.block_bytes = block_bytes
        self.capacity = capacity
        self._folder_lock = lock
        self._lock = threading.Lock()
        self._files = SegmentFiles(lock.folder, identity, block_bytes, capacity)
        self._blocks: EvictionOrder[SlotAddress] = EvictionOrder()
        self._writing: set[bytes] = set()
        self._reading: dict[bytes, int] = {}
        self._stamp = 0
        self._paused_until = 0.0
        self._closed = False
        self._counts = dict.fromkeys(("hits", "misses", "damaged", "written", "refused", "evicted", "failed"), 0)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], fingerprint: bytes, block_bytes: int, capacity: int) -> DiskStore:
        """The store in `folder`, with the blocks of this model that earlier runs stored."""
        path = Path(folder).expanduser().absolute()
        if block_bytes < 1:
            raise ConfigError(f"a block of {block_bytes} bytes cannot be stored on disk", "block_bytes", block_bytes)
        if capacity < (least := file_bytes(block_bytes, 1)):
            raise ConfigError(
                f"kv_disk_size is {capacity} bytes: one block needs {least}. Make it larger",
                "kv_disk_size",
                capacity,
            )
        identity = blake3(b"quire KV store %d %d " % (VERSION, block_bytes) + fingerprint).digest()
        lock = FolderLock(path)
        store = cls(lock, identity, block_bytes, capacity)
        try:
            store._load()
        except OSError as error:
            store._files.close()
            lock.release()
            raise unavailable(path, error) from None
        return store

    @property
    def folder(self) -> Path:
        """Where the blocks of this model are."""
        return self._files.folder

    @property
    def headroom(self) -> tuple[int, int]:
        most = max(1, self.capacity // self.block_bytes)
        return most - len(self._blocks.pinned), most

    # Lookup

    def __len__(self) -> int:
        return len(self._blocks)

    def has(self, key: bytes) -> bool:
        return key in self._blocks

    def pin(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._blocks.pin(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._blocks.unpin(keys)

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                blocks=len(self), pinned_blocks=len(self._blocks.pinned), block_bytes=self.block_bytes,
                used_bytes=self._files.size, capacity=self.capacity,
                is_paused=time.monotonic() < max(self._paused_until, self._files.full_until),
                **self._counts | {"failed": self._counts["failed"] + self._files.failed},
            )  # fmt: skip

    # Reads and writes

    def read(self, key: bytes, into: memoryview) -> bool:
        self._check_size(into)
        with self._lock:
            place = None if self._closed else self._blocks.get(key)
            if place is None:
                self._counts["misses"] += 1
                return False
            self._blocks.touch(key)
            self._reading[key] = self._reading.get(key, 0) + 1
            place.segment.busy += 1
        try:
            whole = place.segment.read(place.slot, key, place.checksum, into)
        except OSError as error:
            logger.warning("cannot read a KV block from %s: %s", place.segment.path, error)
            whole = False
        with self._lock:
            place.segment.busy -= 1
            if self._reading[key] == 1:
                del self._reading[key]
            else:
                self._reading[key] -= 1
            self._counts["hits" if whole else "damaged"] += 1
            if not whole:
                self._drop(key, place)
        return whole

    def write(self, key: bytes, payload: memoryview) -> bool:
        self._check_size(payload)
        if len(key) != KEY_BYTES or key == NO_KEY:
            raise ValueError(f"a content key has {KEY_BYTES} bytes and is not zero, got {len(key)} bytes")
        with self._lock:
            if self._closed or key in self._writing:
                return False
            if key in self._blocks:
                self._blocks.touch(key)
                return True
            is_paused = time.monotonic() < self._paused_until
            taken = None if is_paused else self._take_slot(is_pinned=key in self._blocks.pins)
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
            self._blocks.put(key, SlotAddress(segment, slot, checksum))
            self._counts["written"] += 1
        return True

    def discard(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                if (place := self._blocks.get(key)) is not None:
                    self._drop(key, place)

    def free_space(self, size: int) -> int:
        with self._lock:
            files = self._files
            before = files.size
            files.pause()
            while before - files.size < size and files.drop_others():
                pass
            for segment in sorted(files.segments, key=self._worth):
                if before - files.size >= size:
                    break
                if not segment.busy:
                    self._remove(segment)
            return before - files.size

    def sync(self) -> None:
        """Make everything written so far durable."""
        with self._lock:
            segments = list(self._files.segments)
            for segment in segments:
                segment.busy += 1
        for segment in segments:
            try:
                segment.sync()
            except OSError as error:
                logger.warning("cannot sync %s: %s", segment.path, error)
            with self._lock:
                segment.busy -= 1

    def close(self) -> None:
        """Write the eviction order, sync, and unlock the folder. No read or write may be in flight."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._write_tables()
            except OSError as error:
                logger.warning("cannot write the eviction order of the KV blocks in %s: %s", self.folder, error)
        self.sync()
        self._files.close()
        self._folder_lock.release()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # With the lock held

    def _take_slot(self, is_pinned: bool) -> tuple[Segment, int] | None:
        slot, blocks = self._files.take(), self._blocks
        if slot is None and (self._evict(blocks.unpinned) or (is_pinned and self._evict(blocks.pinned))):
            slot = self._files.take()
        return slot

    def _evict(self, queue: Mapping[bytes, SlotAddress]) -> bool:
        victim = next((key for key in queue if key not in self._reading), None)
        if victim is None:
            return False
        place = self._blocks.pop(victim)
        self._files.give(place.segment, place.slot)
        self._counts["evicted"] += 1
        return True

    def _drop(self, key: bytes, place: SlotAddress) -> None:
        """Remove the block and its table entry, unless it was written again or is being read."""
        if self._blocks.get(key) is not place or key in self._reading:
            return
        self._blocks.pop(key)
        try:
            place.segment.clear(place.slot)
        except OSError as error:
            logger.warning("cannot write to %s: %s", place.segment.path, error)
        self._files.give(place.segment, place.slot)

    def _write_failed(self, key: bytes, segment: Segment, slot: int, error: OSError) -> None:
        with self._lock:
            self._writing.discard(key)
            segment.busy -= 1
            self._files.give(segment, slot)
            self._paused_until = time.monotonic() + RETRY_SECONDS
            self._counts["failed"] += 1
        logger.warning("cannot write a KV block to %s: %s. No writes for %.0f s", segment.path, error, RETRY_SECONDS)

    def _worth(self, segment: Segment) -> tuple[int, int]:
        """Pinned and unpinned blocks in the segment: those with the least are removed first."""
        pinned = sum(place.segment is segment for place in self._blocks.pinned.values())
        return pinned, sum(place.segment is segment for place in self._blocks.unpinned.values())

    def _remove(self, segment: Segment) -> None:
        evicted = [key for key, place in self._blocks.items() if place.segment is segment]
        for key in evicted:
            self._blocks.pop(key)
        self._counts["evicted"] += len(evicted)
        self._files.remove(segment)

    # Load and close

    def _load(self) -> None:
        """Rebuild the index from the tables of all segments."""
        self._files.load()
        self._counts["damaged"] += self._files.damaged
        found: dict[bytes, tuple[int, SlotAddress]] = {}
        for segment in self._files.segments:
            self._read_table(segment, found)
        for key, (stamp, place) in sorted(found.items(), key=lambda item: item[1][0]):
            self._blocks.put(key, place)
            self._stamp = max(self._stamp, stamp)
        self._files.give_all_except({(place.segment.path, place.slot) for _, place in self._blocks.items()})
        self._shrink()

    def _read_table(self, segment: Segment, found: dict[bytes, tuple[int, SlotAddress]]) -> None:
        """Add the segment's blocks to `found`; of two copies of a block the newer stays."""
        try:
            table = segment.table()
        except OSError as error:
            logger.warning("cannot read the table of %s: %s", segment.path, error)
            return
        now = time.time_ns()
        for slot, (key, checksum, stamp, _) in enumerate(table.tolist()):
            # A stamp in the future (damage, or a clock set back) must not outrank all others.
            stamp = min(stamp, now)
            if key != NO_KEY and (key not in found or found[key][0] <= stamp):
                found[key] = stamp, SlotAddress(segment, slot, checksum)

    def _shrink(self) -> None:
        """Fit into a budget that became smaller."""
        files = self._files
        while files.own_size > self.capacity:
            self._remove(min(files.segments, key=self._worth))
        while files.size > self.capacity and files.drop_others():
            pass

    def _write_tables(self) -> None:
        """Write the eviction order into the tables, as stamps."""
        keys = {place: key for key, place in self._blocks.items()}
        order = {place: rank for rank, place in enumerate(keys)}
        newest = max(self._stamp, time.time_ns())
        by_segment: dict[Path, list[SlotAddress]] = {}
        for place in order:
            by_segment.setdefault(place.segment.path, []).append(place)
        for segment in self._files.segments:
            table = bytearray(ENTRY_BYTES * segment.slots)
            for place in by_segment.get(segment.path, ()):
                entry = keys[place] + place.checksum + (newest - len(order) + order[place]).to_bytes(8, "little")
                table[ENTRY_BYTES * place.slot : ENTRY_BYTES * place.slot + len(entry)] = entry
            segment.write_table(np.frombuffer(table, np.uint8))

    def _check_size(self, buffer: memoryview) -> None:
        if buffer.nbytes != self.block_bytes:
            raise ValueError(f"a block of this store has {self.block_bytes} bytes, got {buffer.nbytes}")
