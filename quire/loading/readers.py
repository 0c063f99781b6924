"""Reads tensors from files into their targets with several threads, at the speed of the disk.

Tensors are split into pieces (`LoadPiece`). A thread that waits for the disk, or copies from the page cache, holds no
lock: several threads keep the disk's queue full and copy faster than one core. On the way to a GPU, bytes pass through
page-locked buffers, which the GPU copies from while the thread reads on; the GPU also converts and slices.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Protocol

import torch

from quire.errors import CheckpointError
from quire.loading.stored_tensor import RangeReader, StoredTensor, as_bytes, kept_rows
from quire.loading.weights import Target

THREADS = 16
PIECE_BYTES = 8 << 20
"""Work of a thread at a time: a long enough read for any disk, short enough that all threads end together."""
SLOTS, SLOT_BYTES = 2, 4 << 20
"""Page-locked buffers of each thread: the thread reads into one while the GPU copies from the other."""
LARGE_ROWS_BYTES = 256 << 20
"""Most bytes in memory, over all threads, of rows that are larger than a piece."""


class Reader(Protocol):
    """Reads pieces into the memory of one device. Used by one thread at a time."""

    def read(self, piece: LoadPiece) -> None:
        """Start to fill the piece's targets; they are filled when `close` has returned."""
        ...

    def close(self) -> None: ...


def read_pieces(pieces: Sequence[LoadPiece], done: Callable[[int], None]) -> None:
    """Fill all targets. `done` is called, in this thread, with the size of each piece that has been read.

    The first error stops the other threads, and is raised once they have ended.
    """
    by_place = sorted(pieces, key=lambda piece: (str(piece.device), piece.rows.path, piece.rows.start))
    for device, group in itertools.groupby(by_place, key=lambda piece: piece.device):
        _read_onto(device, list(group), done)


def _read_onto(device: torch.device, pieces: Sequence[LoadPiece], done: Callable[[int], None]) -> None:
    count = min(_threads(device), len(pieces))
    large = ByteBudget(LARGE_ROWS_BYTES)
    idle: SimpleQueue[Reader] = SimpleQueue()

    @torch.no_grad()
    def read(piece: LoadPiece) -> int:
        reader = idle.get()
        try:
            with large.reserve(_large_bytes(piece)):
                reader.read(piece)
        finally:
            idle.put(reader)
        return piece.size

    with ExitStack() as readers, ThreadPoolExecutor(count, "load") as threads:
        for _ in range(count):
            reader = _reader(device)
            readers.callback(reader.close)
            idle.put(reader)
        try:
            for future in as_completed([threads.submit(read, piece) for piece in pieces]):
                done(future.result())
        except BaseException:  # Ctrl-C too: reads in progress are a few megabytes each; no other may start.
            threads.shutdown(cancel_futures=True)
            raise


def _threads(device: torch.device) -> int:
    """Enough to keep a disk's queue full; on a CPU, where copying is most of the work, about as many as cores."""
    return THREADS if device.type == "cuda" else min(THREADS, max(4, os.cpu_count() or 1))


def _large_bytes(piece: LoadPiece) -> int:
    return piece.rows.nbytes if piece.direct is None and piece.rows.nbytes > PIECE_BYTES else 0


def _reader(device: torch.device) -> Reader:
    return CudaReader(device) if device.type == "cuda" else HostReader()


class HostReader:
    """Reads into host memory: directly into the target, or into a buffer that is then converted and sliced."""

    def __init__(self) -> None:
        self._source = RangeReader()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        self._source.close()

    def read(self, piece: LoadPiece) -> None:
        place = piece.direct
        if place is not None and place.device.type == "cpu":
            self._source.fill(as_bytes(place), piece.rows)
            return
        memory = self._memory(piece.rows)
        self._source.fill(memory, piece.rows)
        piece.place(memory.view(piece.rows.dtype).view(piece.rows.shape))

    def _memory(self, rows: StoredTensor) -> torch.Tensor:
        """A buffer for the rows; reused for the next piece unless it is large."""
        if rows.nbytes > PIECE_BYTES:
            # From the system, so that it is returned at once: the allocator would keep it after a thread frees it.
            return torch.frombuffer(mmap.mmap(-1, rows.nbytes), dtype=torch.uint8)
        if rows.nbytes > len(self._buffer):
            self._buffer = torch.empty(rows.nbytes, dtype=torch.uint8)
        return self._buffer[: rows.nbytes]


