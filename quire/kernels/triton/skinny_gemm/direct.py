"""Skinny GEMM `direct`: 2 to 16 rows, weights straight from memory into the registers of tensor-core operands.

A tile is 16 or 32 rows of the weight (with a gate: half of them gate features, half up). A program's warps split K, in
chunks of 64 inputs a warp; weights are the side of 16 of a product, rows of x the side of 8. Up to DEPTH chunks of
weights are in flight, the first of them before `gdc_wait`, so they overlap the end of the preceding kernel. There is no
shared memory and no barrier until one exchange at the end of a tile sums over warps. Where there are many tiles,
programs take several, one after the other, and load the next one's first chunks meanwhile: programs that start together
would otherwise all be at their end, with nothing in flight, at the same time.

Bytes: the weight once; the input once per tile, from cache. Operations: 2 per weight and row of 8, on tensor cores. A
norm is not fused: recomputed by every program it takes longer than a kernel of its own.
"""

# ruff: noqa: N803, N806, RUF005  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.quantized.layouts import arange, batch_layouts, in_layout, layout_jit, multiply, zeros
from quire.kernels.triton.skinny_gemm.common import Gemm, GemmConfig, GemmLaunch, finish

MAX_ROWS = 16
MAX_CHUNKS = 32
"""Chunks of a warp: its loop is unrolled."""
WIDTH = 64
"""Inputs of a chunk."""


@triton.jit
def tile_lines(first, local, N, OUTPUTS: tl.constexpr, SILU: tl.constexpr):
    """The weight's rows of a tile. Past the end the last repeats and is not stored; up features follow the gate's."""
    if SILU:
        line = tl.minimum(first + local % OUTPUTS, N - 1) + N * (local // OUTPUTS)
    else:
        line = tl.minimum(first + local, N - 1)
    return line.to(tl.int64)


@triton.jit
def _weights(weight, lines, k, K: tl.constexpr, EVEN: tl.constexpr):
    """A chunk of every warp, [warps, lines, WIDTH]. A step reads each weight once: it should not evict what is read
    again."""
    at = weight + lines * K + k
    if EVEN:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=k + lines * 0 < K, other=0.0, eviction_policy="evict_first")
    return tile


@layout_jit
def finish_tile(
    sums, bias, y, first, rows, N, BLOCK_M: tl.constexpr, LINES: tl.constexpr, SILU: tl.constexpr, LAYOUTS: tl.constexpr
):  # fmt: skip
    """Epilogue of a tile of outputs from `first` on: its sums [LINES, BLOCK_M] over all warps, gate features first."""
    OUTPUT_Y: tl.constexpr = LAYOUTS.output_y
    ROW_Y: tl.constexpr = LAYOUTS.row_y
    Y: tl.constexpr = LAYOUTS.y
    OUTPUTS: tl.constexpr = LINES // 2 if SILU else LINES
    out = in_layout(sums, Y)
    up = out
    if SILU:
        # Other threads have the up features: each half is summed with zeros in place of the other.
        is_gate = arange(0, LINES, OUTPUT_Y)[:, None] < OUTPUTS
        up = in_layout(tl.sum(tl.reshape(tl.where(is_gate, 0.0, out), (2, OUTPUTS, BLOCK_M)), 0), Y)
        out = in_layout(tl.sum(tl.reshape(tl.where(is_gate, out, 0.0), (2, OUTPUTS, BLOCK_M)), 0), Y)
    column = first + arange(0, OUTPUTS, OUTPUT_Y)[:, None]
    finish(out, up, bias, y, arange(0, BLOCK_M, ROW_Y)[None, :], column, rows, N, SILU)


