"""Tensors whose raw bytes are in a file, and reading those bytes without mapping the file.

A mapping is read one page fault at a time; `read` moves megabytes per call and releases the GIL.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import torch

from quire.errors import CheckpointError


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor, or of some of its rows, in a file: contiguous bytes."""

    path: Path
    name: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def rows(self, first: int, last: int) -> StoredTensor:
        """The rows from `first` to before `last`."""
        inner = math.prod(self.shape[1:]) * self.dtype.itemsize
        return replace(self, start=self.start + first * inner, shape=(last - first, *self.shape[1:]))

    def flat(self) -> StoredTensor:
        """The same values in one dimension."""
        return replace(self, shape=(self.numel,))

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        """The part that `keep` selects; other rows are not read."""
        rows, keep = kept_rows(self, keep)
        values = torch.empty(rows.shape, dtype=rows.dtype)
        with RangeReader() as reader:
            reader.fill(as_bytes(values), rows)
        return values[keep]


def kept_rows(stored: StoredTensor, keep: tuple[slice, ...]) -> tuple[StoredTensor, tuple[slice, ...]]:
    """The rows that contain what `keep` selects, and the selection within them."""
    if not keep or not stored.shape:
        return stored, keep
    first, last, step = keep[0].indices(stored.shape[0])
    rest = keep[1:] if step == 1 else (slice(None, None, step), *keep[1:])
    if step == 1 and rest:
        rest = (slice(None), *rest)
    return stored.rows(first, max(first, last)), rest


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


class RangeReader:
    """Reads byte ranges of files. Keeps one file open: the next range is nearly always in the same file."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._path: Path | None = None

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._path = None

    def fill(self, memory: torch.Tensor, stored: StoredTensor, offset: int = 0) -> None:
        """Fill `memory` (host bytes) with the stored bytes from `offset` on."""
        view = memory.numpy().data
        try:
            file = self._open(stored.path)
            file.seek(stored.start + offset)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise EOFError(f"the file ends {len(view) - done} bytes too early")
                done += count
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{stored.path}: the tensor {stored.name!r} cannot be read: {error}") from error

    def _open(self, path: Path) -> FileIO:
        if self._file is None or path != self._path:
            self.close()
            self._file, self._path = FileIO(path), path
            if hasattr(os, "posix_fadvise"):  # Linux then doubles its read-ahead.
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._file
