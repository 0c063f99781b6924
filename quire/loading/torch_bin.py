"""Checkpoints saved by torch.save (pytorch_model.bin). Only tensors are unpickled: never code."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quire.errors import CheckpointError
from quire.loading.shards import REOPEN_AFTER, Shards


class TorchCheckpoint:
    """Tensors of torch.save files, memory-mapped where the file's format allows it."""

    def __init__(self, shards: Shards) -> None:
        self._weights: dict[str, TorchWeight] = {}
        for path in shards.files:
            file = _File(path)
            tensors = file.tensors()
            for name in shards.owned(path, list(tensors)):
                if name in self._weights:
                    raise CheckpointError(f"{path}: the tensor {name!r} is also in another file of this checkpoint")
                self._weights[name] = TorchWeight(name, tuple(tensors[name].shape), file)
            file.close()

    def __iter__(self) -> Iterator[TorchWeight]:
        return iter(self._weights.values())

    def __len__(self) -> int:
        return len(self._weights)


@dataclass(frozen=True)
class TorchWeight:
    """One tensor of a torch.save file."""

    name: str
    shape: tuple[int, ...]
    _file: _File = field(repr=False)

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor, or the part that `keep` selects; a mapped file's other pages are not touched."""
        return self._file.read(self.name, keep)


class _File:
    """A file's dictionary of tensors, dropped and mapped again every now and then to give back its pages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # The format before torch 1.6 is no zip archive and cannot be mapped: read once, then kept.
        self._mapped = zipfile.is_zipfile(path)
        self._tensors: dict[str, torch.Tensor] | None = None
        self._since_open = 0

    def close(self) -> None:
        if self._mapped:
            self._tensors = None
            self._since_open = 0

    def read(self, name: str, keep: tuple[slice, ...]) -> torch.Tensor:
        if self._since_open > REOPEN_AFTER:
            self.close()
        part = self.tensors()[name][keep]
        self._since_open += part.numel() * part.element_size()
        return part

    def tensors(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            self._tensors = self._load()
        return self._tensors

    def _load(self) -> dict[str, torch.Tensor]:
        try:
            loaded = torch.load(self.path, map_location="cpu", weights_only=True, mmap=self._mapped)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{self.path}: refused: it holds more than tensors, or is damaged ({str(error).splitlines()[0]}). "
                "Convert it to safetensors in a place you trust"
            ) from error
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.path}: damaged or unreadable weight file: {error}") from error
        if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
            loaded = loaded["state_dict"]
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()
        ):
            raise CheckpointError(f"{self.path}: is not a dictionary of named tensors")
        return loaded
