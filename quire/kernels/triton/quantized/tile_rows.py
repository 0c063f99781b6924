"""Weight-only GEMM `tile`: 16 to some hundreds of rows on large tensor-core tiles, with split-K or stream-K.

The result is computed transposed, weight @ x.T: Hopper's WGMMA takes its left operand from registers, where the codes
become numbers. A span of 128 inputs is four products: the words of a tile hold four fields, each with its own 32
columns of x. Sharing of tiles, and sums of their parts, are those of `skinny_gemm/tile.py`.

Bytes: codes, scales and zeros once per block_m rows, the input once per program, from cache. Operations: 2 per weight
and row on tensor cores; about 2 instructions per weight and block_m rows.
"""

# ruff: noqa: N803, N806, RUF005, SIM102  # Triton's names; its tuples grow by `+` alone; constexpr conditions
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.quantized.gemm import WeightOnlyConfig, WeightOnlyGemm, WeightOnlyLaunch, WordWeight
from quire.kernels.triton.quantized.layouts import (
    arange,
    await_stage,
    close_stages,
    fill_stage,
    finish_products,
    in_layout,
    layout_jit,
    multiply_stage,
    open_stages,
    read_words,
    synchronize,
    tile_descriptor,
    tile_layouts,
    words_descriptor,
    zeros,
)
from quire.kernels.triton.quantized.words import group_at, offset_of, scale_of, split, unit, value, word_at
from quire.kernels.triton.skinny_gemm.common import finish
from quire.kernels.triton.skinny_gemm.tile import MAX_SHARED_TILES, _arrivals, _first_iteration, _owner
from quire.kernels.weights.packing import LINES

PREFETCH_WORDS = 256
"""Words of each output that are prefetched into L2 before `gdc_wait`, at most."""


