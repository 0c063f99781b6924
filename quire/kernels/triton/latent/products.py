"""Products by head with `kv_b_proj` [heads, nope + value, rank]: absorbing queries, and values from latents.

A program takes one head, some tokens and some outputs. Bytes: the head's half of the matrix once for every tile of
tokens, the inputs once for every tile of outputs. Operations: 2 * nope * rank (or value * rank) per token and head.
Results of latent attention that are in parts are merged while they are read.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.latent.decode import DecodePlan, LatentDecode
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl


@triton.jit(do_not_specialize=["tokens"])
def _absorb(
    q, up, out, tokens, stride_token, stride_head, stride_up,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_P2: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    column = tl.program_id(0) // HEADS * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    n = tl.arange(0, NOPE_P2)
    weight = tl.load(up + head.to(tl.int64) * stride_up + n[:, None] * RANK + column,
                     mask=(n < NOPE)[:, None] & (column < RANK), other=0.0)  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    x = tl.load(q + token * stride_token + head * stride_head + n[None, :],
                mask=(token < tokens) & (n < NOPE)[None, :], other=0.0)  # fmt: skip
    product = tl.dot(x, weight, input_precision=PRECISION)
    at = out + (token * HEADS + head) * RANK + column
    tl.store(at, product.to(out.dtype.element_ty), mask=(token < tokens) & (column < RANK))


def absorb(q: torch.Tensor, up: torch.Tensor, nope: int) -> torch.Tensor:
    """[tokens, heads, rank]: the first `nope` dimensions of q [tokens, heads, *], multiplied with the head's keys."""
    tokens, heads, _ = q.shape
    rank = up.shape[2]
    out = q.new_empty(tokens, heads, rank)
    block_m, block_n = (16, 64) if tokens <= 16 else (64, 128)
    _absorb[(heads * triton.cdiv(rank, block_n), triton.cdiv(tokens, block_m))](
        q, up, out, tokens, q.stride(0), q.stride(1), up.stride(0),
        HEADS=heads, NOPE=nope, NOPE_P2=max(16, triton.next_power_of_2(nope)), RANK=rank, BLOCK_M=block_m,
        BLOCK_N=block_n, PRECISION=_precision(q), num_warps=4, **pdl(),
    )  # fmt: skip
    return out


@triton.jit
def _load_values(up, head, column, k, stride_up, NOPE: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr):
    """The values' half of the head's matrix, transposed: [BLOCK_K, BLOCK_N]."""
    at = up + head.to(tl.int64) * stride_up + (NOPE + column) * RANK + k[:, None]
    return tl.load(at, mask=(column < VALUE) & (k < RANK)[:, None], other=0.0)


