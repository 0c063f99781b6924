"""Checkpoints spread over files that hold named tensors, whatever the files' format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from quire.errors import CheckpointError
from quire.loading.shards import Shards
from quire.loading.stored import Stored


class TensorFile(Protocol):
    """One file of a checkpoint. It opens itself when it is asked something, again after `close`."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, keep: tuple[slice, ...]) -> torch.Tensor: ...

    def stored(self, name: str) -> Stored | None:
        """Where the tensor's bytes lie, in files that hold them plain."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class FileWeight:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    _file: TensorFile = field(repr=False)

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor, or the part that `keep` selects; the rest of it is left in the file."""
        return self._file.read(self.name, keep)

    @property
    def stored(self) -> Stored | None:
        return self._file.stored(self.name)


class FileCheckpoint:
    """The tensors of all files. Headers are checked now, tensors are read when they are wanted."""

    def __init__(self, shards: Shards, open_file: Callable[[Path], TensorFile]) -> None:
        self._weights: dict[str, FileWeight] = {}
        for path in shards.files:
            file = open_file(path)
            for name in shards.owned(path, file.names()):
                if name in self._weights:
                    raise CheckpointError(f"{path}: the tensor {name!r} is also in another file of this checkpoint")
                self._weights[name] = FileWeight(name, file.shape(name), file)
            file.close()

    def __iter__(self) -> Iterator[FileWeight]:
        return iter(self._weights.values())

    def __len__(self) -> int:
        return len(self._weights)
