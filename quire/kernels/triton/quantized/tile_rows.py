"""Weight-only GEMM `tile`: 16 to some hundreds of rows on large tensor-core tiles, with split-K or stream-K.

The result is computed transposed, weight @ x.T: Hopper's WGMMA takes its left operand from registers, where the codes
become numbers. A span of 128 inputs is four products: the words of a tile hold four fields, each with its own 32
columns of x. Sharing of tiles, and sums of their parts, are those of `skinny_gemm/tile.py`.

Bytes: codes, scales and zeros once per block_m rows, the input once per program, from cache. Operations: 2 per weight
and row on tensor cores; about 2 instructions per weight and block_m rows.
"""

# ruff: noqa: N803, N806
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.quantized.gemm import WeightOnlyConfig, WeightOnlyGemm, WeightOnlyLaunch
from quire.kernels.triton.quantized.words import offset_of, scale_of, split, value
from quire.kernels.triton.skinny_gemm.common import finish, prefetch_rows, prefetch_shape
from quire.kernels.triton.skinny_gemm.tile import (
    MAX_SHARED_TILES,
    _arrivals,
    _first_iteration,
    _owner,
    _part,
    _sum_parts,
)


@triton.jit
def _load_groups(
    scale, zero, minimum, at, span, GROUPS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Scales of a span's groups, then their zeros or minimums, of outputs whose groups begin `at`.

    Past the last group the last repeats.
    """
    COUNT: tl.constexpr = SPAN // GROUP if GROUP < SPAN else 1
    loaded = ()
    for index in tl.static_range(COUNT):
        loaded = loaded + (tl.load(scale + at + tl.minimum((span * SPAN + index * GROUP) // GROUP, GROUPS - 1)),)
    for index in tl.static_range(COUNT):
        group = at + tl.minimum((span * SPAN + index * GROUP) // GROUP, GROUPS - 1)
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
    return value(fields[FIELD], scale, offset, MINIMUM, FORMAT, DTYPE)


@triton.jit
def _accumulate(
    x, x_view, codes, view, scale, zero, minimum, factor, row, skip, output, begin, end, rows, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, FORMAT: tl.constexpr,
    FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Outputs [skip + output, + BLOCK_N) of rows [row, + BLOCK_M), summed over spans [begin, end): [BLOCK_N, BLOCK_M]."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    SPAN: tl.constexpr = WORDS * FIELDS
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # Outputs past the end repeat the last and are not stored.
    lines = (skip + tl.minimum(output + tl.arange(0, BLOCK_N), N - 1)).to(tl.int64)
    groups = lines * GROUPS
    factors = None
    if factor is not None:
        factors = tl.load(factor + lines)
    line = row + tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, WORDS)[None, :]
    at = line.to(tl.int64) * K + column
    # One iteration ahead: the compiler does not pipeline loads this narrow.
    ahead = _load_groups(scale, zero, minimum, groups, begin, GROUPS, GROUP, SPAN)
    for span in tl.range(begin, end, num_stages=STAGES):
        if view is not None:
            words = view.load([skip + output, span * WORDS])
        else:
            words = tl.load(codes + lines[:, None] * (K // FIELDS) + span * WORDS + column)
        present = ahead
        ahead = _load_groups(scale, zero, minimum, groups, span + 1, GROUPS, GROUP, SPAN)
        fields = split(words, FORMAT, DTYPE)
        for field in tl.static_range(FIELDS):
            k = span * SPAN + field * WORDS
            if x_view is not None:
                taken = x_view.load([row, k])
            else:
                taken = tl.load(x + at + k, mask=line < rows, other=0.0)
            weights = _weights(fields, present, factors, field, WORDS, GROUP, SPAN, FORMAT, minimum is not None, DTYPE)
            total = tl.dot(weights, taken.T, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _tile(
    x, x_view, view, codes, scale, zero, minimum, factor, bias, y, parts, arrivals, rows, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, FORMAT: tl.constexpr,
    FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SILU: tl.constexpr,
    PREFETCHES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    steps = K // (WORDS * FIELDS)
    work = row_tiles * tl.cdiv(N, BLOCK_N) * steps
    if parts is None:
        begin = program * steps
        end = begin + steps
    else:
        begin = _first_iteration(program, work, programs)
        end = _first_iteration(program + 1, work, programs)
    if PDL:
        WIDTH: tl.constexpr = K // FIELDS
        outputs = tl.minimum(begin // steps // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
        # Not past the end of the row: for the last row that is the end of memory.
        word = tl.minimum(begin % steps * WORDS, WIDTH - PREFETCH)
        prefetch_rows(codes + outputs * WIDTH + word, WIDTH - word, PREFETCHES, PREFETCH)
        if SILU:
            prefetch_rows(codes + (N + outputs) * WIDTH + word, WIDTH - word, PREFETCHES, PREFETCH)
        gdc_wait()
        gdc_launch_dependents()
    for tile in range(begin // steps, (end - 1) // steps + 1):
        # Consecutive tiles share weights: same outputs, next rows.
        row = tile % row_tiles * BLOCK_M
        output = tile // row_tiles * BLOCK_N
        low = tl.maximum(begin - tile * steps, 0)
        high = tl.minimum(end - tile * steps, steps)
        total = _accumulate(
            x, x_view, codes, view, scale, zero, minimum, factor, row, 0, output, low, high, rows, N,
            K, BLOCK_M, BLOCK_N, STAGES, FORMAT, FIELDS, WORDS, GROUP, GROUPS,
        )  # fmt: skip
        gated = total
        if SILU:
            gated = _accumulate(
                x, x_view, codes, view, scale, zero, minimum, factor, row, N, output, low, high, rows, N,
                K, BLOCK_M, BLOCK_N, STAGES, FORMAT, FIELDS, WORDS, GROUP, GROUPS,
            )  # fmt: skip
        lines = row + tl.arange(0, BLOCK_M)[None, :]
        columns = output + tl.arange(0, BLOCK_N)[:, None]
        if parts is None or high - low == steps:
            finish(total, gated, bias, y, lines, columns, rows, N, SILU)
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
                _sum_parts(
                    parts, bias, y, tile, lines, columns, first, last, rows, N, steps, work, programs,
                    BLOCK_M, BLOCK_N, SILU,
                )  # fmt: skip
                tl.store(arrivals + tile, 0)


def tile_launch(gemm: WeightOnlyGemm, config: WeightOnlyConfig) -> WeightOnlyLaunch:
    """The launch of a GEMM of any number of rows, without a norm."""
    if gemm.gain is not None:
        raise ValueError(f"{config}: no norm is fused into this kernel")
    out = gemm.new_output()
    weight, rows, outputs = gemm.weight, gemm.rows, out.shape[1]
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(outputs, config.block_n)
    steps = weight.inputs // weight.span
    programs = min(config.programs * num_sms(), tiles * steps) if config.programs else tiles * min(config.split, steps)
    programs = programs if tiles <= MAX_SHARED_TILES else tiles
    parts = arrivals = None
    if programs != tiles:
        slots = programs * (2 if config.programs else 1) * (2 if gemm.silu else 1)
        parts = out.new_empty(slots * config.block_n * config.block_m, dtype=torch.float32)
        arrivals = _arrivals(out.device)
    x_view = view = None
    if config.tma:
        view = TensorDescriptor.from_tensor(weight.codes, [config.block_n, weight.words])
        x_view = TensorDescriptor.from_tensor(gemm.x, [config.block_m, weight.words])
    arguments = (
        gemm.x, x_view, view, *weight.tensors, gemm.bias, out, parts, arrivals, rows, outputs,
    )  # fmt: skip
    constants = weight.constants | _constants(config, weight.inputs // weight.fields, gemm.silu)
    return WeightOnlyLaunch(_tile, programs, arguments, constants, out)


@functools.cache
def _constants(config: WeightOnlyConfig, width: int, silu: bool) -> dict[str, Any]:
    """Constexpr arguments and launch options; `width`: words of a row."""
    prefetches, prefetch = prefetch_shape(config.block_n, width, 2, config.warps)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.depth,
        "SILU": silu,
        "PREFETCHES": prefetches,
        "PREFETCH": prefetch,
        "num_warps": config.warps,
        **pdl(),
    }
