"""Which kernel and tile shape a GEMM of 8-bit codes runs, by its shape and its rows.

Rules drawn from measurements of Llama-3.1-8B's shapes on an H200 (`python -m benchmarks.gpu.quantized_gemm`).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import torch

from quire.kernels.triton.skinny_gemm.common import GemmConfig
from quire.kernels.triton.tuning_table import Gpu, current_gpu

INVARIANT = GemmConfig("tile", block_n=128, block_m=64, block_k=128, warps=4, stages=4)
"""For any number of rows: the sums are in the same order."""
MAX_CODE_VECTOR_ROWS, MAX_VALUE_VECTOR_ROWS = 2, 4
"""Rows of `vector`, with quantized activations (every program quantizes them) and without."""
MAX_ROWS = 4
"""Rows that `vector` can have."""
_SHARED = 208 * 1024  # bytes of shared memory a program's stages may take
DEEP = 8192
"""Inputs from which on a weight has many inputs for its outputs."""


@functools.cache
def choose(
    rows: int, n: int, k: int, silu: bool, code: torch.dtype, blocked: bool = False, quantized: bool = True
) -> GemmConfig:
    """The kernel of a product of `rows` rows with a weight [n, k]; `silu`: gate rows, then up rows.

    blocked: scales per block. quantized: whether activations are.
    """
    gpu = current_gpu()
    outputs = n // 2 if silu else n
    if rows <= (MAX_CODE_VECTOR_ROWS if quantized else MAX_VALUE_VECTOR_ROWS):
        return _vector(outputs, k, silu, gpu)
    if not gpu.has_tma or k < 256 or outputs < 64:
        return INVARIANT
    if rows <= 16:
        return _few_rows(outputs, k, silu, quantized and not blocked, gpu)
    if rows <= 64 or not quantized:
        block_m = 32 if rows <= 32 else 64
        if silu and quantized:
            return GemmConfig("tile", 64, block_m, 128, 8, 6, tma=True, programs=1)
        if k > DEEP and quantized and not blocked:
            return GemmConfig("tile", 64, block_m, 256, 4, 3, tma=True, programs=2)
        return GemmConfig("tile", 64, block_m, 128, 4, 5 if quantized else 4, tma=True, programs=2)
    half = 2 if silu else 1
    if blocked:
        return GemmConfig("large", 128 // half, 64, 128, 4, 4, programs=2)
    if rows <= 256 and k > DEEP and -(-rows // 64) * -(-outputs // 128) < 2 * gpu.multiprocessors:
        return GemmConfig("tile", 128, 128, 128, 8, 4 if silu else 6, tma=True, programs=1)
    if -(-rows // 128) * -(-n // 256) < gpu.multiprocessors:
        return GemmConfig("large", 128 // half, 64, 128, 4, 4, programs=2)
    return GemmConfig("specialized", 256, 128, 128, 4, 4)


def candidates(
    rows: int, n: int, k: int, silu: bool, code: torch.dtype, blocked: bool = False, quantized: bool = True
) -> list[GemmConfig]:
    """What `quire tune` measures for such a product; the rule's choice is the first."""
    gpu = current_gpu()
    half = 2 if silu else 1
    outputs = n // half
    found = [choose(rows, n, k, silu, code, blocked, quantized)]
    if rows <= MAX_ROWS:
        for block_n, warps in itertools.product((2, 4, 8), (1, 2, 4, 8)):
            if warps == 1 or 512 * warps <= k:
                found.append(GemmConfig("vector", block_n, warps=warps, early=True))
                found.append(GemmConfig("vector", block_n, warps=warps, programs=2))
    if not gpu.has_tma or k < 256 or outputs < 64:
        return list(dict.fromkeys(found))
    if rows <= 256:
        block_m = min(max(rows, 16), 128)
        for block_n, block_k in itertools.product((64, 128), (128,) if blocked else (128, 256)):
            stages = min(7, _SHARED // ((block_n * half + block_m) * block_k))
            if stages < 3 or k < 2 * block_k:
                continue
            tile = GemmConfig("tile", block_n, block_m, block_k, 8 if block_m * block_n > 4096 else 4, stages, tma=True)
            found += [replace(tile, split=split) for split in (1, 2, 4, 8) if split == 1 or split <= k // block_k // 2]
            found += [replace(tile, programs=programs) for programs in (1, 2)]
    if rows > 32 and quantized:
        found += [GemmConfig("large", 128 // half, 64, 128, 4, 4, programs=programs) for programs in (1, 2)]
        if not blocked:
            found += [GemmConfig("specialized", 256, block_m, 128, 4, 4) for block_m in (128, 192)]
    return list(dict.fromkeys(found))


def _few_rows(outputs: int, k: int, silu: bool, deep_steps: bool, gpu: Gpu) -> GemmConfig:
    """Tiles of 64 outputs, and as many programs for each as make two for every multiprocessor."""
    block_k = 256 if deep_steps else 128
    stages = (4 if silu else 6) * 128 // block_k + 1
    split = 2 * gpu.multiprocessors // -(-outputs // 64)
    return GemmConfig("tile", 64, 16, block_k, 4, stages, tma=True, split=max(1, min(split, 8, k // block_k // 2)))


def _vector(outputs: int, k: int, silu: bool, gpu: Gpu) -> GemmConfig:
    """A few outputs a program: enough bytes in flight, and enough programs for every multiprocessor."""
    if k > DEEP:
        # The whole input in registers is most of the work: programs stay and keep it.
        return GemmConfig("vector", 2, warps=8, programs=2)
    warps = 1 << (min(max(k // 512, 1), 4).bit_length() - 1)
    block_n = 4 if silu else 8
    while block_n > 2 and outputs < 2 * gpu.multiprocessors * block_n:
        block_n //= 2
    return GemmConfig("vector", block_n, warps=warps, early=True)
