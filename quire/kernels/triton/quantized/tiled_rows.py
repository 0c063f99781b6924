"""Weight-only GEMM `tiled`: 1 to 16 rows, persistent programs, weights in the order in which warps read them.

A program takes tiles of 16 or 32 outputs (with a gate: half of them gate features, half up), one after the other. Its
warps split the inputs; each keeps up to DEPTH spans in flight, in registers, the first before `gdc_wait`. Eight outputs
are interleaved in memory (`tiled`), so that a warp reads 512 adjacent bytes at once, and their scales lie side by side:
with 32 bytes of each of many rows a multiprocessor's L1 is the limit, at half the speed of memory. Codes become numbers
in the registers of tensor-core operands, weights on the side of 16, rows of x on the side of 8; the rows of x are in
shared memory, for all tiles, in the order of those operands. One exchange at the end of a tile sums over warps.

Bytes: codes, scales and zeros once; the input once per program, from cache. Operations: 2 per weight and row of 8, on
tensor cores; about 2 instructions per weight to make numbers of codes.
"""

# ruff: noqa: N803, N806, RUF005  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment, misc, var-annotated"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.quantized.few_rows import _input, _numbers
from quire.kernels.triton.quantized.gemm import WeightOnlyConfig, WeightOnlyGemm, WeightOnlyLaunch, WordWeight
from quire.kernels.triton.quantized.layouts import (
    arange,
    in_layout,
    layout_jit,
    multiply,
    open_inputs,
    pair_layouts,
    read_inputs,
    write_inputs,
    zeros,
)
from quire.kernels.triton.quantized.words import EMULATED, split, unit
from quire.kernels.triton.skinny_gemm.common import finish

MAX_ROWS = 16
LINES = 8
"""Outputs that are interleaved."""


