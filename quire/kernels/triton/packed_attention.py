"""Attention in both directions within the runs of a packed sequence: whole pictures, and the windows within them.

A program takes a tile of one run's tokens and one head. The tiles are listed on the host (`Segments.tiles`): nothing is
padded but the last tile of a run. Q, K and V are read where the product left them, with any stride between tokens.

Heads of vision transformers have 72 or 80 dimensions, and tensor cores take powers of two: a head is computed in two
parts, 64 and 16 dimensions, instead of 128.

Operations: 4 * dim per head, query and key of its run; 5,476 patches of 16 heads of 80 are 153 GFLOP. Bytes: Q, K, V
and the output once, and K and V of a run again, from L2, for each further tile of BLOCK_M queries.
"""

# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.segments import Segments
from quire.kernels.triton.launch import INTERPRETED

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class PackedTile:
    """Queries of a program, keys of an iteration, warps, pipeline stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


TILE = PackedTile(128, 64, 8, 3)
"""Also of windows, which have 64 patches in Qwen2.5-VL: a tile of 64 with 4 warps and one stage gave wrong values on an
H200 (triton 3.6) for heads in two parts."""


def parts_of(dim: int) -> tuple[int, int]:
    """A head's dimensions as two powers of two, at least 16 each; the second may be 0."""
    main = max(16, 1 << (dim.bit_length() - 1))
    rest = max(dim - main, 0)
    if not rest:
        return main, 0
    rest = max(16, triton.next_power_of_2(rest))
    return (2 * main, 0) if rest >= main else (main, rest)


@triton.jit
def _columns(SIZE: tl.constexpr, FIRST: tl.constexpr):
    return FIRST + tl.arange(0, SIZE)


@triton.jit
def _rows_of(base, rows, stride, exists, SIZE: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr):
    """Dimensions FIRST to FIRST + SIZE of a head, of these rows; zeros past its DIM."""
    columns = _columns(SIZE, FIRST)
    at = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if FIRST + SIZE > DIM:
        return tl.load(at, mask=exists[:, None] & (columns < DIM)[None, :], other=0.0)
    else:  # noqa: RET505 (a compile-time branch)
        return tl.load(at, mask=exists[:, None], other=0.0)


@triton.jit(do_not_specialize=["scale"])
def _attend(
    q, k, v, out, tiles, scale, q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    entry = tiles + tl.program_id(0) * 4
    head = tl.program_id(1) * DIM
    first, begin, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if first >= end:  # padding of the list
        return
    rows = first + tl.arange(0, BLOCK_M)
    there = rows < end
    n = tl.arange(0, BLOCK_N)
    main_q = _rows_of(q + head, rows, q_stride, there, MAIN, 0, DIM)
    main = tl.zeros([BLOCK_M, MAIN], tl.float32)
    if REST > 0:
        rest_q = _rows_of(q + head, rows, q_stride, there, REST, MAIN, DIM)
        rest = tl.zeros([BLOCK_M, REST], tl.float32)
    best = tl.full([BLOCK_M], -(2.0**100), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        keys = start + n
        exists = keys < end
        scores = tl.dot(
            main_q, tl.trans(_rows_of(k + head, keys, k_stride, exists, MAIN, 0, DIM)), input_precision=PRECISION
        )
        if REST > 0:
            scores = tl.dot(
                rest_q, tl.trans(_rows_of(k + head, keys, k_stride, exists, REST, MAIN, DIM)), scores,
                input_precision=PRECISION,
            )  # fmt: skip
        scores = tl.where(exists[None, :], scores, -(2.0**100))
        higher = tl.maximum(best, tl.max(scores, 1) * scale)
        keep = tl.exp2(best - higher)
        p = tl.exp2(scores * scale - higher[:, None])
        weight = weight * keep + tl.sum(p, 1)
        best = higher
        p = p.to(v.dtype.element_ty)
        main = tl.dot(
            p, _rows_of(v + head, keys, v_stride, exists, MAIN, 0, DIM), main * keep[:, None],
            input_precision=PRECISION,
        )  # fmt: skip
        if REST > 0:
            rest = tl.dot(
                p, _rows_of(v + head, keys, v_stride, exists, REST, MAIN, DIM), rest * keep[:, None],
                input_precision=PRECISION,
            )  # fmt: skip
    at = out + rows[:, None].to(tl.int64) * (HEADS * DIM) + head
    columns = _columns(MAIN, 0)[None, :]
    main = (main / weight[:, None]).to(out.dtype.element_ty)
    tl.store(at + columns, main, mask=there[:, None] & (columns < DIM))
    if REST > 0:
        columns = _columns(REST, MAIN)[None, :]
        rest = (rest / weight[:, None]).to(out.dtype.element_ty)
        tl.store(at + columns, rest, mask=there[:, None] & (columns < DIM))


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float,
    tile: PackedTile | None = None, split: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Attention of [T, heads, dim], heads contiguous, within each run; [T, heads * dim]. `scale` is positive. `split`:
    a head is computed in two parts where that is less."""
    _, heads, dim = q.shape
    if tile is None:
        tile = PackedTile(32, 32, 4, 1) if INTERPRETED else TILE
    main, rest = parts_of(dim) if split else (max(16, triton.next_power_of_2(dim)), 0)
    tiles = segments.tiles(tile.block_m)
    out = q.new_empty(len(q), heads * dim)
    _attend[(len(tiles), heads)](
        q, k, v, out, tiles, scale * LOG2_E, q.stride(0), k.stride(0), v.stride(0),
        HEADS=heads, DIM=dim, MAIN=main, REST=rest, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.warps,
    )  # fmt: skip
    return out
