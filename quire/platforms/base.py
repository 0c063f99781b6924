"""What a platform implements."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from quire.errors import QuireError


class PlatformUnavailableError(QuireError):
    """A device cannot be used on this machine; the message says why."""

    def __init__(self, why: str, is_expected: bool = False) -> None:
        """`is_expected`: the device seems to be installed, so that the user is warned why it is not used."""
        super().__init__(why)
        self.is_expected = is_expected


class Platform(Protocol):
    """A kind of device: its memory, its kernels, and the default limits that suit it.

    Constructed without arguments; raises `PlatformUnavailableError` if this machine has no such device.
    """

    device: torch.device
    ops: str
    """Dotted path of the kernels."""
    attention: str
    """Attention backend used if none is configured."""
    collectives: str
    """The torch.distributed backend its ranks communicate with."""
    pipeline_depth: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def has_bfloat16(self) -> bool:
        """Whether bfloat16 products run in hardware."""
        ...

    def describe(self) -> str:
        """The device in a few words."""
        ...

    def free_memory(self) -> int:
        """Bytes that can be allocated now."""
        ...

    def total_memory(self) -> int:
        """Bytes the device has."""
        ...


CHUNK_BYTES = 64 * 2**20
LINE_BYTES = 64


class MemoryArena:
    """Allocates zeroed tensors that live as long as the engine.

    On a CPU they are slices of large chunks. numpy takes these from calloc, so that pages cost nothing until they are
    written, and asks for huge pages: a decode reads every weight, and with small pages would walk the page tables for
    each 4 KB of them (8% of a step). A chunk is freed with the last tensor in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunk = np.zeros(0, np.uint8)
        self._used = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros."""
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self._device)
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._chunk) - self._used:
            self._chunk = np.zeros(max(size, CHUNK_BYTES) + LINE_BYTES, np.uint8)
            self._used = -self._chunk.ctypes.data % LINE_BYTES
        begin = self._used
        self._used += -(-size // LINE_BYTES) * LINE_BYTES
        return torch.from_numpy(self._chunk[begin : begin + size]).view(dtype).view(shape)
