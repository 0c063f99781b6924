"""Memory for large results of kernels, used again when the tensors in it are gone."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch

_LARGE = 4 << 20
"""Bytes: what is smaller, malloc keeps by itself…"""
_LARGEST = 256 << 20
"""…and what is larger is rare, such as the logits of a whole prompt: to keep it would cost more than it saves."""
_MOST = 16
"""Pieces of memory that are kept."""


def _references(pieces: Sequence[mmap.mmap]) -> list[int]:
    return [sys.getrefcount(piece) for piece in pieces]


_UNUSED = _references([mmap.mmap(-1, 1)])[0]
"""References to a piece that no tensor uses, as `_references` counts them: since Python 3.14 a variable that is an
argument of a call is not counted again."""


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
        if not _LARGE <= size <= _LARGEST or self._is_off:
            return like.new_empty(shape)
        with self._lock:
            try:
                memory = self._unused(size)
            except OSError:  # there is none: torch's error for that is known to callers
                return like.new_empty(shape)
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
        counts = _references(self._pieces)
        unused = [i for i, count in enumerate(counts) if count == _UNUSED and size <= len(self._pieces[i])]
        if unused:
            return self._pieces[min(unused, key=lambda i: len(self._pieces[i]))]
        if len(self._pieces) >= _MOST:
            self._pieces.sort(key=len)
            del self._pieces[0]
        made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked child has its own
        if hasattr(mmap, "MADV_HUGEPAGE"):
            made.madvise(mmap.MADV_HUGEPAGE)
        self._pieces.append(made)
        return made
