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
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from quire.errors import ConfigError
from quire.kvcache.offload.disk.errors import unavailable
from quire.kvcache.offload.disk.ownership import Ownership
from quire.kvcache.offload.disk.segment import ENTRY_BYTES, KEY_BYTES, NO_KEY, VERSION, Segment, file_bytes
from quire.kvcache.offload.disk.segments import REST_SECONDS, SegmentFiles
from quire.kvcache.offload.eviction_order import EvictionOrder

logger = logging.getLogger(__name__)


class SlotAddress(NamedTuple):
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
        self._lock = threading.Lock()
        self._room = SegmentFiles(owner.folder, identity, block_bytes, capacity)
        self._here: EvictionOrder[SlotAddress] = EvictionOrder()
        self._writing: set[bytes] = set()
        self._reading: dict[bytes, int] = {}
        self._stamp = 0
        self._rest_until = 0.0
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
            store._room.close()
            owner.release()
            raise unavailable(path, error) from None
        return store

    @property
    def folder(self) -> Path:
        """Where the blocks of this model lie."""
        return self._room.folder

    @property
    def room(self) -> tuple[int, int]:
        """Blocks that no session owns, or that could be there, and all there could be."""
        most = max(1, self.capacity // self.block_bytes)
        return most - len(self._here.owned), most

    # What is there

    def __len__(self) -> int:
        return len(self._here)

    def has(self, key: bytes) -> bool:
        """Whether the block is likely there: only reading it tells for sure."""
        return key in self._here

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
                if key in self._here:
                    self._here.touch(key)

    def pin(self, keys: Iterable[bytes]) -> None:
        """A session owns these blocks, those to be written later too. Counted: to be unpinned as often."""
        with self._lock:
            self._here.pin(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """A session owns these blocks no longer; they stay, as anonymous ones."""
        with self._lock:
            self._here.unpin(keys)

    @property
    def pins(self) -> dict[bytes, int]:
        """How many sessions own each block that any does."""
        return self._here.pins

    def stats(self) -> DiskStats:
        """What the store holds and what it did."""
        with self._lock:
            return DiskStats(
                blocks=len(self), owned_blocks=len(self._here.owned), block_bytes=self.block_bytes,
                disk_bytes=self._room.size, capacity=self.capacity,
                resting=time.monotonic() < max(self._rest_until, self._room.full_until),
                **self._counts | {"failed": self._counts["failed"] + self._room.failed},
            )  # fmt: skip

    # Moving blocks

    def read(self, key: bytes, into: memoryview) -> bool:
        """Fill `into` with the block. False if it is absent or damaged: `into` then holds nothing of use."""
        self._check_size(into)
        with self._lock:
            place = None if self._closed else self._here.get(key)
            if place is None:
                self._counts["misses"] += 1
                return False
            self._here.touch(key)
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
            if key in self._here:
                self._here.touch(key)
                return True
            taken = self._take_slot(owned=key in self._here.pins) if time.monotonic() >= self._rest_until else None
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
            self._here.put(key, SlotAddress(segment, slot, checksum))
            self._counts["written"] += 1
        return True

    def discard(self, keys: Iterable[bytes]) -> None:
        """These blocks are to be found no more, after a restart neither."""
        with self._lock:
            for key in keys:
                if (place := self._here.get(key)) is not None:
                    self._forget(key, place)

    def give_back(self, size: int) -> int:
        """Return at least `size` bytes of disk, if the store has as many, and the blocks there; returns how many."""
        with self._lock:
            room = self._room
            before = room.size
            room.rest()
            while before - room.size < size and room.drop_others():
                pass
            for segment in sorted(room.segments, key=self._worth):
                if before - room.size >= size:
                    break
                if not segment.busy:
                    self._remove(segment)
            return before - room.size

    def sync(self) -> None:
        """What was written so far stays after a loss of power, as far as the disk obeys."""
        with self._lock:
            segments = list(self._room.segments)
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
                logger.warning("the order of KV blocks in %s could not be noted: %s", self.folder, error)
        self.sync()
        self._room.close()
        self._owner.release()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside, with the lock held

    def _take_slot(self, owned: bool) -> tuple[Segment, int] | None:
        taken = self._room.take()
        if taken is None and (self._evict(self._here.anonymous) or (owned and self._evict(self._here.owned))):
            taken = self._room.take()
        return taken

    def _evict(self, queue: Mapping[bytes, SlotAddress]) -> bool:
        victim = next((key for key in queue if key not in self._reading), None)
        if victim is None:
            return False
        place = self._here.pop(victim)
        self._room.give(place.segment, place.slot)
        self._counts["evicted"] += 1
        return True

    def _forget(self, key: bytes, place: SlotAddress) -> None:
        """Drop a block for good, unless it is another by now, or somebody still reads it."""
        if self._here.get(key) is not place or key in self._reading:
            return
        self._here.pop(key)
        try:
            place.segment.clear(place.slot)
        except OSError as error:
            logger.warning("%s cannot be written: %s", place.segment.path, error)
        self._room.give(place.segment, place.slot)

    def _write_failed(self, key: bytes, segment: Segment, slot: int, error: OSError) -> None:
        with self._lock:
            self._writing.discard(key)
            segment.busy -= 1
            self._room.give(segment, slot)
            self._rest_until = time.monotonic() + REST_SECONDS
            self._counts["failed"] += 1
        logger.warning(
            "a KV block could not be written to %s; resting for %.0f s: %s", segment.path, REST_SECONDS, error
        )

    def _worth(self, segment: Segment) -> tuple[int, int]:
        owned = sum(place.segment is segment for place in self._here.owned.values())
        return owned, sum(place.segment is segment for place in self._here.anonymous.values())

    def _remove(self, segment: Segment) -> None:
        gone = [key for key, place in self._here.items() if place.segment is segment]
        for key in gone:
            self._here.pop(key)
        self._counts["evicted"] += len(gone)
        self._room.remove(segment)

    # Opening and closing

    def _load(self) -> None:
        self._room.load()
        self._counts["damaged"] += self._room.damaged
        found: dict[bytes, tuple[int, SlotAddress]] = {}
        for segment in self._room.segments:
            self._read_table(segment, found)
        for key, (stamp, place) in sorted(found.items(), key=lambda item: item[1][0]):
            self._here.put(key, place)
            self._stamp = max(self._stamp, stamp)
        self._room.give_all_but({(place.segment.path, place.slot) for _, place in self._here.items()})
        self._shrink()

    def _read_table(self, segment: Segment, found: dict[bytes, tuple[int, SlotAddress]]) -> None:
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
                found[key] = stamp, SlotAddress(segment, slot, checksum)

    def _shrink(self) -> None:
        """Fit into a budget that became smaller."""
        room = self._room
        while room.own_size > self.capacity:
            self._remove(min(room.segments, key=self._worth))
        while room.size > self.capacity and room.drop_others():
            pass

    def _write_tables(self) -> None:
        keys = {place: key for key, place in self._here.items()}
        order = {place: rank for rank, place in enumerate(keys)}
        newest = max(self._stamp, time.time_ns())
        by_segment: dict[Path, list[SlotAddress]] = {}
        for place in order:
            by_segment.setdefault(place.segment.path, []).append(place)
        for segment in self._room.segments:
            table = bytearray(ENTRY_BYTES * segment.slots)
            for place in by_segment.get(segment.path, ()):
                entry = keys[place] + place.checksum + (newest - len(order) + order[place]).to_bytes(8, "little")
                table[ENTRY_BYTES * place.slot : ENTRY_BYTES * place.slot + len(entry)] = entry
            segment.write_table(np.frombuffer(table, np.uint8))

    def _check_size(self, buffer: memoryview) -> None:
        if buffer.nbytes != self.block_bytes:
            raise ValueError(f"a block of this store has {self.block_bytes} bytes, not {buffer.nbytes}")
