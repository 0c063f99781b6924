"""Gluon, Triton's language with explicit layouts, as far as kernels here use it; in the interpreter, plain Triton.

A kernel that says in which thread's registers a tile lies can load it from memory into the registers of tensor-core
operands, without shared memory in between. Inside such a kernel plain Triton helpers may be called. The interpreter has
no layouts: there the same source runs as a Triton kernel whose layouts are None.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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

else:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2

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
    line: Any
    """Of a vector, 8 consecutive values a thread."""
    output_y: Any
    """Of arange over outputs, to be indexed [:, None], beside [outputs, rows] as stored."""
    row_y: Any
    y: Any


@functools.cache
def batch_layouts(warps: int, words: int, rows: int) -> BatchLayouts:
    """Layouts for tiles of `words` inputs; a thread holds words / 4 of an output, in runs of words / 8."""
    if INTERPRETED:
        return BatchLayouts(*[None] * 11)
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
        line=gl.BlockedLayout([8], [32], [warps], [0]),
        output_y=gl.SliceLayout(1, y),
        row_y=gl.SliceLayout(0, y),
        y=y,
    )