@triton.jit
def _merge(
    latents, lens, starts, plan, begins, partial, stats,
    HEADS: tl.constexpr, EACH: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some values of one token and head: their parts merged into `latents`, if there are several. Programs are numbered
    as if every row had QUERIES tokens.

    PARTS of them are loaded at once: one after another, each would cost a round trip to L2.
    """
    BLOCKS: tl.constexpr = (RANK + BLOCK - 1) // BLOCK
    OWN: tl.constexpr = EACH * QUERIES
    d = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    line = tl.program_id(0) // BLOCKS
    head = line % HEADS
    row = line // HEADS // QUERIES
    query = line // HEADS % QUERIES
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if QUERIES > 1:
        begin_token = tl.load(starts + row)
        if query >= tl.load(starts + row + 1) - begin_token:
            return
        line = (begin_token + query) * HEADS + head
    # The programs that computed parts of this row and head tile.
    each = tl.load(plan)
    tiles = (tl.load(lens + row) + TILE - 1) // TILE
    begin = tl.load(begins + row) + head // EACH * tiles
    first = begin // each
    last = (begin + tl.maximum(tiles, 1) - 1) // each
    if first < last:
        own = query * EACH + head % EACH
        best = tl.full([1], float("-inf"), tl.float32)
        weight = tl.zeros([1], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(first, last + 1, PARTS):
            part = start + tl.arange(0, PARTS)
            there = part <= last
            place = (part * 2 + (part == first).to(tl.int32)) * OWN + own
            high = tl.load(stats + place * 2, mask=there, other=float("-inf"))
            mass = tl.load(stats + place * 2 + 1, mask=there, other=0.0)
            at = partial + place.to(tl.int64)[:, None] * RANK + d[None, :]
            values = tl.load(at, mask=there[:, None] & (d < RANK)[None, :], other=0.0)
            higher = tl.maximum(best, tl.max(high, 0))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            keep = tl.exp2(best - safe)
            share = tl.exp2(high - safe)
            weight = weight * keep + tl.sum(share * mass, 0)
            total = total * keep + tl.sum(share[:, None] * values, 0)
            best = higher
        x = total / tl.where(weight == 0.0, 1.0, weight)
        tl.store(latents + line.to(tl.int64) * RANK + d, x.to(latents.dtype.element_ty), mask=d < RANK)


@triton.jit
def _values_of_few(
    latents, up, out, stride_up,
    HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, RANK_P2: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token and head, on the float32 units: the time is that of reading weights, most of it before the wait."""
    head = tl.program_id(0) % HEADS
    column = tl.program_id(0) // HEADS * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, RANK_P2)[None, :]
    weight = tl.load(up + head.to(tl.int64) * stride_up + (NOPE + column)[:, None] * RANK + d,
                     mask=(column < VALUE)[:, None] & (d < RANK), other=0.0)  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(1).to(tl.int64) * HEADS + head
    x = tl.load(latents + line * RANK + d, mask=d < RANK, other=0.0).to(tl.float32)
    product = tl.sum(weight.to(tl.float32) * x, 1)
    tl.store(out + line * VALUE + column, product.to(out.dtype.element_ty), mask=column < VALUE)


@triton.jit(do_not_specialize=["tokens"])
def _values(
    latents, up, out, tokens, stride_up,
    HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    column = tl.program_id(0) // HEADS * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    line = token.to(tl.int64) * HEADS + head
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, RANK, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (token < tokens)[:, None] & (k < RANK)[None, :]
        x = tl.load(latents + line[:, None] * RANK + k[None, :], mask=inside, other=0.0)
        w = _load_values(up, head, column, k, stride_up, NOPE, VALUE, RANK)
        total = tl.dot(x, w, total, input_precision=PRECISION)
    at = out + line[:, None] * VALUE + column
    tl.store(at, total.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (column < VALUE))


FEW_TOKENS = 16
"""Up to this many tokens the product runs on the float32 units."""


def values_of_rows(
    latents: torch.Tensor, up: torch.Tensor, out: torch.Tensor, lens: torch.Tensor, plan: DecodePlan,
    kernel: LatentDecode, nope: int, num_rows: int, starts: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """What `LatentDecode.attend` left, merged and multiplied with the heads' values, into out [*, heads * value]. Of
    rows of length 0: anything. latents [tokens, heads, rank]; `starts`: as `attend` had it."""
    tokens, heads, rank = latents.shape
    value = up.shape[1] - nope
    block = min(128, triton.next_power_of_2(rank))
    _merge[(num_rows * kernel.queries * heads * triton.cdiv(rank, block),)](
        latents, lens, lens if starts is None else starts, plan.ranges, plan.begins, kernel.partial, kernel.stats,
        HEADS=heads, EACH=kernel.each, QUERIES=kernel.queries, TILE=kernel.tile.tokens, RANK=rank, BLOCK=block,
        PARTS=32, num_warps=4, **pdl(),
    )  # fmt: skip
    if tokens <= FEW_TOKENS:
        _values_of_few[(heads * triton.cdiv(value, 16), tokens)](
            latents, up, out, up.stride(0), HEADS=heads, NOPE=nope, VALUE=value, RANK=rank,
            RANK_P2=triton.next_power_of_2(rank), BLOCK_N=16, num_warps=4, **pdl(),
        )  # fmt: skip
        return
    block_m = 16 if tokens <= 32 else 32 if tokens <= 128 else 64
    block_n = 32 if tokens <= 128 else 64
    _values[(heads * triton.cdiv(value, block_n), triton.cdiv(tokens, block_m))](
        latents, up, out, tokens, up.stride(0), HEADS=heads, NOPE=nope, VALUE=value, RANK=rank, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=128, PRECISION=_precision(out), num_warps=4, **pdl(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _values_of_context(
    latents, up, out, stats, tokens, stride_up,
    HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    column = tl.program_id(0) // HEADS * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = token < tokens
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = token.to(tl.int64) * HEADS + head
    own = tl.load(stats + line * 2, mask=inside, other=0.0)
    earlier = tl.load(stats + line * 2 + 1, mask=inside, other=float("-inf"))
    exists = earlier > float("-inf")
    if tl.max(exists.to(tl.int32), 0) == 0:
        return
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, RANK, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(latents + line[:, None] * RANK + k[None, :], mask=exists[:, None] & (k < RANK)[None, :], other=0.0)
        w = _load_values(up, head, column, k, stride_up, NOPE, VALUE, RANK)
        total = tl.dot(x, w, total, input_precision=PRECISION)
    share = 1.0 / (1.0 + tl.exp2(own - earlier))[:, None]
    at = out + line[:, None] * VALUE + column
    there = exists[:, None] & (column < VALUE)
    result = total * share + tl.load(at, mask=there, other=0.0).to(tl.float32) * (1.0 - share)
    tl.store(at, result.to(out.dtype.element_ty), mask=there)


def values_of_context(
    latents: torch.Tensor, up: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, nope: int
) -> None:
    """Merge attention over earlier context, as latents [tokens, heads, rank], into that over the step's own tokens,
    out [tokens, heads * value]. stats [tokens, heads, 2]: of both, log2 of the sum of exponentials."""
    tokens, heads, rank = latents.shape
    value = up.shape[1] - nope
    _values_of_context[(heads * triton.cdiv(value, 128), triton.cdiv(tokens, 64))](
        latents, up, out, stats, tokens, up.stride(0), HEADS=heads, NOPE=nope, VALUE=value, RANK=rank, BLOCK_M=64,
        BLOCK_N=128, BLOCK_K=64, PRECISION=_precision(out), num_warps=4, **pdl(),
    )  # fmt: skip


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
