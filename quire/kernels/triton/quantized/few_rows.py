"""Weight-only GEMM `few`: 1 to 16 rows, weights straight from memory into the registers of tensor-core operands.

A program owns 16 or 32 outputs (with a gate: half of them gate features, half up). Its warps split K; each reads words
of its slice, makes numbers of them in registers and multiplies them on tensor cores, weights on the side of 16, rows of
x on the side of 8. Up to DEPTH loads of a thread are in flight, the first of them before `gdc_wait`, so they overlap
the end of the preceding kernel. One exchange at the end sums the slices.

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
from quire.kernels.triton.quantized.layouts import arange, batch_layouts, in_layout, layout_jit, multiply, zeros
from quire.kernels.triton.quantized.words import EMULATED, offset_of, scale_of, split, value
from quire.kernels.triton.skinny_gemm.common import finish

MAX_ROWS = 16
MAX_CHUNKS = 32
"""Spans of a warp: its loop is unrolled."""


@triton.jit
def _words(word, span, inside, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """Words of a span of each warp. A step reads each weight once: it should not evict what is read again."""
    at = word + span[:, :, None] * WORDS
    if EVEN:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def _groups(
    scale, zero, minimum, lines, span, inside,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """(scales, zeros, minimums) of a span of each warp, each for as many groups as a span has."""
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    scales = ()
    zeros = ()
    minimums = ()
    for group in tl.static_range(COUNT):
        at = lines * GROUPS + (span * SPAN + group * GROUP) // GROUP
        if not EVEN:
            at = tl.where(inside, at, 0)
        scales = scales + (tl.load(scale + at),)
        if zero is not None:
            zeros = zeros + (tl.load(zero + at),)
        if minimum is not None:
            minimums = minimums + (tl.load(minimum + at),)
    return scales, zeros, minimums


@triton.jit
def _weights(
    fields, groups, factors,
    FIELD: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The numbers of one of a span's fields."""
    INDEX: tl.constexpr = FIELD * WORDS // GROUP if GROUP < SPAN else 0
    scales, zeros, minimums = groups
    zero = None
    minimum = None
    if len(zeros) > 0:
        zero = zeros[INDEX]
    if len(minimums) > 0:
        minimum = minimums[INDEX]
    scale = scale_of(scales[INDEX], factors, FORMAT, DTYPE)[:, :, None]
    offset = offset_of(scales[INDEX], zero, minimum, FORMAT, DTYPE)
    if offset is not None:
        offset = offset[:, :, None]
    return value(fields[FIELD], scale, offset, minimum is not None, FORMAT, DTYPE)


@triton.jit
def _product(a, b):
    """a * b, rounded once, to their dtype."""
    if EMULATED:
        out = (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)
    else:
        out = tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.bfloat16, True, 2)
    return out


