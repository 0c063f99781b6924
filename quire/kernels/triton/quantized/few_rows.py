"""Weight-only GEMM `few`: 1 to 16 rows, weights straight from memory into the registers of tensor-core operands.

A program owns tiles of 16 or 32 outputs (with a gate: half of them gate features, half up), one after the other. Its
warps split K; each reads words of its spans, makes numbers of them in registers and multiplies them on tensor cores,
weights on the side of 16, rows of x on the side of 8. Up to DEPTH spans of a warp are in flight, the first of them
before `gdc_wait`, so they overlap the end of the preceding kernel. One exchange at the end of a tile sums over warps.

Bytes: codes, scales and zeros once; the input once per program, from cache. Operations: 2 per weight and row of 8, on
tensor cores; about 2 instructions per weight to make numbers of codes, and one per 20 weights to load x.
"""

# ruff: noqa: N803, N806, RUF005  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.quantized.gemm import WeightOnlyConfig, WeightOnlyGemm, WeightOnlyLaunch, WordWeight
from quire.kernels.triton.quantized.layouts import (
    arange,
    batch_layouts,
    layout_jit,
    multiply,
    open_row,
    read_row,
    write_row,
    zeros,
)
from quire.kernels.triton.quantized.words import EMULATED, offset_of, scale_of, split, unit, value
from quire.kernels.triton.skinny_gemm.direct import finish_tile, tile_lines

MAX_ROWS = 16
MAX_CHUNKS = 32
"""Spans of a warp: its loop is unrolled."""


