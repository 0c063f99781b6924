"""The pairs of a token and an expert, put in the order of their experts, and cut into tiles of one expert each.

All of it on the device: how many tiles there are is known there alone. The product that follows is launched for as
many as there could be, and programs without a tile leave at once.
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
"""Pairs of a program: so few are arranged by one, more by several."""
SPAN = 4
"""Integers of a tile: its expert, its first row among the arranged pairs, and where its expert's rows end."""


class ExpertLayout(NamedTuple):
    """Pairs in the order of their experts."""

    order: torch.Tensor
    """[pairs] int32: the pair on each row. Pairs whose expert is none of ours are left out, at the end."""
    spans: torch.Tensor
    """[tiles, SPAN] int32; the expert of a tile that is not needed is past the last."""

    @property
    def tiles(self) -> int:
        return self.spans.shape[0]


@triton.jit
def _read(experts, at, pairs, E: tl.constexpr):
    """(experts of pairs, whether they are there and ours)."""
    expert = tl.load(experts + at, mask=at < pairs, other=-1)
    return expert, (expert >= 0) & (expert < E)


@triton.jit(do_not_specialize=["pairs"])
def _count(experts, totals, pairs, E: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """How many of its pairs go to each expert, by each program."""
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
    # Where the next pair of each expert goes: one cursor a program and expert. In which order the pairs of one expert
    # come does not matter to any result.
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


def most_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Tiles there can be: every expert's last one may hold a single pair."""
    used = min(pairs, experts)
    return used + (pairs - used) // block_m


def arrange(experts: torch.Tensor, count: int, block_m: int) -> ExpertLayout:
    """Arrange pairs, experts [tokens, top_k] int32 of `count`, into tiles of block_m rows.

    Bytes: 8 a pair, 16 a tile. Operations: one addition to a counter a pair; `count` comparisons a tile.
    """
    pairs = experts.numel()
    tiles = most_tiles(pairs, count, block_m)
    block = SMALL if pairs <= SMALL else LARGE
    programs = triton.cdiv(pairs, block)
    meta = _meta(count, block)
    order, spans = experts.new_empty(pairs), experts.new_empty((tiles, SPAN))
    cursors = experts.new_empty(programs * meta["LANES"])
    totals = None
    if programs > 1:
        totals = torch.empty_like(cursors)
        _count[(programs,)](experts, totals, pairs, **meta)
    _arrange[(programs,)](
        experts, totals, cursors, order, spans, pairs, tiles, programs, block_m, SPAN=SPAN, **meta
    )  # fmt: skip
    return ExpertLayout(order, spans)


@functools.cache
def _meta(count: int, block: int) -> dict[str, Any]:
    """What a launch is compiled with."""
    lanes = max(triton.next_power_of_2(count), 32)
    return {"E": count, "LANES": lanes, "BLOCK": block, "num_warps": 8 if block == LARGE else 4, **pdl()}
