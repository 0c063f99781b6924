"""A forward pass recorded once and replayed without Python between its kernels.

A decode step of a small model is some three hundred native calls of which most take microseconds; calling them from
Python costs as much again. The kernels get everything through pointers, so a pass over the same memory can be run
from a list of them. It is to a CPU what a captured graph is to a GPU.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATE = {torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format}
_VIEW = {
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
        """`run`, which writes itself down on this tape each time it is called."""
        address = ctypes.cast(run, ctypes.c_void_p).value or 0

        def record(call: bytes) -> None:
            run(call)
            self._calls.append((address, call))

        return record

    def seal(self, memory: list[torch.Tensor]) -> None:
        """Recording is over; `memory` is what the calls point into."""
        self._memory = memory
        flat = [word for address, call in self._calls for word in (address, _address_of(call))]
        self._entries = (ctypes.c_void_p * len(flat))(*flat)

    def replay(self) -> None:
        """Make all calls again."""
        self._replay(self._entries, len(self._calls))


class TapeArena(TorchDispatchMode):
    """Gives out memory that stays, and takes note of torch operations, which a replay would leave out.

    Memory whose tensor is gone is given out again, as an allocator would: a pass then stays within a few warm buffers
    instead of touching new memory for every layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[torch.Tensor] = []
        self.foreign: list[str] = []
        self._free: dict[int, list[torch.Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; otherwise torch imports its compiler at the first step, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATE:
            return self._place(result)
        if func in _VIEW:
            result.viewed = args[0]  # the memory is in use as long as somebody looks at it
        else:
            self.foreign.append(str(func))
        return result

    def _place(self, wanted: torch.Tensor) -> torch.Tensor:
        size = wanted.numel() * wanted.itemsize
        free = self._free.setdefault(size, [])
        if free:
            memory = free.pop()
        else:
            memory = wanted.new_empty(max(size, 1), dtype=torch.uint8)
            self.memory.append(memory)
        placed = memory[:size].view(wanted.dtype).view(wanted.shape)
        weakref.finalize(placed, free.append, memory)
        return placed


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
