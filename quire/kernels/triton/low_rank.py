"""Low-rank products of adapters: two launches a matrix, whatever slots the tokens have.

`shrink` writes the inner products a[s] x of each token in float32, `expand` adds b[s] of these to the result. Grids
depend on shapes only, and slots are read on the device: both can be captured. Few tokens (decodes) have a program each;
many (prompts) are taken in blocks of 16, for the tensor cores, once for each slot that occurs in the block: tokens of a
prompt are neighbours, so that this is mostly once.

Operations: 2 tokens rank (parts depth + width). Bytes, with numbers of size s: a and b of the slots that occur, once
each from DRAM if L2 holds them (rank 16, depth and width 4096: 256 KiB a matrix and slot); tokens (depth + 2 width) s
for x and the result; 8 tokens parts rank for what is in between. Never run on a card yet: tested in the interpreter.
"""

# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_PARTS = 4
FEW_TOKENS = 256
"""Up to this many tokens have a program each."""
BLOCK_T = 16
BLOCK_R = 16
BLOCK_N = 128


@triton.jit
def _shrink_each(
    x, a, slots, inner, x_stride, DEPTH: tl.constexpr, RANKS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some inner products of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        total = tl.zeros([BLOCK_R], tl.float32)
        rows = a + (slot * RANKS + ranks[:, None]) * DEPTH
        for k in range(0, DEPTH, BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            inside = columns < DEPTH
            values = tl.load(x + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
            weights = tl.load(rows + columns[None, :], mask=inside[None, :] & (ranks < RANKS)[:, None], other=0.0)
            total += tl.sum(weights.to(tl.float32) * values[None, :], axis=1)
        tl.store(inner + token * RANKS + ranks, total, mask=ranks < RANKS)


@triton.jit
def _expand_each(
    inner, b, slots, out, out_stride, first, second, third, WIDTH: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Some outputs of one token. first, second, third: where parts end, the last of which needs no bound."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < WIDTH
        part = (columns >= first).to(tl.int32) + (columns >= second).to(tl.int32) + (columns >= third).to(tl.int32)
        place = out + token * out_stride + columns
        total = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        for r in range(0, RANK, BLOCK_R):
            ranks = r + tl.arange(0, BLOCK_R)
            mask = inside[None, :] & (ranks < RANK)[:, None]
            weights = tl.load(b + (slot * RANK + ranks[:, None]) * WIDTH + columns[None, :], mask=mask, other=0.0)
            shares = tl.load(inner + token * RANKS + part[None, :] * RANK + ranks[:, None], mask=mask, other=0.0)
            total += tl.sum(weights.to(tl.float32) * shares, axis=0)
        tl.store(place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _shrink_blocks(
    x, a, slots, inner, tokens, x_stride, DEPTH: tl.constexpr, RANKS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some inner products of a block of tokens, slot by slot from the highest on."""
    own = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = own < tokens
    slot_of = tl.load(slots + own, mask=is_token, other=-1)
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    x_rows = x + own.to(tl.int64)[:, None] * x_stride
    slot = tl.max(slot_of, axis=0)
    while slot >= 0:
        has = slot_of == slot
        rows = a + (slot.to(tl.int64) * RANKS + ranks[None, :]) * DEPTH
        total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for k in range(0, DEPTH, BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            inside = columns < DEPTH
            values = tl.load(x_rows + columns[None, :], mask=has[:, None] & inside[None, :], other=0.0)
            weights = tl.load(rows + columns[:, None], mask=inside[:, None] & (ranks < RANKS)[None, :], other=0.0)
            total = tl.dot(values, weights.to(values.dtype), total, input_precision="ieee")
        where = inner + own.to(tl.int64)[:, None] * RANKS + ranks[None, :]
        tl.store(where, total, mask=has[:, None] & (ranks < RANKS)[None, :])
        slot = tl.max(tl.where(slot_of < slot, slot_of, -1), axis=0)


@triton.jit
def _expand_blocks(
    inner, b, slots, out, tokens, out_stride, first, second, third, WIDTH: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Some outputs of a block of tokens: those of each part apart, since parts read other inner products."""
    own = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = own < tokens
    slot_of = tl.load(slots + own, mask=is_token, other=-1)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part_of = (columns >= first).to(tl.int32) + (columns >= second).to(tl.int32) + (columns >= third).to(tl.int32)
    place = out + own.to(tl.int64)[:, None] * out_stride + columns[None, :]
    slot = tl.max(slot_of, axis=0)
    while slot >= 0:
        has = slot_of == slot
        written = has[:, None] & (columns < WIDTH)[None, :]
        total = tl.load(place, mask=written, other=0.0).to(tl.float32)
        for part in tl.static_range(PARTS):
            inside = (columns < WIDTH) & (part_of == part)
            for r in range(0, RANK, BLOCK_R):
                ranks = r + tl.arange(0, BLOCK_R)
                mask = has[:, None] & (ranks < RANK)[None, :]
                shares = tl.load(
                    inner + own.to(tl.int64)[:, None] * RANKS + part * RANK + ranks[None, :], mask=mask, other=0.0
                )
                weights = tl.load(
                    b + (slot.to(tl.int64) * RANK + ranks[:, None]) * WIDTH + columns[None, :],
                    mask=(ranks < RANK)[:, None] & inside[None, :],
                    other=0.0,
                )
                total = tl.dot(shares, weights.to(tl.float32), total, input_precision="ieee")
        tl.store(place, total.to(out.dtype.element_ty), mask=written)
        slot = tl.max(tl.where(slot_of < slot, slot_of, -1), axis=0)


def shrink(x: torch.Tensor, a: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The inner products of each token, float32 [tokens, parts * rank]."""
    tokens, depth, ranks = len(x), x.shape[1], a.shape[1]
    inner = torch.empty(tokens, ranks, dtype=torch.float32, device=x.device)
    block_k = min(512, max(16, triton.next_power_of_2(depth)))
    if tokens <= FEW_TOKENS:
        few = 4 if tokens <= 8 else BLOCK_R  # a single token should occupy more multiprocessors
        _shrink_each[(tokens, triton.cdiv(ranks, few))](x, a, slots, inner, x.stride(0), depth, ranks, few, block_k)
        return inner
    _shrink_blocks[(triton.cdiv(tokens, BLOCK_T), triton.cdiv(ranks, BLOCK_R))](
        x, a, slots, inner, tokens, x.stride(0), depth, ranks, BLOCK_T, BLOCK_R, min(block_k, 128)
    )
    return inner


def expand(
    inner: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, bounds: tuple[int, ...]
) -> None:
    """Add b times the inner products to `out`."""
    tokens, ranks = inner.shape
    _, rank, width = b.shape
    parts = len(bounds) - 1
    first, second, third = (*bounds[1:-1], width, width, width)[:3]
    if tokens <= FEW_TOKENS:
        _expand_each[(tokens, triton.cdiv(width, BLOCK_N))](
            inner, b, slots, out, out.stride(0), first, second, third, width, rank, ranks, BLOCK_R, BLOCK_N
        )
        return
    _expand_blocks[(triton.cdiv(tokens, BLOCK_T), triton.cdiv(width, BLOCK_N))](
        inner, b, slots, out, tokens, out.stride(0), first, second, third, width, rank, ranks, BLOCK_T, BLOCK_R,
        BLOCK_N, parts,
    )  # fmt: skip


def add_low_rank(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, bounds: tuple[int, ...]
) -> None:
    """`Ops.add_low_rank`, for up to MAX_PARTS parts and contiguous a and b."""
    expand(shrink(x, a, slots), b, slots, out, bounds)
