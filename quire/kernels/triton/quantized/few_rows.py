"""Weight-only GEMM `few`: 1 to 16 rows, weights straight from memory into the registers of tensor-core operands.

A program owns a tile of 16 or 32 outputs (with a gate: half of them gate features, half up), or several, one after the
other. Its warps split K; each reads words of its spans, makes numbers of them in registers and multiplies them on
tensor cores, weights on the side of 16, rows of x on the side of 8. Up to DEPTH spans of a warp are in flight, some
before `gdc_wait`, so they overlap the end of the preceding kernel. One exchange at the end of a tile sums over
warps. A norm is not fused: computed by every program it takes longer than a kernel of its own.

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

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.quantized.gemm import WeightOnlyConfig, WeightOnlyGemm, WeightOnlyLaunch
from quire.kernels.triton.quantized.layouts import (
    arange,
    batch_layouts,
    layout_jit,
    multiply,
    zeros,
)
from quire.kernels.triton.quantized.words import group_at, offset_of, scale_of, split, unit, value, word_at
from quire.kernels.triton.skinny_gemm.direct import finish_tile, tile_lines

MAX_ROWS = 16
MAX_CHUNKS = 32
"""Spans of a warp: its loop is unrolled."""


@triton.jit
def _load(
    codes, scale, zero, minimum, lines, span, column,
    K: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    LINES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Words of a span of each warp, scales of its groups, then their zeros or minimums.

    Past the end the last span repeats: x is zero there.
    """
    SPAN: tl.constexpr = WORDS * FIELDS
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    if not EVEN:
        span = tl.minimum(span, K // SPAN - 1)
    # A step reads each weight once: it should not evict what is read again.
    at = codes + word_at(lines[:, :, None], span[:, :, None], column, K, FIELDS, WORDS, LINES)
    loaded = (tl.load(at, eviction_policy="evict_first"),)
    for index in tl.static_range(COUNT):
        loaded = loaded + (tl.load(scale + group_at(lines, (span * SPAN + index * GROUP) // GROUP, GROUPS, LINES)),)
    for index in tl.static_range(COUNT):
        group = group_at(lines, (span * SPAN + index * GROUP) // GROUP, GROUPS, LINES)
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
def _input(x, at, start, step, K: tl.constexpr, EVEN: tl.constexpr):
    """Inputs `step` after those `at`, which are number `start` of their row."""
    if EVEN:
        taken = tl.load(x + at + step)
    else:
        taken = tl.load(x + at + step, mask=start + at * 0 + step < K, other=0.0)
    return taken


@layout_jit
def _outputs(
    x, codes, scale, zero, minimum, factor, bias, y, local, warp, column, at, start, held, first, following, rows, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr,
    HELD: tl.constexpr, FORMAT: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, LINES: tl.constexpr, SILU: tl.constexpr, LOOP: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Compute and store outputs from `first` on; returns the first DEPTH chunks of those from `following` on.

    held: the first DEPTH chunks of this tile, of HELD tensors each; as one is used, the one DEPTH after it is loaded.
    """
    TOTAL: tl.constexpr = LAYOUTS.total
    DTYPE: tl.constexpr = x.dtype.element_ty
    SPAN: tl.constexpr = WORDS * FIELDS
    SPANS: tl.constexpr = K // SPAN
    CHUNKS: tl.constexpr = (SPANS + SLICES - 1) // SLICES
    EVEN: tl.constexpr = SPANS % SLICES == 0
    MINIMUM: tl.constexpr = minimum is not None
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    lines = tile_lines(first, local, N, OUTPUTS, SILU)[None, :]
    next_lines = tile_lines(following, local, N, OUTPUTS, SILU)[None, :]
    factors = None
    if factor is not None:
        factors = tl.load(factor + lines + warp * 0)
    # Two sums: a product waits for the one before it.
    total = zeros([SLICES, BLOCK_N, BLOCK_M], TOTAL)
    other = zeros([SLICES, BLOCK_N, BLOCK_M], TOTAL)
    for chunk in tl.static_range(CHUNKS):
        present = held[:HELD]
        held = held[HELD:]
        if chunk + DEPTH < CHUNKS:
            held = held + _load(
                codes, scale, zero, minimum, lines, warp + (chunk + DEPTH) * SLICES, column, K, FIELDS, WORDS, GROUPS,
                GROUP, LINES, EVEN,
            )  # fmt: skip
        elif LOOP:
            held = held + _load(
                codes, scale, zero, minimum, next_lines, warp + (chunk + DEPTH - CHUNKS) * SLICES, column, K, FIELDS,
                WORDS, GROUPS, GROUP, LINES, EVEN,
            )  # fmt: skip
        fields = split(present[0], FORMAT, DTYPE)
        for field in tl.static_range(FIELDS):
            numbers = _numbers(fields, present[1:], factors, field, WORDS, GROUP, SPAN, FORMAT, MINIMUM, DTYPE)
            taken = _input(x, at, start, chunk * SLICES * SPAN + field * WORDS, K, EVEN)
            if field % 2 == 0:
                total = multiply(numbers, taken, total)
            else:
                other = multiply(numbers, taken, other)
    sums = tl.sum(total + other, 0) * unit(FORMAT, DTYPE)
    finish_tile(sums, bias, y, first, rows, N, BLOCK_M, BLOCK_N, SILU, LAYOUTS)
    return held


@layout_jit(do_not_specialize=["rows"])
def _few(
    x, codes, scale, zero, minimum, factor, bias, y, rows, N,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr, FORMAT: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, LINES: tl.constexpr, SILU: tl.constexpr, LOOP: tl.constexpr, LAYOUTS: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SLICE_A: tl.constexpr = LAYOUTS.slice_a
    OUTPUT_A: tl.constexpr = LAYOUTS.output_a
    INPUT_A: tl.constexpr = LAYOUTS.input_a
    SLICE_B: tl.constexpr = LAYOUTS.slice_b
    INPUT_B: tl.constexpr = LAYOUTS.input_b
    ROW_B: tl.constexpr = LAYOUTS.row_b
    SPAN: tl.constexpr = WORDS * FIELDS
    EVEN: tl.constexpr = (K // SPAN) % SLICES == 0
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    HELD: tl.constexpr = 1 + COUNT * (2 if zero is not None or minimum is not None else 1)  # tiles of a chunk
    program = tl.program_id(0)
    first = program * OUTPUTS
    local = arange(0, BLOCK_N, OUTPUT_A)
    column = arange(0, WORDS, INPUT_A)[None, None, :]
    warp = arange(0, SLICES, SLICE_A)[:, None]
    lines = tile_lines(first, local, N, OUTPUTS, SILU)[None, :]
    held = ()
    for chunk in tl.static_range(DEPTH):
        held = held + _load(
            codes, scale, zero, minimum, lines, warp + chunk * SLICES, column, K, FIELDS, WORDS, GROUPS, GROUP, LINES,
            EVEN,
        )  # fmt: skip
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
    if LOOP:
        step = tl.num_programs(0) * OUTPUTS
        for begin in range(first, N, step):
            held = _outputs(
                x, codes, scale, zero, minimum, factor, bias, y, local, warp, column, at, start, held, begin,
                begin + step, rows, N, K, BLOCK_M, BLOCK_N, SLICES, DEPTH, HELD, FORMAT, FIELDS, WORDS, GROUP, GROUPS,
                LINES, SILU, LOOP, LAYOUTS,
            )  # fmt: skip
    else:
        _outputs(
            x, codes, scale, zero, minimum, factor, bias, y, local, warp, column, at, start, held, first, first, rows,
            N, K, BLOCK_M, BLOCK_N, SLICES, DEPTH, HELD, FORMAT, FIELDS, WORDS, GROUP, GROUPS, LINES, SILU, LOOP,
            LAYOUTS,
        )  # fmt: skip


def few_launch(gemm: WeightOnlyGemm, config: WeightOnlyConfig) -> WeightOnlyLaunch:
    """The launch of a GEMM of at most `config.block_m` rows."""
    if gemm.rows > config.block_m:
        raise ValueError(f"{config} is for fewer than {gemm.rows} rows")
    out = gemm.new_output()
    outputs = out.shape[1]
    weight = gemm.weight
    arguments = (gemm.x, *weight.tensors, gemm.bias, out, gemm.rows, outputs)
    constants = weight.constants | _constants(config, gemm.rows == 1, weight.inputs // weight.span, weight.words)
    programs = triton.cdiv(outputs, config.block_n // (2 if gemm.silu else 1))
    if config.programs:
        programs = min(programs, config.programs * num_sms())
    return WeightOnlyLaunch(_few, programs, arguments, constants | {"SILU": gemm.silu}, out)


@functools.cache
def _constants(config: WeightOnlyConfig, single: bool, spans: int, words: int) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    chunks = triton.cdiv(spans, config.warps)
    return {
        "ROWS": 1 if single else config.block_m,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SLICES": config.warps,
        "DEPTH": min(config.depth, chunks),
        "LOOP": config.programs > 0,
        "LAYOUTS": batch_layouts(config.warps, words, config.block_m),
        "EARLY": config.early,
        "num_warps": config.warps,
        **pdl(),
    }
