"""Memory for weights and cache."""

from __future__ import annotations

import math

import numpy as np
import torch

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
