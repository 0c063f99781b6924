"""Files saved by torch.save (pytorch_model.bin). Only tensors are unpickled, never code."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import torch

from quire.errors import CheckpointError
from quire.loading.file_checkpoint import REOPEN_AFTER


class TorchFile:
    """The tensors of one file. The file is unmapped and mapped again from time to time, to release its pages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # The format before torch 1.6 is not a zip archive and cannot be mapped: it is read once and kept.
        self._mapped = zipfile.is_zipfile(path)
        self._tensors: dict[str, torch.Tensor] | None = None
        self._since_open = 0

    def close(self) -> None:
        if self._mapped:
            self._tensors = None
            self._since_open = 0

    def names(self) -> list[str]:
        return list(self._open())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open()[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._open()[name].dtype

    def read(self, name: str, keep: tuple[slice, ...]) -> torch.Tensor:
        if self._since_open > REOPEN_AFTER:
            self.close()
        part = self._open()[name][keep]
        self._since_open += part.numel() * part.element_size()
        return part

    def stored(self, name: str) -> None:
        """None: the bytes are in a zip archive of pickles."""

    def _open(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            self._tensors = self._load()
        return self._tensors

    def _load(self) -> dict[str, torch.Tensor]:
        try:
            loaded = torch.load(self.path, map_location="cpu", weights_only=True, mmap=self._mapped)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{self.path}: refused: it contains more than tensors, or is damaged ({str(error).splitlines()[0]}). "
                "Convert it to safetensors on a machine you trust"
            ) from error
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.path}: damaged or unreadable weight file: {error}") from error
        if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
            loaded = loaded["state_dict"]
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()
        ):
            raise CheckpointError(f"{self.path}: not a dictionary of named tensors")
        return loaded
