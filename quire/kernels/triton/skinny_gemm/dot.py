"""Skinny GEMM `dot`: up to 64 rows on small tensor-core tiles, for weights with too few outputs for large tiles.

A program owns as few as 8 outputs. Its warps split K: each multiplies its own slice, and the slices are reduced once at
the end, within the program. So 1024 outputs occupy 128 multiprocessors without any exchange between programs.

Bytes: the weight once; the input, the residual and the gain once per program, from cache. Operations: 2 per weight and
row of block_m, on tensor cores.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.skinny_gemm.common import Gemm, GemmConfig, GemmLaunch, finish, prefetch_rows, prefetch_shape

MAX_ROWS = 64


@triton.jit
def _weights(at, k, columns, K, EVEN_K: tl.constexpr):
    if EVEN_K:
        tile = tl.load(at + k)
    else:
        tile = tl.load(at + k, mask=k + columns < K, other=0.0)
    return tile


@triton.jit(do_not_specialize=["rows"])
def _dot(
    x, residual, gain, weight, bias, stream, y, rows, N, K, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
    SILU: tl.constexpr, EVEN_K: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = SLICES * BLOCK_K
    program = tl.program_id(0)
    # Outputs past the end repeat the last and are not stored.
    first = tl.minimum(program * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64) * K
    second = first + N.to(tl.int64) * K
    row = tl.arange(0, BLOCK_M)[None, :, None]
    columns = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    if PDL:
        prefetch_rows(weight + first, K, SPANS, SPAN)
        if SILU:
            prefetch_rows(weight + second, K, SPANS, SPAN)
    if gain is not None:
        gains = tl.load(gain + columns, mask=columns < K, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gates = weight + first[None, :, None] + columns
    ups = weight + second[None, :, None] + columns
    at = row * K + columns
    total = tl.zeros((SLICES, BLOCK_M, BLOCK_N), tl.float32)
    gated = tl.zeros((SLICES, BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((SLICES, BLOCK_M), tl.float32)
    for k in tl.range(0, K, STEP, num_stages=STAGES):
        inside = row < rows
        if not EVEN_K:
            inside = inside & (k + columns < K)
        tile = _weights(gates, k, columns, K, EVEN_K)
        value = tl.load(x + at + k, mask=inside, other=0.0)
        if gain is not None:
            if residual is not None:
                carried = tl.load(residual + at + k, mask=inside, other=0.0)
                value = (value.to(tl.float32) + carried.to(tl.float32)).to(value.dtype)
                tl.store(stream + at + k, value, mask=inside & (program == 0))
            wide = value.to(tl.float32)
            squares += tl.sum(wide * wide, 2)
            value = (wide * gains.to(tl.float32)).to(value.dtype)
            # One iteration ahead: the compiler does not pipeline a load this narrow.
            gains = tl.load(gain + k + STEP + columns, mask=k + STEP + columns < K, other=0.0)
        total = tl.dot(value, tl.permute(tile, (0, 2, 1)), total, input_precision="ieee")
        if SILU:
            tile = _weights(ups, k, columns, K, EVEN_K)
            gated = tl.dot(value, tl.permute(tile, (0, 2, 1)), gated, input_precision="ieee")
    out = tl.sum(total, 0)
    up = out
    if SILU:
        up = tl.sum(gated, 0)
    if gain is not None:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)[:, None]
        out *= scale
        up *= scale
    row = tl.arange(0, BLOCK_M)[:, None]
    column = program * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    finish(out, up, bias, y, row, column, rows, N, SILU)


def dot_launch(gemm: Gemm, config: GemmConfig) -> GemmLaunch:
    """The launch of a GEMM of at most `config.block_m` rows."""
    if gemm.rows > config.block_m:
        raise ValueError(f"{config} is for at most {config.block_m} rows, not {gemm.rows}")
    out = gemm.new_output()
    outputs = out.shape[1]
    arguments = (
        gemm.x, gemm.residual, gemm.gain, gemm.weight, gemm.bias, gemm.stream, out,
        gemm.rows, outputs, gemm.depth, gemm.eps,
    )  # fmt: skip
    constants = _constants(config, gemm.depth, gemm.x.element_size(), gemm.silu)
    return GemmLaunch(_dot, triton.cdiv(outputs, config.block_n), arguments, constants, out)


@functools.cache
def _constants(config: GemmConfig, depth: int, itemsize: int, silu: bool) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    spans, span = prefetch_shape(config.block_n, depth, itemsize, config.warps)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SLICES": config.warps,
        "STAGES": config.stages,
        "SILU": silu,
        "EVEN_K": depth % (config.warps * config.block_k) == 0,
        "SPANS": spans,
        "SPAN": span,
        "num_warps": config.warps,
        **pdl(),
    }