@triton.jit
def prefetch_span(at, WORDS: tl.constexpr):
    """Prefetch WORDS words of the rows that begin `at` into L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at, 2 * WORDS],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _load_groups(
    scale, zero, minimum, lines, span, GROUPS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Scales of a span's groups, then their zeros or minimums, of outputs `lines`.

    Past the last group the last repeats.
    """
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    loaded = ()
    for index in tl.static_range(COUNT):
        number = tl.minimum((span * SPAN + index * GROUP) // GROUP, GROUPS - 1)
        loaded = loaded + (tl.load(scale + group_at(lines, number, GROUPS, LINES)),)
    for index in tl.static_range(COUNT):
        number = tl.minimum((span * SPAN + index * GROUP) // GROUP, GROUPS - 1)
        group = group_at(lines, number, GROUPS, LINES)
        if zero is not None:
            loaded = loaded + (tl.load(zero + group),)
        if minimum is not None:
            loaded = loaded + (tl.load(minimum + group),)
    return loaded


@triton.jit
def _weights(
    fields, groups, factors,
    FIELD: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, FORMAT: tl.constexpr,
    MINIMUM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The numbers of one of a span's fields; `groups` are what `_load_groups` returned."""
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    INDEX: tl.constexpr = FIELD * WORDS // GROUP if GROUP < SPAN else 0
    zero = None
    minimum = None
    if len(groups) > COUNT:
        if MINIMUM:
            minimum = groups[COUNT + INDEX]
        else:
            zero = groups[COUNT + INDEX]
    scale = scale_of(groups[INDEX], factors, FORMAT, DTYPE)[:, None]
    offset = offset_of(groups[INDEX], zero, minimum, FORMAT, DTYPE)
    if offset is not None:
        offset = offset[:, None]
    return value(fields[FIELD], scale, offset, FIELD, MINIMUM, FORMAT, DTYPE)


@triton.jit
def _decode(
    words, groups, factors,
    FORMAT: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The numbers of all of a span's fields."""
    fields = split(words, FORMAT, DTYPE)
    numbers = ()
    for field in tl.static_range(FIELDS):
        numbers = numbers + (
            _weights(fields, groups, factors, field, WORDS, GROUP, WORDS * FIELDS, FORMAT, MINIMUM, DTYPE),
        )
    return numbers


@triton.jit
def _sum_parts(parts, at, tile, first, last, steps, work, programs, SIZE: tl.constexpr):
    """The sum of the parts of a tile that programs first to last wrote, in their order."""
    # From L2: L1 is not coherent with what other multiprocessors wrote.
    total = tl.load(parts + _slot(first, tile, steps, work, programs) * SIZE + at, cache_modifier=".cg")
    for program in tl.range(first + 1, last + 1, num_stages=1):
        total += tl.load(parts + _slot(program, tile, steps, work, programs) * SIZE + at, cache_modifier=".cg")
    return total


@triton.jit
def _slot(program, tile, steps, work, programs):
    """The workspace of a program's part of a tile. It has at most two: of its first tile and of its last."""
    later = (_first_iteration(program, work, programs) // steps != tile).to(tl.int32)
    return (program + later * programs).to(tl.int64)


@layout_jit(do_not_specialize=["rows"])
def _tile(
    x, view, words_view, codes, scale, zero, minimum, factor, bias, y, parts, arrivals, rows, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, FORMAT: tl.constexpr,
    FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, LINES: tl.constexpr,
    SILU: tl.constexpr, LAYOUTS: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    A: tl.constexpr = LAYOUTS.a
    SHAPE: tl.constexpr = [BLOCK_N, WORDS]
    OUTPUT_A: tl.constexpr = LAYOUTS.output_a
    INPUT_A: tl.constexpr = LAYOUTS.input_a
    TOTAL: tl.constexpr = LAYOUTS.total
    OUTPUT: tl.constexpr = LAYOUTS.output
    ROW: tl.constexpr = LAYOUTS.row
    Y: tl.constexpr = LAYOUTS.y
    OUTPUT_Y: tl.constexpr = LAYOUTS.output_y
    ROW_Y: tl.constexpr = LAYOUTS.row_y
    DTYPE: tl.constexpr = x.dtype.element_ty
    MINIMUM: tl.constexpr = minimum is not None
    SPAN: tl.constexpr = WORDS * FIELDS
    WIDTH: tl.constexpr = K // FIELDS
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    steps: tl.constexpr = K // SPAN
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    work = row_tiles * tl.cdiv(N, OUTPUTS) * steps
    if parts is None:
        begin = program * steps
        end = begin + steps
    else:
        begin = _first_iteration(program, work, programs)
        end = _first_iteration(program + 1, work, programs)
    local = arange(0, BLOCK_N, OUTPUT_A)
    place = arange(0, BLOCK_N, OUTPUT)[:, None] * BLOCK_M + arange(0, BLOCK_M, ROW)[None, :]
    for tile in range(begin // steps, (end - 1) // steps + 1):
        # Consecutive tiles share weights: same outputs, next rows.
        row = tile % row_tiles * BLOCK_M
        output = tile // row_tiles * OUTPUTS
        low = tl.maximum(begin - tile * steps, 0)
        high = tl.minimum(end - tile * steps, steps)
        # Outputs past the end repeat the last and are not stored. With a gate, eight gate features and the eight up
        # features that belong to them alternate: a thread holds both of a pair.
        if SILU:
            lines = tl.minimum(output + local // 16 * 8 + local % 8, N - 1) + N * (local // 8 % 2)
        else:
            lines = tl.minimum(output + local, N - 1)
        lines = lines.to(tl.int64)
        factors = None
        if factor is not None:
            factors = tl.load(factor + lines)
        word = codes + word_at(lines[:, None], 0, arange(0, WORDS, INPUT_A)[None, :], K, FIELDS, WORDS, LINES)
        # Two spans ahead: the compiler does not pipeline loads this narrow.
        loaded = _load_groups(scale, zero, minimum, lines, low, GROUPS, GROUP, SPAN, LINES)
        later = _load_groups(
            scale, zero, minimum, lines, tl.minimum(low + 1, high - 1), GROUPS, GROUP, SPAN, LINES
        )  # fmt: skip
        if PDL:
            if tile == begin // steps:
                # Not past the end of the row: for the last row that is the end of memory.
                beside = lines % LINES
                prefetched = (lines - beside) * WIDTH + tl.minimum(low * WORDS, WIDTH - PREFETCH) * LINES
                prefetch_span(codes + prefetched + beside * PREFETCH, PREFETCH)
                gdc_wait()
                gdc_launch_dependents()
        tiles, stages, barriers = open_stages(view, words_view, STAGES, FIELDS)
        synchronize()
        for stage in tl.static_range(STAGES):
            fill_stage(
                view, words_view, tiles, stages, barriers, stage, row, output, low + stage, low + stage < high,
                FIELDS, WORDS, LINES, SILU,
            )  # fmt: skip
        await_stage(barriers, 0, 0)
        words = read_words(stages, 0, word, low, WORDS, LINES, SHAPE, A)
        numbers = _decode(words, loaded, factors, FORMAT, FIELDS, WORDS, GROUP, MINIMUM, DTYPE)
        total = zeros([BLOCK_N, BLOCK_M], TOTAL)
        stage = 0
        phase = 0
        for span in range(low, high):
            sums = total
            for field in tl.static_range(FIELDS):
                sums = multiply_stage(
                    numbers[field], tiles, stage, sums, x, row, span * SPAN, rows, field, FIELDS, K, BLOCK_M, WORDS
                )
            # While tensor cores multiply: the next span's codes become numbers, and the stage before this one, which
            # all threads have read, is filled again.
            loaded = later
            later = _load_groups(
                scale, zero, minimum, lines, tl.minimum(span + 2, high - 1), GROUPS, GROUP, SPAN, LINES
            )  # fmt: skip
            before = (stage + STAGES - 1) % STAGES
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            following = tl.minimum(span + 1, high - 1)
            if span + 1 < high:
                await_stage(barriers, stage, phase)
            words = read_words(stages, stage, word, following, WORDS, LINES, SHAPE, A)
            decoded = _decode(words, loaded, factors, FORMAT, FIELDS, WORDS, GROUP, MINIMUM, DTYPE)
            if (span > low) & (span - 1 + STAGES < high):
                synchronize()
                fill_stage(
                    view, words_view, tiles, stages, barriers, before, row, output, span - 1 + STAGES, True,
                    FIELDS, WORDS, LINES, SILU,
                )  # fmt: skip
            total, numbers = finish_products(sums, numbers, decoded)
        synchronize()
        close_stages(barriers, STAGES)
        whole = True
        if parts is not None:
            if high - low != steps:
                SIZE: tl.constexpr = BLOCK_N * BLOCK_M
                tl.store(parts + _slot(program, tile, steps, work, programs) * SIZE + place, total)
                first = _owner(tile * steps, work, programs)
                last = _owner(tile * steps + steps - 1, work, programs)
                # All threads must have written before one of them counts the arrival.
                synchronize()
                whole = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == last - first
                if whole:
                    total = _sum_parts(parts, place, tile, first, last, steps, work, programs, SIZE)
                    tl.store(arrivals + tile, 0)
        if whole:
            total *= unit(FORMAT, DTYPE)
            up = total
            out = total
            if SILU:
                pairs = tl.permute(tl.reshape(total, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
                out, up = tl.split(pairs)
                out = in_layout(tl.reshape(out, (OUTPUTS, BLOCK_M)), Y)
                up = in_layout(tl.reshape(up, (OUTPUTS, BLOCK_M)), Y)
            else:
                out = in_layout(out, Y)
                up = out
            column = output + arange(0, OUTPUTS, OUTPUT_Y)[:, None]
            line = row + arange(0, BLOCK_M, ROW_Y)[None, :]
            finish(out, up, bias, y, line, column, rows, N, SILU)


def can_gate(weight: WordWeight) -> bool:
    """Whether the kernel can multiply the outputs' halves: it pairs what lies side by side."""
    return weight.lines == LINES and weight.outputs % (2 * LINES) == 0


def tile_launch(gemm: WeightOnlyGemm, config: WeightOnlyConfig) -> WeightOnlyLaunch:
    """The launch of a GEMM of any number of rows."""
    if config.depth < 3:
        # A stage is filled in the step before it is waited for.
        raise ValueError(f"{config}: fewer than 3 stages")
    if gemm.silu and not can_gate(gemm.weight):
        raise ValueError(f"{config}: {gemm.weight.outputs} outputs are not eights of gate and up features")
    out = gemm.new_output()
    weight, rows, outputs = gemm.weight, gemm.rows, out.shape[1]
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(outputs, config.block_n // (2 if gemm.silu else 1))
    steps = weight.inputs // weight.span
    programs = min(config.programs * num_sms(), tiles * steps) if config.programs else tiles * min(config.split, steps)
    programs = programs if tiles <= MAX_SHARED_TILES else tiles
    parts = arrivals = None
    if tiles <= MAX_SHARED_TILES and (config.programs or config.split > 1):
        slots = programs * (2 if config.programs else 1)
        parts = out.new_empty(slots * config.block_n * config.block_m, dtype=torch.float32)
        arrivals = _arrivals(out.device)
    view = tile_descriptor(gemm.x, config.block_m, weight.words)
    words_view = words_descriptor(weight.codes, config.block_n, weight.words, weight.lines, gemm.silu)
    arguments = (gemm.x, view, words_view, *weight.tensors, gemm.bias, out, parts, arrivals, rows, outputs)
    constants = weight.constants | _constants(config, weight.inputs // weight.fields, gemm.silu)
    return WeightOnlyLaunch(_tile, programs, arguments, constants, out)


@functools.cache
def _constants(config: WeightOnlyConfig, width: int, silu: bool) -> dict[str, Any]:
    """Constexpr arguments and launch options; `width`: words of a row."""
    outputs = config.block_n // (2 if silu else 1)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.depth,
        "SILU": silu,
        "LAYOUTS": tile_layouts(config.warps, config.block_m, outputs),
        "PREFETCH": min(width, PREFETCH_WORDS),
        "num_warps": config.warps,
        **pdl(),
    }
