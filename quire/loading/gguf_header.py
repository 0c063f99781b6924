"""The header of a GGUF file: the model's metadata, and where each tensor is.

The `gguf` package reads the same header, but builds an object per array element: two seconds for a vocabulary of
49,152. Here arrays are skipped and decoded on demand. The file may come from anyone, so every length and offset is
checked against the file's size before it is used.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import CheckpointError
from quire.loading.bundle import StoredFile, locate

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_NAME = 1 << 16
_MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor is in the file, and how it is encoded."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in torch."""
    kind: int
    """GGML's number of the encoding."""
    start: int
    """Offset in the file."""
    nbytes: int


@dataclass(frozen=True)
class StringArray:
    """Strings of a header, not decoded yet."""

    buffer: mmap.mmap = field(repr=False)
    start: int
    count: int

    def __len__(self) -> int:
        return self.count

    def tolist(self) -> list[str]:
        """Decode all of them."""
        at, buffer, unpack = self.start, self.buffer, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(self.count):  # Lengths were checked when the header was read.
            (length,) = unpack(buffer, at)
            at += 8 + length
            strings.append(buffer[at - length : at].decode("utf-8", "replace"))
        return strings


@dataclass(frozen=True)
class GGUFHeader:
    """A parsed header. `buffer` maps the whole file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    buffer: mmap.mmap = field(repr=False)

    @property
    def architecture(self) -> str:
        """The model's family, by llama.cpp's name."""
        return self.text("general.architecture", "")

    def text(self, key: str, default: str | None = None) -> Any:
        """A string of the metadata, or the default when it is absent."""
        return self._typed(key, str, default)

    def integer(self, key: str, default: int | None = None) -> Any:
        """An integer of the metadata, or the default when it is absent."""
        return self._typed(key, int, default)

    def positive(self, key: str) -> int:
        """A positive integer of the metadata, which must be there."""
        value: int | None = self.integer(key)
        if value is None or value < 1:
            raise CheckpointError(f"{self.path}: the GGUF header has {key} = {value}; a positive integer is needed")
        return value

    def number(self, key: str, default: float | None = None) -> Any:
        """A number of the metadata, or the default when it is absent."""
        return self._typed(key, (int, float), default)

    def flag(self, key: str, default: bool | None = None) -> Any:
        """A boolean of the metadata, or the default when it is absent."""
        return self._typed(key, bool, default)

    def strings(self, key: str) -> list[str] | None:
        """An array of strings, decoded, or None when it is absent."""
        value = self._typed(key, StringArray, None)
        return None if value is None else value.tolist()

    def numbers(self, key: str) -> np.ndarray | None:
        """An array of numbers, or None when it is absent."""
        return self._typed(key, np.ndarray, None)

    def _typed(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.path}: {key} has a value of the wrong type ({type(value).__name__})")
        return value


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Parse and check the header of a GGUF file. Cached until the file changes."""
    path = Path(path)
    try:
        stored = locate(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    return _read_header(path, stored)


@functools.lru_cache(maxsize=2)
def _read_header(path: Path, stored: StoredFile) -> GGUFHeader:
    if stored.size < 24:
        raise CheckpointError(f"{path}: a file of {stored.size} bytes is too short for GGUF")
    return _Reader(path, stored.map()).header()


class _Reader:
    """Parses the header; every read first checks that the file is long enough."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0

    def header(self) -> GGUFHeader:
        if self.buffer[:4] != b"GGUF":
            raise self.error(f"bad magic {self.buffer[:4]!r}: this is not a GGUF file")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = " (a big-endian file)" if swapped in (2, 3) else ""
            raise self.error(f"GGUF version {version}{hint} is not supported; versions 2 and 3 are")
        tensor_count, value_count = self.scalar("Q"), self.scalar("Q")
        # At least 8 + 4 + 8 + 4 + 8 bytes per tensor and 8 + 4 + 1 per value.
        self.need(tensor_count * 32 + value_count * 13, f"{tensor_count:,} tensors and {value_count:,} values")
        metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = self.string(_MAX_NAME)
            if key in metadata:
                raise self.error(f"the key {key!r} appears twice")
            metadata[key] = self.value(self.scalar("I"), key)
        listed = [self.tensor() for _ in range(tensor_count)]
        return GGUFHeader(self.path, metadata, self.placed(listed, metadata), self.buffer)

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged or unreadable GGUF file: {what}")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.error(
                f"{what} at byte {self.at:,} would need {count:,} bytes, but only {self.size - self.at:,} are left "
                "(is the file cut short?)"
            )

    def scalar(self, code: str) -> Any:
        width = struct.calcsize("<" + code)
        self.need(width, "a number")
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += width
        return value

    def string(self, limit: int | None = None) -> str:
        length = self.scalar("Q")
        if limit is not None and length > limit:
            raise self.error(f"a name of {length:,} bytes at byte {self.at:,} (at most {limit:,} are allowed)")
        self.need(length, "a string")
        raw = self.buffer[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", "replace")

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.error(f"the value of {key!r} has unknown type {kind}")
        element, count = self.scalar("I"), self.scalar("Q")
        if element == _STRING:
            return self.string_array(count, key)
        if element not in _SCALARS:
            raise self.error(f"the array {key!r} has elements of unsupported type {element}")
        dtype = np.dtype("<" + _SCALARS[element]) if element != 7 else np.dtype(np.uint8)
        self.need(count * dtype.itemsize, f"the array {key!r} of {count:,} elements")
        array = np.frombuffer(self.buffer, dtype, count, self.at)
        self.at += array.nbytes
        return array

    def string_array(self, count: int, key: str) -> StringArray:
        self.need(count * 8, f"the array {key!r} of {count:,} strings")
        start, at, size, unpack, buffer = self.at, self.at, self.size, struct.Struct("<Q").unpack_from, self.buffer
        for _ in range(count):
            if at + 8 > size:
                break
            at += 8 + unpack(buffer, at)[0]
        if at > size:
            raise self.error(f"the array {key!r} of {count:,} strings runs past the end of the file")
        self.at = at
        return StringArray(buffer, start, count)

    def tensor(self) -> TensorInfo:
        """An entry of the tensor list; `start` is still relative to the beginning of the data."""
        name = self.string(_MAX_NAME)
        dims = self.scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self.error(f"tensor {name!r} has {dims} dimensions (1 to {_MAX_DIMS} are allowed)")
        shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
        kind, start = self.scalar("I"), self.scalar("Q")
        if min(shape) < 1:
            raise self.error(f"tensor {name!r} has the shape {shape}")
        if kind not in (sizes := block_sizes()):
            raise self.error(f"tensor {name!r} has the unknown encoding {kind}")
        block, block_bytes = sizes[kind]
        if shape[-1] % block:
            raise self.error(f"tensor {name!r}: rows of {shape[-1]} values do not divide into blocks of {block}")
        return TensorInfo(name, shape, kind, start, math.prod(shape) // block * block_bytes)

    def placed(self, listed: list[TensorInfo], metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise self.error(f"general.alignment is {alignment!r}")
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for tensor in listed:
            if tensor.name in tensors:
                raise self.error(f"the tensor {tensor.name!r} appears twice")
            if tensor.start % alignment:
                raise self.error(f"tensor {tensor.name!r} starts at {tensor.start}, not a multiple of {alignment}")
            end = base + tensor.start + tensor.nbytes
            if end > self.size:
                raise self.error(
                    f"tensor {tensor.name!r} {tensor.shape} extends beyond the end of the file: it would end at byte "
                    f"{end:,} of {self.size:,} (is the file cut short?)"
                )
            tensors[tensor.name] = TensorInfo(
                tensor.name, tensor.shape, tensor.kind, base + tensor.start, tensor.nbytes
            )
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for one, following in itertools.pairwise(in_order):
            if following.start < one.start + one.nbytes:
                raise self.error(f"the tensors {one.name!r} and {following.name!r} overlap at byte {following.start:,}")
            # Only padding may be between tensors: bytes that belong to none mean that a type or a shape is wrong.
            if (unused := following.start - one.start - one.nbytes) >= alignment:
                raise self.error(
                    f"{unused:,} bytes between the tensors {one.name!r} and {following.name!r} belong to neither: "
                    f"{one.name!r} {one.shape} takes {one.nbytes:,} bytes in its encoding"
                )
        return tensors


@functools.cache
def block_sizes() -> dict[int, tuple[int, int]]:
    """For each encoding: values and bytes per quantization block."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (block, size) for kind, (block, size) in GGML_QUANT_SIZES.items()}
