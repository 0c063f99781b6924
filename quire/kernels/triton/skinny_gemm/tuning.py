"""Which kernel a skinny GEMM runs: the one measured fastest for its shape, or else a guess.

A GEMM is identified by its kind, its rows rounded up to a bucket, its weight's shape and its dtype. The tables
(`tuning_table.py`) are looked up first, then `candidates.guess`. An entry is
{"linear 1 4096x1024 bfloat16": {"kernel": "vector", ..., "us": 3.1, "cublas_us": 5.0}}; the kernel `cublas` means that
none of ours was faster than cuBLAS with the unfused kernels around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, Protocol

import torch

from quire.kernels.triton.skinny_gemm.candidates import GemmShape, candidates, guess
from quire.kernels.triton.skinny_gemm.gemm import Gemm, GemmConfig, compile_gemm, compile_key
from quire.kernels.triton.tuning_table import Entry, Gpu, TuningTables, bucket_of, current_tables, dtype_name

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Rows."""
MEASURED_BUCKETS = BUCKETS[:-1]
"""Measured by default: with more rows our kernels rarely beat cuBLAS."""
KINDS = ("linear", "silu_linear", "norm_linear", "norm_silu_linear")
"""Less fused kinds first: a kind is measured against combinations of those before it."""

EARLY_KERNELS = ("vector", "direct")
"""Kernels that may launch their dependents before they wait."""
MARGIN = 0.98
"""Our kernel must take at most this share of the time of what it replaces: a smaller gain is noise."""


class GemmVariant(NamedTuple):
    """One way to compute a GEMM: the kernel (None: cuBLAS), and what is fused into it."""

    config: GemmConfig | None = None
    norm: bool = False
    silu: bool = False


class GemmTimer(Protocol):
    """Measures a variant of a GEMM."""

    def __call__(self, shape: GemmShape, rows: int, dtype: torch.dtype, variant: GemmVariant) -> float:
        """Microseconds; infinity if the variant cannot run."""
        ...


class GemmKernel(NamedTuple):
    """A kernel that a model needs compiled."""

    shape: GemmShape
    rows: int
    dtype: torch.dtype
    config: GemmConfig
    residual: bool
    """Whether its norm adds one."""

    def gemm(self) -> Gemm:
        """A GEMM that runs this kernel, on the `meta` device."""
        rows, shape = self.rows, self.shape
        x = torch.empty(rows, shape.k, dtype=self.dtype, device="meta")
        weight = x.new_empty(shape.n, shape.k)
        bias = x.new_empty(shape.n) if shape.bias else None
        gain = x.new_empty(shape.k) if shape.norm else None
        residual = x.new_empty(x.shape) if self.residual else None
        return Gemm(x, weight, bias, gain, residual, 1e-5, shape.silu, residual)

    def compile(self) -> None:
        """Compile the kernel, into Triton's cache on disk as well."""
        compile_gemm(self.gemm(), self.config)


class GemmTuner:
    """Chooses and measures the kernels of skinny GEMMs on one GPU."""

    def __init__(self, tables: TuningTables) -> None:
        self._tables = tables

    def choose(self, shape: GemmShape, rows: int, dtype: torch.dtype) -> GemmConfig | None:
        """The kernel for a GEMM; None: cuBLAS, with norm and activation unfused."""
        bucket = bucket_of(rows, BUCKETS)
        if bucket is None:
            return None
        entry = self.known(shape, bucket, dtype)
        return guess(shape, bucket, dtype, self._tables.gpu) if entry is None else config_of(entry)

    def known(self, shape: GemmShape, bucket: int, dtype: torch.dtype) -> Entry | None:
        """The tables' entry for a GEMM; None: it was not measured."""
        return self._tables.get(key_of(shape, bucket, dtype))

    def tune(
        self, shapes: Iterable[GemmShape], dtype: torch.dtype, buckets: Sequence[int], timer: GemmTimer
    ) -> dict[str, Entry]:
        """Measure every candidate for the shapes and record the fastest."""
        found: dict[str, Entry] = {}
        for shape in sorted(dict.fromkeys(shapes), key=lambda shape: KINDS.index(shape.kind)):
            measured = {key_of(shape, rows, dtype): self._fastest(shape, rows, dtype, timer) for rows in buckets}
            self._tables.record(measured)
            found |= measured
        _chosen.cache_clear()
        return found

    def _fastest(self, shape: GemmShape, rows: int, dtype: torch.dtype, timer: GemmTimer) -> Entry:
        cublas = timer(shape, rows, dtype, GemmVariant())
        less_fused = self._less_fused(shape, rows, dtype)
        unfused = cublas if less_fused == GemmVariant() else min(cublas, timer(shape, rows, dtype, less_fused))
        best, us = None, float("inf")
        for config in candidates(shape, rows, dtype, self._tables.gpu):
            time = timer(shape, rows, dtype, GemmVariant(config, shape.norm, shape.silu))
            if time < us:
                best, us = config, time
        if best is not None and best.kernel in EARLY_KERNELS:
            early = replace(best, early=True)
            time = timer(shape, rows, dtype, GemmVariant(early, shape.norm, shape.silu))
            if time < us:
                best, us = early, time
        if best is None or us > MARGIN * unfused:
            return {"kernel": "cublas", "us": round(unfused, 2), "cublas_us": round(cublas, 2)}
        return entry_of(best) | {"us": round(us, 2), "cublas_us": round(cublas, 2)}

    def _less_fused(self, shape: GemmShape, rows: int, dtype: torch.dtype) -> GemmVariant:
        """The GEMM with only the gate fused, or nothing, by the kernels chosen for that."""
        if shape.kind == "linear":
            return GemmVariant()
        if shape.kind == "norm_silu_linear":
            config = self._measured(GemmShape("silu_linear", shape.n, shape.k), rows, dtype)
            if config is not None:
                return GemmVariant(config, silu=True)
        return GemmVariant(self._measured(GemmShape("linear", shape.n, shape.k), rows, dtype))

    def _measured(self, shape: GemmShape, rows: int, dtype: torch.dtype) -> GemmConfig | None:
        entry = self.known(shape, rows, dtype)
        return None if entry is None else config_of(entry)