@triton.jit
def _total(a, b):
    """a + b, rounded once, to their dtype."""
    if EMULATED:
        out = (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)
    else:
        out = tl.inline_asm_elementwise("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.bfloat16, True, 2)
    return out


@triton.jit
def _norm(x, residual, stream, at, writes, eps, K: tl.constexpr, LENGTH: tl.constexpr):
    """1 / rms of the row x (+ residual), whose sum is written to `stream`; `at` is arange(0, LENGTH)."""
    squares = at.to(tl.float32) * 0
    for block in tl.static_range((K + LENGTH - 1) // LENGTH):
        column = block * LENGTH + at
        taken = tl.load(x + column, mask=column < K, other=0.0)
        if residual is not None:
            carried = tl.load(residual + column, mask=column < K, other=0.0)
            taken = (taken.to(tl.float32) + carried.to(tl.float32)).to(taken.dtype)
            tl.store(stream + column, taken, mask=(column < K) & writes)
        wide = taken.to(tl.float32)
        squares += wide * wide
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


@layout_jit(do_not_specialize=["rows"])
def _few(
    x, residual, gain, codes, scale, zero, minimum, factor, bias, stream, y, rows, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr, FORMAT: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SILU: tl.constexpr, LAYOUTS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SLICE_A: tl.constexpr = LAYOUTS.slice_a
    OUTPUT_A: tl.constexpr = LAYOUTS.output_a
    INPUT_A: tl.constexpr = LAYOUTS.input_a
    SLICE_B: tl.constexpr = LAYOUTS.slice_b
    INPUT_B: tl.constexpr = LAYOUTS.input_b
    ROW_B: tl.constexpr = LAYOUTS.row_b
    TOTAL: tl.constexpr = LAYOUTS.total
    LINE: tl.constexpr = LAYOUTS.line
    OUTPUT_Y: tl.constexpr = LAYOUTS.output_y
    ROW_Y: tl.constexpr = LAYOUTS.row_y
    Y: tl.constexpr = LAYOUTS.y
    DTYPE: tl.constexpr = x.dtype.element_ty
    SPAN: tl.constexpr = WORDS * FIELDS
    SPANS: tl.constexpr = K // SPAN
    CHUNKS: tl.constexpr = (SPANS + SLICES - 1) // SLICES
    EVEN: tl.constexpr = SPANS % SLICES == 0
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    program = tl.program_id(0)
    # Outputs past the end repeat the last and are not stored; with a gate, up features follow the gate's.
    local = arange(0, BLOCK_N, OUTPUT_A)
    if SILU:
        output = tl.minimum(program * OUTPUTS + local % OUTPUTS, N - 1) + N * (local // OUTPUTS)
    else:
        output = tl.minimum(program * OUTPUTS + local, N - 1)
    lines = output.to(tl.int64)[None, :]
    first = arange(0, SLICES, SLICE_A)[:, None] * CHUNKS
    word = codes + lines[:, :, None] * (K // FIELDS) + arange(0, WORDS, INPUT_A)[None, None, :]
    factors = None
    if factor is not None:
        factors = tl.load(factor + lines + first * 0)
    tiles = ()
    groups = ()
    for chunk in tl.static_range(DEPTH):
        span = first + chunk
        # Past the end of K weights are arbitrary, but finite, and x is zero.
        inside = (span < SPANS) & (lines >= 0)
        tiles = tiles + (_words(word, span, inside, WORDS, EVEN),)
        groups = groups + (_groups(scale, zero, minimum, lines, span, inside, GROUPS, GROUP, SPAN, EVEN),)
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    start = arange(0, SLICES, SLICE_B)[:, None, None] * (CHUNKS * SPAN) + arange(0, WORDS, INPUT_B)[None, :, None]
    row = arange(0, BLOCK_M, ROW_B)[None, None, :]
    if ROWS == 1:
        at = start + row * 0
    else:
        at = start + tl.minimum(row, rows - 1) * K
    inverse = 1.0
    if gain is not None:
        inverse = _norm(x, residual, stream, arange(0, 256 * SLICES, LINE), program == 0, eps, K, 256 * SLICES)
    total = zeros([SLICES, BLOCK_N, BLOCK_M], TOTAL)
    for chunk in tl.static_range(CHUNKS):
        fields = split(tiles[0], FORMAT, DTYPE)
        tiles = tiles[1:]
        if chunk + DEPTH < CHUNKS:
            span = first + chunk + DEPTH
            inside = (span < SPANS) & (lines >= 0)
            tiles = tiles + (_words(word, span, inside, WORDS, EVEN),)
            groups = groups + (_groups(scale, zero, minimum, lines, span, inside, GROUPS, GROUP, SPAN, EVEN),)
        for field in tl.static_range(FIELDS):
            weights = _weights(fields, groups[0], factors, field, WORDS, GROUP, SPAN, FORMAT, DTYPE)
            place = at + (chunk * SPAN + field * WORDS)
            if EVEN:
                taken = tl.load(x + place)
            else:
                within = start + (chunk * SPAN + field * WORDS) + row * 0 < K
                taken = tl.load(x + place, mask=within, other=0.0)
            if gain is not None:
                if EVEN:
                    if residual is not None:
                        taken = _total(taken, tl.load(residual + place))
                    taken = _product(taken, tl.load(gain + place))
                else:
                    if residual is not None:
                        taken = _total(taken, tl.load(residual + place, mask=within, other=0.0))
                    taken = _product(taken, tl.load(gain + place, mask=within, other=0.0))
            total = multiply(weights, taken, total)
        groups = groups[1:]
    out = in_layout(tl.sum(total, 0) * inverse, Y)
    up = out
    if SILU:
        # Other threads have the up features: each half is summed with zeros in place of the other.
        is_gate = arange(0, BLOCK_N, OUTPUT_Y)[:, None] < OUTPUTS
        up = in_layout(tl.sum(tl.reshape(tl.where(is_gate, 0.0, out), (2, OUTPUTS, BLOCK_M)), 0), Y)
        out = in_layout(tl.sum(tl.reshape(tl.where(is_gate, out, 0.0), (2, OUTPUTS, BLOCK_M)), 0), Y)
    column = program * OUTPUTS + arange(0, OUTPUTS, OUTPUT_Y)[:, None]
    finish(out, up, bias, y, arange(0, BLOCK_M, ROW_Y)[None, :], column, rows, N, SILU)


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
    constants = weight.constants | _constants(config, gemm.rows == 1, weight.inputs // weight.span, weight.words)
    programs = triton.cdiv(outputs, config.block_n // (2 if gemm.silu else 1))
    return WeightOnlyLaunch(_few, programs, arguments, constants | {"SILU": gemm.silu}, out)


def fits(weight: WordWeight, config: WeightOnlyConfig) -> bool:
    """Whether a warp's loop is short enough to be unrolled."""
    return triton.cdiv(weight.inputs // weight.span, config.warps) <= MAX_CHUNKS


@functools.cache
def _constants(config: WeightOnlyConfig, single: bool, spans: int, words: int) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    return {
        "ROWS": 1 if single else config.block_m,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SLICES": config.warps,
        "DEPTH": min(config.depth, triton.cdiv(spans, config.warps)),
        "LAYOUTS": batch_layouts(config.warps, words, config.block_m),
        "EARLY": config.early,
        "num_warps": config.warps,
        **pdl(),
    }
