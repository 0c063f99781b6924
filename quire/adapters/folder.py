"""The files of an adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors (or .bin).

A folder may come from a stranger: nothing outside it is read, no code in it runs, sizes are checked before memory is
taken, and what is not understood is refused by its name. Imports no torch, unless the tensors are in a .bin.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from quire.adapters.layout import LayoutReader, Shape
from quire.adapters.peft_config import CONFIG, MAX_CONFIG_BYTES, LoraSettings, read_settings
from quire.errors import AdapterError, AdapterNotFoundError, ValidationError, short_repr
from quire.messages.json_limits import JsonLimits, check_json

WEIGHTS = "adapter_model.safetensors"
TORCH_WEIGHTS = "adapter_model.bin"
MAX_ADAPTER_BYTES = 16 << 30
"""Size of the largest file of weights that is read."""
MAX_HEADER_BYTES = 16 << 20
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of values, as safetensors and torch name them."""
_HEADER_LIMITS = JsonLimits(values=1 << 21, depth=4)
_CHUNK = 4 << 20
_EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "F16": ("<u2", 0x1F << 10),
    "BF16": ("<u2", 0xFF << 7),
}
"""Bits that are all set in infinity and NaN."""


_Part = TypeVar("_Part", bytes, memoryview)


class StoredValues(NamedTuple):
    """Where the values of a tensor are in the file, after its header."""

    dtype: str
    shape: Shape
    start: int
    end: int


@dataclass(frozen=True)
class AdapterFacts:
    """What an adapter's files say without their values."""

    folder: Path
    settings: LoraSettings
    rank: int
    """The largest rank of a matrix."""
    nbytes: int
    shapes: Mapping[str, tuple[int, int]]
    """[out, in] of each matrix that it adapts, by module; experts by parameter, and of one expert."""
    is_pickled: bool


def describe_adapter(folder: Path, max_rank: int) -> AdapterFacts:
    """Check what can be checked without reading values: files, settings, names, shapes, ranks."""
    found = AdapterFolder(folder)
    settings = found.settings()
    if found.is_pickled:
        from quire.adapters.torch_file import read_torch

        loaded = read_torch(found.weights)
        shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in loaded.items()}
        nbytes = sum(tensor.nbytes for tensor in loaded.values())
    else:
        header = found.header()
        shapes = {name: stored.shape for name, stored in header.items()}
        nbytes = sum(stored.end - stored.start for stored in header.values())
    layout = LayoutReader(found.weights, settings, max_rank, shapes).read()
    return AdapterFacts(found.path, settings, layout.rank, nbytes, layout.shapes(), found.is_pickled)


def digest_adapter(folder: Path) -> bytes:
    """The digest that the adapter will have when it is read. Raises for values that are not finite."""
    found = AdapterFolder(folder)
    settings = found.settings()
    if found.is_pickled:
        from quire.adapters.torch_file import read_torch, tensor_values

        values = tensor_values(read_torch(found.weights))
        return adapter_digest(
            settings,
            ((name, dtype, shape, _finite(found.weights, name, dtype, data)) for name, dtype, shape, data in values),
        )
    header = found.header()
    try:
        with found.weights.open("rb", buffering=0) as file:
            tensors = (
                (name, at.dtype, at.shape, _finite(found.weights, name, at.dtype, _chunks(file, at)))
                for name, at in sorted(header.items())
            )
            return adapter_digest(settings, tensors)
    except OSError as error:
        raise AdapterError(f"{found.weights} cannot be read: {error}") from error


def adapter_digest(
    settings: LoraSettings, tensors: Iterable[tuple[str, str, Shape, Iterable[bytes] | Iterable[memoryview]]]
) -> bytes:
    """Equal for equal adapters: over the settings that matter, and each tensor's name, type, shape and values, in the
    order of names."""
    digest = blake3(msgspec.json.encode(settings.digested(), order="deterministic"))
    for name, dtype, shape, values in tensors:
        digest.update(msgspec.json.encode([name, dtype, shape]))
        for part in values:
            digest.update(part)
    return digest.digest()


def _finite(path: Path, name: str, dtype: str, chunks: Iterable[_Part]) -> Iterable[_Part]:
    """The same chunks; raises at one with a value that is not finite."""
    kind, exponent = _EXPONENTS[dtype]
    for part in chunks:
        if np.any((np.frombuffer(part, kind) & exponent) == exponent):
            raise not_finite(path, name)
        yield part


