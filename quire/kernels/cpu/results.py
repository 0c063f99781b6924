"""Memory for large results of kernels, used again when the tensors in it are gone."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

_LARGE = 4 << 20
"""Bytes: what is smaller, malloc keeps by itself."""
_MOST = 16
"""Pieces of memory that are kept."""
_UNUSED = 3
"""References to a piece that no tensor uses: the list's, the loop's and that of the call that counts them."""


class ResultMemory:
    """Allocates results. malloc gives large blocks back to the system when they are freed, and the system clears every
    page again at its next use, which took 15 % of the time of a prompt of 512 (shapes of a model of 1 billion weights).
    """

    def __init__(self) -> None:
        self._pieces: list[mmap.mmap] = []
        self._lock = Lock()
        self._is_off = False

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """As `like.new_empty(shape)`."""
        count = 1
        for size in shape:
            count *= size
        size = count * like.element_size()
        if size < _LARGE or self._is_off:
            return like.new_empty(shape)
        with self._lock:
            memory = self._unused(size)
            # The tensor's storage holds a reference to the memory, for as long as a view of it exists.
            return torch.frombuffer(memory, dtype=like.dtype, count=count).view(shape)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, all memory is torch's: for a recording, which uses it after its tensors are gone."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def _unused(self, size: int) -> mmap.mmap:
        """The smallest piece that is large enough, or a new one."""
        best: mmap.mmap | None = None
        for piece in self._pieces:
            if sys.getrefcount(piece) == _UNUSED and size <= len(piece) < (len(best) if best else sys.maxsize):
                # `best` counts as a reference from here on, but the piece is not looked at again.
                best = piece
        if best is not None:
            return best
        if len(self._pieces) >= _MOST:
            self._pieces.sort(key=len)
            del self._pieces[0]
        made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked child has its own
        if hasattr(mmap, "MADV_HUGEPAGE"):
            made.madvise(mmap.MADV_HUGEPAGE)
        self._pieces.append(made)
        return made
