"""Transfers of blocks between the device, host memory and disk.

Blocks are found by content key in every tier: a swapped-out row, a suspended session and a cached prefix are the same
thing, blocks under keys. A transfer holds its device blocks, so that they are not reused before the bytes have been
copied; plans carry the copies, and a result reports them done.

    device ──out──▶ host ──write──▶ disk          early: blocks are saved before they are evicted
    device ◀─back── host ◀──read─── disk          for a request that waits; others run meanwhile
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np

from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.block_store import BlockStore
from quire.kvcache.offload.costs import LEAST_BYTES, Costs
from quire.kvcache.offload.host_tier import HostTier
from quire.kvcache.offload.io_threads import IOTask, IOThreads
from quire.kvcache.offload.page_keys import key_of_cached
from quire.kvcache.offload.transfers import CopyIn, CopyOut, LoadTransfer, SaveTransfer, StepCopies
from quire.messages.plan import Moves, MovesDone

NO_SLOT = -1
WRITES_AT_ONCE = 32
"""Blocks being written to disk at a time: each keeps a slot of host memory busy."""


class OffloadManager:
    """The tiers below the device's cache, and all transfers between them."""

    def __init__(
        self,
        tables: BlockTables,
        host: HostTier,
        costs: Costs,
        io: IOThreads | None = None,
        slot_bytes: Callable[[int], memoryview] | None = None,
    ) -> None:
        """`io`: the block store below host memory, if there is one. `slot_bytes`: the bytes of a host slot."""
        self.host = host
        self.store: BlockStore | None = None if io is None else io.store
        self.costs = costs
        self._tables = tables
        self._io = io
        self._slot_bytes = slot_bytes
        self._copies_out: deque[CopyOut] = deque()
        self._queue: deque[CopyOut] = deque()
        """Blocks to be saved on disk that wait for a host slot."""
        self._copies_in: deque[CopyIn] = deque()
        self._in_flight: dict[int, StepCopies] = {}
        """Copies of launched plans, by step."""
        self._loads: list[LoadTransfer] = []
        self._reads: dict[IOTask, tuple[LoadTransfer, int]] = {}
        self._writes: dict[IOTask, SaveTransfer | None] = {}
        self._writing: set[bytes] = set()
        self._unwritten = 0
        """Blocks copied to the host that may not be on disk yet."""
        self._calls: dict[IOTask, Callable[[Exception | None], object]] = {}
        self.saved = 0
        """Blocks copied to the host so far…"""
        self.loaded = 0
        """…and back to the device."""

    # Lookup

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For each leading key that a lower tier has: True if it is in host memory, False if on disk."""
        found = []
        for key in keys:
            if self.host.has(key) or self.host.is_arriving(key):
                found.append(True)
            elif self._on_disk(key):
                found.append(False)
            else:
                break
        return found

    def _on_disk(self, key: bytes) -> bool:
        return self.store is not None and self.store.has(key)

    def is_saved(self, key: bytes) -> bool:
        """Whether the block is, or will soon be, in a tier below the device."""
        return self.host.has(key) or self.host.is_arriving(key) or self._on_disk(key)

    @property
    def is_moving(self) -> bool:
        """Copies between device and host are queued or in flight."""
        return bool(self._copies_out or self._copies_in or self._in_flight)

    @property
    def is_busy(self) -> bool:
        """Any transfer is unfinished."""
        return self.is_moving or self.waits_for_disk or bool(self._loads or self._queue)

    @property
    def waits_for_disk(self) -> bool:
        """Reads, writes or calls are in flight."""
        return bool(self._reads or self._writes or self._calls)

    @property
    def saving_blocks(self) -> list[int]:
        """Device blocks that are being saved…"""
        in_flight = (copy for copies in self._in_flight.values() for copy in copies.out)
        return [copy.block for copy in (*self._copies_out, *self._queue, *in_flight)]

    @property
    def loading_blocks(self) -> list[int]:
        """…and those that are being loaded."""
        in_flight = (copy for copies in self._in_flight.values() for copy in copies.back)
        read = [load.blocks[index] for load, index in self._reads.values()]
        return [block for copy in (*self._copies_in, *in_flight) for block in copy.blocks] + read

    @property
    def num_writes(self) -> int:
        """Blocks being written to disk."""
        return len(self._writes)

    def block_refs(self) -> Counter[int]:
        """How many references transfers have to each device block."""
        return Counter(self.saving_blocks + self.loading_blocks)

    # Saving

    def save(self, pairs: Sequence[tuple[bytes, int]], to_disk: bool = False, is_idle: bool = False) -> SaveTransfer:
        """Copy the blocks of these (content key, block) pairs that the host lacks to it. Holds each until it is copied.

        `to_disk`: write them to disk as well. `is_idle`: the blocks have no other references.
        """
        save = SaveTransfer(to_disk=to_disk and self.store is not None)
        missing: dict[bytes, int] = {}
        for key, block in pairs:
            if not self.host.has(key):
                if not self.host.is_arriving(key):
                    missing[key] = block
            elif save.to_disk:
                self._write(key, save)
        reserved = dict(self.host.reserve_all(list(missing)))
        for key, block in missing.items():
            if key not in reserved and not save.to_disk:
                save.lost += 1
                continue
            self._tables.pool.share([block])
            save.pending += 1
            (self._copies_out if key in reserved else self._queue).append(
                CopyOut(key, block, reserved.get(key, NO_SLOT), save, is_idle)
            )
        return save

    def _start_queued(self) -> None:
        """Start saves that waited for a slot; if no transfer can free one any more, they are lost."""
        while self._queue:
            copy = self._queue[0]
            slot = None if self.is_saved(copy.key) else self.host.reserve(copy.key)
            if slot is not None:
                copy.slot = slot
                self._copies_out.append(self._queue.popleft())
            elif self.is_saved(copy.key) or not (self.is_moving or self.waits_for_disk):
                copy.save.lost += not self.is_saved(copy.key)
                self._end_copy_out(self._queue.popleft())
            else:
                return

    def save_idle(self, count: int) -> int:
        """Save the cached blocks that would be evicted next, at most `count`; returns how many it copies."""
        pairs = []
        for block in self._tables.pool.oldest(count):
            key = key_of_cached(self._tables, block)
            if key is not None and not self.is_saved(key):
                pairs.append((key, block))
        return self.save(pairs, is_idle=True).pending

    # Loading

    def load(self, keys: list[bytes], blocks: list[int], tokens: np.ndarray) -> LoadTransfer:
        """Load blocks back; `tokens` is what they contain, [blocks, block size]."""
        load = LoadTransfer(keys, blocks, tokens)
        self._loads.append(load)
        self._advance(load)
        return load

    def _advance(self, load: LoadTransfer) -> None:
        """Start loading as many of its blocks as possible."""
        while load.started < len(load.keys) and not load.is_cancelled:
            key, index = load.keys[load.started], load.started
            if self.host.has(key):
                self._start_copies_in(load, index)
                continue
            if self.host.is_arriving(key):
                return  # another transfer is loading it
            if not self._on_disk(key):
                load.is_cancelled = True
                return
            slot = self.host.reserve(key)
            if slot is None:
                if not load.pending and not self._reads and not self._in_flight:
                    load.is_cancelled = True  # nothing in flight will free a slot
                return
            assert self._io is not None and self._slot_bytes is not None
            self._tables.pool.share([load.blocks[index]])
            load.pending += 1
            self._reads[self._io.submit_read(key, self._slot_bytes(slot))] = load, index
            load.started += 1

    def _start_copies_in(self, load: LoadTransfer, first: int) -> None:
        """Copy the consecutive blocks from `first` on that are in host memory."""
        host, end = self.host, first
        while end < len(load.keys) and host.has(load.keys[end]):
            end += 1
        self._tables.pool.share(load.blocks[first:end])
        load.pending += end - first
        load.started = end
        self._copies_in.append(CopyIn(load, first, host.acquire(load.keys[first:end])))

    # Copies of a plan

    def can_carry(self, load: LoadTransfer, limit: int) -> bool:
        """Whether a plan with `limit` copies would finish the load."""
        if load.is_cancelled or load.started < len(load.keys):
            return False
        own = sum(len(copy.slots) for copy in self._copies_in if copy.load is load)
        return own == load.pending and sum(len(copy.slots) for copy in self._copies_in) <= limit

    def take(self, step: int, limit: int) -> Moves | None:
        """Copies for this plan, at most `limit` each way."""
        out = [self._copies_out.popleft() for _ in range(min(limit, len(self._copies_out)))]
        back = self._take_copies_in(limit)
        if not out and not back:
            return None
        self._in_flight[step] = StepCopies(out, back)
        tokens = [copy.tokens.ravel() for copy in back]
        return Moves(
            out=[(copy.block, copy.slot) for copy in out],
            back=[pair for copy in back for pair in zip(copy.slots, copy.blocks, strict=True)],
            tokens=np.concatenate(tokens).astype(np.int32) if tokens else np.empty(0, np.int32),
        )

    def _take_copies_in(self, limit: int) -> list[CopyIn]:
        """The next `limit` blocks to load."""
        taken = []
        while self._copies_in and limit:
            copy = self._copies_in.popleft()
            if len(copy.slots) > limit:
                copy, rest = copy.split(limit)
                self._copies_in.appendleft(rest)
            taken.append(copy)
            limit -= len(copy.slots)
        return taken

    def finish_copies(self, done: MovesDone) -> None:
        """The copies of a plan are done."""
        copies = self._in_flight.pop(done.step)
        size = self.costs.block_bytes
        num_loaded = sum(len(copy.slots) for copy in copies.back)
        if len(copies.out) * size >= LEAST_BYTES:
            self.costs.out.note(len(copies.out) * size, done.out_seconds)
        if num_loaded * size >= LEAST_BYTES:
            self.costs.back.note(num_loaded * size, done.back_seconds)
        for copy in copies.out:
            self.host.arrived(copy.key)
            if copy.save.to_disk:
                self._write(copy.key, copy.save)
            self._end_copy_out(copy)
        self._end_copies_in(copies.back, ok=True)
        self._unwritten = min(self._unwritten + len(copies.out), self.host.num_slots)
        self.saved += len(copies.out)
        self.loaded += num_loaded

    def _end_copy_out(self, copy: CopyOut) -> None:
        copy.save.pending -= 1
        self._tables.pool.release([copy.block], as_oldest=copy.is_idle)

    def _end_copies_in(self, copies: Sequence[CopyIn], ok: bool) -> None:
        for copy in copies:
            self._tables.pool.release(copy.blocks)
            self.host.release(copy.keys)
            copy.load.finish(copy.first, len(copy.slots), ok)

    # Disk

    def poll(self) -> None:
        """Collect finished reads and writes, and start what waited for them."""
        if self._io is not None:
            for task in self._io.poll():
                self._finish_task(task)
            self._write_oldest()
            self._start_queued()
        if self._loads:
            for load in self._loads:
                self._advance(load)
            if any(load.is_cancelled for load in self._loads):
                cancelled = [copy for copy in self._copies_in if copy.load.is_cancelled]
                self._copies_in = deque(copy for copy in self._copies_in if not copy.load.is_cancelled)
                self._end_copies_in(cancelled, ok=False)
            self._loads = [load for load in self._loads if not load.is_done]

    def _finish_task(self, task: IOTask) -> None:
        """End a write, a call, or a read, whose block is then copied to the device."""
        if task in self._writes:
            save = self._writes.pop(task)
            self._writing.discard(task.key)
            self.host.release([task.key])
            if save is not None:
                save.pending -= 1
                save.lost += not task.ok
            return
        if task in self._calls:
            self._calls.pop(task)(task.error)
            return
        load, index = self._reads.pop(task)
        if task.ok:
            assert self._io is not None
            self.costs.disk.note(self._io.num_threads * self.costs.block_bytes, task.seconds)
            self.host.arrived(task.key)
            self._copies_in.append(CopyIn(load, index, self.host.acquire([task.key])))
        else:
            self.host.cancel(task.key)
            self._tables.pool.release([load.blocks[index]])
            load.finish(index, 1, ok=False)

    def run_in_thread(self, function: Callable[[], object], then: Callable[[Exception | None], object]) -> None:
        """Run a blocking function in an I/O thread; the loop then calls `then` with its error, if it raised one."""
        assert self._io is not None
        self._calls[self._io.submit_call(function)] = then

    def _write(self, key: bytes, save: SaveTransfer | None = None) -> None:
        assert self._io is not None and self._slot_bytes is not None
        if key in self._writing or self._on_disk(key):
            return
        self._writing.add(key)
        if save is not None:
            save.pending += 1
        (slot,) = self.host.acquire([key])
        self._writes[self._io.submit_write(key, self._slot_bytes(slot))] = save

    def _write_oldest(self) -> None:
        """Write the blocks that host memory would evict next, before it must evict them."""
        if self.host.free >= self.host.num_slots // 8 or len(self._writes) >= WRITES_AT_ONCE:
            return
        # As many as were copied since: a disk smaller than host memory would otherwise be rewritten without end.
        room = min(WRITES_AT_ONCE - len(self._writes), self._unwritten)
        keys: list[bytes] = []
        for seen, key in enumerate(self.host.oldest()):
            if len(keys) == room or seen > 4 * WRITES_AT_ONCE:
                break
            if key not in self._writing and not self._on_disk(key):
                keys.append(key)
        self._unwritten -= len(keys)
        for key in keys:
            self._write(key)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Remove these blocks from all lower tiers: their content is wrong."""
        self.host.discard(keys)
        if self.store is not None:
            self.store.discard(keys)

    def wait(self, seconds: float, wakes: Sequence[int] = ()) -> None:
        """Sleep until a read, write or call finishes, or one of the descriptors `wakes` can be read."""
        if self._io is not None and self.waits_for_disk:
            self._io.sleep(seconds, wakes)

    # Errors and shutdown

    def reset(self) -> None:
        """A step failed: drop copies in flight and queued ones. Reads and writes of the store continue."""
        out = [*self._copies_out, *(copy for copies in self._in_flight.values() for copy in copies.out)]
        back = [*self._copies_in, *(copy for copies in self._in_flight.values() for copy in copies.back)]
        queued = list(self._queue)
        self._copies_out.clear()
        self._queue.clear()
        self._copies_in.clear()
        self._in_flight.clear()
        for copy in out:
            self.host.cancel(copy.key)
        for copy in (*out, *queued):
            copy.save.lost += 1
            self._end_copy_out(copy)
        self._end_copies_in(back, ok=False)
        for load in self._loads:
            load.is_cancelled = True

    def close(self) -> None:
        """End the transfers; submitted writes are finished."""
        if self._io is not None:
            self._io.close()
