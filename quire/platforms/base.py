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

    Tensors may be slices of memory that has their values already (`begin_image`, for `worker/weight_image.py`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._image: np.ndarray | None = None
        self._chunk = np.zeros(0, np.uint8)
        self._used = 0
        self.used = 0
        """Bytes allocated, if all were in one piece."""
        self.held: list[tuple[int, np.ndarray]] = []
        """(where it would be in that piece, bytes) of every tensor, from `begin_image` to `release`."""
        self._holds = False

    def begin_image(self, image: np.ndarray | None) -> None:
        """Before anything is allocated: take tensors from `image`, in order, if there is one, and hold them."""
        self._image, self._holds = image, True

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros."""
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self._device)
        size = math.prod(shape) * dtype.itemsize
        flat = self._take(size)
        if self._holds and size:
            self.held.append((self.used, flat))
        self.used += -(-size // LINE_BYTES) * LINE_BYTES
        return torch.from_numpy(flat).view(dtype).view(shape)

    def _take(self, size: int) -> np.ndarray:
        if self._image is not None and self.used + size <= len(self._image):
            return self._image[self.used : self.used + size]
        if size > len(self._chunk) - self._used:
            self._chunk = np.zeros(max(size, CHUNK_BYTES) + LINE_BYTES, np.uint8)
            self._used = -self._chunk.ctypes.data % LINE_BYTES
        begin = self._used
        self._used += -(-size // LINE_BYTES) * LINE_BYTES
        return self._chunk[begin : begin + size]

    @property
    def places(self) -> dict[int, int]:
        """Where tensors begin, if all were in one piece, by their addresses."""
        return {held.ctypes.data: offset for offset, held in self.held}

    def release(self) -> None:
        """Hold tensors no longer."""
        self.held, self._holds = [], False
