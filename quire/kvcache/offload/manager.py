"""Blocks on their way between the device, host memory and disk.

Everything is found by content key, whatever tier it lies in: a swapped row, a sleeping session and a cached prefix are
the same thing, blocks under keys. A block on its way is held by its journey, so nobody takes it before the bytes have
been copied; the plan carries the copies, and a result reports them done.

    device ──out──▶ host ──write──▶ disk          ahead of need: what is then evicted has been saved
    device ◀─back── host ◀──read─── disk          for a request that waits; others run meanwhile
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np

from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.costs import LEAST_BYTES, Costs
from quire.kvcache.offload.disk.io_threads import DiskIO, Ticket
from quire.kvcache.offload.host_tier import HostTier
from quire.kvcache.offload.transfers import Back, Fetch, Journey, Out, Save
from quire.messages.plan import Moves, MovesDone
from quire.sleeping import sleep_until

NO_SLOT = -1
WRITES_AT_ONCE = 32
"""Blocks on their way to disk: each keeps a slot of host memory from being taken."""


class OffloadManager:
    """The tiers below the device's cache, and every block that is on its way."""

    def __init__(
        self,
        tables: BlockTables,
        host: HostTier,
        costs: Costs,
        disk: DiskIO | None = None,
        slot_bytes: Callable[[int], memoryview] | None = None,
    ) -> None:
        """`slot_bytes`: the bytes of a host slot, for the disk to read and write."""
        self.host = host
        self.disk = disk
        self.costs = costs
        self._tables = tables
        self._slot_bytes = slot_bytes
        self._outs: deque[Out] = deque()
        self._queue: deque[Out] = deque()
        """Blocks on their way to disk for which host memory has no slot yet."""
        self._backs: deque[Back] = deque()
        self._journeys: dict[int, Journey] = {}
        self._fetches: list[Fetch] = []
        self._reads: dict[Ticket, tuple[Fetch, int]] = {}
        self._writes: dict[Ticket, Save | None] = {}
        self._writing: set[bytes] = set()
        self._unwritten = 0
        """Blocks that have come to the host and perhaps have to go on."""
        self._calls: dict[Ticket, Callable[[Exception | None], object]] = {}
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self.saved = 0
        """Blocks copied to the host…"""
        self.loaded = 0
        """…and back, in all."""
        if disk is not None:
            self._bell = socket.socketpair()
            for end in self._bell:
                end.setblocking(False)
            disk.on_finished = self._ring

    # What is where

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For the leading keys that are in some tier: whether it is the host (or else the disk)."""
        found = []
        for key in keys:
            if self.host.has(key) or self.host.is_coming(key):
                found.append(True)
            elif self._on_disk(key):
                found.append(False)
            else:
                break
        return found

    def _on_disk(self, key: bytes) -> bool:
        return self.disk is not None and self.disk.store.has(key)

    def is_saved(self, key: bytes) -> bool:
        """Whether the block is, or will soon be, in a tier below the device."""
        return self.host.has(key) or self.host.is_coming(key) or self._on_disk(key)

    @property
    def is_moving(self) -> bool:
        """Copies between device and host wait or are under way."""
        return bool(self._outs or self._backs or self._journeys)

    @property
    def has_moves(self) -> bool:
        """Copies wait for a plan to carry them."""
        return bool(self._outs or self._backs)

    @property
    def is_busy(self) -> bool:
        """Anything at all is on its way."""
        return self.is_moving or self.waits_for_disk or bool(self._fetches or self._queue)

    @property
    def waits_for_disk(self) -> bool:
        """The disk has something to do."""
        return bool(self._reads or self._writes or self._calls)

    @property
    def going(self) -> list[int]:
        """Device blocks that are being saved…"""
        outs = (*self._outs, *self._queue, *(out for journey in self._journeys.values() for out in journey.outs))
        return [out.block for out in outs]

    @property
    def coming(self) -> list[int]:
        """…and those that are being filled."""
        backs = (*self._backs, *(back for journey in self._journeys.values() for back in journey.backs))
        read = [fetch.blocks[index] for fetch, index in self._reads.values()]
        return [block for back in backs for block in back.blocks] + read

    @property
    def num_writes(self) -> int:
        """Blocks on their way to disk."""
        return len(self._writes)

    def held(self) -> Counter[int]:
        """How often each device block is held because it is on its way."""
        return Counter(self.going + self.coming)

    # Going out

    def save(self, pairs: Sequence[tuple[bytes, int]], to_disk: bool = False, is_idle: bool = False) -> Save:
        """Copy blocks out that are not in host memory yet: (content key, block). Each is held until its bytes are safe.

        `to_disk`: and on to disk. `is_idle`: nobody else holds them.
        """
        save = Save(to_disk=to_disk and self.disk is not None)
        missing: dict[bytes, int] = {}
        for key, block in pairs:
            if not self.host.has(key):
                if not self.host.is_coming(key):
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
            (self._outs if key in reserved else self._queue).append(
                Out(key, block, reserved.get(key, NO_SLOT), save, is_idle)
            )
        return save

    def _dequeue(self) -> None:
        """Blocks that waited for a slot go on; where none will ever be free, they are lost."""
        while self._queue:
            out = self._queue[0]
            slot = None if self.is_saved(out.key) else self.host.reserve(out.key)
            if slot is not None:
                out.slot = slot
                self._outs.append(self._queue.popleft())
            elif self.is_saved(out.key) or not (self.is_moving or self.waits_for_disk):
                out.save.lost += not self.is_saved(out.key)
                self._end_out(self._queue.popleft())
            else:
                return

    def save_idle(self, count: int) -> int:
        """Save the cached blocks that would be evicted next, up to `count` of them; returns how many go."""
        index, pairs = self._tables.index, []
        for block in self._tables.pool.oldest(count):
            key = index.key_of(block)
            if key is not None and not self.is_saved(key):
                pairs.append((key, block))
        save = self.save(pairs, is_idle=True)
        return save.pending

    # Coming back

    def fetch(self, keys: list[bytes], blocks: list[int], tokens: np.ndarray) -> Fetch:
        """Bring blocks back; `tokens` is what they contain, [blocks, block size]."""
        fetch = Fetch(keys, blocks, tokens)
        self._fetches.append(fetch)
        self._advance(fetch)
        return fetch

    def _advance(self, fetch: Fetch) -> None:
        """Begin as many of its blocks as can be begun."""
        while fetch.begun < len(fetch.keys) and not fetch.is_cancelled:
            key, index = fetch.keys[fetch.begun], fetch.begun
            if self.host.has(key):
                self._start_backs(fetch, index)
                continue
            if self.host.is_coming(key):
                return  # for somebody else; soon
            if not self._on_disk(key):
                fetch.is_cancelled = True
                return
            slot = self.host.reserve(key)
            if slot is None:
                if not fetch.pending and not self._reads and not self._journeys:
                    fetch.is_cancelled = True  # nothing that is under way will make room
                return
            assert self.disk is not None and self._slot_bytes is not None
            self._tables.pool.share([fetch.blocks[index]])
            fetch.pending += 1
            self._reads[self.disk.submit_read(key, self._slot_bytes(slot))] = fetch, index
            fetch.begun += 1

    def _start_backs(self, fetch: Fetch, first: int) -> None:
        """The blocks from `first` on that are in host memory are copied back."""
        host, end = self.host, first
        while end < len(fetch.keys) and host.has(fetch.keys[end]):
            end += 1
        self._tables.pool.share(fetch.blocks[first:end])
        fetch.pending += end - first
        fetch.begun = end
        self._backs.append(Back(fetch, first, host.use(fetch.keys[first:end])))

    # Plans carry the copies

    def can_carry(self, fetch: Fetch, limit: int) -> bool:
        """Whether a plan with so many copies would bring all that is still missing."""
        if fetch.is_cancelled or fetch.begun < len(fetch.keys):
            return False
        own = sum(len(back.slots) for back in self._backs if back.fetch is fetch)
        return own == fetch.pending and sum(len(back.slots) for back in self._backs) <= limit

    def take(self, step: int, limit: int) -> Moves | None:
        """Copies for this plan, at most `limit` each way."""
        outs = [self._outs.popleft() for _ in range(min(limit, len(self._outs)))]
        backs = self._take_backs(limit)
        if not outs and not backs:
            return None
        self._journeys[step] = Journey(outs, backs)
        tokens = [back.tokens.ravel() for back in backs]
        return Moves(
            out=[(out.block, out.slot) for out in outs],
            back=[pair for back in backs for pair in zip(back.slots, back.blocks, strict=True)],
            tokens=np.concatenate(tokens).astype(np.int32) if tokens else np.empty(0, np.int32),
        )

    def _take_backs(self, limit: int) -> list[Back]:
        """The next `limit` blocks that come back."""
        taken = []
        while self._backs and limit:
            back = self._backs.popleft()
            if len(back.slots) > limit:
                back, rest = back.split(limit)
                self._backs.appendleft(rest)
            taken.append(back)
            limit -= len(back.slots)
        return taken

    def arrived(self, done: MovesDone) -> None:
        """The copies of a plan are done."""
        journey = self._journeys.pop(done.step)
        size = self.costs.block_bytes
        came = sum(len(back.slots) for back in journey.backs)
        if len(journey.outs) * size >= LEAST_BYTES:
            self.costs.out.note(len(journey.outs) * size, done.out_seconds)
        if came * size >= LEAST_BYTES:
            self.costs.back.note(came * size, done.back_seconds)
        for out in journey.outs:
            self.host.arrived(out.key)
            if out.save.to_disk:
                self._write(out.key, out.save)
            self._end_out(out)
        self._end_backs(journey.backs, ok=True)
        self._unwritten = min(self._unwritten + len(journey.outs), self.host.num_slots)
        self.saved += len(journey.outs)
        self.loaded += came

    def _end_out(self, out: Out) -> None:
        out.save.pending -= 1
        self._tables.pool.release([out.block], as_oldest=out.is_idle)

    def _end_backs(self, backs: Sequence[Back], ok: bool) -> None:
        for back in backs:
            self._tables.pool.release(back.blocks)
            self.host.let_go(back.keys)
            back.fetch.ended(back.first, len(back.slots), ok)

    # The disk

    def turn(self) -> None:
        """Take note of what the disk has done, and go on with what waited for it."""
        if self.disk is not None:
            for ticket in self.disk.poll():
                self._end_ticket(ticket)
            self._save_oldest()
            self._dequeue()
        if self._fetches:
            for fetch in self._fetches:
                self._advance(fetch)
            if any(fetch.is_cancelled for fetch in self._fetches):
                cancelled = [back for back in self._backs if back.fetch.is_cancelled]
                self._backs = deque(back for back in self._backs if not back.fetch.is_cancelled)
                self._end_backs(cancelled, ok=False)
            self._fetches = [fetch for fetch in self._fetches if not fetch.is_done]

    def _end_ticket(self, ticket: Ticket) -> None:
        if ticket in self._writes:
            save = self._writes.pop(ticket)
            self._writing.discard(ticket.key)
            self.host.let_go([ticket.key])
            if save is not None:
                save.pending -= 1
                save.lost += not ticket.ok
            return
        if ticket in self._calls:
            self._calls.pop(ticket)(ticket.error)
            return
        fetch, index = self._reads.pop(ticket)
        if ticket.ok:
            assert self.disk is not None
            self.costs.disk.note(self.disk.num_threads * self.costs.block_bytes, ticket.seconds)
            self.host.arrived(ticket.key)
            self._backs.append(Back(fetch, index, self.host.use([ticket.key])))
        else:
            self.host.cancel(ticket.key)
            self._tables.pool.release([fetch.blocks[index]])
            fetch.ended(index, 1, ok=False)

    def call(self, function: Callable[[], object], then: Callable[[Exception | None], object]) -> None:
        """Do something that waits for the disk beside the loop; `then` is told in the loop, with what went wrong."""
        assert self.disk is not None
        self._calls[self.disk.submit_call(function)] = then

    def _write(self, key: bytes, save: Save | None = None) -> None:
        assert self.disk is not None and self._slot_bytes is not None
        if key in self._writing or self.disk.store.has(key):
            return
        self._writing.add(key)
        if save is not None:
            save.pending += 1
        (slot,) = self.host.use([key])
        self._writes[self.disk.submit_write(key, self._slot_bytes(slot))] = save

    def _save_oldest(self) -> None:
        """What host memory would let go next goes to disk, before it must."""
        if self.host.free >= self.host.num_slots // 8 or len(self._writes) >= WRITES_AT_ONCE:
            return
        # As many as have come since: a disk smaller than host memory would be written to for ever.
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

    def forget(self, keys: Sequence[bytes]) -> None:
        """These blocks are not to be used again: what they were computed from was not sound."""
        self.host.discard(keys)
        if self.disk is not None:
            self.disk.store.discard(keys)

    def wait(self, seconds: float, wakes: Sequence[int] = ()) -> None:
        """Sleep until the disk has done something, or one of the files `wakes` can be read."""
        if self._bell is not None and self.waits_for_disk:
            bell = self._bell[0].fileno()
            if bell in sleep_until([bell, *wakes], seconds):
                self._quiet()

    def _ring(self) -> None:
        if self._bell is not None:
            with contextlib.suppress(OSError):  # it is ringing already, or nobody listens any more
                self._bell[1].send(b"!")

    def _quiet(self) -> None:
        assert self._bell is not None
        try:
            while self._bell[0].recv(4096):
                pass
        except BlockingIOError:
            pass

    # When a step failed

    def reset(self) -> None:
        """What plans carried is lost, and what waited for a plan is given up. Reads and writes of the disk go on."""
        outs = [*self._outs, *(out for journey in self._journeys.values() for out in journey.outs)]
        backs = [*self._backs, *(back for journey in self._journeys.values() for back in journey.backs)]
        queued = list(self._queue)
        self._outs.clear()
        self._queue.clear()
        self._backs.clear()
        self._journeys.clear()
        for out in outs:
            self.host.cancel(out.key)
        for out in (*outs, *queued):
            out.save.lost += 1
            self._end_out(out)
        self._end_backs(backs, ok=False)
        for fetch in self._fetches:
            fetch.is_cancelled = True

    def close(self) -> None:
        """End the transfers; what was being written to disk is written."""
        if self.disk is not None:
            self.disk.close()
        if self._bell is not None:
            for end in self._bell:
                end.close()
            self._bell = None
