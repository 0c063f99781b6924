"""Which kernel and tile shape a GEMM of 8-bit codes runs, by its shape and its rows."""

from __future__ import annotations

import functools

import torch

from quire.kernels.triton.quantized.w8.vector import MAX_ROWS as MAX_VECTOR_ROWS
from quire.kernels.triton.skinny_gemm.common import GemmConfig
from quire.kernels.triton.tuning_table import current_gpu

INVARIANT = GemmConfig("tile", block_n=128, block_m=64, block_k=128, warps=4, stages=4)
"""For any number of rows: the sums are in the same order."""


@functools.cache
def choose(
    rows: int, n: int, k: int, silu: bool, code: torch.dtype, blocked: bool = False, quantized: bool = True
) -> GemmConfig:
    """The kernel of a product of `rows` rows with a weight [n, k]; `silu`: gate rows, then up rows.

    blocked: scales per block. quantized: whether activations are.
    """
    gpu = current_gpu()
    outputs = n // 2 if silu else n
    if rows <= (1 if quantized else MAX_VECTOR_ROWS):
        return _vector(outputs, k, silu, gpu.multiprocessors)
    tma, sms = gpu.has_tma, gpu.multiprocessors
    if not tma or k < 256 or outputs < 64:
        return INVARIANT
    deep = 128 if blocked or not quantized else 256
    if rows <= 16:
        return GemmConfig("tile", 64, 16, deep, 4, (4 if silu else 6) * 128 // deep + 1, tma=True, programs=2)
    if rows <= 64 or not quantized:
        block_m = 32 if rows <= 32 else 64
        return GemmConfig("tile", 64, block_m, 128, 4, 4, tma=True, programs=2)
    if rows <= 128:
        return GemmConfig("tile", 64, 128, 128, 4 if not silu else 8, 4, tma=True, programs=1)
    half = 2 if silu else 1
    if blocked:
        return GemmConfig("large", 128 // half, 128, 128, 8, 4, programs=1)
    wide = -(-rows // 128) * -(-n // 256) >= sms
    return GemmConfig("large", (256 if wide else 128) // half, 128, 128, 8, 3, programs=1)


def _vector(outputs: int, k: int, silu: bool, multiprocessors: int) -> GemmConfig:
    """A few outputs a program: enough bytes in flight, and enough programs for every multiprocessor."""
    warps = min(max(k // 512, 1), 8)
    warps = 1 << (warps.bit_length() - 1)
    chunks = -(-k // (512 * warps))
    block_n = max(1, min(4, 8 // chunks) // (2 if silu else 1))
    while block_n > 1 and outputs < 2 * multiprocessors * block_n:
        block_n //= 2
    return GemmConfig("vector", block_n, warps=warps, early=True)
