"""GEMM `tile` of 8-bit codes: 1 to a few hundred rows on tensor-core tiles, weights read near memory speed.

Like `skinny_gemm/tile.py`, from which it takes the division of work (split-K, stream-K): the result is computed
transposed, weight @ x.T, so that the few rows take WGMMA's side of any multiple of 8. Codes go from memory to shared
memory to the tensor cores without conversion. Scales, bias, gate and the addition to the residual stream are in the
epilogue; with scales per block, each 128 inputs are summed by the tensor cores and added in float32.

Bytes: one per weight; the input once per program, from cache. Operations: 2 per weight and row.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.quantized.w8.activations import Codes
from quire.kernels.triton.skinny_gemm.common import GemmConfig, GemmLaunch, prefetch_shape
from quire.kernels.triton.skinny_gemm.tile import (
    _arrivals,
    _first_iteration,
    _owner,
    _part,
    _prefetch_tile,
    _programs,
    _weight_tile,
)


@dataclass(slots=True)
class CodedGemm:
    """One GEMM of codes: its inputs, and what is fused into it."""

    x: Codes
    """Without a scale: activations as they are, which weights are multiplied with as values, rounded to their dtype."""
    weight: torch.Tensor
    """Codes [out, in]; under `silu` [gate and up, in]."""
    scale: torch.Tensor
    """float32 [out]; in blocks [block rows, block columns]."""
    dtype: torch.dtype
    bias: torch.Tensor | None = None
    silu: bool = False
    stream: torch.Tensor | None = None
    """The result is added to it, in place."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a scale's block; None: a scale per output."""

    @property
    def rows(self) -> int:
        return self.x.codes.shape[0]

    @property
    def depth(self) -> int:
        return self.x.codes.shape[1]

    def output(self) -> torch.Tensor:
        """The stream, or an uninitialized tensor [rows, out]."""
        if self.stream is not None:
            return self.stream
        outputs = self.weight.shape[0] // (2 if self.silu else 1)
        return torch.empty(self.rows, outputs, dtype=self.dtype, device=self.weight.device)


@triton.jit
def scaled(total, scale, x_scale, bias, column, row, rows, N, skip, BLOCKED: tl.constexpr):
    """Sums of codes (in blocks: of values) as outputs in float32; `row` and `column` broadcast to their shape."""
    out = total.to(tl.float32)
    if x_scale is not None and not BLOCKED:
        out = out * tl.load(x_scale + row, mask=row < rows, other=0.0)
        out = out * tl.load(scale + skip + column, mask=column < N, other=0.0)
    if bias is not None:
        out += tl.load(bias + skip + column, mask=column < N, other=0.0).to(tl.float32)
    return out


