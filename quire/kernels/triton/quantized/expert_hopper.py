"""MXFP4 experts on Hopper: the tokens of each expert on tensor-core tiles, whose weights never leave registers.

As `expert_tiles._dequantized`, transposed: weight @ x.T, because WGMMA takes its left operand from registers. One
program a multiprocessor takes items, 256 lines of an expert's matrix for up to BLOCK_M of its rows, one after the
other. TMA copies codes and rows of x several steps of 128 inputs ahead, across items; a step's codes become numbers
while tensor cores multiply those of the step before.

Nothing is moved between threads: lane q of four takes 16 adjacent bytes of a line, whose nibbles are inputs j and
j + 32, in the order in which they come out of the words, and x lies in that order (`operand_order`). Two lines that
belong together, of gate and up, are in one thread.

Bytes: codes and scales of the experts used once per BLOCK_M rows; x once per item, from L2. Operations: 2 per weight
and row on tensor cores; about 3 instructions per weight and BLOCK_M rows. At 32 rows an expert both take about as long
as the bytes.

Codes and scales are read as `Fp4Weight` keeps them: nothing is laid out anew when weights are loaded.

Written in Gluon, which has no interpreter: `expert_tiles.py` is what tests on a CPU walk through.
"""

# ruff: noqa: N803, N806  # Triton's names

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.triton.gates import gate_mul
from quire.kernels.triton.launch import arch, gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, GemmTile
from quire.kernels.triton.moe.layout import ExpertLayout, arrange
from quire.kernels.triton.moe.tile import combine
from quire.kernels.triton.quantized.expert_stacks import Stack

USE_HOPPER = True
"""Off only to compare."""
SPAN = 64
"""Inputs whose codes are packed together: a byte holds input j and j + 32."""
STEP = 128
"""Inputs of a step."""
LINES = 128
"""Lines of each of an item's two halves: of gate and of up, or adjacent outputs."""
# Sign to bit 15; exponent and mantissa to bits 8 to 6, which is 2^126 times too small: products know subnormals.
# Numbers are 2^-32 of the weights: 2^126 times the scale may be too large for bfloat16; so scales up to 2^33 are not.
_SPLIT = tl.constexpr(
    """{ .reg .b32 a, b;
    shl.b32 a, $4, 12;
    shl.b32 b, $4, 6;
    and.b32 b, b, 0x01c001c0;
    lop3.b32 a, a, 0x80008000, b, 0xea;
    mul.rn.bf16x2 $0, a, $5;
    shl.b32 a, $4, 4;
    shr.u32 b, $4, 2;
    and.b32 b, b, 0x01c001c0;
    lop3.b32 a, a, 0x80008000, b, 0xea;
    mul.rn.bf16x2 $1, a, $5;
    shl.b32 a, $4, 8;
    shl.b32 b, $4, 2;
    and.b32 b, b, 0x01c001c0;
    lop3.b32 a, a, 0x80008000, b, 0xea;
    mul.rn.bf16x2 $2, a, $6;
    shr.u32 b, $4, 6;
    and.b32 b, b, 0x01c001c0;
    lop3.b32 a, $4, 0x80008000, b, 0xea;
    mul.rn.bf16x2 $3, a, $6; }"""
)
"""Low nibbles of even bytes and of odd ones, high nibbles of both."""
UNIT = gl.constexpr(4294967296.0)


class Layouts(NamedTuple):
    """Where tiles lie in registers."""

    codes: Any
    """int16 [LINES, 32]: a step's codes."""
    words: Any
    """int16 [LINES, 2 spans, 8]: half a step's."""
    line_s: Any
    """Of arange over lines, beside scales [LINES, 2]."""
    span_s: Any
    total: Any
    """[2 LINES, rows]."""
    line: Any
    """Of arange over its lines."""
    a: Any
    """[2 LINES, 64]: half a step's numbers."""
    y: Any
    """[LINES, rows] as stored: lines are contiguous."""
    line_y: Any
    row_y: Any