def tile_words(codes: torch.Tensor, words: int) -> torch.Tensor:
    """Words int16 [out, words of a row] in the order of this kernel: blocks of 8 outputs and half a span."""
    lines, width = codes.shape
    blocks = codes.view(lines // LINES, LINES, width // (words // 2), words // 2)
    return blocks.transpose(1, 2).contiguous().view(lines, width)


def tile_groups(values: torch.Tensor) -> torch.Tensor:
    """Scales, zeros or minimums [out, groups] in the order of this kernel: a group's of 8 outputs are adjacent."""
    lines, groups = values.shape
    return values.view(lines // LINES, LINES, groups).transpose(1, 2).contiguous().view(lines, groups)


def tiled(weight: WordWeight) -> WordWeight:
    """The weight in the order of this kernel."""
    zero, minimum = (None if values is None else tile_groups(values) for values in (weight.zero, weight.minimum))
    codes = tile_words(weight.codes, weight.words)
    return weight._replace(codes=codes, scale=tile_groups(weight.scale), zero=zero, minimum=minimum, tiled=True)


@triton.jit
def _group(warp, chunk, INDEX: tl.constexpr, SLICES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr):
    """The number of group INDEX of a span of each warp."""
    if GROUP < SPAN:
        group = warp * (SPAN // GROUP) + (chunk * (SLICES * (SPAN // GROUP)) + INDEX)
    elif GROUP % SPAN == 0:
        group = (warp + chunk * SLICES) // (GROUP // SPAN)
    else:
        group = warp * 0  # one group for all inputs
    return group


@triton.jit
def _load(
    codes, scale, zero, minimum, place, line, warp, first, chunk,
    K: tl.constexpr, SLICES: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Pairs of words of a span of each warp, scales of its groups, then their zeros or minimums.

    place, line: where codes of the first span and scales of the first group are, of the tile that begins at output 0.
    """
    SPAN: tl.constexpr = WORDS * FIELDS
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    LINES: tl.constexpr = 8 if TILED else 1
    start = first.to(tl.int64)
    at = codes + (start * (K // FIELDS // 2) + chunk * (SLICES * WORDS // 2 * LINES))
    # A step reads each weight once: it should not evict what is read again.
    loaded = (tl.load(at + place, eviction_policy="evict_first"),)
    begin = start * GROUPS
    for index in tl.static_range(COUNT):
        loaded = loaded + (tl.load(scale + begin + (line + _group(warp, chunk, index, SLICES, SPAN, GROUP) * LINES)),)
    for index in tl.static_range(COUNT):
        offset = line + _group(warp, chunk, index, SLICES, SPAN, GROUP) * LINES
        if zero is not None:
            loaded = loaded + (tl.load(zero + begin + offset),)
        if minimum is not None:
            loaded = loaded + (tl.load(minimum + begin + offset),)
    return loaded


@triton.jit
def _words(pairs, SLICES: tl.constexpr, OUTPUTS: tl.constexpr, WORDS: tl.constexpr):
    """Words of pairs, which are what is loaded: a loop would carry words one in a register."""
    return tl.reshape(tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)), (SLICES, OUTPUTS, WORDS))


@triton.jit
def _prefetch(codes, warp, first, N, K: tl.constexpr, FIELDS: tl.constexpr, BLOCK_N: tl.constexpr,
              SLICES: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    """Bring the codes of a tile to L2, a piece by each warp."""
    PIECE: tl.constexpr = BLOCK_N * (K // FIELDS // 2) // SLICES  # of 4 bytes
    at = first.to(tl.int64) * (K // FIELDS // 2) + warp * PIECE
    if SILU:
        HALF: tl.constexpr = SLICES // 2
        at += (warp // HALF).to(tl.int64) * ((N - BLOCK_N // 2) * (K // FIELDS // 2))
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [codes + at, 4 * PIECE],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@layout_jit
def _hold_inputs(
    x, residual, gains, stream, memory, rows, writes, eps, K: tl.constexpr, COUNT: tl.constexpr, SLICES: tl.constexpr,
    FIELDS: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Write x to `memory`; with a norm x (+ residual, the sum to `stream`) times the gain, and return 1 / rms."""
    SLICE_X: tl.constexpr = LAYOUTS.slice_x
    INPUT_X: tl.constexpr = LAYOUTS.input_x
    ROW_X: tl.constexpr = LAYOUTS.row_x
    SPAN: tl.constexpr = WORDS * FIELDS
    at = arange(0, SLICES, SLICE_X)[:, None, None] * SPAN + arange(0, WORDS, INPUT_X)[None, :, None]
    at += tl.minimum(arange(0, ROWS, ROW_X), rows - 1)[None, None, :] * K
    inverse = 1.0
    read = ()
    for index in tl.static_range(COUNT):
        taken = tl.load(x + at + (index // FIELDS * SLICES * SPAN + index % FIELDS * WORDS))
        if residual is not None:
            carried = tl.load(residual + at + (index // FIELDS * SLICES * SPAN + index % FIELDS * WORDS))
            taken = (taken.to(tl.float32) + carried.to(tl.float32)).to(taken.dtype)
        if gains is None:
            write_inputs(memory, index, taken)
        else:
            read = read + (taken,)
    if gains is not None:
        squares = at.to(tl.float32) * 0
        for index in tl.static_range(COUNT):
            wide = read[index].to(tl.float32)
            squares += wide * wide
            write_inputs(memory, index, (wide * gains[index].to(tl.float32)).to(read[index].dtype))
        for index in tl.static_range(COUNT):
            if residual is not None:
                place = stream + at + (index // FIELDS * SLICES * SPAN + index % FIELDS * WORDS)
                tl.store(place, read[index], mask=writes & (at >= 0))
        inverse = tl.rsqrt(tl.sum(tl.sum(tl.sum(squares, 0), 0), 0) / K + eps)
    return inverse


@layout_jit(do_not_specialize=["rows"])
def _tiled(
    x, residual, gain, codes, scale, zero, minimum, bias, stream, y, rows, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr, FORMAT: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SILU: tl.constexpr, TILED: tl.constexpr, LAYOUTS: tl.constexpr, PREFETCH: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    A: tl.constexpr = LAYOUTS.a
    GROUPS_A: tl.constexpr = LAYOUTS.groups
    SLICE_P: tl.constexpr = LAYOUTS.slice_p
    OUTPUT_P: tl.constexpr = LAYOUTS.output_p
    PAIR_P: tl.constexpr = LAYOUTS.pair_p
    B: tl.constexpr = LAYOUTS.b
    SLICE_B: tl.constexpr = LAYOUTS.slice_b
    INPUT_B: tl.constexpr = LAYOUTS.input_b
    ROW_B: tl.constexpr = LAYOUTS.row_b
    SLICE_X: tl.constexpr = LAYOUTS.slice_x
    INPUT_X: tl.constexpr = LAYOUTS.input_x
    ROW_X: tl.constexpr = LAYOUTS.row_x
    SHARED: tl.constexpr = LAYOUTS.shared
    TOTAL: tl.constexpr = LAYOUTS.total
    PARTS: tl.constexpr = LAYOUTS.parts
    HALVES: tl.constexpr = LAYOUTS.halves
    Y: tl.constexpr = LAYOUTS.y
    OUTPUT_Y: tl.constexpr = LAYOUTS.output_y
    ROW_Y: tl.constexpr = LAYOUTS.row_y
    DTYPE: tl.constexpr = x.dtype.element_ty
    SPAN: tl.constexpr = WORDS * FIELDS
    WIDTH: tl.constexpr = K // FIELDS // 2  # of a row, in pairs of words
    HALF: tl.constexpr = WORDS // 4
    CHUNKS: tl.constexpr = K // SPAN // SLICES
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    HELD: tl.constexpr = 1 + COUNT * (2 if zero is not None or minimum is not None else 1)  # tensors of a chunk
    MINIMUM: tl.constexpr = minimum is not None
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    units = N // OUTPUTS
    codes = codes.to(tl.pointer_type(tl.int32))
    local = arange(0, BLOCK_N, OUTPUT_P)[None, :]
    pair = arange(0, WORDS // 2, PAIR_P)[None, None, :]
    warp = arange(0, SLICES, SLICE_P)[:, None]
    half = local // OUTPUTS * N.to(tl.int64)  # the first up feature, with a gate
    if TILED:
        block = half + local % OUTPUTS // 8 * 8
        place = (block * WIDTH + (local % 8 * HALF + warp * (WORDS * 4)))[:, :, None] + (
            pair // HALF * (8 * HALF) + pair % HALF
        )
        line = block * GROUPS + local % 8
    else:
        place = ((half + local % OUTPUTS) * WIDTH + warp * (WORDS // 2))[:, :, None] + pair
        line = (half + local % OUTPUTS) * GROUPS
    held = ()
    for chunk in tl.static_range(DEPTH):
        ahead = tl.minimum(program + chunk // CHUNKS * programs, units - 1) * OUTPUTS
        held = held + _load(codes, scale, zero, minimum, place, line, warp, ahead, chunk % CHUNKS,
                            K, SLICES, FIELDS, WORDS, GROUPS, GROUP, TILED)  # fmt: skip
    gains = None
    if gain is not None:
        gains = ()
        at_gain = arange(0, SLICES, SLICE_X)[:, None, None] * SPAN + arange(0, WORDS, INPUT_X)[None, :, None]
        at_gain += arange(0, ROWS, ROW_X)[None, None, :] * K
        for index in tl.static_range(CHUNKS * FIELDS):
            gains = gains + (tl.load(gain + at_gain + (index // FIELDS * SLICES * SPAN + index % FIELDS * WORDS)),)
    if PDL:
        for index in tl.static_range(PREFETCH):
            _prefetch(codes, arange(0, SLICES, SLICE_P), tl.minimum(program + index * programs, units - 1) * OUTPUTS, N,
                      K, FIELDS, BLOCK_N, SLICES, SILU)  # fmt: skip
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    inverse = 1.0
    memory = open_inputs(CHUNKS * FIELDS, SLICES, WORDS, ROWS, DTYPE, SHARED)
    if not EMULATED or gain is not None:
        inverse = _hold_inputs(
            x, residual, gains, stream, memory, rows, program == 0, eps, K, CHUNKS * FIELDS, SLICES, FIELDS, WORDS,
            ROWS, LAYOUTS,
        )  # fmt: skip
    # For the interpreter, which has no shared memory.
    start = arange(0, SLICES, SLICE_B)[:, None, None] * SPAN + arange(0, WORDS, INPUT_B)[None, :, None]
    at = start + tl.minimum(arange(0, BLOCK_M, ROW_B)[None, None, :], rows - 1) * K
    for unit_index in range(program, units, programs):
        # Two sums: a product waits for the one before it.
        total = zeros([SLICES, BLOCK_N, BLOCK_M], TOTAL)
        other = zeros([SLICES, BLOCK_N, BLOCK_M], TOTAL)
        for turn in range(CHUNKS // DEPTH):
            for slot in tl.static_range(DEPTH):
                number = turn * DEPTH + slot
                groups = ()
                for part in tl.static_range(1, HELD):
                    groups = groups + (in_layout(held[part], GROUPS_A),)
                fields = split(in_layout(_words(held[0], SLICES, BLOCK_N, WORDS), A), FORMAT, DTYPE)
                for field in tl.static_range(FIELDS):
                    numbers = _numbers(fields, groups, None, field, WORDS, GROUP, SPAN, FORMAT, MINIMUM, DTYPE)
                    if EMULATED:
                        taken = _input(x, residual, gain, at, start, number * SLICES * SPAN + field * WORDS, K, True)
                    else:
                        taken = read_inputs(memory, number * FIELDS + field, SLICES, WORDS, BLOCK_M, B)
                    if field % 2 == 0:
                        total = multiply(numbers, taken, total)
                    else:
                        other = multiply(numbers, taken, other)
                # Into the same registers, once they have been used: no value is moved.
                loaded = held[:HELD]
                later = number + DEPTH
                tile = unit_index + later // CHUNKS * programs
                if tile < units:
                    loaded = _load(codes, scale, zero, minimum, place, line, warp, tile * OUTPUTS, later % CHUNKS,
                                   K, SLICES, FIELDS, WORDS, GROUPS, GROUP, TILED)  # fmt: skip
                held = held[HELD:] + loaded
        total = (total + other) * (inverse * unit(FORMAT, DTYPE))
        if SILU:
            parts = in_layout(tl.reshape(total, (SLICES, 2, OUTPUTS, BLOCK_M)), HALVES)
            out, up = tl.split(tl.permute(tl.sum(parts, 0), (1, 2, 0)))
            out = in_layout(out, Y)
            up = in_layout(up, Y)
        else:
            out = in_layout(tl.sum(in_layout(total, PARTS), 0), Y)
            up = out
        column = unit_index * OUTPUTS + arange(0, OUTPUTS, OUTPUT_Y)[:, None]
        finish(out, up, bias, y, arange(0, BLOCK_M, ROW_Y)[None, :], column, rows, N, SILU)


def tiled_launch(gemm: WeightOnlyGemm, config: WeightOnlyConfig) -> WeightOnlyLaunch:
    """The launch of a GEMM of at most `config.block_m` rows with a `tiled` weight; a fused norm: of one row."""
    if gemm.rows > config.block_m or (gemm.gain is not None and gemm.rows > 1):
        raise ValueError(f"{config} is for fewer than {gemm.rows} rows")
    weight = gemm.weight
    out = gemm.new_output()
    outputs = out.shape[1]
    if not fits(weight, config):
        raise ValueError(f"{config} is not for {weight.inputs} inputs and {outputs} outputs")
    arguments = (
        gemm.x, gemm.residual, gemm.gain, weight.codes, weight.scale, weight.zero, weight.minimum, gemm.bias,
        gemm.stream, out, gemm.rows, outputs, gemm.eps,
    )  # fmt: skip
    constants = weight.constants | _constants(config, gemm.rows == 1, weight.words)
    tiles = outputs // (config.block_n // (2 if gemm.silu else 1))
    programs = min(tiles, max(config.programs, 1) * num_sms())
    return WeightOnlyLaunch(_tiled, programs, arguments, constants | {"SILU": gemm.silu, "TILED": weight.tiled}, out)


def fits(weight: WordWeight, config: WeightOnlyConfig) -> bool:
    """Whether outputs are whole tiles, and inputs whole rounds of all warps."""
    spans = weight.inputs // weight.span
    return (
        weight.format in ("int4", "int8")
        and weight.outputs % config.block_n == 0
        and spans % config.warps == 0
        and spans // config.warps % config.depth == 0
        and (weight.group % weight.span == 0 or weight.span % weight.group == 0 or weight.scale.shape[1] == 1)
    )


@functools.cache
def _constants(config: WeightOnlyConfig, single: bool, words: int) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    return {
        "ROWS": 1 if single else config.block_m,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SLICES": config.warps,
        "DEPTH": config.depth,
        "LAYOUTS": pair_layouts(config.warps, words, config.block_m, single),
        "PREFETCH": config.prefetch,
        "EARLY": config.early,
        "num_warps": config.warps,
        **pdl(),
    }
