"""Which kernel a product gets: what was measured for its shape, or else a guess.

A product is known by its kind, its rows rounded up to a bucket, its weight's shape and its dtype. Looked up in this
order: the user's own table, which `quire tune` writes; the one that comes with quire for this card;
`thin_candidates.guess`.
Tables are JSON: {"linear 1 4096x1024 bfloat16": {"kernel": "vector", ..., "us": 3.1, "cublas_us": 5.0}, ...}; the
kernel `cublas` says that nothing here was faster than cuBLAS and the other kernels on their own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import triton

from quire.kernels import cublaslt
from quire.kernels.cublaslt import Products
from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.triton.skinny_gemm.candidates import GemmShape, Gpu, candidates, guess
from quire.kernels.triton.skinny_gemm.gemm import Config, Product, compile_key, compile_product
from quire.paths import cache_dir

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MEASURED_BUCKETS = BUCKETS[:-1]
"""Those worth measuring unless asked for: with more rows hardly anything beats cuBLAS."""
KINDS = ("linear", "silu_linear", "norm_linear", "norm_silu_linear")
"""Parts before wholes: what a kind is measured against may be made of those before it."""

MARGIN = 0.98
"""A kernel of ours must take at most this share of the time of what it replaces: less is noise."""

Entry = dict[str, Any]


class Plan(NamedTuple):
    """One way to do a product: with which kernel (None: cuBLAS), and what is folded into it."""

    config: Config | None = None
    norm: bool = False
    silu: bool = False


class GemmTimer(Protocol):
    """Measures a way to do a product of a shape."""

    def __call__(self, shape: GemmShape, rows: int, dtype: torch.dtype, plan: Plan) -> float:
        """Microseconds; infinity if it cannot be done that way."""
        ...


class TuningJob(NamedTuple):
    """A kernel that a model needs compiled."""

    shape: GemmShape
    rows: int
    dtype: torch.dtype
    config: Config
    residual: bool
    """Whether its norm adds one."""

    def product(self) -> Product:
        """A product of this form, without data."""
        rows, shape = self.rows, self.shape
        x = torch.empty(rows, shape.k, dtype=self.dtype, device="meta")
        weight = x.new_empty(shape.n, shape.k)
        bias = x.new_empty(shape.n) if shape.bias else None
        gain = x.new_empty(shape.k) if shape.norm else None
        residual = x.new_empty(x.shape) if self.residual else None
        return Product(x, weight, bias, gain, residual, 1e-5, shape.silu, residual)

    def compile(self) -> None:
        """Compile the kernel, into Triton's cache on disk as well."""
        compile_product(self.product(), self.config)