@triton.jit
def _finish(
    total, gated, scale, x_scale, bias, y, row, column, rows, N, y_stride,
    SILU: tl.constexpr, ADD: tl.constexpr, BLOCKED: tl.constexpr,
):  # fmt: skip
    """Epilogue of a block of outputs: scales, bias, gate, store."""
    inside = (column < N) & (row < rows)
    out = scaled(total, scale, x_scale, bias, column, row, rows, N, 0, BLOCKED)
    if SILU:
        up = scaled(gated, scale, x_scale, bias, column, row, rows, N, N, BLOCKED)
        out = out / (1 + tl.exp(-out)) * up
    at = y + row.to(tl.int64) * y_stride + column
    if ADD:
        out += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def block_scales(
    scale, x_scale, line, output, k, rows, N, K, skip,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(weight scales [BLOCK_N], row scales like `line`) of the block that begins at input k."""
    column = k // BLOCK_COLUMNS
    columns = tl.cdiv(K, BLOCK_COLUMNS)
    outputs = skip + tl.minimum(output + tl.arange(0, BLOCK_N), N - 1)
    weights = tl.load(scale + outputs // BLOCK_ROWS * columns + column)
    lines = tl.load(x_scale + column.to(tl.int64) * rows + line, mask=line < rows, other=0.0)
    return weights, lines


@triton.jit
def _accumulate(
    x, x_view, x_scale, weight, view, scale, row, output, begin, end, rows, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SILU: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Outputs [output, + BLOCK_N) of rows [row, + BLOCK_M), summed over inputs [begin, end): (gate, up)."""
    total = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    gated = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    line = row + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)[None, :]
    at = line.to(tl.int64)[:, None] * K + columns
    if x_scale is None:
        outputs = tl.minimum(output + tl.arange(0, BLOCK_N), N - 1)
        weights = tl.load(scale + outputs)[:, None]
        if SILU:
            others = tl.load(scale + N + outputs)[:, None]
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        tile = _weight_tile(weight, view, 0, output, k, N, K, BLOCK_N, BLOCK_K, EVEN_K)
        if x_view is not None:
            value = x_view.load([row, k])
        else:
            inside = line[:, None] < rows
            if not EVEN_K:
                inside = inside & (k + columns < K)
            value = tl.load(x + at + k, mask=inside, other=0.0)
        if x_scale is None:
            tile = (tile.to(tl.float32) * weights).to(value.dtype)
        if BLOCK_COLUMNS:
            weights, lines = block_scales(scale, x_scale, line, output, k, rows, N, K, 0, BLOCK_ROWS, BLOCK_COLUMNS,
                                          BLOCK_N)  # fmt: skip
            total += tl.dot(tile, value.T, out_dtype=SUM) * (weights[:, None] * lines[None, :])
        else:
            total = tl.dot(tile, value.T, total, out_dtype=SUM, input_precision="ieee")
        if SILU:
            tile = _weight_tile(weight, view, N, output, k, N, K, BLOCK_N, BLOCK_K, EVEN_K)
            if x_scale is None:
                tile = (tile.to(tl.float32) * others).to(value.dtype)
            if BLOCK_COLUMNS:
                weights, lines = block_scales(scale, x_scale, line, output, k, rows, N, K, N, BLOCK_ROWS,
                                              BLOCK_COLUMNS, BLOCK_N)  # fmt: skip
                gated += tl.dot(tile, value.T, out_dtype=SUM) * (weights[:, None] * lines[None, :])
            else:
                gated = tl.dot(tile, value.T, gated, out_dtype=SUM, input_precision="ieee")
    return total, gated


