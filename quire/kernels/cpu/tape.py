"""Records a forward pass and replays it without Python between its kernels: for a CPU what a CUDA graph is for a GPU.

A decode step of a small model is some three hundred native calls, most of microseconds; calling them from Python costs
as much again. The kernels get all arguments through pointers, so a pass over the same memory can be replayed from a
list of calls (`replay.cpp`).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = {torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format}
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.t.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
}


class Tape:
    """Native calls in order, with the memory they use."""

    def __init__(self, replay: Callable[[Any, int], None]) -> None:
        self._replay = replay
        self._calls: list[tuple[int, bytes]] = []
        self._memory: list[torch.Tensor] = []
        self._entries: Any = None

    def recording(self, run: Any) -> Callable[[bytes], None]:
        """`run`, recorded on this tape each time it is called."""
        address = ctypes.cast(run, ctypes.c_void_p).value or 0

        def record(call: bytes) -> None:
            run(call)
            self._calls.append((address, call))

        return record

    def seal(self, memory: list[torch.Tensor]) -> None:
        """End the recording; `memory` is what the calls point into."""
        self._memory = memory
        flat = [word for address, call in self._calls for word in (address, _address_of(call))]
        self._entries = (ctypes.c_void_p * len(flat))(*flat)

    def replay(self) -> None:
        """Repeat all calls."""
        self._replay(self._entries, len(self._calls))


class TapeArena(TorchDispatchMode):
    """Allocates memory that outlives the pass, and records torch operations, which a replay would skip.

    Memory whose tensor is gone is reused, as by an allocator: a pass then stays within a few warm buffers instead of
    touching new memory for every layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[torch.Tensor] = []
        self.torch_ops: list[str] = []
        self._free: dict[int, list[torch.Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler at the first step, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            return self._allocate(result)
        if func in _VIEWS:
            result.viewed = args[0]  # the memory is in use as long as a view of it exists
        else:
            self.torch_ops.append(str(func))
        return result

    def _allocate(self, wanted: torch.Tensor) -> torch.Tensor:
        size = wanted.numel() * wanted.itemsize
        free = self._free.setdefault(size, [])
        if free:
            memory = free.pop()
        else:
            memory = wanted.new_empty(max(size, 1), dtype=torch.uint8)
            self.memory.append(memory)
        tensor = memory[:size].view(wanted.dtype).view(wanted.shape)
        weakref.finalize(tensor, free.append, memory)
        return tensor


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
