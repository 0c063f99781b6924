"""Weight-only GEMM `stream`: 1 to 16 rows, persistent programs, weights through shared memory by TMA.

A program takes tiles of 16 or 32 outputs (with a gate: half of them gate features, half up), one after the other. Its
warps split the inputs. TMA keeps STAGES boxes of codes in flight, across tiles, the first of them before `gdc_wait`:
while a step's small kernels run, memory reads the weights of the next product, as far as shared memory goes. So
dependents are launched at once: a kernel's programs are resident beside those of its predecessor, and wait.
Scales and offsets of a tile are made ready in shared memory; the rows of x stay there for all tiles. Codes go from
there into the registers of tensor-core operands, weights on the side of 16, rows of x on the side of 8.

Bytes: codes, scales and zeros once; the input once per program, from cache. Operations: 2 per weight and row of 8, on
tensor cores; about 2 instructions per weight to make numbers of codes.
"""

# ruff: noqa: N803, N806, RUF005  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.quantized.few_rows import _input, _lines
from quire.kernels.triton.quantized.gemm import WeightOnlyConfig, WeightOnlyGemm, WeightOnlyLaunch, WordWeight
from quire.kernels.triton.quantized.layouts import (
    arange,
    await_stage,
    batch_layouts,
    fill_ring,
    in_layout,
    layout_jit,
    multiply,
    open_ring,
    open_row,
    open_rows,
    open_table,
    read_ring,
    read_row,
    read_rows,
    read_table,
    ring_descriptor,
    synchronize,
    write_row,
    write_rows,
    write_table,
    zeros,
)
from quire.kernels.triton.quantized.words import EMULATED, offset_of, split, unit, value
from quire.kernels.triton.skinny_gemm.common import finish

MAX_ROWS = 16
MAX_CHUNKS = 32
"""Spans of a warp: its loop is unrolled."""


