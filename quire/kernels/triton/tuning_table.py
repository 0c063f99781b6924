"""Tuning tables: which kernel was measured fastest for a shape, by GPU.

A table is JSON, one entry per line: {"linear 1 4096x1024 bfloat16": {"kernel": "vector", ..., "us": 3.1}, ...}.
A key is what was measured (a kind, rows rounded up to a bucket, a shape, a dtype); `skinny_gemm/tuning.py`,
`quantized/tuning.py`, `moe/tuning.py` and `cublaslt.py` each define their keys and entries. Every GPU has two tables:
the one shipped with quire, and the user's own, which `quire tune` writes and which takes precedence.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from quire.kernels.triton.launch import INTERPRETED
from quire.paths import cache_dir

log = logging.getLogger(__name__)

TABLES = Path(__file__).parent / "tables"
"""Folder of the tables shipped with quire."""

Entry = dict[str, Any]


class Gpu(NamedTuple):
    """The properties of a GPU that candidates and table names depend on."""

    name: str
    multiprocessors: int
    has_tma: bool
    """Whether it has the tensor memory accelerator (Hopper and later)."""


@functools.cache
def current_gpu() -> Gpu:
    """The current device; an H200's properties where there is none."""
    if INTERPRETED or not torch.cuda.is_available():
        return Gpu("interpreter", 132, True)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(properties.name, properties.multi_processor_count, properties.major >= 9)


class TuningTables:
    """The tables of one GPU."""

    def __init__(self, gpu: Gpu, shipped: Path | None, own: Path | None) -> None:
        self.gpu = gpu
        self.own = own
        self._shipped = read_table(shipped)
        self._own = read_table(own)

    def get(self, key: str) -> Entry | None:
        """The user's entry, or else the shipped one; None if there is neither."""
        return self._own.get(key) or self._shipped.get(key)

    def record(self, found: dict[str, Entry]) -> None:
        """Add measured entries, also to the user's file."""
        self._own |= found
        if self.own is not None:
            # Another process may have written in the meantime.
            write_table(self.own, read_table(self.own) | found)


@functools.cache
def current_tables() -> TuningTables:
    """The tables of the current device."""
    gpu = current_gpu()
    return TuningTables(gpu, shipped_path(gpu), own_path(gpu))


def shipped_path(gpu: Gpu, library: str = "") -> Path:
    """The table shipped for a GPU (there may be none); `library`: that of a library's version, not of our kernels.

    H100, H200 and GH200 are one processor with different memories and share a table.
    """
    name = _slug(gpu.name)
    card = "nvidia-h200" if re.match(r"nvidia-g?h[12]00\b", name) else name
    return TABLES / f"{card}{library and '-'}{library}.json"


def own_path(gpu: Gpu, library: str = "") -> Path:
    """The user's table. Versions are part of its name: another compiler makes other kernels."""
    versions = library or f"{triton.__version__}-{torch.__version__}".replace("+", "-")
    return cache_dir("tuning", f"{_slug(gpu.name)}-{versions}.json")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def bucket_of(count: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket that holds `count`; None past the largest."""
    index = bisect_left(buckets, count)
    return buckets[index] if index < len(buckets) else None


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as keys spell it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def read_table(path: Path | None) -> dict[str, Entry]:
    """A table's entries; none if the file is missing or damaged."""
    if path is None:
        return {}
    try:
        table = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("ignored the tuning table %s: %s", path, error)
        return {}
    if not isinstance(table, dict):
        log.warning("ignored the tuning table %s: not a JSON object", path)
        return {}
    return {key: entry for key, entry in table.items() if isinstance(entry, dict)}


def write_table(path: Path, table: dict[str, Entry]) -> None:
    """Write a table, sorted, one entry per line. Atomic: concurrent readers see the old file or the new one."""
    lines = [f"  {json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table, key=_sort_key)]
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write("{\n" + ",\n".join(lines) + "\n}\n")
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _sort_key(key: str) -> tuple[Any, ...]:
    """Entries of one weight together, by rows, which is the first number of a key."""
    words = key.split()
    at = next((i for i, word in enumerate(words) if word.isdecimal()), len(words))
    return words[:at] + words[at + 1 :], int(words[at]) if at < len(words) else 0, key