def with_less_fused(shape: GemmShape) -> list[GemmShape]:
    """A shape, after the less fused ones it is measured against."""
    kinds = {"norm_linear": ["linear"], "norm_silu_linear": ["linear", "silu_linear"]}
    return [*(GemmShape(kind, shape.n, shape.k) for kind in kinds.get(shape.kind, [])), shape]


def distinct_kernels(
    shapes: Iterable[GemmShape],
    dtype: torch.dtype,
    buckets: Iterable[int],
    configs: Callable[[GemmShape, int], list[GemmConfig]],
) -> list[GemmKernel]:
    """The kernels of `configs(shape, rows)` for these shapes and row counts, each once."""
    kernels: dict[Any, GemmKernel] = {}
    for shape in shapes:
        for rows in buckets:
            for config in configs(shape, rows):
                # The first layer has no residual stream yet.
                for residual in (True, False) if shape.norm else (False,):
                    kernel = GemmKernel(shape, rows, dtype, config, residual)
                    kernels.setdefault(compile_key(kernel.gemm(), config), kernel)
    return list(kernels.values())


def candidate_kernels(
    shapes: Iterable[GemmShape], dtype: torch.dtype, buckets: Iterable[int], gpu: Gpu
) -> list[GemmKernel]:
    """Every kernel that `GemmTuner.tune` measures."""

    def tried(shape: GemmShape, rows: int) -> list[GemmConfig]:
        configs = candidates(shape, rows, dtype, gpu)
        return configs + [replace(config, early=True) for config in configs if config.kernel in EARLY_KERNELS]

    kernels = distinct_kernels(shapes, dtype, buckets, tried)
    return [kernel for kernel in kernels if kernel.residual or not kernel.shape.norm]


def choose(kind: str, m: int, n: int, k: int, dtype: torch.dtype) -> GemmConfig | None:
    """The kernel for a GEMM of m rows with a weight [n, k] on the current device.

    None: cuBLAS for the GEMM; norm and activation by kernels of their own, or by the `choose` of a less fused kind.
    """
    if not 0 < m <= BUCKETS[-1]:
        return None
    return _chosen(kind, m, n, k, dtype)


@functools.cache
def _chosen(kind: str, m: int, n: int, k: int, dtype: torch.dtype) -> GemmConfig | None:
    return GemmTuner(current_tables()).choose(GemmShape(kind, n, k), m, dtype)


def key_of(shape: GemmShape, bucket: int, dtype: torch.dtype) -> str:
    """A GEMM's key in a table."""
    return f"{shape.kind} {bucket} {shape.n}x{shape.k} {dtype_name(dtype)}"


def entry_of(config: GemmConfig) -> Entry:
    """A configuration as a table stores it: the fields that differ from the defaults."""
    return {
        field.name: value
        for field in fields(GemmConfig)
        if (value := getattr(config, field.name)) != field.default or field.name == "kernel"
    }


def config_of(entry: Entry) -> GemmConfig | None:
    """The configuration of an entry; None for `cublas`, and for entries that this version does not support."""
    if entry.get("kernel") not in ("vector", "direct", "dot", "tile"):
        return None
    known = {field.name: entry[field.name] for field in fields(GemmConfig) if field.name in entry}
    return GemmConfig(**known) if _is_sound(known) else None


def _is_sound(entry: Entry) -> bool:
    return "block_n" in entry and all(
        isinstance(value, int) and 0 <= value <= 1024 for name, value in entry.items() if name != "kernel"
    )


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