def not_finite(path: Path, name: str) -> AdapterError:
    return AdapterError(f"{path}: the tensor {short_repr(name)} holds NaN or infinite values")


def _chunks(file: Any, stored: StoredValues) -> Iterable[bytes]:
    file.seek(stored.start)
    left = stored.end - stored.start
    while left:
        part = file.read(min(left, _CHUNK))
        if not part:
            raise OSError(f"the file ends {left} bytes too early")
        left -= len(part)
        yield part


class AdapterFolder:
    """The two files of an adapter: found, and checked before they are opened."""

    def __init__(self, folder: Path) -> None:
        if "\0" in str(folder):
            raise AdapterError("the name of an adapter's folder holds a zero byte")
        try:
            self.path = folder.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise AdapterNotFoundError(f"there is no adapter folder {folder}: {error}") from error
        if not self.path.is_dir():
            raise AdapterError(f"{folder} is a file: an adapter is a folder with {CONFIG} and {WEIGHTS}")
        weights = next((name for name in (WEIGHTS, TORCH_WEIGHTS) if os.path.lexists(self.path / name)), None)
        if weights is None:
            raise AdapterNotFoundError(
                f"{folder} has neither {WEIGHTS} nor {TORCH_WEIGHTS}: not an adapter saved by PEFT"
            )
        self.is_pickled = weights == TORCH_WEIGHTS
        self.weights = self._file(weights, MAX_ADAPTER_BYTES)

    def settings(self) -> LoraSettings:
        path = self._file(CONFIG, MAX_CONFIG_BYTES)
        try:
            return read_settings(path, path.read_bytes())
        except OSError as error:
            raise AdapterError(f"{path} cannot be read: {error}") from error

    def header(self) -> dict[str, StoredValues]:
        """The tensors of the safetensors file."""
        path = self.weights
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > MAX_HEADER_BYTES:
                    raise AdapterError(f"{path}: its header has {length} bytes; at most {MAX_HEADER_BYTES} are read")
                text = file.read(length)
            check_json(text, _HEADER_LIMITS, "its header")
            # The safetensors library checks lengths, offsets and shapes against each other and the file's size.
            with safe_open(path, framework="np"):
                pass
            header = json.loads(text)
        except (SafetensorError, ValidationError, OSError, ValueError, RecursionError, struct.error) as error:
            if isinstance(error, AdapterError):
                raise
            raise AdapterError(f"{path}: damaged or unreadable: {error}") from error
        header.pop("__metadata__", None)
        return {name: self._stored(name, entry, 8 + length) for name, entry in header.items()}

    def _stored(self, name: str, entry: dict[str, Any], offset: int) -> StoredValues:
        start, end = entry["data_offsets"]
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if dtype not in DTYPES:
            raise wrong_dtype(self.weights, name, dtype)
        if math.prod(shape) > MAX_ADAPTER_BYTES:
            raise AdapterError(f"{self.weights}: the tensor {short_repr(name)} has the shape {list(shape)}")
        return StoredValues(dtype, shape, offset + start, offset + end)

    def _file(self, name: str, limit: int) -> Path:
        path = self.path / name
        try:
            target = path.resolve(strict=True)
            facts = target.stat()
        except (OSError, RuntimeError) as error:
            raise AdapterNotFoundError(f"{self.path} has no readable {name}: {error}") from error
        if not target.is_relative_to(self.path) and not target.is_relative_to(self._blobs()):
            raise AdapterError(f"{path} is a link out of the adapter's folder: refused")
        if not stat.S_ISREG(facts.st_mode):
            raise AdapterError(f"{path} is not a regular file: refused")
        if facts.st_size > limit:
            raise AdapterError(f"{path} has {facts.st_size} bytes; at most {limit} are read")
        return path

    def _blobs(self) -> Path:
        """Where the files of a folder of the Hub's cache (models--…/snapshots/revision) are links to."""
        is_snapshot = self.path.parent.name == "snapshots" and self.path.parent.parent.name.startswith("models--")
        return self.path.parent.parent / "blobs" if is_snapshot else self.path


def wrong_dtype(path: Path, name: str, dtype: str) -> AdapterError:
    allowed = ", ".join(DTYPES.values())
    return AdapterError(f"{path}: the tensor {short_repr(name)} is of the type {dtype}: expected {allowed}")
