"""Ways to take tokens through their experts that are worth trying, and a guess. Reasons only; `moe_tuning` measures.

With few tokens an expert the time is that of reading the experts used: what counts is how many reads are under way on
every multiprocessor. With many it is that of the tensor cores: what counts is how little else a tile does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.kernels.triton.moe.common import Block, ExpertsConfig, ExpertsShape
from quire.kernels.triton.skinny_gemm.candidates import KB, Gpu

MAX_VECTOR_TOKENS = 8
"""Past that tokens share experts often enough for tiles to pay."""
_SHARED = 224 * KB  # of a multiprocessor, less what the compiler needs

INVARIANT = ExpertsConfig("tile", Block(64, 64, 4, 4), Block(128, 64, 4, 4), 64)
"""One shape for any number of tokens, so that all are summed in the same order."""


class Family(NamedTuple):
    """Configurations that differ in the shapes of their two products alone."""

    base: ExpertsConfig
    gate_ups: list[Block]
    downs: list[Block]


_VECTORS = (
    [Block(2, warps=4), Block(4, warps=4), Block(1, warps=2), Block(2, warps=2), Block(4, warps=8), Block(8, warps=8)],
    [Block(2, warps=4), Block(1, warps=4), Block(1, warps=2), Block(4, warps=8), Block(2, warps=8), Block(4, warps=4)],
)
"""(gate and up, down), the best guesses first."""
_TILES = {
    16: (((64, 128, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8)), ((128, 128, 4), (64, 128, 4), (128, 64, 4))),
    32: (((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8)), ((128, 64, 4), (128, 128, 4), (64, 128, 4))),
    64: (((64, 64, 4), (128, 64, 8), (64, 128, 4)), ((128, 64, 4), (128, 128, 8), (256, 64, 8))),
    128: (((128, 64, 8), (64, 64, 4), (64, 64, 8)), ((128, 64, 8), (256, 64, 8), (128, 64, 4))),
    256: (((64, 64, 8),), ((128, 64, 8), (64, 64, 8))),
}
"""(outputs, inputs of a step, warps) by pairs of a tile, the best guesses first."""


def families(shape: ExpertsShape, tokens: int, dtype: torch.dtype, gpu: Gpu) -> list[Family]:
    """What to try for at most so many tokens (a power of two), the best guess first."""
    found = []
    aligned = shape.hidden * dtype.itemsize % 16 == 0 and shape.width * dtype.itemsize % 16 == 0
    if tokens <= MAX_VECTOR_TOKENS and aligned:
        base = ExpertsConfig("vector", _VECTORS[0][0], _VECTORS[1][0])
        found.append(Family(base, *_VECTORS))
    tma = gpu.has_copy_engine and aligned and dtype.itemsize == 2
    for block_m in _heights(shape, tokens):
        gate_ups, downs = (
            [block for n, k, warps in blocks for block in _staged(n, k, warps, block_m, folds, dtype)]
            for blocks, folds in zip(_TILES[block_m], (2, 1), strict=True)
        )
        found.append(Family(ExpertsConfig("tile", gate_ups[0], downs[0], block_m, tma), gate_ups, downs))
    if found[0].base.kernel == "vector" and tokens > MAX_VECTOR_TOKENS // 2:
        found.append(found.pop(0))
    return found


def guess(shape: ExpertsShape, tokens: int, dtype: torch.dtype, gpu: Gpu) -> ExpertsConfig:
    """What to use where nothing was measured."""
    return families(shape, tokens, dtype, gpu)[0].base


def _heights(shape: ExpertsShape, tokens: int) -> list[int]:
    """Pairs of a tile, the best guess first: most experts should need a single tile, or fill several."""
    each = tokens * shape.top_k / shape.experts
    if each <= 8:
        return [16, 32]
    if each <= 24:
        return [32, 16]
    if each <= 48:
        return [64, 32]
    if each <= 128:
        return [128, 64]
    return [128, 256, 64]


def _staged(n: int, k: int, warps: int, block_m: int, folds: int, dtype: torch.dtype) -> list[Block]:
    """A block with as many stages as fit: for two programs a multiprocessor, and for one."""
    if dtype.itemsize == 4:
        n, k = min(n, 64), 32
    step = (folds * n + block_m) * k * dtype.itemsize
    counts = [min(6, shared // step) for shared in (_SHARED // 2, _SHARED)]
    return [Block(n, k, warps, stages) for stages in dict.fromkeys(counts) if stages >= 3] or [
        Block(n, k, warps, max(counts[1], 1))
    ]
