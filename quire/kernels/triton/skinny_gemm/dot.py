"""Products of up to 64 rows on small tensor core tiles, for outputs too few to give every multiprocessor a large one.

A program owns as few as 8 outputs and reads their weights in one go, its warps side by side along the inputs: each
multiplies its own slice, and the slices are summed once at the end. So 1024 outputs occupy 128 multiprocessors without
any exchange between programs.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.skinny_gemm.common import Config, Launch, Product, finish, prefetch_rows, prefetch_shape

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
    SILU: tl.constexpr, EVEN_K: tl.constexpr, PIECES: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = SLICES * BLOCK_K
    program = tl.program_id(0)
    # Outputs past the end repeat the last, and are not stored.
    first = tl.minimum(program * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64) * K
    second = first + N.to(tl.int64) * K
    row = tl.arange(0, BLOCK_M)[None, :, None]
    columns = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    if PDL:
        prefetch_rows(weight + first, K, PIECES, SPAN)
        if SILU:
            prefetch_rows(weight + second, K, PIECES, SPAN)
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
            # A step ahead: a read so narrow is not pipelined by the compiler.
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


def dot_launch(product: Product, config: Config) -> Launch:
    """The launch of a product of at most `config.block_m` rows.

    Bytes: the weight once; the input, the residual and the gain once a program, from the cache. Operations: 2 a weight
    and row of block_m, on tensor cores.
    """
    if product.rows > config.block_m:
        raise ValueError(f"{config} is for at most {config.block_m} rows, not {product.rows}")
    out = product.new_output()
    outputs = out.shape[1]
    arguments = (
        product.x, product.residual, product.gain, product.weight, product.bias, product.stream, out,
        product.rows, outputs, product.depth, product.eps,
    )  # fmt: skip
    meta = _meta(config, product.depth, product.x.element_size(), product.silu)
    return Launch(_dot, triton.cdiv(outputs, config.block_n), arguments, meta, out)


@functools.cache
def _meta(config: Config, depth: int, itemsize: int, silu: bool) -> dict[str, Any]:
    """What a launch is compiled with."""
    pieces, span = prefetch_shape(config.block_n, depth, itemsize, config.warps)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SLICES": config.warps,
        "STAGES": config.stages,
        "SILU": silu,
        "EVEN_K": depth % (config.warps * config.block_k) == 0,
        "PIECES": pieces,
        "SPAN": span,
        "num_warps": config.warps,
        **pdl(),
    }
