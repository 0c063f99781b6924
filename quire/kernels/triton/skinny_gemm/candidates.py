"""Shapes of programs worth trying for a product, best guess first. Reasons only; `tuning` measures.

What makes a shape good, from one row to hundreds: every multiprocessor busy, and equally; enough reads under way on
each of them to cover the memory's latency (about 40 KB on an H200); little read again that is not weights.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import torch

from quire.kernels.triton.skinny_gemm.common import Config
from quire.kernels.triton.skinny_gemm.dot import MAX_ROWS as MAX_DOT_ROWS
from quire.kernels.triton.skinny_gemm.vector import MAX_ROWS as MAX_VECTOR_ROWS

KB = 1024
# What an H200 does, measured or counted; the order of the guesses is much the same on its relatives.
_REGISTERS = 65536  # of 4 bytes, on a multiprocessor
_SHARED = 224 * KB  # of a multiprocessor, less what the compiler needs
_IN_FLIGHT = 64 * KB  # of reads on a multiprocessor: plenty
_MEMORY = 4300.0  # bytes a nanosecond
_CACHE = 52.0  # bytes a nanosecond, into one multiprocessor
_TENSOR = 650_000.0  # operations a nanosecond
_EXCHANGE = 2500.0  # nanoseconds to leave parts of a tile and add them up

MAX_NORM_ROWS = 32
"""Rows of a product with a norm folded in."""
SMALL = 12 << 20
"""Bytes: what is read in three microseconds."""


class Gpu(NamedTuple):
    """What a guess needs to know of the card."""

    name: str
    multiprocessors: int
    has_copy_engine: bool


class GemmShape(NamedTuple):
    """A product of a model: `kind` says what is folded into it, the weight is [n, k]."""

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


def candidates(shape: GemmShape, rows: int, dtype: torch.dtype, gpu: Gpu) -> list[Config]:
    """Configurations for a product of at most `rows` rows (a power of two): a handful, the best guesses first."""
    if shape.k * dtype.itemsize % 16 or shape.outputs < 8:
        return []  # rows of the weight must be as aligned as the reads; hardly any outputs are no concern of ours
    vectors = _vectors(shape, rows, dtype, gpu)[:6] if rows <= MAX_VECTOR_ROWS else []
    # No tensor cores in float32; in float16 a stream times its gain may be too large. A norm of many rows is done by
    # every program again.
    if dtype.itemsize != 2 or (shape.norm and (dtype != torch.bfloat16 or rows > MAX_NORM_ROWS)):
        return vectors
    if vectors and (rows <= 2 or shape.norm):
        return vectors + _dots(shape, rows, gpu)[: rows // 2]
    if vectors:
        return vectors[:4] + _blocks(shape, rows, gpu)[:5]
    return _blocks(shape, rows, gpu)


def _blocks(shape: GemmShape, rows: int, gpu: Gpu) -> list[Config]:
    """On tensor cores, small tiles and large ones."""
    found = _dots(shape, rows, gpu)[:4] if rows <= MAX_DOT_ROWS else []
    found += _tiles(shape, rows, gpu)
    found.sort(key=lambda config: _estimate(shape, rows, config, gpu))
    tile = next((config for config in found if config.tma), None)
    if tile and rows <= MAX_DOT_ROWS:
        found[7:] = [replace(tile, tma=False)]
    return found[:8]


def guess(shape: GemmShape, rows: int, dtype: torch.dtype, gpu: Gpu) -> Config | None:
    """What to use where nothing was measured; None: cuBLAS, and the kernels around it on their own.

    With more than two rows a guess is worth it for small weights alone: there a launch takes longer than the reading,
    and ours fold several into one. For the others cuBLAS reads as fast, and a bad guess would take twice its time.
    Over the shapes of sixteen models on an H200 guesses take at most 4% longer than the best, on the average over any
    number of rows (`python -m benchmarks.gpu.skinny_gemm`).
    """
    if rows > 16 or (rows > 2 and shape.n * shape.k * dtype.itemsize > SMALL):
        return None
    if shape.norm and rows > 1 and shape.k > 4096:
        return None  # every program norms the rows again
    return next(iter(candidates(shape, rows, dtype, gpu)), None)


def _vectors(shape: GemmShape, rows: int, dtype: torch.dtype, gpu: Gpu) -> list[Config]:
    width = 32 * 16 // dtype.itemsize  # what a warp reads at a time
    scored = []
    for warps, block_n in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        chunks = -(-shape.k // (warps * width))
        if chunks * warps * width < 2 * _round_up(shape.k, width):
            config = Config("vector", block_n, warps=warps)
            scored.append((_score_vector(shape, rows, config, chunks, gpu), config, chunks))
    ranked = sorted((item for item in scored if item[0]), key=lambda item: -item[0])
    best = [config for _, config, _ in ranked]
    if best and shape.outputs > 24 * gpu.multiprocessors * best[0].block_n:
        # So many programs that it may pay to keep a few, and the input with them; they hold the next weights too.
        lasting = [
            replace(config, programs=16 // config.warps)
            for _, config, chunks in ranked
            if sum(_registers(shape, rows, config, chunks, held_twice=True)) <= 144
        ]
        best[2:2] = lasting[:2]
    return best


def _registers(shape: GemmShape, rows: int, config: Config, chunks: int, held_twice: bool = False) -> tuple[int, int]:
    """About how many a thread of `vector` needs for weights, and for inputs, that it reads in `chunks` of 16 bytes."""
    weights = 4 * chunks * config.block_n * (2 if shape.silu else 1) * (2 if held_twice else 1)
    return weights, chunks * rows * (12 if shape.norm else 4) + (4 * chunks if shape.norm else 0)


def _score_vector(shape: GemmShape, rows: int, config: Config, chunks: int, gpu: Gpu) -> float:
    """How good a guess a shape is; 0 if it does not fit."""
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
    overlap = blocks / (blocks + gpu.multiprocessors / 2)  # of one program's reads with another's arithmetic
    purpose = held / (held + inputs / 4)  # of what is read, the weights
    used = shape.k / (chunks * warps)  # of a row's lanes, in units that do not matter
    together = 0.8 if warps == 8 and rows > 1 else 1.0  # so many wait for each other longest
    return balance * in_flight * overlap * purpose * used * together


def _dots(shape: GemmShape, rows: int, gpu: Gpu) -> list[Config]:
    found = []
    block_m = max(rows, 16)
    for block_n in (8, 16, 32):
        for warps in (4, 8):
            # Every warp holds all results, and normed inputs beside them.
            held = block_m * block_n * (2 if shape.silu else 1)
            if warps * 64 > _round_up(shape.k, 64) or held > (512 if shape.norm else 2048):
                continue
            config = Config("dot", block_n, block_m, 64, warps)
            stages = min(6, 96 * KB // (2 * 64 * warps * _tile_rows(shape, config)) + 1)
            if stages >= 3:
                found.append(replace(config, stages=stages))
    return sorted(found, key=lambda config: _estimate(shape, rows, config, gpu))


def _tiles(shape: GemmShape, rows: int, gpu: Gpu) -> list[Config]:
    found = []
    for block_m, block_n, block_k, warps in _TILE_SHAPES[min(max(rows, 16), 256)]:
        config = Config("tile", block_n, block_m, block_k, warps, tma=gpu.has_copy_engine)
        step = 2 * block_k * _tile_rows(shape, config)
        # Two small programs share a multiprocessor: one multiplies while the other begins or ends.
        shared = _SHARED // 2 if block_m * block_n <= 128 * 64 and step * 3 <= _SHARED // 2 else _SHARED
        stages = min(6, shared // step)
        if stages < 3 or (shape.silu and block_m * block_n > 128 * 128):
            continue
        config = replace(config, stages=stages)
        found.append(config)
        tiles = _count(shape, rows, config)
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


def _tile_rows(shape: GemmShape, config: Config) -> int:
    """Rows of weights and of inputs that a program reads in each step."""
    return config.block_n * (2 if shape.silu else 1) + config.block_m * (2 if shape.norm else 1)


def _count(shape: GemmShape, rows: int, config: Config) -> int:
    return -(-shape.outputs // config.block_n) * -(-rows // config.block_m)


def _estimate(shape: GemmShape, rows: int, config: Config, gpu: Gpu) -> float:
    """Nanoseconds a `dot` or `tile` may take: the longest of its reads from memory, from the cache, its operations."""
    tiles = _count(shape, rows, config)
    whole = -(-tiles * config.split // gpu.multiprocessors) / config.split
    each = tiles / gpu.multiprocessors if config.programs else whole  # tiles a multiprocessor, at the busiest
    depth = 2 * shape.k
    memory = shape.n * depth / _MEMORY
    cache = each * _tile_rows(shape, config) * depth / _CACHE
    padded = config.block_m * config.block_n * (2 if shape.silu else 1)
    operations = each * padded * depth * gpu.multiprocessors / _TENSOR
    return max(memory, cache, operations) + (_EXCHANGE if config.split > 1 or config.programs else 0.0)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