@triton.jit
def _load(
    codes, scale, zero, minimum, lines, span, column,
    K: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Words of a span of each warp, scales of its groups, then their zeros or minimums.

    Past the end the last span repeats: x is zero there.
    """
    SPAN: tl.constexpr = WORDS * FIELDS
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    if not EVEN:
        span = tl.minimum(span, K // SPAN - 1)
    # A step reads each weight once: it should not evict what is read again.
    at = codes + lines[:, :, None] * (K // FIELDS) + span[:, :, None] * WORDS + column
    loaded = (tl.load(at, eviction_policy="evict_first"),)
    for index in tl.static_range(COUNT):
        loaded = loaded + (tl.load(scale + lines * GROUPS + (span * SPAN + index * GROUP) // GROUP),)
    for index in tl.static_range(COUNT):
        group = lines * GROUPS + (span * SPAN + index * GROUP) // GROUP
        if zero is not None:
            loaded = loaded + (tl.load(zero + group),)
        if minimum is not None:
            loaded = loaded + (tl.load(minimum + group),)
    return loaded


@triton.jit
def _numbers(
    fields, groups, factors,
    FIELD: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, FORMAT: tl.constexpr,
    MINIMUM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The numbers of one of a span's fields; `groups` are what `_load` returned after the words."""
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    INDEX: tl.constexpr = FIELD * WORDS // GROUP if GROUP < SPAN else 0
    zero = None
    minimum = None
    if len(groups) > COUNT:
        if MINIMUM:
            minimum = groups[COUNT + INDEX]
        else:
            zero = groups[COUNT + INDEX]
    scale = scale_of(groups[INDEX], factors, FORMAT, DTYPE)[:, :, None]
    offset = offset_of(groups[INDEX], zero, minimum, FORMAT, DTYPE)
    if offset is not None:
        offset = offset[:, :, None]
    return value(fields[FIELD], scale, offset, FIELD, MINIMUM, FORMAT, DTYPE)


@triton.jit
def _input(x, residual, gain, at, start, step, K: tl.constexpr, EVEN: tl.constexpr):
    """Inputs `step` after those `at`, which are number `start` of their row.

    With a gain (in the interpreter only, which has no shared memory) they are normed, but for 1 / rms.
    """
    if EVEN:
        mask = start + at * 0 + step >= 0
    else:
        mask = start + at * 0 + step < K
    if EVEN:
        taken = tl.load(x + at + step)
    else:
        taken = tl.load(x + at + step, mask=mask, other=0.0)
    if gain is not None:
        if residual is not None:
            carried = tl.load(residual + at + step, mask=mask, other=0.0)
            taken = (taken.to(tl.float32) + carried.to(tl.float32)).to(taken.dtype)
        taken = (taken.to(tl.float32) * tl.load(gain + at + step, mask=mask, other=0.0).to(tl.float32)).to(taken.dtype)
    return taken


@layout_jit
def _norm(
    x, residual, gain, stream, memory, at, writes, eps, K: tl.constexpr, CHUNKS: tl.constexpr, LENGTH: tl.constexpr
):  # fmt: skip
    """1 / rms of the row x (+ residual), whose sum is written to `stream`, and times the gain to `memory`.

    `at` is arange(0, LENGTH).
    """
    squares = at.to(tl.float32) * 0
    for chunk in tl.static_range(CHUNKS):
        column = chunk * LENGTH + at
        inside = column < K
        taken = tl.load(x + column, mask=inside, other=0.0)
        if residual is not None:
            carried = tl.load(residual + column, mask=inside, other=0.0)
            taken = (taken.to(tl.float32) + carried.to(tl.float32)).to(taken.dtype)
            tl.store(stream + column, taken, mask=inside & writes)
        wide = taken.to(tl.float32)
        squares += wide * wide
        weighted = wide * tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
        write_row(memory, chunk, weighted.to(taken.dtype), LENGTH)
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


@layout_jit
def _outputs(
    x, residual, gain, memory, codes, scale, zero, minimum, factor, bias, y, local, warp, column, at, start, held,
    first, rows, N, inverse,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr,
    HELD: tl.constexpr, FORMAT: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SILU: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Compute and store outputs from `first` on, tile TILE of TILES; returns the chunks held for those after them.

    held: DEPTH chunks, of HELD tensors each; as one is used, the one DEPTH after it is loaded.
    """
    B: tl.constexpr = LAYOUTS.b
    TOTAL: tl.constexpr = LAYOUTS.total
    DTYPE: tl.constexpr = x.dtype.element_ty
    SPAN: tl.constexpr = WORDS * FIELDS
    SPANS: tl.constexpr = K // SPAN
    CHUNKS: tl.constexpr = (SPANS + SLICES - 1) // SLICES
    EVEN: tl.constexpr = SPANS % SLICES == 0
    MINIMUM: tl.constexpr = minimum is not None
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    factors = None
    if factor is not None:
        factors = tl.load(factor + tile_lines(first, local, N, OUTPUTS, SILU)[None, :] + warp * 0)
    # Two sums: a product waits for the one before it.
    total = zeros([SLICES, BLOCK_N, BLOCK_M], TOTAL)
    other = zeros([SLICES, BLOCK_N, BLOCK_M], TOTAL)
    for chunk in tl.static_range(CHUNKS):
        present = held[:HELD]
        held = held[HELD:]
        if TILE * CHUNKS + chunk + DEPTH < TILES * CHUNKS:
            lines = tile_lines(first + (chunk + DEPTH) // CHUNKS * OUTPUTS, local, N, OUTPUTS, SILU)[None, :]
            span = warp + (chunk + DEPTH) % CHUNKS * SLICES
            held = held + _load(
                codes, scale, zero, minimum, lines, span, column, K, FIELDS, WORDS, GROUPS, GROUP, EVEN
            )  # fmt: skip
        fields = split(present[0], FORMAT, DTYPE)
        for field in tl.static_range(FIELDS):
            numbers = _numbers(fields, present[1:], factors, field, WORDS, GROUP, SPAN, FORMAT, MINIMUM, DTYPE)
            if gain is not None and not EMULATED:
                taken = read_row(memory, chunk, field, WORDS, SLICES, BLOCK_M, B)
            else:
                taken = _input(x, residual, gain, at, start, chunk * SLICES * SPAN + field * WORDS, K, EVEN)
            if field % 2 == 0:
                total = multiply(numbers, taken, total)
            else:
                other = multiply(numbers, taken, other)
    sums = tl.sum(total + other, 0) * (inverse * unit(FORMAT, DTYPE))
    finish_tile(sums, bias, y, first, rows, N, BLOCK_M, BLOCK_N, SILU, LAYOUTS)
    return held


@layout_jit(do_not_specialize=["rows"])
def _few(
    x, residual, gain, codes, scale, zero, minimum, factor, bias, stream, y, rows, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr, FORMAT: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SILU: tl.constexpr, TILES: tl.constexpr, LAYOUTS: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    SLICE_A: tl.constexpr = LAYOUTS.slice_a
    OUTPUT_A: tl.constexpr = LAYOUTS.output_a
    INPUT_A: tl.constexpr = LAYOUTS.input_a
    SLICE_B: tl.constexpr = LAYOUTS.slice_b
    INPUT_B: tl.constexpr = LAYOUTS.input_b
    ROW_B: tl.constexpr = LAYOUTS.row_b
    LINE: tl.constexpr = LAYOUTS.line
    DTYPE: tl.constexpr = x.dtype.element_ty
    SPAN: tl.constexpr = WORDS * FIELDS
    SPANS: tl.constexpr = K // SPAN
    CHUNKS: tl.constexpr = (SPANS + SLICES - 1) // SLICES
    EVEN: tl.constexpr = SPANS % SLICES == 0
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    HELD: tl.constexpr = 1 + COUNT * (2 if zero is not None or minimum is not None else 1)  # tiles of a chunk
    program = tl.program_id(0)
    begin = program * (OUTPUTS * TILES)
    local = arange(0, BLOCK_N, OUTPUT_A)
    column = arange(0, WORDS, INPUT_A)[None, None, :]
    warp = arange(0, SLICES, SLICE_A)[:, None]
    held = ()
    for chunk in tl.static_range(DEPTH):
        lines = tile_lines(begin + chunk // CHUNKS * OUTPUTS, local, N, OUTPUTS, SILU)[None, :]
        span = warp + chunk % CHUNKS * SLICES
        held = held + _load(codes, scale, zero, minimum, lines, span, column, K, FIELDS, WORDS, GROUPS, GROUP, EVEN)
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    start = arange(0, SLICES, SLICE_B)[:, None, None] * SPAN + arange(0, WORDS, INPUT_B)[None, :, None]
    row = arange(0, BLOCK_M, ROW_B)[None, None, :]
    if ROWS == 1:
        at = start + row * 0
    else:
        at = start + tl.minimum(row, rows - 1) * K
    inverse = 1.0
    memory = None
    if gain is not None:
        memory = open_row(CHUNKS, SLICES, FIELDS, WORDS, DTYPE)
        line = arange(0, SLICES * SPAN, LINE)
        inverse = _norm(x, residual, gain, stream, memory, line, program == 0, eps, K, CHUNKS, SLICES * SPAN)
    for tile in tl.static_range(TILES):
        held = _outputs(
            x, residual, gain, memory, codes, scale, zero, minimum, factor, bias, y, local, warp, column, at, start,
            held, begin + tile * OUTPUTS, rows, N, inverse, K, BLOCK_M, BLOCK_N, SLICES, DEPTH, HELD, FORMAT, FIELDS,
            WORDS, GROUP, GROUPS, SILU, tile, TILES, LAYOUTS,
        )  # fmt: skip


def few_launch(gemm: WeightOnlyGemm, config: WeightOnlyConfig) -> WeightOnlyLaunch:
    """The launch of a GEMM of at most `config.block_m` rows; a fused norm: of one row."""
    if gemm.rows > config.block_m or (gemm.gain is not None and gemm.rows > 1):
        raise ValueError(f"{config} is for fewer than {gemm.rows} rows")
    out = gemm.new_output()
    outputs = out.shape[1]
    weight = gemm.weight
    arguments = (
        gemm.x, gemm.residual, gemm.gain, *weight.tensors, gemm.bias, gemm.stream, out, gemm.rows, outputs, gemm.eps,
    )  # fmt: skip
    constants = weight.constants | _constants(
        config, gemm.rows == 1, weight.inputs // weight.span, weight.words, weight.span
    )
    programs = triton.cdiv(outputs, config.tiles * config.block_n // (2 if gemm.silu else 1))
    return WeightOnlyLaunch(_few, programs, arguments, constants | {"SILU": gemm.silu}, out)


def fits(weight: WordWeight, config: WeightOnlyConfig) -> bool:
    """Whether a warp's loop is short enough to be unrolled."""
    return triton.cdiv(weight.inputs // weight.span, config.warps) <= MAX_CHUNKS


@functools.cache
def _constants(config: WeightOnlyConfig, single: bool, spans: int, words: int, span: int) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    chunks = triton.cdiv(spans, config.warps)
    return {
        "ROWS": 1 if single else config.block_m,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SLICES": config.warps,
        "DEPTH": min(config.depth, chunks * config.tiles),
        "TILES": config.tiles,
        "LAYOUTS": batch_layouts(config.warps, words, span, config.block_m),
        "EARLY": config.early,
        "num_warps": config.warps,
        **pdl(),
    }
