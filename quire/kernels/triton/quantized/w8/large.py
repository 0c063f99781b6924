"""GEMM `large` of 8-bit codes: hundreds to thousands of rows, bound by the tensor cores.

Persistent programs, one a multiprocessor, walk over tiles [rows, outputs] in groups that share weights and inputs in
L2; TMA loads both operands, and the loads of the next tile begin before the epilogue stores the last. Scales, bias,
gate and the addition to the residual stream are in the epilogue. A gated weight's tile is gate rows and as many up
rows, loaded as one, so that each thread holds both halves of a pair.

Bytes: per tile (block_m + block_n) * in, mostly from L2. Operations: 2 per weight and row.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.quantized.w8.tile import CodedGemm, block_scales, scaled
from quire.kernels.triton.skinny_gemm.common import GemmConfig, GemmLaunch

ROW_GROUP = 8
"""Row tiles whose programs run side by side with the same weights."""


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile [ROWS, COLUMNS]."""
    return tl.reshape(tile, (ROWS, 2, COLUMNS // 2)).permute(0, 2, 1).split()


@triton.jit
def _store(
    total, up, scale, x_scale, bias, y_view, row, output, rows, N,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, BLOCKED: tl.constexpr,
):  # fmt: skip
    """Epilogue of outputs [output, + WIDTH) of rows [row, + BLOCK_M)."""
    lines = row + tl.arange(0, BLOCK_M)[:, None]
    columns = output + tl.arange(0, WIDTH)[None, :]
    out = scaled(total, scale, x_scale, bias, columns, lines, rows, N, 0, BLOCKED)
    if SILU:
        gated = scaled(up, scale, x_scale, bias, columns, lines, rows, N, N, BLOCKED)
        out = out / (1 + tl.exp(-out)) * gated
    if ADD:
        out += y_view.load([row, output]).to(tl.float32)
    y_view.store([row, output], out.to(y_view.dtype))


@triton.jit(do_not_specialize=["rows"])
def _large(
    x_view, x_scale, view, scale, bias, y_view, rows, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SILU: tl.constexpr,
    ADD: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SUM: tl.constexpr = tl.int32 if x_view.dtype == tl.int8 else tl.float32
    BOTH: tl.constexpr = 2 * BLOCK_N if SILU else BLOCK_N
    BLOCKED: tl.constexpr = BLOCK_COLUMNS > 0
    row_tiles = tl.cdiv(rows, BLOCK_M)
    column_tiles = tl.cdiv(N, BLOCK_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        first = tile // (GROUP * column_tiles) * GROUP
        size = tl.minimum(row_tiles - first, GROUP)
        within = tile % (GROUP * column_tiles)
        row = (first + within % size) * BLOCK_M
        output = within // size * BLOCK_N
        total = tl.zeros((BLOCK_M, BOTH), SUM)
        for step in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
            value = x_view.load([row, step * BLOCK_K])
            if SILU:
                weight = tl.reshape(view.load([0, output, step * BLOCK_K]), (BOTH, BLOCK_K))
            else:
                weight = view.load([output, step * BLOCK_K])
            if BLOCKED:
                line = row + tl.arange(0, BLOCK_M)
                weights, lines = block_scales(scale, x_scale, line, output, step * BLOCK_K, rows, N, K, 0, BLOCK_ROWS,
                                              BLOCK_COLUMNS, BLOCK_N)  # fmt: skip
                if SILU:
                    others, _ = block_scales(scale, x_scale, line, output, step * BLOCK_K, rows, N, K, N, BLOCK_ROWS,
                                             BLOCK_COLUMNS, BLOCK_N)  # fmt: skip
                    weights = tl.reshape(tl.join(weights, others).permute(1, 0), (BOTH,))
                total += tl.dot(value, weight.T, out_dtype=SUM) * (lines[:, None] * weights[None, :])
            else:
                total = tl.dot(value, weight.T, total, out_dtype=SUM)
        if SILU:
            gate, up = _halves(total, BLOCK_M, BOTH)
            _store(gate, up, scale, x_scale, bias, y_view, row, output, rows, N, BLOCK_M, BLOCK_N, True, ADD, BLOCKED)
        else:
            # In halves: the staging buffer of a whole tile would cost a pipeline stage.
            left, right = _halves(total, BLOCK_M, BLOCK_N)
            HALF: tl.constexpr = BLOCK_N // 2
            _store(left, left, scale, x_scale, bias, y_view, row, output, rows, N, BLOCK_M, HALF, False, ADD, BLOCKED)
            _store(right, right, scale, x_scale, bias, y_view, row, output + HALF, rows, N, BLOCK_M, HALF, False, ADD,
                   BLOCKED)  # fmt: skip


def large_launch(gemm: CodedGemm, config: GemmConfig) -> GemmLaunch:
    """The launch of a GEMM of any number of rows. `programs`: per multiprocessor; 0: one per tile, not persistent."""
    if gemm.block is not None and gemm.block[1] != config.block_k:
        raise ValueError(f"{config}: with scales per {gemm.block[1]} inputs an iteration has as many")
    out = gemm.output()
    rows, depth, outputs = gemm.rows, gemm.depth, out.shape[1]
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(outputs, config.block_n)
    programs = min(tiles, config.programs * num_sms()) if config.programs else tiles
    x_view = TensorDescriptor.from_tensor(gemm.x.codes, [config.block_m, config.block_k])
    if gemm.silu:
        view = TensorDescriptor.from_tensor(gemm.weight.view(2, outputs, depth), [2, config.block_n, config.block_k])
        y_view = TensorDescriptor.from_tensor(out, [config.block_m, config.block_n])
    else:
        view = TensorDescriptor.from_tensor(gemm.weight, [config.block_n, config.block_k])
        y_view = TensorDescriptor.from_tensor(out, [config.block_m, config.block_n // 2])
    arguments = (x_view, gemm.x.scale, view, gemm.scale, gemm.bias, y_view, rows, outputs, depth)
    constants = _constants(config, gemm.silu, gemm.stream is not None, gemm.block or (0, 0))
    return GemmLaunch(_large, programs, arguments, constants, out)


@functools.cache
def _constants(config: GemmConfig, silu: bool, add: bool, block: tuple[int, int]) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.stages,
        "SILU": silu,
        "ADD": add,
        "GROUP": ROW_GROUP,
        "FLATTEN": config.programs > 0,
        "BLOCK_ROWS": block[0],
        "BLOCK_COLUMNS": block[1],
        "num_warps": config.warps,
        **pdl(),
    }