class CudaReader:
    """Reads into page-locked buffers, alternating; its own CUDA stream copies from them to the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._source = RangeReader()
        self._stream = torch.cuda.Stream(device)
        # The targets may still be being initialized.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._slots = itertools.cycle([_Slot() for _ in range(SLOTS)])

    def close(self) -> None:
        self._stream.synchronize()
        self._source.close()

    def read(self, piece: LoadPiece) -> None:
        with torch.cuda.stream(self._stream):
            place = piece.direct
            if place is not None:
                self._copy(piece.rows, place)
                return
            rows = torch.empty(piece.rows.shape, dtype=piece.rows.dtype, device=piece.device)
            self._copy(piece.rows, rows)
            piece.place(rows)

    def _copy(self, rows: StoredTensor, place: torch.Tensor) -> None:
        place = as_bytes(place)
        for start in range(0, len(place), SLOT_BYTES):
            part = place[start : start + SLOT_BYTES]
            slot = next(self._slots)
            self._source.fill(slot.free(len(part)), rows, start)
            part.copy_(slot.memory[: len(part)], non_blocking=True)
            slot.fetched.record(self._stream)


class _Slot:
    """A page-locked buffer, allocated on first use."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.fetched = torch.cuda.Event(blocking=True)

    def free(self, size: int) -> torch.Tensor:
        """Its first `size` bytes, after waiting for the last copy from them."""
        if not len(self.memory):
            self.memory = torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=True)
        self.fetched.synchronize()
        return self.memory[:size]


class ByteBudget:
    """Limits the bytes that all threads hold together. A reservation larger than the budget runs alone."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, wanted: int) -> Iterator[None]:
        wanted = min(wanted, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()


@dataclass(frozen=True)
class LoadPiece:
    """Rows that are read once, and the targets filled from them. A target's `keep` is relative to these rows."""

    rows: StoredTensor
    targets: tuple[Target, ...]

    @property
    def size(self) -> int:
        """Bytes of the targets."""
        return sum(target.into.nbytes for target in self.targets)

    @property
    def device(self) -> torch.device:
        return self.targets[0].into.device

    @property
    def direct(self) -> torch.Tensor | None:
        """The target's memory, if the rows can be read into it without conversion; else None."""
        target = self.targets[0]
        same = target.into.dtype == self.rows.dtype and target.into.is_contiguous()
        plain = not target.keep and target.arrange is None
        return target.into if same and plain and len(self.targets) == 1 else None

    def place(self, rows: torch.Tensor) -> None:
        """Copy each target's part of the rows, which have the file's dtype and may be on the target's device."""
        for target in self.targets:
            copy_part(rows[target.keep], target, self.rows.name)


def copy_part(part: torch.Tensor, target: Target, name: str) -> None:
    """Arrange the kept part of the tensor `name` and copy it into its target."""
    arranged = part if target.arrange is None else target.arrange(part)
    _check_shape(tuple(arranged.shape), target, name)
    target.into.copy_(arranged)


def split_tensor(stored: StoredTensor, targets: Sequence[Target]) -> Iterator[LoadPiece]:
    """Split the load of a tensor into pieces.

    A plain copy is split by rows. A target with `arrange` needs its whole part: one piece, shared by all targets that
    are arranged from the same rows.
    """
    whole: dict[tuple[int, tuple[int, ...]], LoadPiece] = {}
    for target in targets:
        rows, keep = kept_rows(stored, target.keep)
        here = replace(target, keep=keep)
        if target.arrange is None and rows.shape and (not keep or keep[0] == slice(None)):
            yield from _cut_rows(rows, here)
        else:
            key = (rows.start, rows.shape)
            before = whole[key].targets if key in whole else ()
            whole[key] = LoadPiece(rows, (*before, here))
    yield from whole.values()


def _cut_rows(rows: StoredTensor, target: Target) -> Iterator[LoadPiece]:
    _check_shape(_kept_shape(rows.shape, target.keep), target, rows.name)
    if not target.into.numel():
        return
    if not target.keep and target.into.is_contiguous():
        rows, target = rows.flat(), replace(target, into=target.into.view(-1))
    step = max(1, PIECE_BYTES // rows.rows(0, 1).nbytes)
    if rows.shape[0] <= step:
        yield LoadPiece(rows, (target,))
        return
    for first in range(0, rows.shape[0], step):
        last = min(first + step, rows.shape[0])
        yield LoadPiece(rows.rows(first, last), (replace(target, into=target.into[first:last]),))


def _kept_shape(shape: tuple[int, ...], keep: tuple[slice, ...]) -> tuple[int, ...]:
    kept = (len(range(*part.indices(size))) for part, size in zip(keep, shape, strict=False))
    return (*kept, *shape[len(keep) :])


def _check_shape(shape: tuple[int, ...], target: Target, name: str) -> None:
    if shape != tuple(target.into.shape):
        raise CheckpointError(f"the kept part of {name!r} has shape {shape}, its target {tuple(target.into.shape)}")
