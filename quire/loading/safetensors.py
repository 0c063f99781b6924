"""Files in the safetensors format, read slice by slice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.errors import CheckpointError
from quire.loading.shards import REOPEN_AFTER


class SafetensorsFile:
    """An open file that lets go of the pages it has read every now and then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: Any = None
        self._since_open = 0

    def close(self) -> None:
        self._handle = None
        self._since_open = 0

    def names(self) -> list[str]:
        return list(self._open().keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open().get_slice(name).get_shape())

    def read(self, name: str, keep: tuple[slice, ...]) -> torch.Tensor:
        if self._since_open > REOPEN_AFTER:
            self.close()
        handle = self._open()
        try:
            tensor: torch.Tensor = handle.get_slice(name)[keep] if keep else handle.get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path}: the tensor {name!r} cannot be read: {error}") from error
        self._since_open += tensor.numel() * tensor.element_size()
        return tensor

    def _open(self) -> Any:
        if self._handle is None:
            try:
                self._handle = safe_open(self.path, framework="pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(f"{self.path}: damaged or unreadable safetensors file: {error}") from error
        return self._handle
