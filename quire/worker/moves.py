"""Copies of blocks between the device's cache and pinned host memory, concurrent with the device's computation."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.messages.plan import Moves, MovesDone
from quire.messages.shared_memory import map_shared
from quire.worker.kv import KVCache
from quire.worker.page_copies import PageCopies, WholePages

STAGING_SLOTS = 64
"""Slots for blocks on their way to disk and back, if host memory keeps no blocks itself."""
TRIAL_BYTES = 64 << 20
"""Bytes copied each way when the transfer rates are measured."""
_PORTABLE = 1
"""cudaHostRegisterPortable: locked for every CUDA context, not only the current one."""


def host_slots(config: EngineConfig, slot_bytes: int) -> int:
    """Blocks that fit into the configured host memory; with a disk tier, at least enough to stage its blocks."""
    slots = int(config.swap_space * 2**30) // slot_bytes
    return max(slots, STAGING_SLOTS) if config.kv_disk is not None else slots


@dataclass(frozen=True)
class HostTierInfo:
    """The host tier, for the planning half."""

    num_slots: int
    slot_bytes: int
    """Bytes of a block, over all ranks."""
    out_rate: float
    """Bytes per second, device to host…"""
    back_rate: float
    """…and host to device."""
    slot: Callable[[int], memoryview] | None = None
    """A slot's bytes; None if they are in other processes."""


class HostMemory:
    """Slots for blocks in host memory, pinned if the device is a GPU: page-locking gigabytes takes a second or two, so
    a thread does it while the model is loaded."""

    def __init__(
        self, num_slots: int, slot_bytes: int, pinned: bool, open_memory: Callable[[], torch.Tensor] | None = None
    ) -> None:
        """`open_memory`: returns the memory, [slots, bytes]; None: new memory is allocated."""
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self._pinned = pinned
        self._open = open_memory or self._make
        self._data: torch.Tensor | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._allocate, name="host-tier", daemon=True)
        self._thread.start()

    def _allocate(self) -> None:
        try:
            self._data = self._open()
        except BaseException as error:
            self._failure = error

    def _make(self) -> torch.Tensor:
        return torch.empty((self.num_slots, self.slot_bytes), dtype=torch.uint8, pin_memory=self._pinned)

    @property
    def data(self) -> torch.Tensor:
        """[slots, bytes]."""
        self._thread.join()
        if self._failure is not None:
            size = self.num_slots * self.slot_bytes / 2**30
            raise ConfigError(
                f"{size:.1f} GiB of host memory for KV blocks cannot be allocated: {self._failure}. Lower swap_space",
                "swap_space",
            ) from self._failure
        assert self._data is not None
        return self._data

    def slot(self, number: int) -> memoryview:
        """A slot's bytes."""
        return self.data[number].numpy().data


def open_shared_part(
    descriptor: int, slots: int, slot_bytes: int, offset: int, part_bytes: int, device: torch.device
) -> torch.Tensor:
    """A rank's part of every slot, [slots, part_bytes], of host memory that all ranks of a machine share.

    A slot is a block's parts, one rank's after another, so that the engine reads a whole block in one piece to write it
    to disk. The memory is the file behind an inherited `descriptor`. `slot_bytes`: of all parts together; `offset`:
    where this part begins; `device`: the one that copies to and from it.
    """
    whole = torch.frombuffer(map_shared(os.dup(descriptor)), dtype=torch.uint8)
    if device.type == "cuda":
        with torch.cuda.device(device):
            _pin(whole)
    return whole[: slots * slot_bytes].view(slots, slot_bytes)[:, offset : offset + part_bytes]


def _pin(memory: torch.Tensor) -> None:
    """Page-lock the memory, so that the device copies asynchronously. Every rank does this for its own device."""
    failed = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)
    if int(failed):
        raise RuntimeError(f"the driver cannot lock {memory.numel() / 2**30:.1f} GiB of shared memory ({failed})")


