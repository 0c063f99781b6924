"""A disk that only takes time: a block store without bytes, and its I/O over a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from quire.kvcache.offload.block_store import BlockStore, StoreStats
from quire.kvcache.offload.io_threads import IOTask, IOThreads
from quire.simulation.device import VirtualClock


class SimulatedStore(BlockStore):
    """Which blocks are on disk. The least recently used goes first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self.written = self.evicted = self.hits = 0

    @classmethod
    def open(cls, folder: Path, fingerprint: bytes, block_bytes: int, capacity: int) -> SimulatedStore:
        """A store of `capacity` bytes; there is no folder."""
        return cls(capacity // block_bytes)

    def has(self, key: bytes) -> bool:
        return key in self._keys

    def read(self, key: bytes, into: memoryview) -> bool:
        if key not in self._keys:
            return False
        self._keys.move_to_end(key)
        self.hits += 1
        return True

    def write(self, key: bytes, payload: memoryview) -> bool:
        if key not in self._keys and len(self._keys) >= self.num_blocks:
            self._keys.popitem(last=False)
            self.evicted += 1
        self._keys[key] = None
        self.written += 1
        return True

    def pin(self, keys: Iterable[bytes]) -> None:
        """Sessions are not simulated."""

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Likewise."""

    def close(self) -> None:
        """There is nothing to close."""

    def discard(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)

    def stats(self) -> StoreStats:
        return StoreStats(
            blocks=len(self._keys), block_bytes=1, used_bytes=len(self._keys), capacity=self.num_blocks,
            hits=self.hits, written=self.written, evicted=self.evicted,
        )  # fmt: skip


class SimulatedIO(IOThreads):
    """Reads and writes that are done when the clock says so: each of `threads` lanes has a share of the disk's rate.
    Reads do not wait for writes."""

    def __init__(
        self,
        store: BlockStore,
        clock: VirtualClock,
        block_seconds: float,
        next_event: Callable[[], float],
        threads: int = 2,
    ) -> None:
        """`block_seconds`: what the disk takes for a block. `next_event`: when something else happens, for which a
        sleeping engine wakes up."""
        self.store = store
        self.num_threads = threads
        self._clock = clock
        self._seconds = threads * block_seconds
        self._next_event = next_event
        self._read_lanes = [-math.inf] * threads
        """When each lane is free."""
        self._write_lanes = [-math.inf] * threads
        self._tasks: list[tuple[float, int, IOTask]] = []
        self._order = itertools.count()

    @property
    def pending(self) -> int:
        return len(self._tasks)

    def submit_read(self, key: bytes, into: memoryview) -> IOTask:
        return self._start(IOTask("read", key, into), self._read_lanes)

    def submit_write(self, key: bytes, payload: memoryview) -> IOTask:
        return self._start(IOTask("write", key, payload), self._write_lanes)

    def submit_call(self, call: Callable[[], object]) -> IOTask:
        return self._start(IOTask("call", call=call), self._read_lanes)

    def _start(self, task: IOTask, lanes: list[float]) -> IOTask:
        task.seconds = self._seconds
        end = max(self._clock.now, heapq.heappop(lanes)) + task.seconds
        heapq.heappush(lanes, end)
        heapq.heappush(self._tasks, (end, next(self._order), task))
        return task

    def poll(self) -> list[IOTask]:
        done = []
        while self._tasks and self._tasks[0][0] <= self._clock.now:
            done.append(task := heapq.heappop(self._tasks)[2])
            self._run(task)
            task.seconds = self._seconds
        return done

    def sleep(self, seconds: float, wakes: Sequence[int] = ()) -> None:
        """Set the clock to when a task is done, or something else happens, at most so many seconds later."""
        now = self._clock.now
        ends = [self._tasks[0][0]] if self._tasks else []
        self._clock.now = max(now, min([now + seconds, self._next_event(), *ends]))

    def close(self) -> None: ...
