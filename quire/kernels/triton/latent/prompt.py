"""Latent attention of prompts and their chunks: over their own tokens, then over what was cached before.

Over the chunk's own tokens, keys and values of every head are computed from the latents first (`kv_b_proj`), and
attention is that of heads of nope + rope and value dimensions: 2 * (nope + rope + value) operations per head, query and
key, a third of the absorbed form. For tokens that were cached before (earlier chunks, prefix hits) computing keys and
values again costs 2 * rank * (nope + value) for each head and token. That pays for chunks of hundreds of tokens, a
piece of the context at a time; short chunks attend absorbed, over the paged cache as in a decode.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.latent.decode import LOG2_E, LatentTile, attend_latents, load_queries
from quire.kernels.triton.launch import INTERPRETED, gdc_launch_dependents, gdc_wait, pdl

UNSEEN = tl.constexpr(-(2.0**100))
"""Score of a key that a query does not see; a power of two, so that its product with the scale is exact."""


@dataclass(frozen=True)
class PromptTile:
    """Queries and keys of a tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@functools.cache
def prompt_tile(head_dim: int, itemsize: int) -> PromptTile:
    """The tile shape; found with benchmarks/gpu/latent_attention.py on an H200. `head_dim`: of keys without their
    rotated part, or of values if larger."""
    if INTERPRETED or itemsize == 4:
        return PromptTile(32, 32, 4, 1)
    if head_dim > 128:
        return PromptTile(64, 64, 4, 2)
    return PromptTile(128, 64, 8, 3)


@functools.cache
def context_tile(itemsize: int) -> LatentTile:
    """The tile shape over earlier context."""
    if INTERPRETED or itemsize == 4:
        return LatentTile(16, 4, 1)
    return LatentTile(32, 8, 5)


