"""Checkpoints of one or more files (shards) with named tensors, independent of the file format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from quire.errors import CheckpointError, ModelNotFoundError
from quire.loading.files import ModelFiles, read_json
from quire.loading.stored_tensor import StoredTensor

REOPEN_AFTER = 256 << 20
"""Bytes after which a mapped file is closed and mapped again: its pages count as memory of this process until then.
Keeps the peak of a load near the model's own size."""


class TensorFile(Protocol):
    """One file of a checkpoint. Opens itself on first use, and again after `close`."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, keep: tuple[slice, ...]) -> torch.Tensor: ...

    def stored(self, name: str) -> StoredTensor | None:
        """Where the tensor's bytes are, if the file stores them unencoded."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class FileWeight:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    _file: TensorFile = field(repr=False)

    @property
    def dtype(self) -> torch.dtype:
        return self._file.dtype(self.name)

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor, or the part that `keep` selects; the rest is not read."""
        return self._file.read(self.name, keep)

    @property
    def stored(self) -> StoredTensor | None:
        return self._file.stored(self.name)


@dataclass(frozen=True)
class Shards:
    """The files of a checkpoint. With an index, `expected` maps each tensor to its file."""

    files: tuple[Path, ...]
    expected: dict[str, Path] | None = None

    def owned(self, path: Path, names: list[str]) -> list[str]:
        """The tensors to read from this file: with an index, only those it assigns to the file."""
        if self.expected is None:
            return names
        present = set(names)
        lacking = [name for name, file in self.expected.items() if file == path and name not in present]
        if lacking:
            raise CheckpointError(
                f"{path}: the index lists {len(lacking)} tensors that this file lacks: {', '.join(lacking[:5])}"
            )
        return [name for name in names if self.expected.get(name) == path]


class FileCheckpoint:
    """The tensors of all files. Headers are checked on construction, tensors are read on demand."""

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


def find_shards(files: ModelFiles, kind: str) -> Shards:
    """The weight files of one kind (safetensors or pt)."""
    index = files.weight_index(kind)
    if index is not None:
        return _from_index(index)
    found = files.weight_files(kind)
    if not found:
        raise ModelNotFoundError(f"{files.path} has no {kind} weights")
    return Shards(found)


def _from_index(index: Path) -> Shards:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{index}: 'weight_map' is missing or empty")
    expected: dict[str, Path] = {}
    for name, file in mapping.items():
        # A name from a downloaded file becomes a path: it must stay in this folder.
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", "..") or "\0" in file:
            raise CheckpointError(f"{index}: the tensor {name!r} is mapped to {file!r}, which is not a plain file name")
        expected[name] = index.parent / file
    shards = tuple(sorted(set(expected.values())))
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of {len(shards)} weight files are missing: {', '.join(missing[:5])} "
            "(an unfinished download?)"
        )
    return Shards(shards, expected)