class Tuner:
    """The tables of one card."""

    def __init__(self, gpu: Gpu, shipped: Path | None, own: Path | None) -> None:
        self.gpu = gpu
        self.own = own
        self.shipped = read_table(shipped)
        self.measured = read_table(own)

    def choose(self, shape: GemmShape, rows: int, dtype: torch.dtype) -> Config | None:
        """The kernel for a product; None: cuBLAS, and what is not folded in on its own."""
        bucket = bucket_of(rows)
        if bucket is None:
            return None
        entry = self.known(shape, bucket, dtype)
        return guess(shape, bucket, dtype, self.gpu) if entry is None else config_of(entry)

    def known(self, shape: GemmShape, bucket: int, dtype: torch.dtype) -> Entry | None:
        """What was measured for a product, by the user or by us; None: nothing was."""
        key = key_of(shape, bucket, dtype)
        return self.measured.get(key) or self.shipped.get(key)

    def tune(
        self,
        shapes: Iterable[GemmShape],
        dtype: torch.dtype,
        buckets: Sequence[int],
        timer: GemmTimer,
        progress: Callable[[GemmShape, int, Entry], None] | None = None,
    ) -> dict[str, Entry]:
        """Measure every candidate for the shapes and keep the fastest, here and in the user's table."""
        found: dict[str, Entry] = {}
        for shape in sorted(dict.fromkeys(shapes), key=lambda shape: KINDS.index(shape.kind)):
            for rows in buckets:
                entry = self._fastest(shape, rows, dtype, timer)
                found[key_of(shape, rows, dtype)] = entry
                self.measured[key_of(shape, rows, dtype)] = entry
                if progress is not None:
                    progress(shape, rows, entry)
        if self.own is not None:
            # Another process may have written in the meantime.
            write_table(self.own, read_table(self.own) | found)
        _chosen.cache_clear()
        return found

    def _fastest(self, shape: GemmShape, rows: int, dtype: torch.dtype, timer: GemmTimer) -> Entry:
        cublas = timer(shape, rows, dtype, Plan())
        parts = self._parts(shape, rows, dtype)
        apart = cublas if parts == Plan() else min(cublas, timer(shape, rows, dtype, parts))
        best, us = None, float("inf")
        for config in candidates(shape, rows, dtype, self.gpu):
            time = timer(shape, rows, dtype, Plan(config, shape.norm, shape.silu))
            if time < us:
                best, us = config, time
        if best is not None and best.kernel == "vector":
            early = replace(best, early=True)
            time = timer(shape, rows, dtype, Plan(early, shape.norm, shape.silu))
            if time < us:
                best, us = early, time
        if best is None or us > MARGIN * apart:
            return {"kernel": "cublas", "us": round(apart, 2), "cublas_us": round(cublas, 2)}
        return entry_of(best) | {"us": round(us, 2), "cublas_us": round(cublas, 2)}

    def _parts(self, shape: GemmShape, rows: int, dtype: torch.dtype) -> Plan:
        """A product with less folded in, by the kernels chosen for that: the gate in it, or nothing."""
        if shape.kind == "linear":
            return Plan()
        if shape.kind == "norm_silu_linear":
            config = self._measured(GemmShape("silu_linear", shape.n, shape.k), rows, dtype)
            if config is not None:
                return Plan(config, silu=True)
        return Plan(self._measured(GemmShape("linear", shape.n, shape.k), rows, dtype))

    def _measured(self, shape: GemmShape, rows: int, dtype: torch.dtype) -> Config | None:
        entry = self.known(shape, rows, dtype)
        return None if entry is None else config_of(entry)


def with_parts(shape: GemmShape) -> list[GemmShape]:
    """A shape after those with less folded in, which it is measured against."""
    parts = {"norm_linear": ["linear"], "norm_silu_linear": ["linear", "silu_linear"]}
    return [*(GemmShape(kind, shape.n, shape.k) for kind in parts.get(shape.kind, [])), shape]


def jobs_for(
    shapes: Iterable[GemmShape],
    dtype: torch.dtype,
    buckets: Iterable[int],
    configs: Callable[[GemmShape, int], list[Config]],
) -> list[TuningJob]:
    """The compilations that `configs` of these shapes and row counts come to, each once."""
    jobs: dict[Any, TuningJob] = {}
    for shape in shapes:
        for rows in buckets:
            for config in configs(shape, rows):
                # The first layer has no residual stream yet.
                for residual in (True, False) if shape.norm else (False,):
                    job = TuningJob(shape, rows, dtype, config, residual)
                    jobs.setdefault(compile_key(job.product(), config), job)
    return list(jobs.values())


def tuning_jobs(shapes: Iterable[GemmShape], dtype: torch.dtype, buckets: Iterable[int], gpu: Gpu) -> list[TuningJob]:
    """Every kernel that `Tuner.tune` will measure."""

    def tried(shape: GemmShape, rows: int) -> list[Config]:
        configs = candidates(shape, rows, dtype, gpu)
        return configs + [replace(config, early=True) for config in configs if config.kernel == "vector"]

    return [job for job in jobs_for(shapes, dtype, buckets, tried) if job.residual or not job.shape.norm]


def choose(kind: str, m: int, n: int, k: int, dtype: torch.dtype) -> Config | None:
    """The kernel for a product of m rows with a weight [n, k] on the current device.

    None: cuBLAS for the product, and what is not folded into it by its own kernel, or by the `choose` of a lesser kind.
    """
    if not 0 < m <= BUCKETS[-1]:
        return None
    return _chosen(kind, m, n, k, dtype)


@functools.cache
def _chosen(kind: str, m: int, n: int, k: int, dtype: torch.dtype) -> Config | None:
    return tuner().choose(GemmShape(kind, n, k), m, dtype)


