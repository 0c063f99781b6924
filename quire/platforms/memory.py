"""Memory for weights and cache."""

from __future__ import annotations

import math

import numpy as np
import torch

CHUNK = 64 * 2**20
LINE = 64


class MemoryArena:
    """Zeros for tensors that live long.

    On a CPU they are cut from large chunks. numpy takes these from calloc, so that pages cost nothing until they are
    written, and asks for huge pages: a decode reads every weight, and with small pages would walk the page tables for
    each 4 KB of them (8% of a step). A chunk is given back when the last tensor in it is gone.
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
            self._chunk = np.zeros(max(size, CHUNK) + LINE, np.uint8)
            self._used = -self._chunk.ctypes.data % LINE
        begin = self._used
        self._used += -(-size // LINE) * LINE
        return torch.from_numpy(self._chunk[begin : begin + size]).view(dtype).view(shape)