@triton.jit
def _load_groups(values, lines, span, K: tl.constexpr, SPAN: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
                 INDEX: tl.constexpr):  # fmt: skip
    """Scales (or zeros, or minimums) of group INDEX of spans."""
    group = (tl.minimum(span, K // SPAN - 1) * SPAN + INDEX * GROUP) // GROUP
    return tl.load(values + lines * GROUPS + group)


@triton.jit
def _raw(
    scale, zero, minimum, first, local, span, N,
    K: tl.constexpr, SPAN: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Scales of a tile's groups, then their zeros or minimums, as they are in memory."""
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    lines = _lines(first, local, N, OUTPUTS, SILU)
    loaded = ()
    for index in tl.static_range(COUNT):
        loaded = loaded + (_load_groups(scale, lines, span, K, SPAN, GROUPS, GROUP, index),)
    if zero is not None:
        for index in tl.static_range(COUNT):
            loaded = loaded + (_load_groups(zero, lines, span, K, SPAN, GROUPS, GROUP, index),)
    if minimum is not None:
        for index in tl.static_range(COUNT):
            loaded = loaded + (_load_groups(minimum, lines, span, K, SPAN, GROUPS, GROUP, index),)
    return loaded


@triton.jit
def _offset(raw, INDEX: tl.constexpr, COUNT: tl.constexpr, MINIMUM: tl.constexpr, FORMAT: tl.constexpr,
            DTYPE: tl.constexpr):  # fmt: skip
    """The offsets of group INDEX."""
    if len(raw) == COUNT:
        offset = offset_of(raw[INDEX], None, None, FORMAT, DTYPE)
    elif MINIMUM:
        offset = offset_of(raw[INDEX], None, raw[COUNT + INDEX], FORMAT, DTYPE)
    else:
        offset = offset_of(raw[INDEX], raw[COUNT + INDEX], None, FORMAT, DTYPE)
    return offset


@layout_jit
def _hold_row(
    x, residual, gains, stream, memory, at, writes, eps, K: tl.constexpr, CHUNKS: tl.constexpr, LENGTH: tl.constexpr
):  # fmt: skip
    """Write a row to `memory`; with a norm x (+ residual, the sum to `stream`) times the gain, and return 1 / rms."""
    inverse = 1.0
    if gains is not None:
        squares = at.to(tl.float32) * 0
        sums = ()
        for chunk in tl.static_range(CHUNKS):
            taken = tl.load(x + chunk * LENGTH + at)
            if residual is not None:
                carried = tl.load(residual + chunk * LENGTH + at)
                taken = (taken.to(tl.float32) + carried.to(tl.float32)).to(taken.dtype)
            sums = sums + (taken,)
        for chunk in tl.static_range(CHUNKS):
            if residual is not None:
                tl.store(stream + chunk * LENGTH + at, sums[chunk], mask=writes & (at >= 0))
            wide = sums[chunk].to(tl.float32)
            squares += wide * wide
            write_row(memory, chunk, (wide * gains[chunk].to(tl.float32)).to(sums[chunk].dtype), LENGTH)
        inverse = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    else:
        for chunk in tl.static_range(CHUNKS):
            write_row(memory, chunk, tl.load(x + chunk * LENGTH + at), LENGTH)
    return inverse


@layout_jit
def _hold_rows(
    x, memory, rows, K: tl.constexpr, CHUNKS: tl.constexpr, SLICES: tl.constexpr, FIELDS: tl.constexpr,
    WORDS: tl.constexpr, BLOCK_M: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Write rows to `memory`."""
    ROW: tl.constexpr = LAYOUTS.row_r
    FIELD: tl.constexpr = LAYOUTS.field_r
    WORD: tl.constexpr = LAYOUTS.word_r
    SPAN: tl.constexpr = WORDS * FIELDS
    row = tl.minimum(arange(0, BLOCK_M, ROW), rows - 1)[:, None, None]
    field = arange(0, SLICES * FIELDS, FIELD)[None, :, None]
    at = row * K + field % SLICES * SPAN + field // SLICES * WORDS + arange(0, WORDS, WORD)[None, None, :]
    for chunk in tl.static_range(CHUNKS):
        write_rows(memory, chunk, tl.load(x + at + chunk * SLICES * SPAN))


@layout_jit
def _field(
    x, residual, gain, scale, zero, minimum, memory, scales, offsets, bits, first, local, warp, at, start, total, N,
    CHUNK: tl.constexpr, FIELD: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    SLICES: tl.constexpr, FORMAT: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, OUTPUTS: tl.constexpr, SILU: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """total + the products of one field of a chunk's words."""
    B: tl.constexpr = LAYOUTS.b
    TABLE: tl.constexpr = LAYOUTS.table
    DTYPE: tl.constexpr = x.dtype.element_ty
    MINIMUM: tl.constexpr = minimum is not None
    SPAN: tl.constexpr = WORDS * FIELDS
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    INDEX: tl.constexpr = FIELD * WORDS // GROUP if GROUP < SPAN else 0
    factor = None
    offset = None
    if EMULATED:  # there are no tables
        raw = _raw(scale, zero, minimum, first, local, warp + CHUNK * SLICES, N,
                   K, SPAN, GROUPS, GROUP, OUTPUTS, SILU)  # fmt: skip
        factor = raw[INDEX]
        offset = _offset(raw, INDEX, COUNT, MINIMUM, FORMAT, DTYPE)
    factor = read_table(scales, INDEX, factor, CHUNK * SLICES, SLICES, TABLE)[:, :, None]
    offset = read_table(offsets, INDEX, offset, CHUNK * SLICES, SLICES, TABLE)[:, :, None]
    numbers = value(bits, factor, offset, FIELD, MINIMUM, FORMAT, DTYPE)
    if EMULATED:
        taken = _input(x, residual, gain, at, start, CHUNK * SLICES * SPAN + FIELD * WORDS, K, True)
    elif ROWS == 1:
        taken = read_row(memory, CHUNK, FIELD, WORDS, SLICES, BLOCK_M, B)
    else:
        taken = read_rows(memory, CHUNK, FIELD, SLICES, FIELDS, BLOCK_M, WORDS, B)
    return multiply(numbers, taken, total)


@layout_jit(do_not_specialize=["rows"])
def _stream(
    x, residual, gain, view, codes, scale, zero, minimum, bias, stream, y, rows, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, FORMAT: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, SILU: tl.constexpr, LAYOUTS: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    A: tl.constexpr = LAYOUTS.a
    SLICE_A: tl.constexpr = LAYOUTS.slice_a
    OUTPUT_A: tl.constexpr = LAYOUTS.output_a
    INPUT_A: tl.constexpr = LAYOUTS.input_a
    SLICE_B: tl.constexpr = LAYOUTS.slice_b
    INPUT_B: tl.constexpr = LAYOUTS.input_b
    ROW_B: tl.constexpr = LAYOUTS.row_b
    LINE: tl.constexpr = LAYOUTS.line
    TOTAL: tl.constexpr = LAYOUTS.total
    Y: tl.constexpr = LAYOUTS.y
    OUTPUT_Y: tl.constexpr = LAYOUTS.output_y
    ROW_Y: tl.constexpr = LAYOUTS.row_y
    SPANS_G: tl.constexpr = LAYOUTS.spans_g
    OUTPUTS_G: tl.constexpr = LAYOUTS.outputs_g
    DTYPE: tl.constexpr = x.dtype.element_ty
    SPAN: tl.constexpr = WORDS * FIELDS
    SPANS: tl.constexpr = K // SPAN
    CHUNKS: tl.constexpr = SPANS // SLICES
    TURNS: tl.constexpr = CHUNKS // STEPS
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    TABLES: tl.constexpr = 1 << (SPANS - 1).bit_length()
    MINIMUM: tl.constexpr = minimum is not None
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    units = tl.cdiv(N, OUTPUTS)
    ring, barriers = open_ring(view, STAGES)
    synchronize()
    for stage in tl.static_range(STAGES):
        unit_ahead = program + stage // TURNS * programs
        fill_ring(
            view, ring, barriers, stage, unit_ahead * OUTPUTS, stage % TURNS * (STEPS * SLICES), unit_ahead < units
        )
    group_span = arange(0, TABLES, SPANS_G)[:, None]
    group_line = arange(0, BLOCK_N, OUTPUTS_G)
    raw = _raw(scale, zero, minimum, program * OUTPUTS, group_line, group_span, N,
               K, SPAN, GROUPS, GROUP, OUTPUTS, SILU)  # fmt: skip
    line = arange(0, SLICES * SPAN, LINE)
    gains = None
    if gain is not None:
        gains = ()
        for chunk in tl.static_range(CHUNKS):
            gains = gains + (tl.load(gain + chunk * (SLICES * SPAN) + line),)
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    inverse = 1.0
    if ROWS == 1:
        memory = open_row(CHUNKS, SLICES, FIELDS, WORDS, DTYPE)
        inverse = _hold_row(
            x, residual, gains, stream, memory, line, program == 0, eps, K, CHUNKS, SLICES * SPAN
        )  # fmt: skip
    else:
        memory = open_rows(CHUNKS, SLICES, FIELDS, BLOCK_M, WORDS, DTYPE)
        if not EMULATED:
            _hold_rows(x, memory, rows, K, CHUNKS, SLICES, FIELDS, WORDS, BLOCK_M, LAYOUTS)
    scales = open_table(COUNT, TABLES, BLOCK_N, DTYPE)
    offsets = open_table(COUNT, TABLES, BLOCK_N, DTYPE)
    local = arange(0, BLOCK_N, OUTPUT_A)
    column = arange(0, WORDS, INPUT_A)[None, None, :]
    warp = arange(0, SLICES, SLICE_A)[:, None]
    # For the interpreter, which has no shared memory.
    start = arange(0, SLICES, SLICE_B)[:, None, None] * SPAN + arange(0, WORDS, INPUT_B)[None, :, None]
    at = start + tl.minimum(arange(0, BLOCK_M, ROW_B)[None, None, :], rows - 1) * K
    stage = 0
    phase = 0
    for unit_index in range(program, units, programs):
        first = unit_index * OUTPUTS
        for index in tl.static_range(COUNT):
            write_table(scales, index, raw[index])
            write_table(offsets, index, _offset(raw, index, COUNT, MINIMUM, FORMAT, DTYPE))
        following = tl.minimum(unit_index + programs, units - 1) * OUTPUTS
        raw = _raw(scale, zero, minimum, following, group_line, group_span, N,
                   K, SPAN, GROUPS, GROUP, OUTPUTS, SILU)  # fmt: skip
        # Two sums: a product waits for the one before it.
        total = zeros([SLICES, BLOCK_N, BLOCK_M], TOTAL)
        other = zeros([SLICES, BLOCK_N, BLOCK_M], TOTAL)
        lines = _lines(first, local, N, OUTPUTS, SILU)
        for turn in tl.static_range(TURNS):
            await_stage(barriers, stage, phase)
            words = ()
            for step in tl.static_range(STEPS):
                span = warp + (turn * STEPS + step) * SLICES
                pointers = codes + lines[:, :, None] * (K // FIELDS) + span[:, :, None] * WORDS + column
                words = words + (read_ring(ring, stage, pointers, step, SLICES, BLOCK_N, WORDS, A),)
            # All warps have read the stage: it is filled again.
            synchronize()
            later = unit_index + (turn + STAGES) // TURNS * programs
            fill_ring(view, ring, barriers, stage, later * OUTPUTS, (turn + STAGES) % TURNS * (STEPS * SLICES),
                      later < units)  # fmt: skip
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            for step in tl.static_range(STEPS):
                fields = split(words[step], FORMAT, DTYPE)
                for field in tl.static_range(FIELDS):
                    product = _field(
                        x, residual, gain, scale, zero, minimum, memory, scales, offsets, fields[field], first, local,
                        warp, at, start, total if field % 2 == 0 else other, N, turn * STEPS + step, field, K, ROWS,
                        BLOCK_M, SLICES, FORMAT, FIELDS, WORDS, GROUP, GROUPS, OUTPUTS, SILU, LAYOUTS,
                    )  # fmt: skip
                    if field % 2 == 0:
                        total = product
                    else:
                        other = product
        out = in_layout(tl.sum(total + other, 0) * (inverse * unit(FORMAT, DTYPE)), Y)
        up = out
        if SILU:
            # Other threads have the up features: each half is summed with zeros in place of the other.
            is_gate = arange(0, BLOCK_N, OUTPUT_Y)[:, None] < OUTPUTS
            up = in_layout(tl.sum(tl.reshape(tl.where(is_gate, 0.0, out), (2, OUTPUTS, BLOCK_M)), 0), Y)
            out = in_layout(tl.sum(tl.reshape(tl.where(is_gate, out, 0.0), (2, OUTPUTS, BLOCK_M)), 0), Y)
        place = first + arange(0, OUTPUTS, OUTPUT_Y)[:, None]
        finish(out, up, bias, y, arange(0, BLOCK_M, ROW_Y)[None, :], place, rows, N, SILU)


def stream_launch(gemm: WeightOnlyGemm, config: WeightOnlyConfig) -> WeightOnlyLaunch:
    """The launch of a GEMM of at most `config.block_m` rows; a fused norm: of one row."""
    if gemm.rows > config.block_m or (gemm.gain is not None and gemm.rows > 1):
        raise ValueError(f"{config} is for fewer than {gemm.rows} rows")
    weight = gemm.weight
    if not fits(weight, config):
        raise ValueError(f"{config} is not for {weight.inputs} inputs")
    out = gemm.new_output()
    outputs = out.shape[1]
    view = ring_descriptor(weight.codes, config.warps * config.steps, config.block_n, weight.words, gemm.silu)
    arguments = (
        gemm.x, gemm.residual, gemm.gain, view, weight.codes, weight.scale, weight.zero, weight.minimum, gemm.bias,
        gemm.stream, out, gemm.rows, outputs, gemm.eps,
    )  # fmt: skip
    constants = weight.constants | _constants(config, gemm.rows == 1, weight.words, weight.span)
    tiles = triton.cdiv(outputs, config.block_n // (2 if gemm.silu else 1))
    programs = min(tiles, max(config.programs, 1) * num_sms())
    return WeightOnlyLaunch(_stream, programs, arguments, constants | {"SILU": gemm.silu}, out)


def fits(weight: WordWeight, config: WeightOnlyConfig) -> bool:
    """Whether warps have equal shares of the inputs, and few enough to be unrolled."""
    spans = weight.inputs // weight.span
    return (
        weight.format in ("int4", "int8")
        and weight.inputs % (weight.span * config.warps * config.steps) == 0
        and spans // config.warps <= MAX_CHUNKS
    )


@functools.cache
def _constants(config: WeightOnlyConfig, single: bool, words: int, span: int) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    return {
        "ROWS": 1 if single else config.block_m,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SLICES": config.warps,
        "STEPS": config.steps,
        "STAGES": config.depth,
        "LAYOUTS": batch_layouts(config.warps, words, span, config.block_m),
        "EARLY": config.early,
        "num_warps": config.warps,
        **pdl(),
    }