class Mover:
    """Copies the blocks of plans' moves on two streams, out and back, so that both directions run at once."""

    def __init__(self, kv: KVCache, memory: HostMemory, copies: PageCopies | None = None) -> None:
        """`copies`: what copies the pages; None: they are kept as they are."""
        self._kv = kv
        self.memory = memory
        self._copies = copies or WholePages(kv.geometry)
        self._copies.connect(kv, memory.data)
        self._device = kv.data.device
        self._on_gpu = self._device.type == "cuda"
        self._done: list[MovesDone] = []
        self._pending: deque[tuple[int, Any, Any]] = deque()
        if self._on_gpu:
            self._out, self._back = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)

    def start(self, step: int, moves: Moves) -> None:
        """Start the copies of a plan; they read what all launched steps have written."""
        if self._on_gpu:  # the copies first, which take longest
            self._pending.append((step, *self._launch(moves)))
        if moves.back and self._kv.has_tokens and len(moves.tokens):
            blocks = [block for _, block in moves.back]
            ids = torch.from_numpy(moves.tokens.reshape(len(blocks), -1))
            if self._on_gpu:
                ids = ids.pin_memory().to(self._device, non_blocking=True)
            self._kv.tokens[torch.tensor(blocks).to(self._device, non_blocking=True)] = ids
        if self._on_gpu:
            return
        times = []
        for copy, pairs in ((self._copies.out, moves.out), (self._copies.back, moves.back)):
            begin = time.perf_counter()
            copy(pairs)
            times.append(time.perf_counter() - begin)
        self._done.append(MovesDone(step, *times))

    def make_steps_wait(self) -> None:
        """Steps launched after this wait until all copies back to the device are done."""
        if self._on_gpu:
            torch.cuda.current_stream().wait_stream(self._back)

    def _launch(self, moves: Moves) -> tuple[Any, Any]:
        now = torch.cuda.Event()
        now.record()
        return (
            self._timed(self._out, now, self._copies.out, moves.out),
            self._timed(self._back, now, self._copies.back, moves.back),
        )

    def _timed(
        self,
        stream: torch.cuda.Stream,
        after: torch.cuda.Event,
        copy: Callable[[list[tuple[int, int]]], None],
        pairs: list[tuple[int, int]],
    ) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        if not pairs:
            return None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            begin.record()
            copy(pairs)
            end.record()
        return begin, end

    @property
    def can_report(self) -> bool:
        """Whether there are finished copies to report, or none in progress."""
        return bool(self._done) or not self._pending or _is_over(self._pending[0])

    def take_done(self) -> list[MovesDone]:
        """Copies finished since the last call."""
        while self._pending and _is_over(self._pending[0]):
            step, *timers = self._pending.popleft()
            self._done.append(MovesDone(step, *(_seconds(timer) for timer in timers)))
        done, self._done = self._done, []
        return done

    def forget(self) -> None:
        """Drop copies in progress. The caller has waited for the device."""
        self._pending.clear()
        self._done = []

    def tier_info(self) -> HostTierInfo:
        """The tier, with measured transfer rates."""
        return HostTierInfo(self.memory.num_slots, self.memory.slot_bytes, *self.measure(), self.memory.slot)

    def measure(self) -> tuple[float, float]:
        """Bytes per second out and back, measured by copying blocks that are still empty."""
        size = self.memory.slot_bytes
        count = max(1, min(TRIAL_BYTES // size, self._kv.num_blocks - 1, self.memory.num_slots))
        pairs = [(i, i) for i in range(count)]
        tokens = np.zeros(count * self._kv.block_size, np.int32)
        best = [0.0, 0.0]
        for _ in range(3):
            self.start(-1, Moves(out=pairs, back=pairs, tokens=tokens))
            if self._on_gpu:
                torch.cuda.synchronize(self._device)
            for done in self.take_done():
                for way, seconds in enumerate((done.out_seconds, done.back_seconds)):
                    best[way] = max(best[way], count * size / max(seconds, 1e-9))
        return best[0], best[1]


def _is_over(pending: tuple[int, Any, Any]) -> bool:
    return all(timer is None or timer[1].query() for timer in pending[1:])


def _seconds(timer: tuple[torch.cuda.Event, torch.cuda.Event] | None) -> float:
    return 0.0 if timer is None else timer[0].elapsed_time(timer[1]) / 1000
