"""Files in the safetensors format: eight bytes of length, a JSON header, and the tensors' raw bytes."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.errors import CheckpointError
from quire.loading.bundle import locate
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


MOST_HEADER_BYTES = 100 << 20
"""The library's own limit."""


class SafetensorsFile:
    """The tensors of one safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, dict[str, Any]] | None = None
        self._start = 0
        self._file = path
        """Where the bytes are: the file itself, or a bundle."""

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
        return StoredTensor(self._file, name, self._start + entry["data_offsets"][0], tuple(entry["shape"]), dtype)

    def read(self, name: str, keep: tuple[slice, ...]) -> torch.Tensor:
        return self.stored(name).read(keep)

    def _header(self) -> dict[str, dict[str, Any]]:
        if self._entries is None:
            try:
                place = locate(self.path)
                if place.start == 0:
                    # The library checks lengths, offsets and shapes against each other and the file's size.
                    with safe_open(self.path, framework="pt"):
                        pass
                with place.path.open("rb") as file:
                    file.seek(place.start)
                    (length,) = struct.unpack("<Q", file.read(8))
                    if length > min(place.size - 8, MOST_HEADER_BYTES):
                        raise ValueError(f"a header of {length:,} bytes in a file of {place.size:,}")
                    header = json.loads(file.read(length))
                header.pop("__metadata__", None)
                if place.start:
                    _check_entries(header, place.size - 8 - length)
            except (SafetensorError, OSError, ValueError, TypeError, KeyError, struct.error) as error:
                raise CheckpointError(f"{self.path}: damaged or unreadable safetensors file: {error}") from error
            self._entries, self._start, self._file = header, place.start + 8 + length, place.path
        return self._entries


def _check_entries(header: dict[str, dict[str, Any]], size: int) -> None:
    """What the library checks, for a file within a bundle: the tensors fill the data, each as long as its shape."""
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        dtype = getattr(torch, _DTYPES.get(entry["dtype"], ""), None)
        is_whole = dtype is None or end - begin == math.prod(entry["shape"]) * dtype.itemsize
        if begin != at or end < begin or not is_whole or any(side < 0 for side in entry["shape"]):
            raise ValueError(f"the tensor {name!r} has shape {entry['shape']} and bytes {begin:,} to {end:,}")
        at = end
    if at != size:
        raise ValueError(f"its tensors take {at:,} bytes, and it has {size:,}")
