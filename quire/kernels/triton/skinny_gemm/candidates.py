"""Candidate kernels and tile shapes for a skinny GEMM, best guess first. A model of their cost; `tuning.py` measures.

A good shape, from one row to hundreds, keeps every multiprocessor equally busy, has enough bytes in flight on each to
cover memory latency (about 40 KB on an H200), and rereads little besides the weights.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import torch

from quire.kernels.triton.skinny_gemm import direct
from quire.kernels.triton.skinny_gemm.common import GemmConfig
from quire.kernels.triton.skinny_gemm.dot import MAX_ROWS as MAX_DOT_ROWS
from quire.kernels.triton.skinny_gemm.vector import MAX_ROWS as MAX_VECTOR_ROWS
from quire.kernels.triton.tuning_table import Gpu

KB = 1024
# An H200, measured or by its data sheet; the ranking of candidates is much the same on related GPUs.
_REGISTERS = 65536  # of 4 bytes, per multiprocessor
_SHARED = 224 * KB  # bytes per multiprocessor, less what the compiler needs
_IN_FLIGHT = 64 * KB  # bytes of loads per multiprocessor: plenty
_MEMORY = 4300.0  # bytes per nanosecond
_CACHE = 52.0  # bytes per nanosecond, L2 to one multiprocessor
_TENSOR = 650_000.0  # operations per nanosecond
_EXCHANGE = 2500.0  # nanoseconds to write parts of a tile and sum them

MAX_NORM_ROWS = 32
"""Rows of a GEMM with a fused norm."""
SMALL = 12 << 20
"""Bytes: read in 3 microseconds."""


class GemmShape(NamedTuple):
    """A GEMM of a model: `kind` says what is fused into it, the weight is [n, k]."""

    kind: str
    """`linear`, `silu_linear`, `norm_linear` or `norm_silu_linear`."""
    n: int
    k: int
    bias: bool = False

    @property
    def norm(self) -> bool:
        return self.kind.startswith("norm")

    @property
    def silu(self) -> bool:
        return "silu" in self.kind

    @property
    def outputs(self) -> int:
        return self.n // 2 if self.silu else self.n


def candidates(shape: GemmShape, rows: int, dtype: torch.dtype, gpu: Gpu) -> list[GemmConfig]:
    """Configurations for a GEMM of at most `rows` rows (a power of two): at most 16, the best guesses first."""
    if shape.k * dtype.itemsize % 16 or shape.outputs < 8:
        return []  # loads need rows aligned to 16 bytes; a few outputs are not worth a kernel
    return _without_directs(shape, rows, dtype, gpu) + _directs(shape, rows, dtype, gpu)


def _without_directs(shape: GemmShape, rows: int, dtype: torch.dtype, gpu: Gpu) -> list[GemmConfig]:
    vectors = _vectors(shape, rows, dtype, gpu)[:6] if rows <= MAX_VECTOR_ROWS else []
    # No tensor cores in float32; in float16 a stream times its gain may overflow. Every program recomputes the norm,
    # which costs too much with many rows.
    if dtype.itemsize != 2 or (shape.norm and (dtype != torch.bfloat16 or rows > MAX_NORM_ROWS)):
        return vectors
    if vectors and (rows <= 2 or shape.norm):
        return vectors + _dots(shape, rows, gpu)[: rows // 2]
    if vectors:
        return vectors[:4] + _tensor_core_configs(shape, rows, gpu)[:5]
    return _tensor_core_configs(shape, rows, gpu)


def _tensor_core_configs(shape: GemmShape, rows: int, gpu: Gpu) -> list[GemmConfig]:
    """Small tensor-core tiles and large ones, by estimated time."""
    found = _dots(shape, rows, gpu)[:4] if rows <= MAX_DOT_ROWS else []
    found += _tiles(shape, rows, gpu)
    found.sort(key=lambda config: _estimate(shape, rows, config, gpu))
    tile = next((config for config in found if config.tma), None)
    if tile and rows <= MAX_DOT_ROWS:
        found[7:] = [replace(tile, tma=False)]
    return found[:8]


def guess(shape: GemmShape, rows: int, dtype: torch.dtype, gpu: Gpu) -> GemmConfig | None:
    """The configuration to use where nothing was measured; None: cuBLAS, unfused.

    With more than two rows a guess pays for small weights only: their launch takes longer than the reads, and ours fuse
    several kernels into one. For larger weights cuBLAS reads as fast, and a bad guess could take twice its time. Over
    the shapes of sixteen models on an H200 guesses take at most 4% longer than the best, averaged over row counts
    (`python -m benchmarks.gpu.skinny_gemm`).
    """
    if rows > 16 or (rows > 2 and shape.n * shape.k * dtype.itemsize > SMALL):
        return None
    if shape.norm and rows > 1 and shape.k > 4096:
        return None  # every program recomputes the norm
    return next(iter(candidates(shape, rows, dtype, gpu)), None)


def _vectors(shape: GemmShape, rows: int, dtype: torch.dtype, gpu: Gpu) -> list[GemmConfig]:
    width = 32 * 16 // dtype.itemsize  # values a warp loads at a time
    scored = []
    for warps, block_n in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        chunks = -(-shape.k // (warps * width))
        if chunks * warps * width < 2 * _round_up(shape.k, width):
            config = GemmConfig("vector", block_n, warps=warps)
            scored.append((_score_vector(shape, rows, config, chunks, gpu), config, chunks))
    ranked = sorted((item for item in scored if item[0]), key=lambda item: -item[0])
    best = [config for _, config, _ in ranked]
    if best and shape.outputs > 24 * gpu.multiprocessors * best[0].block_n:
        # With this many programs, persistent ones may pay: they keep the input, and prefetch the next weights.
        persistent = [
            replace(config, programs=16 // config.warps)
            for _, config, chunks in ranked
            if sum(_registers(shape, rows, config, chunks, double_buffered=True)) <= 144
        ]
        best[2:2] = persistent[:2]
    return best


def _registers(
    shape: GemmShape, rows: int, config: GemmConfig, chunks: int, double_buffered: bool = False
) -> tuple[int, int]:
    """About how many registers a thread of `vector` needs for weights and for inputs, read in `chunks` of 16 bytes."""
    weights = 4 * chunks * config.block_n * (2 if shape.silu else 1) * (2 if double_buffered else 1)
    return weights, chunks * rows * (12 if shape.norm else 4) + (4 * chunks if shape.norm else 0)


def _score_vector(shape: GemmShape, rows: int, config: GemmConfig, chunks: int, gpu: Gpu) -> float:
    """How good a shape is estimated to be; 0 if it does not fit."""
    held, inputs = _registers(shape, rows, config, chunks)
    if held > 64 or held + inputs > 176:
        return 0.0
    warps = config.warps
    blocks = -(-shape.outputs // config.block_n)
    resident = min(_REGISTERS // (32 * warps * (held + inputs // 2 + 32)), 64 // warps, 32)
    each = -(-blocks // gpu.multiprocessors)
    weight_bytes = 128 * warps * held
    enough = min(_IN_FLIGHT, weight_bytes * each)
    in_flight = min(enough, weight_bytes * min(resident, each)) / enough
    balance = blocks / (each * gpu.multiprocessors)
    overlap = blocks / (blocks + gpu.multiprocessors / 2)  # of one program's loads with another's arithmetic
    useful = held / (held + inputs / 4)  # share of the weights in what is loaded
    used = shape.k / (chunks * warps)  # share of lanes in use, up to a constant factor
    barrier = 0.8 if warps == 8 and rows > 1 else 1.0  # eight warps wait longest for each other
    return balance * in_flight * overlap * useful * used * barrier


def _directs(shape: GemmShape, rows: int, dtype: torch.dtype, gpu: Gpu) -> list[GemmConfig]:
    """At most six: with few tiles a program each, otherwise persistent ones, as many as are resident at once."""
    if dtype.itemsize != 2 or not 1 < rows <= direct.MAX_ROWS or shape.norm:
        return []
    few = ((16, 4, 6, 0), (16, 4, 4, 0), (16, 8, 4, 0), (32, 4, 3, 0))
    many = ((16, 4, 4, 3), (16, 4, 3, 4), (16, 4, 4, 4), (16, 2, 4, 7), (16, 4, 6, 2), (16, 4, 4, 0))
    found = []
    for lines, warps, stages, programs in many if shape.n > 64 * gpu.multiprocessors else few:
        if direct.chunks(shape.k, warps) <= direct.MAX_CHUNKS and warps * direct.WIDTH <= shape.k:
            block_n = lines // 2 if shape.silu else lines
            found.append(GemmConfig("direct", block_n, max(rows, 8), direct.WIDTH, warps, stages, programs=programs))
    return found


def _dots(shape: GemmShape, rows: int, gpu: Gpu) -> list[GemmConfig]:
    found = []
    block_m = max(rows, 16)
    for block_n in (8, 16, 32):
        for warps in (4, 8):
            # Every warp holds all results, and the normed inputs.
            held = block_m * block_n * (2 if shape.silu else 1)
            if warps * 64 > _round_up(shape.k, 64) or held > (512 if shape.norm else 2048):
                continue
            config = GemmConfig("dot", block_n, block_m, 64, warps)
            stages = min(6, 96 * KB // (2 * 64 * warps * _tile_rows(shape, config)) + 1)
            if stages >= 3:
                found.append(replace(config, stages=stages))
    return sorted(found, key=lambda config: _estimate(shape, rows, config, gpu))


def _tiles(shape: GemmShape, rows: int, gpu: Gpu) -> list[GemmConfig]:
    found = []
    for block_m, block_n, block_k, warps in _TILE_SHAPES[min(max(rows, 16), 256)]:
        config = GemmConfig("tile", block_n, block_m, block_k, warps, tma=gpu.has_tma)
        step = 2 * block_k * _tile_rows(shape, config)
        # Two small programs share a multiprocessor: one multiplies while the other is in its prologue or epilogue.
        shared = _SHARED // 2 if block_m * block_n <= 128 * 64 and step * 3 <= _SHARED // 2 else _SHARED
        stages = min(6, shared // step)
        if stages < 3 or (shape.silu and block_m * block_n > 128 * 128):
            continue
        config = replace(config, stages=stages)
        found.append(config)
        tiles = _tile_count(shape, rows, config)
        if shape.norm:
            continue
        if 2 * tiles <= gpu.multiprocessors:
            split = min(gpu.multiprocessors // tiles, 8, shape.k // block_k // 2)
            found.append(replace(config, split=max(split, 1)))
        elif tiles % gpu.multiprocessors and tiles < 16 * gpu.multiprocessors:
            found.append(replace(config, programs=1))
    return list(dict.fromkeys(found))


_TILE_SHAPES = {
    16: ((16, 64, 128, 4), (16, 128, 64, 4), (16, 64, 256, 4)),
    32: ((32, 64, 128, 4), (32, 128, 64, 4), (32, 64, 64, 4)),
    64: ((64, 64, 64, 4), (64, 128, 64, 4), (64, 128, 64, 8)),
    128: ((128, 128, 64, 8), (128, 64, 64, 4), (128, 256, 64, 8), (128, 64, 128, 4)),
    256: ((256, 128, 64, 8), (256, 64, 64, 8), (128, 128, 64, 8), (128, 256, 64, 8), (128, 64, 64, 4)),
}
"""(block_m, block_n, block_k, warps) by rows."""


def _tile_rows(shape: GemmShape, config: GemmConfig) -> int:
    """Rows of weights and of inputs that a program loads each iteration."""
    return config.block_n * (2 if shape.silu else 1) + config.block_m * (2 if shape.norm else 1)


def _tile_count(shape: GemmShape, rows: int, config: GemmConfig) -> int:
    return -(-shape.outputs // config.block_n) * -(-rows // config.block_m)


def _estimate(shape: GemmShape, rows: int, config: GemmConfig, gpu: Gpu) -> float:
    """Estimated nanoseconds of a `dot` or `tile`: the longest of memory reads, L2 reads and operations."""
    tiles = _tile_count(shape, rows, config)
    whole = -(-tiles * config.split // gpu.multiprocessors) / config.split
    each = tiles / gpu.multiprocessors if config.programs else whole  # tiles of the busiest multiprocessor
    depth = 2 * shape.k
    memory = shape.n * depth / _MEMORY
    cache = each * _tile_rows(shape, config) * depth / _CACHE
    padded = config.block_m * config.block_n * (2 if shape.silu else 1)
    operations = each * padded * depth * gpu.multiprocessors / _TENSOR
    return max(memory, cache, operations) + (_EXCHANGE if config.split > 1 or config.programs else 0.0)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