@layout_jit
def _tile(
    x, weight, bias, y, held, local, k_weight, k_input, row, first, following, rows, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, LINES: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr,
    WIDTH: tl.constexpr, SILU: tl.constexpr, LOOP: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Compute and store outputs from `first` on; returns the first DEPTH chunks of those from `following` on.

    held: the first DEPTH chunks of this tile; as one is used, the one DEPTH after it is loaded.
    """
    TOTAL: tl.constexpr = LAYOUTS.total
    STEP: tl.constexpr = SLICES * WIDTH
    CHUNKS: tl.constexpr = (K + STEP - 1) // STEP
    EVEN: tl.constexpr = K % STEP == 0
    OUTPUTS: tl.constexpr = LINES // 2 if SILU else LINES
    lines = tile_lines(first, local, N, OUTPUTS, SILU)[None, :, None]
    next_lines = tile_lines(following, local, N, OUTPUTS, SILU)[None, :, None]
    at = tl.minimum(row, rows - 1) * K + k_input
    total = zeros([SLICES, LINES, BLOCK_M], TOTAL)
    for chunk in tl.static_range(CHUNKS):
        present = held[0]
        held = held[1:]
        if chunk + DEPTH < CHUNKS:
            held = held + (_weights(weight, lines, (chunk + DEPTH) * STEP + k_weight, K, EVEN),)
        elif LOOP:
            held = held + (_weights(weight, next_lines, (chunk + DEPTH - CHUNKS) * STEP + k_weight, K, EVEN),)
        if EVEN:
            taken = tl.load(x + at + chunk * STEP)
        else:
            taken = tl.load(x + at + chunk * STEP, mask=chunk * STEP + k_input + row * 0 < K, other=0.0)
        total = multiply(present, taken, total)
    finish_tile(tl.sum(total, 0), bias, y, first, rows, N, BLOCK_M, LINES, SILU, LAYOUTS)
    return held


@layout_jit(do_not_specialize=["rows"])
def _direct(
    x, weight, bias, y, rows, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, LINES: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr,
    WIDTH: tl.constexpr, SILU: tl.constexpr, LOOP: tl.constexpr, LAYOUTS: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    SLICE_A: tl.constexpr = LAYOUTS.slice_a
    OUTPUT_A: tl.constexpr = LAYOUTS.output_a
    INPUT_A: tl.constexpr = LAYOUTS.input_a
    SLICE_B: tl.constexpr = LAYOUTS.slice_b
    INPUT_B: tl.constexpr = LAYOUTS.input_b
    ROW_B: tl.constexpr = LAYOUTS.row_b
    STEP: tl.constexpr = SLICES * WIDTH
    EVEN: tl.constexpr = K % STEP == 0
    OUTPUTS: tl.constexpr = LINES // 2 if SILU else LINES
    first = tl.program_id(0) * OUTPUTS
    local = arange(0, LINES, OUTPUT_A)
    lines = tile_lines(first, local, N, OUTPUTS, SILU)[None, :, None]
    k_weight = arange(0, SLICES, SLICE_A)[:, None, None] * WIDTH + arange(0, WIDTH, INPUT_A)[None, None, :]
    held = ()
    for chunk in tl.static_range(DEPTH):
        held = held + (_weights(weight, lines, chunk * STEP + k_weight, K, EVEN),)
    k_input = arange(0, SLICES, SLICE_B)[:, None, None] * WIDTH + arange(0, WIDTH, INPUT_B)[None, :, None]
    row = arange(0, BLOCK_M, ROW_B)[None, None, :]
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    if LOOP:
        step = tl.num_programs(0) * OUTPUTS
        for begin in range(first, N, step):
            held = _tile(
                x, weight, bias, y, held, local, k_weight, k_input, row, begin, begin + step, rows, N,
                K, BLOCK_M, LINES, SLICES, DEPTH, WIDTH, SILU, LOOP, LAYOUTS,
            )  # fmt: skip
    else:
        _tile(
            x, weight, bias, y, held, local, k_weight, k_input, row, first, first, rows, N,
            K, BLOCK_M, LINES, SLICES, DEPTH, WIDTH, SILU, LOOP, LAYOUTS,
        )  # fmt: skip


def direct_launch(gemm: Gemm, config: GemmConfig) -> GemmLaunch:
    """The launch of a GEMM of at most `config.block_m` rows."""
    if gemm.rows > config.block_m:
        raise ValueError(f"{config} is for at most {config.block_m} rows, not {gemm.rows}")
    if gemm.gain is not None:
        raise ValueError(f"{config} does not fuse a norm")
    out = gemm.new_output()
    outputs = out.shape[1]
    programs = triton.cdiv(outputs, config.block_n)
    if config.programs:
        programs = min(programs, config.programs * num_sms())
    arguments = (gemm.x, gemm.weight, gemm.bias, out, gemm.rows, outputs)
    return GemmLaunch(_direct, programs, arguments, _constants(config, gemm.depth, gemm.silu), out)


def chunks(depth: int, warps: int) -> int:
    """Chunks of a warp."""
    return triton.cdiv(depth, warps * WIDTH)


@functools.cache
def _constants(config: GemmConfig, depth: int, silu: bool) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    return {
        "K": depth,
        "BLOCK_M": config.block_m,
        "LINES": config.block_n * (2 if silu else 1),
        "SLICES": config.warps,
        "DEPTH": min(config.stages, chunks(depth, config.warps)),
        "WIDTH": WIDTH,
        "SILU": silu,
        "LOOP": config.programs > 0,
        "LAYOUTS": batch_layouts(config.warps, WIDTH, config.block_m),
        "EARLY": config.early,
        "num_warps": config.warps,
        **pdl(),
    }
