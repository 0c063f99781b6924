"""Sorts pairs (token, chosen expert) by expert, and divides them into tiles of one expert each: a counting sort.

Entirely on the device: the host does not know the number of tiles. The GEMM that follows is launched for the largest
number possible; programs without a tile exit at once.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl

SMALL, LARGE = 512, 4096
"""Pairs per program: up to SMALL by one small program, up to LARGE by one large one, more by several."""
SPAN = 4
"""Integers of a tile: its expert, its first row among the sorted pairs, the end of its expert's rows; padding."""


class ExpertLayout(NamedTuple):
    """Pairs sorted by expert."""

    order: torch.Tensor
    """[pairs] int32: the pair of each row. Pairs of experts on other ranks are left out."""
    spans: torch.Tensor
    """[tiles, SPAN] int32; an unused tile's expert is past the last."""

    @property
    def tiles(self) -> int:
        return self.spans.shape[0]


@triton.jit
def _read(experts, at, pairs, E: tl.constexpr):
    """(experts of pairs, whether they exist and are on this rank)."""
    expert = tl.load(experts + at, mask=at < pairs, other=-1)
    return expert, (expert >= 0) & (expert < E)


@triton.jit(do_not_specialize=["pairs"])
def _count(experts, totals, pairs, E: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Each program's histogram of its pairs over experts."""
    program = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, ours = _read(experts, program * BLOCK + tl.arange(0, BLOCK), pairs, E)
    total = tl.histogram(tl.where(ours, expert, 0), LANES, mask=ours)
    tl.store(totals + program * LANES + tl.arange(0, LANES), total)


@triton.jit(do_not_specialize=["pairs", "tiles", "programs", "block_m"])
def _arrange(
    experts, totals, cursors, order, spans, pairs, tiles, programs, block_m,
    E: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    MANY: tl.constexpr = 16
    program = tl.program_id(0)
    lane = tl.arange(0, LANES)
    pair = program * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, ours = _read(experts, pair, pairs, E)
    if totals is None:
        total = tl.histogram(tl.where(ours, expert, 0), LANES, mask=ours)
        before = tl.zeros((LANES,), tl.int32)
    else:
        total = tl.zeros((LANES,), tl.int32)
        before = tl.zeros((LANES,), tl.int32)
        for first in range(0, programs, MANY):
            other = (first + tl.arange(0, MANY))[:, None]
            count = tl.load(totals + other * LANES + lane[None, :], mask=other < programs, other=0)
            total += tl.sum(count, 0)
            before += tl.sum(tl.where(other < program, count, 0), 0)
    end = tl.cumsum(total, 0)
    begin = end - total
    # The row of the next pair of each expert: one cursor per program and expert. The order of an expert's pairs affects
    # no result.
    own = cursors + program * LANES
    tl.store(own + lane, begin + before)
    tl.debug_barrier()
    row = tl.atomic_add(own + expert, 1, mask=ours, sem="relaxed")
    tl.store(order + row, pair, mask=ours)

    count = (total + block_m - 1) // block_m
    last = tl.cumsum(count, 0)
    needed = tl.max(last, 0)
    for first in range(program * MANY, tiles, programs * MANY):
        tile = first + tl.arange(0, MANY)
        owned = (tile[:, None] < last[None, :]) & (tile[:, None] >= (last - count)[None, :])
        owner = tl.sum(tl.where(owned, lane[None, :], 0), 1)
        start = tl.sum(tl.where(owned, (begin - (last - count) * block_m)[None, :], 0), 1) + tile * block_m
        stop = tl.sum(tl.where(owned, end[None, :], 0), 1)
        at = spans + tile * SPAN
        tl.store(at, tl.where(tile < needed, owner, E), mask=tile < tiles)
        tl.store(at + 1, start, mask=tile < tiles)
        tl.store(at + 2, stop, mask=tile < tiles)


def max_tiles(pairs: int, experts: int, block_m: int) -> int:
    """The largest possible number of tiles: every expert's last one may hold a single pair."""
    used = min(pairs, experts)
    return used + (pairs - used) // block_m


def arrange(experts: torch.Tensor, count: int, block_m: int) -> ExpertLayout:
    """Sort the pairs of experts [tokens, top_k] int32, of `count` experts, into tiles of block_m rows.

    Bytes: 8 per pair, 16 per tile. Operations: one atomic addition per pair; `count` comparisons per tile.
    """
    pairs = experts.numel()
    tiles = max_tiles(pairs, count, block_m)
    block = SMALL if pairs <= SMALL else LARGE
    programs = triton.cdiv(pairs, block)
    constants = _constants(count, block)
    order, spans = experts.new_empty(pairs), experts.new_empty((tiles, SPAN))
    cursors = experts.new_empty(programs * constants["LANES"])
    totals = None
    if programs > 1:
        totals = torch.empty_like(cursors)
        _count[(programs,)](experts, totals, pairs, **constants)
    _arrange[(programs,)](
        experts, totals, cursors, order, spans, pairs, tiles, programs, block_m, SPAN=SPAN, **constants
    )  # fmt: skip
    return ExpertLayout(order, spans)


@functools.cache
def _constants(count: int, block: int) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    lanes = max(triton.next_power_of_2(count), 32)
    return {"E": count, "LANES": lanes, "BLOCK": block, "num_warps": 8 if block == LARGE else 4, **pdl()}