@triton.jit
def _key_tile(keys, latent, start, end, stride_key, stride_latent, NOPE: tl.constexpr, NOPE_P2: tl.constexpr,
              ROPE: tl.constexpr, ROPE_P2: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Keys of tokens from `start`, zeros from `end` on: (not rotated [BLOCK_N, NOPE_P2], rotated)."""
    n = tl.arange(0, NOPE_P2)[None, :]
    e = tl.arange(0, ROPE_P2)[None, :]
    token = (start + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    there = token < end
    k = tl.load(keys + token * stride_key + n, mask=there & (n < NOPE), other=0.0)
    r = tl.load(latent + token * stride_latent + e, mask=there & (e < ROPE), other=0.0)
    return k, r


@triton.jit(do_not_specialize=["first_key_token"])
def _own_tokens(
    q, keys, latent, out, stats, tiles, key_starts, key_ends, scale, stride_token, stride_head, stride_key,
    stride_latent, first_key_token,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_P2: tl.constexpr, ROPE: tl.constexpr, ROPE_P2: tl.constexpr,
    VALUE: tl.constexpr, VALUE_P2: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, STATS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of a row's queries, one head: causal attention over the row's tokens of this step, or attention over
    keys from before, merged into the result so far."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    head = program % HEADS
    entry = tiles + program // HEADS * 4
    row = tl.load(entry)
    if row < 0:
        return
    first = tl.load(entry + 1)
    count = tl.load(entry + 2)
    begin = tl.load(key_starts + row)
    if CAUSAL:
        end = first + count
    else:
        end = tl.load(key_ends + row)
        if begin >= end:
            return
    # There is always a key: see `_prefill` in prefill_attention.py.
    tl.assume(begin < end)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, NOPE_P2)[None, :]
    e = tl.arange(0, ROPE_P2)[None, :]
    v = tl.arange(0, VALUE_P2)[None, :]
    token = first + tl.minimum(m, count - 1)
    line = (first + m).to(tl.int64)
    there = (m < count)[:, None]
    query = q + line[:, None] * stride_token + head * stride_head
    q_nope = tl.load(query + d, mask=there & (d < NOPE), other=0.0)
    q_rope = tl.load(query + NOPE + e, mask=there & (e < ROPE), other=0.0)
    # Keys are of the step's tokens from `first_key_token` on.
    own_keys = keys + head * (NOPE + VALUE) - first_key_token.to(tl.int64) * stride_key
    rotated = latent + RANK
    best = tl.full([BLOCK_M], UNSEEN, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_P2], tl.float32)
    # The product with V runs one iteration late, while the next softmax is computed.
    p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    keep = tl.full([BLOCK_M], 1.0, tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        k, r = _key_tile(
            own_keys, rotated, start, end, stride_key, stride_latent, NOPE, NOPE_P2, ROPE, ROPE_P2, BLOCK_N
        )
        past = tl.maximum(start - BLOCK_N, begin) + n.to(tl.int64)
        values = tl.load(own_keys + past[:, None] * stride_key + NOPE + v,
                         mask=(start > begin) & (v < VALUE), other=0.0)  # fmt: skip
        scores = tl.dot(q_nope, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(r), scores, input_precision=PRECISION)
        acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None], input_precision=PRECISION)
        if CAUSAL:
            if start + BLOCK_N > first + 1:
                scores = tl.where((start + n)[None, :] <= token[:, None], scores, UNSEEN)
        elif start + BLOCK_N > end:
            scores = tl.where((start + n)[None, :] < end, scores, UNSEEN)
        higher = tl.maximum(best, tl.max(scores, 1) * scale)
        keep = tl.exp2(best - higher)
        p = tl.exp2(scores * scale - higher[:, None])
        weight = weight * keep + tl.sum(p, 1)
        best = higher
    start = begin + (end - begin - 1) // BLOCK_N * BLOCK_N
    past = start + n.to(tl.int64)
    values = tl.load(own_keys + past[:, None] * stride_key + NOPE + v, mask=(past < end)[:, None] & (v < VALUE),
                     other=0.0)  # fmt: skip
    acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None], input_precision=PRECISION)
    at = out + (line * HEADS + head)[:, None] * VALUE + v
    result = acc / weight[:, None]
    if STATS:
        mass = best + tl.log2(weight)
        own = stats + (line * HEADS + head) * 2
        if not CAUSAL:
            before = tl.load(own, mask=m < count, other=0.0)
            share = 1.0 / (1.0 + tl.exp2(before - mass))[:, None]
            earlier = tl.load(at, mask=there & (v < VALUE), other=0.0).to(tl.float32)
            result = result * share + earlier * (1.0 - share)
            mass = tl.maximum(before, mass) + tl.log2(1.0 + tl.exp2(-tl.abs(before - mass)))
        tl.store(own, mass, mask=m < count)
    tl.store(at, result.to(out.dtype.element_ty), mask=there & (v < VALUE))


def attend_own_tokens(
    q: torch.Tensor, keys: torch.Tensor, latent: torch.Tensor, out: torch.Tensor, stats: torch.Tensor | None,
    tiles: torch.Tensor, query_starts: torch.Tensor, shape: tuple[int, int, int, int], scale: float, first_token: int,
    tile: PromptTile | None = None, key_ends: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Attention of the tokens that `tiles` lists (`plan_tiles` with row numbers as rows, `tile.block_m` tokens each)
    over the tokens of their rows in this step, into their rows of out [T, heads * value].

    q [T, heads, nope + rope]; keys [T - first_token, heads * (nope + value)]: keys and values of the tokens from
    `first_token` on; latent [T, rank + rope], of which the rotated part is read. shape: (rank, nope, rope, value).
    stats [T, heads, 2] gets log2 of the sum of exponentials as its first number, if it is wanted.

    With `key_ends`: keys and latent are of other tokens, row i's from query_starts[i] to key_ends[i], all of which its
    queries see; the result is merged into out and stats.
    """
    rank, nope, rope, value = shape
    heads = q.shape[1]
    tile = tile or prompt_tile(max(nope, value), q.element_size())
    _own_tokens[(len(tiles) * heads,)](
        q, keys, latent, out, out if stats is None else stats, tiles, query_starts,
        query_starts if key_ends is None else key_ends, scale * LOG2_E, q.stride(0), q.stride(1), keys.stride(0),
        latent.stride(0), first_token,
        HEADS=heads, NOPE=nope, NOPE_P2=max(16, triton.next_power_of_2(nope)), ROPE=rope,
        ROPE_P2=max(16, triton.next_power_of_2(rope)), VALUE=value, VALUE_P2=max(16, triton.next_power_of_2(value)),
        RANK=rank, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.stages, STATS=stats is not None,
        CAUSAL=key_ends is None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.warps, **pdl(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_token"])
def _context(
    q, absorbed, kv, stats, tables, rows, tiles, query_starts, scale, stride_token, stride_head, stride_block,
    stride_table, first_token,
    HEADS: tl.constexpr, EACH: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr, NOPE: tl.constexpr,
    RANK: tl.constexpr, RANK_P2: tl.constexpr, ROPE: tl.constexpr, ROPE_P2: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few of a row's queries, one tile of heads: attention over what was cached before this step."""
    HEAD_TILES: tl.constexpr = (HEADS + EACH - 1) // EACH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    entry = tiles + program // HEAD_TILES * 4
    row = tl.load(entry)
    if row < 0:
        return
    first = tl.load(entry + 1)
    count = tl.load(entry + 2)
    length = tl.load(entry + 3) - (first - tl.load(query_starts + row))  # tokens before the chunk
    g = tl.arange(0, M)
    head = program % HEAD_TILES * EACH + g % EACH
    token = (first + g // EACH).to(tl.int64)
    there = (g // EACH < count) & (g < EACH * TOKENS) & (head < HEADS)
    line = (token - first_token) * HEADS + head
    if length <= 0:
        tl.store(stats + (token * HEADS + head) * 2 + 1, tl.full([M], float("-inf"), tl.float32), mask=there)
        return
    tl.assume(length > 0)
    own = absorbed - first_token.to(tl.int64) * (HEADS * RANK)
    qc, qr = load_queries(q, own, token, head, there, stride_token, stride_head, HEADS, NOPE, RANK, RANK_P2, ROPE,
                          ROPE_P2)  # fmt: skip
    table = tables + tl.load(rows + row).to(tl.int64) * stride_table
    best, weight, acc = attend_latents(
        qc, qr, kv, table, 0, length, length, g, scale, stride_block, RANK, ROPE, TILE, BLOCK, False, False, PRECISION,
        STAGES,
    )  # fmt: skip
    d = tl.arange(0, RANK_P2)[None, :]
    tl.store(absorbed + line[:, None] * RANK + d, (acc / weight[:, None]).to(absorbed.dtype.element_ty),
             mask=there[:, None] & (d < RANK))  # fmt: skip
    tl.store(stats + (token * HEADS + head) * 2 + 1, best + tl.log2(weight), mask=there)


def context_tokens(heads: int) -> int:
    """Query tokens of a tile for `attend_context`."""
    return max(1, 64 // triton.next_power_of_2(heads))


def attend_context(
    q: torch.Tensor, absorbed: torch.Tensor, kv: torch.Tensor, stats: torch.Tensor, tables: torch.Tensor,
    rows: torch.Tensor, tiles: torch.Tensor, query_starts: torch.Tensor, nope: int, scale: float, first_token: int,
    tile: LatentTile | None = None,
) -> None:  # fmt: skip
    """Attention of the tokens that `tiles` lists (`plan_tiles` with row numbers as rows, `context_tokens` each) over
    what their rows had cached before this step. The result, in latents, replaces the absorbed queries
    [T - first_token, heads, rank]; stats [T, heads, 2] gets log2 of the sum of exponentials as its second number, -inf
    where there was nothing."""
    _, heads, rank = absorbed.shape
    tokens, each = context_tokens(heads), min(64, triton.next_power_of_2(heads))
    rope = q.shape[2] - nope
    tile = tile or context_tile(q.element_size())
    _context[(len(tiles) * triton.cdiv(heads, each),)](
        q, absorbed, kv, stats, tables, rows, tiles, query_starts, scale * LOG2_E, q.stride(0), q.stride(1),
        kv.stride(0), tables.stride(0), first_token,
        HEADS=heads, EACH=each, TOKENS=tokens, M=max(16, each * tokens), NOPE=nope, RANK=rank,
        RANK_P2=max(16, triton.next_power_of_2(rank)), ROPE=rope, ROPE_P2=max(16, triton.next_power_of_2(rope)),
        TILE=tile.tokens, BLOCK=kv.shape[1], PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        STAGES=tile.stages, num_warps=tile.warps, **pdl(),
    )  # fmt: skip