@functools.cache
def layouts(warps: int, rows: int) -> Layouts:
    """Layouts for `warps` warps that multiply, and items of `rows` rows."""

    def codes(shape: list[int], registers: list[list[int]], lanes: list[list[int]]) -> Any:
        def line(number: int) -> list[int]:
            return [number] + [0] * (len(shape) - 1)

        tall = [line(8 * warps << bit) for bit in range((16 // warps).bit_length() - 1)]
        return gl.DistributedLinearLayout(
            reg_bases=registers + tall,
            lane_bases=lanes + [line(1 << bit) for bit in range(3)],
            warp_bases=[line(8 << bit) for bit in range(warps.bit_length() - 1)],
            block_bases=[],
            shape=shape,
        )

    words = codes([LINES, 2, 8], [[0, 0, 1], [0, 0, 2]], [[0, 0, 4], [0, 1, 0]])
    scales = gl.SliceLayout(2, words)
    total = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])
    y = gl.BlockedLayout([8, 1], [16, 2], [1, warps], [0, 1])
    return Layouts(
        codes=codes([LINES, 32], [[0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]]),
        words=words,
        line_s=gl.SliceLayout(1, scales),
        span_s=gl.SliceLayout(0, scales),
        total=total,
        line=gl.SliceLayout(1, total),
        a=gl.DotOperandLayout(0, total, 2),
        y=y,
        line_y=gl.SliceLayout(1, y),
        row_y=gl.SliceLayout(0, y),
    )


class ExpertShape(NamedTuple):
    """Constants of a product."""

    experts: Any
    outputs: Any
    """With a gate: features."""
    lines: Any
    """Of an expert's matrix: as many as outputs, or twice."""
    next: Any
    """From the first half's lines to the second's."""
    each: Any
    """Outputs of an item."""
    width: Any
    """Items that share rows."""
    spans: Any
    """Of 64 inputs."""
    line_stride: Any
    """Of scales."""
    span_stride: Any
    steps: Any
    block_m: Any
    """Rows of an item, at most."""
    group: Any
    """Rows copied at once: an item has as many groups as it needs."""
    stages: Any


@gluon.jit
def _numbers(words, low, high):
    """Numbers of half a step's words, [LINES, 2 spans, (q0, i0, e) 8, odd 2, high 2]."""
    a, b, c, d = tl.inline_asm_elementwise(
        _SPLIT, "=&r,=&r,=&r,=&r,r,r,r", [words, low[:, :, None], high[:, :, None]],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
    )  # fmt: skip
    return gl.join(gl.join(a, b), gl.join(c, d))


@gluon.jit
def _operand(first, second, scales, LAYOUTS: gl.constexpr):
    """Half a step's numbers of both halves' lines, [2 LINES, 64]."""
    A: gl.constexpr = LAYOUTS.a
    first = _numbers(first, scales[0], scales[1])
    second = _numbers(second, scales[2], scales[3])
    # [lines / 8, 8, span, q0, i0, e, odd, high, second] to [lines / 8, second, 8, i0, high, odd, span, q0, e]
    both = gl.reshape(gl.join(first, second), [16, 8, 2, 2, 2, 2, 2, 2, 2])
    both = gl.permute(both, [0, 8, 1, 4, 7, 6, 2, 3, 5])
    return gl.convert_layout(gl.reshape(both, [256, 64]), A, assert_trivial=True)


@gluon.jit
def _halves(codes, LAYOUTS: gl.constexpr):
    """A step's codes of one half's lines: words of both halves of the step."""
    CODES: gl.constexpr = LAYOUTS.codes
    WORDS: gl.constexpr = LAYOUTS.words
    # [lines, (span, q0), i1, (i0, e)]
    parts = gl.permute(gl.reshape(codes.load(CODES), [128, 4, 2, 4]), [0, 1, 3, 2])
    low, high = gl.split(parts)
    low = gl.convert_layout(gl.reshape(low, [128, 2, 8]), WORDS, assert_trivial=True)
    return low, gl.convert_layout(gl.reshape(high, [128, 2, 8]), WORDS, assert_trivial=True)


@gluon.jit
def _factors(scales):
    """Both scales of a span, as bfloat16: 2^(s - 127 + 126 - 32)."""
    both = scales.to(gl.int32)
    low = (((both & 255) + 94) << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return low, ((((both >> 8) & 255) + 94) << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _item(spans, item, items, SHAPE: gl.constexpr):
    """(expert, first row, end of the expert's rows, first line) of an item; past the last expert: there is none."""
    at = spans + item // SHAPE.width * 4
    expert = gl.load(at, mask=item < items, other=SHAPE.experts)
    there = (item < items) & (expert < SHAPE.experts)
    first = gl.load(at + 1, mask=there, other=0)
    end = gl.load(at + 2, mask=there, other=1)
    return expert, first, end, item % SHAPE.width * SHAPE.each


@gluon.jit
def _load_scales(scale, expert, column, step, SHAPE: gl.constexpr, LAYOUTS: gl.constexpr):
    """Of both halves: [LINES, 2 spans] int16, two scales each. Past the end, others: what they multiply is 0."""
    LINE: gl.constexpr = LAYOUTS.line_s
    SPAN_S: gl.constexpr = LAYOUTS.span_s
    line = column + gl.arange(0, 128, layout=LINE)
    span = gl.minimum(step * 2 + gl.arange(0, 2, layout=SPAN_S), SHAPE.spans - 1)
    at = scale + gl.minimum(expert, SHAPE.experts - 1) * (SHAPE.spans * SHAPE.lines) + span[None, :] * SHAPE.span_stride
    first = gl.load(at + (gl.minimum(line, SHAPE.lines - 1) * SHAPE.line_stride)[:, None])
    return first, gl.load(at + (gl.minimum(line + SHAPE.next, SHAPE.lines - 1) * SHAPE.line_stride)[:, None])


@gluon.jit
def _load_bias(bias, expert, column, SHAPE: gl.constexpr, LAYOUTS: gl.constexpr):
    """Of both halves, in float32, divided by UNIT: [2 LINES]."""
    LINE: gl.constexpr = LAYOUTS.line
    local = gl.arange(0, 256, layout=LINE)
    line = column + local // 16 * 8 + local % 8 + local // 8 % 2 * SHAPE.next
    if bias is not None:
        there = (line < SHAPE.lines) & (expert < SHAPE.experts)
        out = gl.load(bias + expert * SHAPE.lines + line, mask=there, other=0.0).to(gl.float32) * (1 / UNIT)
    else:
        out = (line * 0).to(gl.float32)
    return out


@gluon.jit
def _fill_codes(view, codes, barrier, stage, expert, column, groups, step, SHAPE: gl.constexpr):
    """Begin to copy a step's codes, and say how much is copied in all."""
    GROUP_BYTES: gl.constexpr = SHAPE.group * 256
    GROUPS: gl.constexpr = SHAPE.block_m // SHAPE.group
    for count in gl.static_range(1, GROUPS + 1):
        mbarrier.expect(barrier, 16384 + count * GROUP_BYTES, pred=groups == count)
    line = expert * SHAPE.lines + column
    tma.async_copy_global_to_shared(view, [line, step * 32], barrier, codes.index(2 * stage))
    tma.async_copy_global_to_shared(view, [line + SHAPE.next, step * 32], barrier, codes.index(2 * stage + 1))


@gluon.jit
def _fill_rows(view, tiles, barrier, stage, first, groups, step, SHAPE: gl.constexpr):
    """Begin to copy a step of as many groups of rows as the item has."""
    GROUPS: gl.constexpr = SHAPE.block_m // SHAPE.group
    for group in gl.static_range(GROUPS):
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                view, [first + group * SHAPE.group, step * 128 + half * 64], barrier,
                tiles.index((stage * 2 + half) * GROUPS + group), pred=group < groups,
            )  # fmt: skip


@gluon.jit
def _copy(x_view, codes_view, codes, tiles, full, empty, spans, items, SHAPE: gl.constexpr, PDL: gl.constexpr):
    """What the copying warp does."""
    STAGES: gl.constexpr = SHAPE.stages
    GROUPS: gl.constexpr = SHAPE.block_m // SHAPE.group
    item = gl.program_id(0)
    expert, first, end, column = _item(spans, item, items, SHAPE)
    groups = gl.minimum((end - first + SHAPE.group - 1) // SHAPE.group, GROUPS)
    # Weights do not depend on the preceding kernel, and it began after the routing was written.
    if expert < SHAPE.experts:
        for index in gl.static_range(STAGES):
            _fill_codes(codes_view, codes, full.index(index), index, expert, column, groups, index, SHAPE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if expert < SHAPE.experts:
        for index in gl.static_range(STAGES):
            _fill_rows(x_view, tiles, full.index(index), index, first, groups, index, SHAPE)
    begin = SHAPE.stages
    stage = 0
    phase = 0
    while expert < SHAPE.experts:
        for step in range(begin, SHAPE.steps):
            mbarrier.wait(empty.index(stage), phase)
            _fill_codes(codes_view, codes, full.index(stage), stage, expert, column, groups, step, SHAPE)
            _fill_rows(x_view, tiles, full.index(stage), stage, first, groups, step, SHAPE)
            stage += 1
            if stage == SHAPE.stages:
                stage = 0
                phase ^= 1
        begin = 0
        item += gl.num_programs(0)
        expert, first, end, column = _item(spans, item, items, SHAPE)
        groups = gl.minimum((end - first + SHAPE.group - 1) // SHAPE.group, GROUPS)


@gluon.jit
def _multiply(
    codes, rows, full, empty, scale, bias, order, spans, y, items,
    SHAPE: gl.constexpr, LAYOUTS: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, PITCH: gl.constexpr,
):  # fmt: skip
    """What the other warps do."""
    TOTAL: gl.constexpr = LAYOUTS.total
    BLOCK_M: gl.constexpr = SHAPE.block_m
    item = gl.program_id(0)
    expert, first, end, column = _item(spans, item, items, SHAPE)
    if expert < SHAPE.experts:
        # Two steps ahead: nothing else hides their latency.
        loaded = _load_scales(scale, expert, column, 0, SHAPE, LAYOUTS)
        later = _load_scales(scale, expert, column, 1, SHAPE, LAYOUTS)
        own_bias = _load_bias(bias, expert, column, SHAPE, LAYOUTS)
        mbarrier.wait(full.index(0), 0)
        words, up_words = _halves(codes.index(0), LAYOUTS), _halves(codes.index(1), LAYOUTS)
        scales = _factors(loaded[0]) + _factors(loaded[1])
        operand = _operand(words[0], up_words[0], scales, LAYOUTS)
        second = operand
        stage = 0
        phase = 0
        before = 0
        is_later = False
        while expert < SHAPE.experts:
            next_expert, next_first, next_end, next_column = _item(spans, item + gl.num_programs(0), items, SHAPE)
            next_bias = _load_bias(bias, next_expert, next_column, SHAPE, LAYOUTS)
            total = own_bias[:, None] + gl.zeros([256, BLOCK_M], gl.float32, layout=TOTAL)
            for step in range(SHAPE.steps):
                # While tensor cores multiply one half of a step, the codes of the next become numbers.
                sums = warpgroup_mma(
                    operand, rows.index(stage * 2).permute((1, 0)), warpgroup_mma_init(total), is_async=True
                )
                total = warpgroup_mma_wait(1, deps=(sums, second))[0]
                mbarrier.arrive(empty.index(before), count=1, pred=is_later)
                is_later = True
                before = stage
                is_next = step + 2 >= SHAPE.steps
                loaded = later
                later = _load_scales(
                    scale, gl.where(is_next, next_expert, expert), gl.where(is_next, next_column, column),
                    gl.where(is_next, step + 2 - SHAPE.steps, step + 2), SHAPE, LAYOUTS,
                )  # fmt: skip
                second = _operand(words[1], up_words[1], scales, LAYOUTS)
                sums = warpgroup_mma(
                    second, rows.index(stage * 2 + 1).permute((1, 0)), warpgroup_mma_init(total), is_async=True
                )
                stage += 1
                if stage == SHAPE.stages:
                    stage = 0
                    phase ^= 1
                mbarrier.wait(full.index(stage), phase, pred=(step + 1 < SHAPE.steps) | (next_expert < SHAPE.experts))
                words, up_words = _halves(codes.index(2 * stage), LAYOUTS), _halves(codes.index(2 * stage + 1), LAYOUTS)
                scales = _factors(loaded[0]) + _factors(loaded[1])
                total = warpgroup_mma_wait(1, deps=(sums, operand))[0]
                operand = _operand(words[0], up_words[0], scales, LAYOUTS)
            total = warpgroup_mma_wait(0, deps=(total, second))[0]
            _finish(total, order, y, first, end, column, SHAPE, LAYOUTS, GATED, ACTIVATION, PITCH)
            item += gl.num_programs(0)
            expert = next_expert
            first = next_first
            end = next_end
            column = next_column
            own_bias = next_bias


@gluon.jit
def _finish(
    total, order, y, first, end, column,
    SHAPE: gl.constexpr, LAYOUTS: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, PITCH: gl.constexpr,
):  # fmt: skip
    """Store an item: features in the order of operands, or results of pairs."""
    LINE: gl.constexpr = LAYOUTS.line
    Y: gl.constexpr = LAYOUTS.y
    LINE_Y: gl.constexpr = LAYOUTS.line_y
    ROW_Y: gl.constexpr = LAYOUTS.row_y
    DTYPE: gl.constexpr = y.dtype.element_ty
    BLOCK_M: gl.constexpr = SHAPE.block_m
    total = total * UNIT
    row = gl.arange(0, BLOCK_M, layout=ROW_Y)
    inside = (first + row < end)[None, :]
    local = gl.arange(0, 128, layout=LINE_Y)
    if GATED:
        # Features past the end are 0: the next product reads them.
        lines = gl.arange(0, 256, layout=LINE)
        there = column + lines // 16 * 8 + lines % 8 < SHAPE.outputs
        total = gl.where(there[:, None], total, 0.0)
        gate, up = gl.split(gl.permute(gl.reshape(total, [16, 2, 8, BLOCK_M]), [0, 2, 3, 1]))
        out = gate_mul(gate, up, ACTIVATION).to(DTYPE)
        # [span, high, q0, i, e, odd, rows] to [i, high, odd, span, q0, e, rows]
        out = gl.permute(gl.reshape(out, [2, 2, 2, 4, 2, 2, BLOCK_M]), [3, 1, 5, 0, 2, 4, 6])
        out = gl.convert_layout(gl.reshape(out, [128, BLOCK_M]), Y)
        gl.store(y + (first + row).to(gl.int64)[None, :] * PITCH + (column + local)[:, None], out, mask=inside)
    else:
        pair = gl.load(order + gl.minimum(first + row, end - 1)).to(gl.int64)
        low, high = gl.split(gl.permute(gl.reshape(total.to(DTYPE), [16, 2, 8, BLOCK_M]), [0, 2, 3, 1]))
        at = y + pair[None, :] * PITCH + (column + local)[:, None]
        low = gl.convert_layout(gl.reshape(low, [128, BLOCK_M]), Y)
        gl.store(at, low, mask=inside & (column + local < SHAPE.outputs)[:, None])
        high = gl.convert_layout(gl.reshape(high, [128, BLOCK_M]), Y)
        gl.store(at + 128, high, mask=inside & (column + 128 + local < SHAPE.outputs)[:, None])


@gluon.jit(do_not_specialize=["items"])
def _products(
    x_view, codes_view, scale, bias, order, spans, y, items,
    SHAPE: gl.constexpr, LAYOUTS: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, PITCH: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = y.dtype.element_ty
    STAGES: gl.constexpr = SHAPE.stages
    codes = gl.allocate_shared_memory(gl.int16, [2 * STAGES, 128, 32], codes_view.layout)
    GROUPS: gl.constexpr = SHAPE.block_m // SHAPE.group
    tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES * GROUPS, SHAPE.group, 64], x_view.layout)
    rows = tiles._reinterpret(DTYPE, [2 * STAGES, SHAPE.block_m, 64], x_view.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(full.index(index), count=1)
        mbarrier.init(empty.index(index), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_multiply, (codes, rows, full, empty, scale, bias, order, spans, y, items, SHAPE, LAYOUTS, GATED,
                         ACTIVATION, PITCH)),
            (_copy, (x_view, codes_view, codes, tiles, full, empty, spans, items, SHAPE, PDL)),
        ],
        [1], [REGISTERS],
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _gather(
    x, order, y, tokens,
    TOP: tl.constexpr, K: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Past the last pair of this rank anything may stand, and no product reads what is written here.
    source = tl.minimum(tl.maximum(tl.load(order + row) // TOP, 0), tokens - 1).to(tl.int64)
    value = tl.load(x + source * K + column, mask=column < K, other=0.0)
    # [block, span, high, q0, i, e, odd] to [block, i, high, odd, span, q0, e]
    value = tl.permute(tl.reshape(value, (BLOCK // 128, 2, 2, 2, 4, 2, 2)), (0, 4, 2, 6, 1, 3, 5))
    tl.store(y + row * PITCH + column, tl.reshape(value, (BLOCK,)), mask=column < PITCH)


def pitch_of(width: int) -> int:
    """Values of a row in the order of operands."""
    return -(-width // STEP) * STEP


def operand_order(x: torch.Tensor) -> torch.Tensor:
    """x [rows, inputs] in the order of operands, zeros up to `pitch_of`: what `_gather` writes."""
    x = torch.nn.functional.pad(x, (0, pitch_of(x.shape[1]) - x.shape[1]))
    return x.unflatten(1, (-1, 2, 2, 2, 4, 2, 2)).permute(0, 1, 5, 3, 7, 2, 4, 6).flatten(1)


def gather_rows(x: torch.Tensor, layout: ExpertLayout, top_k: int) -> torch.Tensor:
    """The tokens of all pairs in the layout's order, their values in the order of operands.

    Bytes: x once per pair, from L2 after the first read, and as many written.
    """
    pairs, depth = layout.order.shape[0], x.shape[1]
    out = x.new_empty((pairs, pitch_of(depth)))
    _gather[(pairs,)](
        x, layout.order, out, len(x), TOP=top_k, K=depth, PITCH=out.shape[1],
        BLOCK=triton.next_power_of_2(out.shape[1]), num_warps=4, **pdl(),
    )  # fmt: skip
    return out


def products(
    x: torch.Tensor,
    layout: ExpertLayout,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    block_m: int,
    warps: int,
    stages: int,
    gated: bool,
    activation: str = "silu",
) -> torch.Tensor:
    """Features of all pairs in the layout's order, their values in the order of operands; or (not gated) results of
    pairs, in token order. x: as `gather_rows` or the first of these wrote it; codes uint8 [experts, lines, inputs / 2];
    scales int16 [experts, lines, inputs / 64].
    """
    experts, lines, half = codes.shape
    depth, width = 2 * half, lines // 2 if gated else lines
    out = x.new_empty((x.shape[0], pitch_of(width) if gated else width))
    group = min(block_m, 32)
    x_view = TensorDescriptor.from_tensor(x, [group, 64], gl.NVMMASharedLayout(128, 16, 2))
    flat = codes.view(torch.int16).flatten(0, 1)
    codes_view = TensorDescriptor.from_tensor(flat, [LINES, 32], gl.NVMMASharedLayout(64, 16, 2))
    shape = shape_of(experts, width, depth, gated, block_m, group, stages, scales.stride()[1:])
    items = layout.tiles * shape.width
    _products[(min(num_sms(), items),)](
        x_view, codes_view, scales, bias, layout.order, layout.spans, out, items, SHAPE=shape,
        LAYOUTS=layouts(warps, block_m), GATED=gated, ACTIVATION=activation, PITCH=out.shape[1], REGISTERS=24,
        num_warps=warps, **pdl(),
    )  # fmt: skip
    return out


@functools.cache
def shape_of(
    experts: int, width: int, depth: int, gated: bool, block_m: int, group: int, stages: int, strides: tuple[int, int]
) -> ExpertShape:
    """The constants of a product with `width` outputs (with a gate: features); strides of scales by line and span."""
    each, steps = LINES if gated else 2 * LINES, -(-depth // STEP)
    return ExpertShape(
        experts=experts,
        outputs=width,
        lines=2 * width if gated else width,
        next=width if gated else LINES,
        each=each,
        width=-(-width // each),
        spans=depth // 64,
        line_stride=strides[0],
        span_stride=strides[1],
        steps=steps,
        block_m=block_m,
        group=group,
        stages=min(stages, steps),
    )


def hopper_experts(
    x: torch.Tensor,
    routing: ChosenExperts,
    gate_up: Stack,
    down: Stack,
    config: ExpertsConfig,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """`Ops.experts` for any number of tokens; of `config`'s tiles, warps and stages are used."""
    layout = arrange(routing.experts, gate_up.experts, config.block_m)
    features = products(
        gather_rows(x, layout, routing.top_k), layout, gate_up.codes, gate_up.scale.view(torch.int16), gate_up_bias,
        config.block_m, config.gate_up.warps, config.gate_up.stages, True, activation,
    )  # fmt: skip
    results = products(
        features, layout, down.codes, down.scale.view(torch.int16), down_bias, config.block_m, config.down.warps,
        config.down.stages, False,
    )  # fmt: skip
    return combine(results, routing.weights, routing.experts, gate_up.experts)


def fits(gate_up: Stack, down: Stack) -> bool:
    """Whether the device has these kernels' instructions, and they can read the stacks: inputs in spans of 64, and more
    than one step of them."""
    return USE_HOPPER and arch() == 90 and _is_readable(gate_up) and _is_readable(down)


def _is_readable(stack: Stack) -> bool:
    return (
        stack.kind == "mxfp4" and stack.half == SPAN // 2 and stack.dtype is torch.bfloat16 and stack.inputs > STEP
    )  # fmt: skip


def config_for(block_m: int, warps: int, stages: int) -> ExpertsConfig:
    """The configuration of `hopper_experts` with items of `block_m` rows."""
    gate_up, down = GemmTile(LINES, STEP, warps, stages), GemmTile(2 * LINES, STEP, warps, stages)
    return ExpertsConfig("hopper", gate_up, down, block_m)
