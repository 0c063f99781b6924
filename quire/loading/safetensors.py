"""Files in the safetensors format: eight bytes of length, a JSON header, and the tensors' raw bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.errors import CheckpointError
from quire.loading.stored_tensor import StoredTensor

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


class SafetensorsFile:
    """The tensors of one safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, dict[str, Any]] | None = None
        self._start = 0

    def close(self) -> None:
        """Does nothing: no file stays open, and the header is small."""

    def names(self) -> list[str]:
        return list(self._header())

    def dtypes(self) -> dict[str, str]:
        """The header's name of each tensor's dtype: BF16, F8_E4M3."""
        return {name: entry["dtype"] for name, entry in self._header().items()}

    def dtype(self, name: str) -> torch.dtype:
        return self.stored(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header()[name]["shape"])

    def stored(self, name: str) -> StoredTensor:
        entry = self._header()[name]
        dtype = getattr(torch, _DTYPES.get(entry["dtype"], ""), None)
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: the tensor {name!r} cannot be read: its dtype {entry['dtype']} is not supported"
            )
        return StoredTensor(self.path, name, self._start + entry["data_offsets"][0], tuple(entry["shape"]), dtype)

    def read(self, name: str, keep: tuple[slice, ...]) -> torch.Tensor:
        return self.stored(name).read(keep)

    def _header(self) -> dict[str, dict[str, Any]]:
        if self._entries is None:
            try:
                # The safetensors library checks lengths, offsets and shapes against each other and the file's size.
                with safe_open(self.path, framework="pt"):
                    pass
                with self.path.open("rb") as file:
                    (length,) = struct.unpack("<Q", file.read(8))
                    header = json.loads(file.read(length))
            except (SafetensorError, OSError, ValueError, struct.error) as error:
                raise CheckpointError(f"{self.path}: damaged or unreadable safetensors file: {error}") from error
            header.pop("__metadata__", None)
            self._entries, self._start = header, 8 + length
        return self._entries