@triton.jit
def _sum_parts(
    parts, tile, first, last, steps, work, programs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The sum of the parts of a tile that programs first to last wrote: (gate, up)."""
    total = tl.zeros((BLOCK_N, BLOCK_M), parts.dtype.element_ty)
    gated = tl.zeros((BLOCK_N, BLOCK_M), parts.dtype.element_ty)
    for program in tl.range(first, last + 1, num_stages=1):
        at = _part(parts, program, tile, steps, work, programs, BLOCK_M, BLOCK_N, SILU)
        # From L2: L1 is not coherent with what other multiprocessors wrote.
        total += tl.load(at, cache_modifier=".cg")
        if SILU:
            gated += tl.load(at + BLOCK_N * BLOCK_M, cache_modifier=".cg")
    return total, gated


@triton.jit(do_not_specialize=["rows"])
def _tile(
    x, x_view, x_scale, weight, view, scale, bias, y, parts, arrivals, rows, N, K, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SILU: tl.constexpr,
    ADD: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    SPANS: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    steps = tl.cdiv(K, BLOCK_K)
    work = row_tiles * tl.cdiv(N, BLOCK_N) * steps
    if parts is None:
        begin = program * steps
        end = begin + steps
    else:
        begin = _first_iteration(program, work, programs)
        end = _first_iteration(program + 1, work, programs)
    if PDL:
        _prefetch_tile(weight, begin // steps, begin % steps * BLOCK_K, row_tiles, N, K, BLOCK_N, SPANS, SPAN, SILU)
        gdc_wait()
        gdc_launch_dependents()
    for tile in range(begin // steps, (end - 1) // steps + 1):
        # Consecutive tiles share weights: same outputs, next rows.
        row = tile % row_tiles * BLOCK_M
        output = tile // row_tiles * BLOCK_N
        low = tl.maximum(begin - tile * steps, 0)
        high = tl.minimum(end - tile * steps, steps)
        total, gated = _accumulate(
            x, x_view, x_scale, weight, view, scale, row, output, low * BLOCK_K, high * BLOCK_K, rows, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SILU, EVEN_K, BLOCK_ROWS, BLOCK_COLUMNS, SUM,
        )  # fmt: skip
        lines = row + tl.arange(0, BLOCK_M)[None, :]
        columns = output + tl.arange(0, BLOCK_N)[:, None]
        if parts is None or high - low == steps:
            _finish(
                total, gated, scale, x_scale, bias, y, lines, columns, rows, N, y_stride, SILU, ADD, BLOCK_COLUMNS > 0,
            )  # fmt: skip
        else:
            at = _part(parts, program, tile, steps, work, programs, BLOCK_M, BLOCK_N, SILU)
            tl.store(at, total)
            if SILU:
                tl.store(at + BLOCK_N * BLOCK_M, gated)
            first = _owner(tile * steps, work, programs)
            last = _owner(tile * steps + steps - 1, work, programs)
            # All threads must have written before one of them counts the arrival.
            tl.debug_barrier()
            if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == last - first:
                total, gated = _sum_parts(parts, tile, first, last, steps, work, programs, BLOCK_M, BLOCK_N, SILU)
                _finish(
                    total, gated, scale, x_scale, bias, y, lines, columns, rows, N, y_stride, SILU, ADD,
                    BLOCK_COLUMNS > 0,
                )  # fmt: skip
                tl.store(arrivals + tile, 0)


def tile_launch(gemm: CodedGemm, config: GemmConfig) -> GemmLaunch:
    """The launch of a GEMM of any number of rows."""
    if gemm.block is not None and gemm.block[1] != config.block_k:
        raise ValueError(f"{config}: with scales per {gemm.block[1]} inputs an iteration has as many")
    out = gemm.output()
    rows, depth, outputs = gemm.rows, gemm.depth, out.shape[1]
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(outputs, config.block_n)
    programs = _programs(config, tiles, triton.cdiv(depth, config.block_k))
    parts = arrivals = None
    if programs != tiles:
        slots = programs * (2 if config.programs else 1) * (2 if gemm.silu else 1)
        sums = torch.int32 if gemm.x.codes.dtype is torch.int8 else torch.float32
        parts = torch.empty(slots * config.block_n * config.block_m, dtype=sums, device=out.device)
        arrivals = _arrivals(out.device)
    x_view = view = None
    if config.tma:
        view = TensorDescriptor.from_tensor(gemm.weight, [config.block_n, config.block_k])
        x_view = TensorDescriptor.from_tensor(gemm.x.codes, [config.block_m, config.block_k])
    arguments = (
        gemm.x.codes, x_view, gemm.x.scale, gemm.weight, view, gemm.scale, gemm.bias, out, parts, arrivals,
        rows, outputs, depth, out.stride(0),
    )  # fmt: skip
    constants = _constants(config, depth, gemm.silu, gemm.stream is not None, gemm.block or (0, 0))
    return GemmLaunch(_tile, programs, arguments, constants, out)


@functools.cache
def _constants(config: GemmConfig, depth: int, silu: bool, add: bool, block: tuple[int, int]) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    spans, span = prefetch_shape(config.block_n, depth, 1, config.warps)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.stages,
        "SILU": silu,
        "ADD": add,
        "EVEN_K": depth % config.block_k == 0,
        "BLOCK_ROWS": block[0],
        "BLOCK_COLUMNS": block[1],
        "SPANS": spans,
        "SPAN": span,
        "num_warps": config.warps,
        **pdl(),
    }