@functools.cache
def tuner() -> Tuner:
    """The tables of the current device."""
    gpu = current_gpu()
    return Tuner(gpu, shipped_table(gpu), own_table(gpu))


@functools.cache
def many_rows() -> Products | None:
    """Products of many rows on the current device, by algorithms that were measured; None: none was."""
    found = cublaslt.library()
    if found is None:
        return None
    gpu, version = current_gpu(), found.version
    shipped, own = cublaslt.shipped_table(card_of(gpu), version), cublaslt.own_table(slug(gpu.name), version)
    table = read_table(shipped) | read_table(own)
    return Products(found, table) if table else None


@functools.cache
def current_gpu() -> Gpu:
    """The current device; an H200, as far as guesses go, where there is none."""
    if INTERPRETED or not torch.cuda.is_available():
        return Gpu("interpreter", 132, True)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(properties.name, properties.multi_processor_count, properties.major >= 9)


def slug(name: str) -> str:
    """A card's name as a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def card_of(gpu: Gpu) -> str:
    """The card whose tables serve this one."""
    name = slug(gpu.name)
    return "nvidia-h200" if re.match(r"nvidia-g?h[12]00\b", name) else name  # one processor, whatever the memory


def shipped_table(gpu: Gpu) -> Path:
    """The table that comes with quire; there may be none for this card."""
    return Path(__file__).parents[1] / "tables" / f"{card_of(gpu)}.json"


def own_table(gpu: Gpu) -> Path:
    """The user's table. Versions are part of its name: another compiler makes other kernels."""
    versions = f"{triton.__version__}-{torch.__version__}".replace("+", "-")
    return cache_dir("tuning", f"{slug(gpu.name)}-{versions}.json")


def bucket_of(rows: int) -> int | None:
    """The smallest bucket that holds so many rows; None past the largest."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)


def key_of(shape: GemmShape, bucket: int, dtype: torch.dtype) -> str:
    """A product's name in a table."""
    return f"{shape.kind} {bucket} {shape.n}x{shape.k} {str(dtype).removeprefix('torch.')}"


def entry_of(config: Config) -> Entry:
    """A configuration as a table holds it: what differs from the defaults."""
    return {
        field.name: value
        for field in fields(Config)
        if (value := getattr(config, field.name)) != field.default or field.name == "kernel"
    }


def config_of(entry: Entry) -> Config | None:
    """The configuration of an entry; None for `cublas`, and for what this version does not know."""
    if entry.get("kernel") not in ("vector", "dot", "tile"):
        return None
    known = {field.name: entry[field.name] for field in fields(Config) if field.name in entry}
    return Config(**known) if _is_sound(known) else None


def describe(entry: Entry) -> str:
    """An entry's kernel in a few characters."""
    config = config_of(entry)
    if config is None:
        return "cublas"
    text = f"{config.kernel} n{config.block_n} w{config.warps}"
    if config.kernel != "vector":
        text += f" m{config.block_m} k{config.block_k} s{config.stages}"
    if config.split > 1:
        text += f" split {config.split}"
    if config.programs:
        text += f" programs {config.programs}"
    return text + (" tma" if config.tma else "") + (" early" if config.early else "")


def _is_sound(entry: Entry) -> bool:
    return "block_n" in entry and all(
        isinstance(value, int) and 0 <= value <= 1024 for name, value in entry.items() if name != "kernel"
    )


def read_table(path: Path | None) -> dict[str, Entry]:
    """A table's entries. A file that is not there or damaged has none."""
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
        log.warning("ignored the tuning table %s: no object at its top", path)
        return {}
    return {key: entry for key, entry in table.items() if isinstance(entry, dict)}


def write_table(path: Path, table: dict[str, Entry]) -> None:
    """Write a table in order, an entry a line; whoever reads meanwhile finds the old one or the new one."""
    lines = [f"  {json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table, key=_order)]
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


def _order(key: str) -> tuple[Any, ...]:
    """Entries of one weight together, by rows, which is the first number of a key."""
    words = key.split()
    at = next((i for i, word in enumerate(words) if word.isdecimal()), len(words))
    return words[:at] + words[at + 1 :], int(words[at]) if at < len(words) else 0, key
