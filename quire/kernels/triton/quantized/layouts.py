"""Gluon, Triton's language with explicit layouts, as far as kernels here use it; in the interpreter, plain Triton.

A kernel that says in which thread's registers a tile lies can load it from memory into the registers of tensor-core
operands, without shared memory in between. Inside such a kernel plain Triton helpers may be called. The interpreter has
no layouts: there the same source runs as a Triton kernel whose layouts are None.
"""

# ruff: noqa: N803

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import INTERPRETED

if INTERPRETED:
    layout_jit = triton.jit

    @triton.jit
    def arange(START: tl.constexpr, END: tl.constexpr, LAYOUT: tl.constexpr):
        """tl.arange in a layout."""
        return tl.arange(START, END)

    @triton.jit
    def zeros(SHAPE: tl.constexpr, LAYOUT: tl.constexpr):
        """Zeros in float32 in a layout."""
        return tl.zeros(SHAPE, tl.float32)

    @triton.jit
    def in_layout(tile, LAYOUT: tl.constexpr):
        """A tile moved to a layout."""
        return tile

    @triton.jit
    def multiply(a, b, total):
        """total + a @ b on tensor cores; all are batches of matrices, a warp each."""
        return tl.dot(a, b, total, input_precision="ieee")

    @triton.jit
    def open_inputs(
        COUNT: tl.constexpr, SLICES: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
        LAYOUT: tl.constexpr,
    ):  # fmt: skip
        """Shared memory for COUNT tiles [SLICES, WORDS, ROWS]. Not in the interpreter."""
        return 0

    @triton.jit
    def write_inputs(memory, index, values):
        """Write a tile."""
        return

    @triton.jit
    def read_inputs(
        memory, index, SLICES: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, LAYOUT: tl.constexpr
    ):  # fmt: skip
        """A tile as [SLICES, WORDS, ROWS]; one row is repeated."""
        return

    @triton.jit
    def open_stages(view, words_view, STAGES: tl.constexpr, FIELDS: tl.constexpr):
        """(tiles, words, barriers): shared memory for STAGES times FIELDS tiles of x and one of words.

        The views are descriptors of x and of the weight's words.
        """
        return 0, 0, 0

    @triton.jit
    def close_stages(barriers, STAGES: tl.constexpr):
        """After the last use of `open_stages`."""
        return

    @triton.jit
    def fill_stage(
        view, words_view, tiles, words, barriers, stage, row, output, span, wanted,
        FIELDS: tl.constexpr, WORDS: tl.constexpr, LINES: tl.constexpr, PAIRED: tl.constexpr,
    ):  # fmt: skip
        """Begin to load a span of x from `row` on and of the weight from `output` on, if `wanted`, into a stage that no
        thread reads. PAIRED: eight lines of `output` and eight of its other half alternate."""
        return

    @triton.jit
    def read_words(
        words, stage, word, span, WORDS: tl.constexpr, LINES: tl.constexpr, SHAPE: tl.constexpr, LAYOUT: tl.constexpr
    ):  # fmt: skip
        """A stage's words; in the interpreter those of `span`, where those of the first one lie at `word`."""
        return tl.load(word + span * (LINES * WORDS))

    @triton.jit
    def await_stage(barriers, stage, phase):
        """Wait for the load of a stage; `phase` is 0 the first time, 1 the second, 0 the third."""
        return

    @triton.jit
    def multiply_stage(
        a, tiles, stage, total, x, row, k, rows,
        FIELD: tl.constexpr, FIELDS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    ):  # fmt: skip
        """total + a @ x.T, begun: `finish_products` waits. x is tile FIELD of a stage, which begins at (row, k)."""
        line = row + tl.arange(0, ROWS)[:, None]
        at = line * K + k + FIELD * WORDS + tl.arange(0, WORDS)[None, :]
        tile = tl.load(x + at, mask=line < rows, other=0.0)
        return tl.dot(a, tile.T, total, input_precision="ieee")

    @triton.jit
    def finish_products(total, operands, following):
        """(the total of all products begun, following): waits for them; until then their operands must be kept.

        `following` has been computed before the wait, while the products run.
        """
        return total, following

    @triton.jit
    def synchronize():
        """A barrier of the program's threads, after which TMA may overwrite what they have read."""
        return

else:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        mma_v2,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout_jit = gluon.jit

    @gluon.jit
    def arange(START: gl.constexpr, END: gl.constexpr, LAYOUT: gl.constexpr):
        return gl.arange(START, END, layout=LAYOUT)

    @gluon.jit
    def zeros(SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        return gl.zeros(SHAPE, gl.float32, layout=LAYOUT)

    @gluon.jit
    def in_layout(tile, LAYOUT: gl.constexpr):
        return gl.convert_layout(tile, LAYOUT)

    @gluon.jit
    def multiply(a, b, total):
        return mma_v2(a, b, total)

    @gluon.jit
    def open_inputs(
        COUNT: gl.constexpr, SLICES: gl.constexpr, WORDS: gl.constexpr, ROWS: gl.constexpr, DTYPE: gl.constexpr,
        LAYOUT: gl.constexpr,
    ):  # fmt: skip
        return gl.allocate_shared_memory(DTYPE, [COUNT, SLICES, WORDS, ROWS], LAYOUT)

    @gluon.jit
    def write_inputs(memory, index, values):
        memory.index(index).store(values)

    @gluon.jit
    def read_inputs(
        memory, index, SLICES: gl.constexpr, WORDS: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr
    ):  # fmt: skip
        return tl.broadcast_to(memory.index(index).load(LAYOUT), (SLICES, WORDS, ROWS))

    @gluon.jit
    def open_stages(view, words_view, STAGES: gl.constexpr, FIELDS: gl.constexpr):
        tiles = gl.allocate_shared_memory(view.dtype, [STAGES * FIELDS] + view.block_shape, view.layout)  # noqa: RUF005
        shape: gl.constexpr = [STAGES] + words_view.block_shape  # noqa: RUF005
        words = gl.allocate_shared_memory(words_view.dtype, shape, words_view.layout)
        barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(barriers.index(stage), count=1)
        return tiles, words, barriers

    @gluon.jit
    def close_stages(barriers, STAGES: gl.constexpr):
        for stage in gl.static_range(STAGES):
            mbarrier.invalidate(barriers.index(stage))

    @gluon.jit
    def fill_stage(
        view, words_view, tiles, words, barriers, stage, row, output, span, wanted,
        FIELDS: gl.constexpr, WORDS: gl.constexpr, LINES: gl.constexpr, PAIRED: gl.constexpr,
    ):  # fmt: skip
        barrier = barriers.index(stage)
        mbarrier.expect(barrier, FIELDS * view.block_type.nbytes + words_view.block_type.nbytes, pred=wanted)
        if PAIRED:
            at = [output // LINES, 0, span * LINES * WORDS]
        else:
            at = [output // LINES, span * LINES * WORDS]
        tma.async_copy_global_to_shared(words_view, at, barrier, words.index(stage), pred=wanted)
        for field in gl.static_range(FIELDS):
            place = [row, (span * FIELDS + field) * WORDS]
            tma.async_copy_global_to_shared(view, place, barrier, tiles.index(stage * FIELDS + field), pred=wanted)

    @gluon.jit
    def read_words(
        words, stage, word, span, WORDS: gl.constexpr, LINES: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr
    ):  # fmt: skip
        runs: gl.constexpr = [SHAPE[0] // LINES, 2, LINES, WORDS // 2]
        return words.index(stage).reshape(runs).permute((0, 2, 1, 3)).reshape(SHAPE).load(LAYOUT)

    @gluon.jit
    def await_stage(barriers, stage, phase):
        mbarrier.wait(barriers.index(stage), phase)

    @gluon.jit
    def multiply_stage(
        a, tiles, stage, total, x, row, k, rows,
        FIELD: gl.constexpr, FIELDS: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, WORDS: gl.constexpr,
    ):  # fmt: skip
        return warpgroup_mma(a, tiles.index(stage * FIELDS + FIELD).permute((1, 0)), total, is_async=True)

    @gluon.jit
    def finish_products(total, operands, following):
        kept = warpgroup_mma_wait(0, deps=(total,) + operands + following)  # noqa: RUF005
        return kept[0], kept[1 + len(operands) :]

    @gluon.jit
    def synchronize():
        fence_async_shared()
        gl.thread_barrier()


class BatchLayouts(NamedTuple):
    """Layouts of `multiply` where warp s multiplies matrix s of a batch: [s, outputs, inputs] x [s, inputs, rows]."""

    slice_a: Any
    """Of arange over s, to be indexed [:, None, None], beside `a`."""
    output_a: Any
    """[None, :, None]."""
    input_a: Any
    """[None, None, :]."""
    slice_b: Any
    input_b: Any
    row_b: Any
    total: Any
    """[s, outputs, rows]."""
    output_y: Any
    """Of arange over outputs, to be indexed [:, None], beside [outputs, rows] as stored."""
    row_y: Any
    y: Any


@functools.cache
def batch_layouts(warps: int, words: int, rows: int) -> BatchLayouts:
    """Layouts for tiles of `words` inputs; a thread holds words / 4 of an output, in runs of words / 8."""
    if INTERPRETED:
        return BatchLayouts(*[None] * len(BatchLayouts._fields))
    total = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
    a = gl.DotOperandLayout(0, total, words // 8)
    b = gl.DotOperandLayout(1, total, words // 8)
    y = gl.BlockedLayout([1, 1], [32 // rows, rows], [warps, 1], [1, 0])
    return BatchLayouts(
        slice_a=gl.SliceLayout(1, gl.SliceLayout(2, a)),
        output_a=gl.SliceLayout(0, gl.SliceLayout(2, a)),
        input_a=gl.SliceLayout(0, gl.SliceLayout(1, a)),
        slice_b=gl.SliceLayout(1, gl.SliceLayout(2, b)),
        input_b=gl.SliceLayout(0, gl.SliceLayout(2, b)),
        row_b=gl.SliceLayout(0, gl.SliceLayout(1, b)),
        total=total,
        output_y=gl.SliceLayout(1, y),
        row_y=gl.SliceLayout(0, y),
        y=y,
    )


def _operand_order(slices: int, words: int, rows: int) -> list[list[int]]:
    """Bases of the offset in shared memory of [slices, words, rows].

    A thread's values for a tensor-core operand, of two runs of `words` / 8, are adjacent and in the order of its
    registers, 16 bytes at a time; eight threads read 128 different bytes.
    """
    run = words // 8
    pairs = [[0, bit, 0] for bit in (2, 4) if bit < run]
    threads = [[0, run * bit, 0] for bit in (1, 2)]
    row = [[0, 0, 1 << bit] for bit in range(rows.bit_length() - 1)]
    slice_ = [[1 << bit, 0, 0] for bit in range(slices.bit_length() - 1)]
    return [[0, 1, 0], [0, words // 2, 0], *pairs[:1], *threads, *row[:1], *pairs[1:], *row[1:], *slice_]


class ExpertLayouts(NamedTuple):
    """Layouts of `expert_streams.py`: codes as they are loaded, 64 bytes of a row, and as operands."""

    slice_p: Any
    """Of arange over s, beside pairs of words [s, outputs, 2 spans, 8]; [:, None, None, None]."""
    output_p: Any
    span_p: Any
    pair_p: Any
    slice_g: Any
    """Beside groups [s, outputs, 2 spans]."""
    output_g: Any
    span_g: Any
    words: Any
    """Words [s, outputs, 2 spans, 16]."""
    a: Any
    """[s, outputs, 32 words]."""
    b: Any
    total: Any
    shared: Any
    """Of x in shared memory: [s, 32 words, rows]."""
    slice_x: Any
    """Of x as it is loaded: [s, 32 words, rows]."""
    input_x: Any
    row_x: Any
    slice_b: Any
    input_b: Any
    row_b: Any
    halves: Any
    """[s, 2, outputs, rows] before it is summed: all s in a thread."""
    parts: Any
    """[s, outputs, rows], likewise."""
    slice_s: Any
    """Beside `parts`."""
    output_y: Any
    """Beside [outputs, rows] as stored."""
    row_y: Any
    y: Any


@functools.cache
def expert_layouts(warps: int, outputs: int, rows: int, single: bool) -> ExpertLayouts:
    """Layouts for tiles of `outputs` outputs and `rows` rows, or one."""
    if INTERPRETED:
        return ExpertLayouts(*[None] * 24)
    total = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
    b = gl.DotOperandLayout(1, total, 4)
    warp_bases = [[1 << bit, 0, 0, 0] for bit in range(warps.bit_length() - 1)]
    line_bases = [[0, bit, 0, 0] for bit in (1, 2, 4)]
    tall = [[0, bit, 0, 0] for bit in (8, 16) if bit < outputs]

    def codes(size: int) -> Any:
        """A thread holds 16 bytes of a row: half a span."""
        registers = [[0, 0, 0, 1 << bit] for bit in range((size // 2).bit_length() - 1)]
        return gl.DistributedLinearLayout(
            reg_bases=registers + tall,
            lane_bases=[[0, 0, 0, size // 2], [0, 0, 1, 0], *line_bases],
            warp_bases=warp_bases,
            block_bases=[],
            shape=[warps, outputs, 2, size],
        )

    x = (
        gl.BlockedLayout([1, 1, 1], [1, 32, 1], [warps, 1, 1], [1, 0, 2])
        if single
        else gl.BlockedLayout([1, 8, 1], [1, 4, 8], [warps, 1, 1], [1, 2, 0])
    )
    parts = gl.BlockedLayout([warps, 1, 1], [1, 32 // rows, rows], [1, warps, 1], [2, 1, 0])
    y = gl.BlockedLayout([1, 1], [32 // rows, rows], [warps, 1], [1, 0])
    pairs, words = codes(8), codes(16)
    groups = gl.SliceLayout(3, words)
    return ExpertLayouts(
        slice_p=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, pairs))),
        output_p=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, pairs))),
        span_p=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, pairs))),
        pair_p=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, pairs))),
        slice_g=gl.SliceLayout(1, gl.SliceLayout(2, groups)),
        output_g=gl.SliceLayout(0, gl.SliceLayout(2, groups)),
        span_g=gl.SliceLayout(0, gl.SliceLayout(1, groups)),
        words=words,
        a=gl.DotOperandLayout(0, total, 4),
        b=b,
        total=total,
        shared=gl.SharedLinearLayout(_operand_order(warps, 32, 1 if single else rows)),
        slice_x=gl.SliceLayout(1, gl.SliceLayout(2, x)),
        input_x=gl.SliceLayout(0, gl.SliceLayout(2, x)),
        row_x=gl.SliceLayout(0, gl.SliceLayout(1, x)),
        slice_b=gl.SliceLayout(1, gl.SliceLayout(2, b)),
        input_b=gl.SliceLayout(0, gl.SliceLayout(2, b)),
        row_b=gl.SliceLayout(0, gl.SliceLayout(1, b)),
        parts=parts,
        slice_s=gl.SliceLayout(1, gl.SliceLayout(2, parts)),
        halves=gl.BlockedLayout([warps, 2, 1, 1], [1, 1, 32 // rows, rows], [1, 1, warps, 1], [3, 2, 1, 0]),
        output_y=gl.SliceLayout(1, y),
        row_y=gl.SliceLayout(0, y),
        y=y,
    )


class TileLayouts(NamedTuple):
    """Layouts of `multiply_stage`: a [outputs, inputs] in registers, x in shared memory."""

    a: Any
    output_a: Any
    """Of arange over outputs, to be indexed [:, None], beside `a`."""
    input_a: Any
    """[None, :]."""
    total: Any
    """[outputs, rows]."""
    output: Any
    """[:, None], beside `total`."""
    row: Any
    y: Any
    """[outputs, rows] as stored: outputs are contiguous in memory."""
    output_y: Any
    row_y: Any


@functools.cache
def tile_layouts(warps: int, rows: int, outputs: int) -> TileLayouts:
    """Layouts for tiles of `rows` rows, of which `outputs` outputs are stored."""
    if INTERPRETED:
        return TileLayouts(*[None] * 9)
    total = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])
    a = gl.DotOperandLayout(0, total, 2)
    across = min(outputs // 8, 32)
    y = gl.BlockedLayout([8, 1], [across, 32 // across], [1, warps], [0, 1])
    return TileLayouts(
        a=a,
        output_a=gl.SliceLayout(1, a),
        input_a=gl.SliceLayout(0, a),
        total=total,
        output=gl.SliceLayout(1, total),
        row=gl.SliceLayout(0, total),
        y=y,
        output_y=gl.SliceLayout(1, y),
        row_y=gl.SliceLayout(0, y),
    )


def tile_descriptor(x: Any, rows: int, words: int) -> Any:
    """x [rows, in] for TMA, in tiles of `rows` rows and `words` inputs."""
    if INTERPRETED:
        return None
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    return TensorDescriptor.from_tensor(x, [rows, words], gl.NVMMASharedLayout.get_default_for([rows, words], kind))


def words_descriptor(codes: Any, outputs: int, words: int, lines: int, paired: bool) -> Any:
    """Codes int16 [out, words of a row], `lines` outputs side by side, for TMA, in tiles of `outputs` outputs; paired:
    `lines` of the first half and as many of the second alternate."""
    if INTERPRETED:
        return None
    height, width = codes.shape[0] // lines, codes.shape[1] * lines
    if paired:
        codes = codes.as_strided((height // 2, 2, width), (width, height // 2 * width, 1))
        block = [outputs // (2 * lines), 2, lines * words]
    else:
        codes, block = codes.view(height, width), [outputs // lines, lines * words]
    return TensorDescriptor.from_tensor(codes, block, gl.NVMMASharedLayout.get_default_for(block, gl.int16))
