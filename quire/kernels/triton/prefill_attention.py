"""Paged prefill attention: rows with several query tokens (prompts and chunks of prompts), on tensor cores.

The queries of each row are divided into tiles of tokens; a program takes one tile and one KV head, and all query heads
of that head's group are rows of the same matrix, so that K and V are read once per group. The tiles are known only on
the device: `plan_tiles` lists them once per step, longest context first, and the grid is an upper bound that the host
can compute; programs past the list's end exit at once.

Operations: 4 * head_dim per query head, query and visible key; a causal prompt of n tokens has n * (n + 1) / 2 pairs.
Bytes: a program reads its context's K and V, 4 * head_dim per key in half precision, mostly from L2, and does
4 * head_dim * BLOCK_M operations with them: BLOCK_M = 128 operations per byte, bound by the tensor cores (and, close
behind, by the exponentials: one per pair and head, 16 per cycle and SM on an H200, against 4096 operations).

Keys and values in few bits are widened in registers and written to shared memory, where the tensor cores read them:
32k values per BLOCK_N = 128 keys, of half an instruction each (e4m3 to float16) to 2.5 (`kv_codes.py`). Products and
sums are those of 16-bit values.

A query's result depends only on its own row and on the fixed stride of key tiles from position 0, not on its tile, the
chunking of its prompt or the rest of the batch: the bits are the same.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.kv import LayerKV, QuantizedKV
from quire.kernels.triton.attention_scores import capped, load_logits, score_arguments, with_sink
from quire.kernels.triton.kv_codes import as_keys, decode, read_arguments
from quire.kernels.triton.launch import INTERPRETED, gdc_launch_dependents, gdc_wait, pdl


@dataclass(frozen=True)
class PrefillTile:
    """Tile shape: matrix rows (tokens times the heads of a group), keys per iteration, warps, pipeline stages.

    `skewed`: the product with V runs one iteration late, while the next softmax is computed.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    skewed: bool = True

    def tokens(self, group: int) -> int:
        """Query tokens of a tile when `group` query heads share a KV head."""
        return self.block_m // group


LONG_CONTEXT = 3072
"""Tokens. From here on large tiles win: they read each key for more queries, and waste less at the diagonal."""


@functools.cache
def prefill_tile(head_dim: int, itemsize: int, is_long: bool = True) -> PrefillTile:
    """The tile shape for a head size; found with benchmarks/gpu/prefill_attention.py on an H200."""
    if INTERPRETED:
        return PrefillTile(32, 32, 4, 1)
    if itemsize == 4:  # no tensor cores for exact float32
        return PrefillTile(32, 32, 4, 1, skewed=False)
    if head_dim > 256:
        return PrefillTile(64, 32, 8, 2)
    if head_dim > 128:
        return PrefillTile(128, 64, 8, 2)
    return PrefillTile(128, 128, 8, 2) if is_long else PrefillTile(64, 64, 4, 2)


UNSEEN = tl.constexpr(-(2.0**100))
"""Score of a key that a query does not see."""


@triton.jit(do_not_specialize=["first_row", "num_rows", "bound"])
def _plan(query_starts, context_lens, rows, tiles, first_row, num_rows, bound,
          TOKENS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Each program writes the tiles of its row, [batch row, first token, tokens, position of the first] each, last
    tile first; rows with longer contexts come earlier. One more program marks the rest of the list as empty."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = first_row + tl.program_id(0)
    own = row < num_rows
    first = tl.load(query_starts + row, mask=own, other=0)
    length = tl.load(query_starts + row + 1, mask=own, other=0) - first
    context = tl.load(context_lens + row, mask=own, other=-1)
    length = tl.where(context > 0, length, 0)  # an ended row, or padding
    lane = tl.arange(0, AT_ONCE)
    slot = 0
    for start in range(first_row, num_rows, AT_ONCE):
        other = start + lane
        there = other < num_rows
        lengths = tl.load(query_starts + other + 1, mask=there, other=0)
        lengths -= tl.load(query_starts + other, mask=there, other=0)
        contexts = tl.load(context_lens + other, mask=there, other=-1)
        lengths = tl.where(contexts > 0, lengths, 0)
        earlier = (contexts > context) | ((contexts == context) & (other < row))
        slot += tl.sum(tl.where(there & earlier, (lengths + TOKENS - 1) // TOKENS, 0), 0)
    if own:
        batch_row = tl.load(rows + row).to(tl.int32)
        count = (length + TOKENS - 1) // TOKENS
        for start in range(0, count, AT_ONCE):
            index = start + lane
            there = index < count
            begin = (count - 1 - index) * TOKENS
            entry = tiles + (slot + index) * 4
            tl.store(entry, batch_row, mask=there)
            tl.store(entry + 1, first + begin, mask=there)
            tl.store(entry + 2, tl.minimum(length - begin, TOKENS), mask=there)
            tl.store(entry + 3, context - length + begin, mask=there)
    else:
        for start in range(slot, bound, AT_ONCE):
            tl.store(tiles + (start + lane) * 4, -1, mask=start + lane < bound)


@triton.jit
def _key_offsets(table, start, columns, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, STRIDE_BLOCK: tl.constexpr,
            DIM: tl.constexpr):  # fmt: skip
    """Cache offsets of keys start to start + BLOCK_N, [BLOCK_N]; those past the row's end are invalid."""
    if BLOCK < BLOCK_N:
        # One table entry per block, not one per key: a thread that copies keys of eight blocks needs two loads.
        index = start // BLOCK + tl.arange(0, BLOCK_N // BLOCK)
        blocks = tl.load(table + index, mask=index < columns)
        offsets = (blocks.to(tl.int64) * STRIDE_BLOCK)[:, None] + (tl.arange(0, BLOCK) * DIM)[None, :]
        # A reshape loses Triton's alignment information, without which it would copy two bytes at a time.
        return tl.multiple_of(tl.reshape(offsets, [BLOCK_N]), 16)
    else:  # noqa: RET505 (a compile-time branch)
        block = tl.load(table + start // BLOCK)
        return block.to(tl.int64) * STRIDE_BLOCK + (start % BLOCK + tl.arange(0, BLOCK_N)) * DIM


@triton.jit
def _token_scales(scales, table, start, exists, columns, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
                  BLOCK_N: tl.constexpr, STRIDE: tl.constexpr):  # fmt: skip
    """Scales of keys and of values start to start + BLOCK_N. `scales`: of this head; `STRIDE`: between blocks.

    One load for both: of a tensor with fewer elements than threads Triton makes every thread load all that it needs.
    """
    position = start + tl.arange(0, BLOCK_N)
    blocks = tl.load(table + position // BLOCK, mask=position // BLOCK < columns, other=0)
    at = blocks.to(tl.int64) * STRIDE + position % BLOCK
    both = at[:, None] + (tl.arange(0, 2) * (KV_HEADS * BLOCK))[None, :]
    return tl.split(tl.load(scales + both, mask=exists[:, None], other=0.0))


@triton.jit
def _exists(n, start, low, end, WINDOW: tl.constexpr):
    """Which keys start + n some query of the tile sees; others may be uninitialized, and zero times NaN is NaN."""
    exists = n < end - start
    if WINDOW > 0:
        exists = exists & (n >= low - start)
    return exists


@triton.jit
def _mask(scores, start, n, position, limit, first, last, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Causal and window mask: scores of invisible keys become very low. Most tiles are fully visible and skip it."""
    edge = start + BLOCK_N > first + 1
    if WINDOW > 0:
        edge = edge | (start <= last - WINDOW)
    if edge:
        key = start + n
        seen = key[None, :] <= limit[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        # Not -inf: a row that sees no key of its first tile must not become NaN. What it accumulates there is scaled
        # to 0 at the first visible key. A power of two: its product with the scale is exact, so that the difference
        # from the best such score, computed with a fused multiply-add, is 0 and not a rounding error of 1e22.
        scores = tl.where(seen, scores, UNSEEN)
    return scores


@triton.jit
def _softmax(scores, best, weight, scale, score_scale, SCALED: tl.constexpr):
    """Online softmax: (weights of a tile's keys, factor for earlier sums, best score so far, sum of weights).

    `scale`: a number, or one for each query; `score_scale`: the same, as a column. Scores with a cap or a
    bias are scaled already.
    """
    if SCALED:
        scale = 1.0
        score_scale = 1.0
    higher = tl.maximum(best, tl.max(scores, 1) * scale)
    keep = tl.exp2(best - higher)
    p = tl.exp2(scores * score_scale - higher[:, None])
    return p, keep, higher, weight * keep + tl.sum(p, 1)


@triton.jit
def _prefill(
    q, kv, out, tables, tiles, sinks, slopes, ahead, scale, stride_q, stride_half, stride_table,
    STRIDE_BLOCK: tl.constexpr, STRIDE_HEAD: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_P2: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SKEWED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    scales, CODES: tl.constexpr, TOKEN_SCALES: tl.constexpr, VALUES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One tile of queries, one KV head: matrix row m is token m // GROUP and head m % GROUP of the group."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    head = program % KV_HEADS
    entry = tiles + program // KV_HEADS * 4
    row = tl.load(entry)
    if row < 0:
        return
    first_token = tl.load(entry + 1)
    count = tl.load(entry + 2)
    first = tl.load(entry + 3)
    last = first + count - 1
    m = tl.arange(0, BLOCK_M)
    token = m // GROUP
    position = first + tl.minimum(token, count - 1)
    limit = position
    end = last + 1
    if ahead is not None:
        limit += tl.load(ahead + first_token + token, mask=token < count, other=0)
        end = tl.maximum(end, tl.max(limit, 0) + 1)
    low = 0
    begin = 0
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
        begin = low // BLOCK_N * BLOCK_N
    # There is always a key. A loop that may be empty has a path around it, on which ptxas cannot tell that no WGMMA is
    # in flight; it would then serialize every WGMMA of the kernel.
    tl.assume(begin < end)

    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, DIM_P2)
    in_dim = (d < DIM)[None, :]
    line = (first_token + token).to(tl.int64)[:, None]
    at = (head * GROUP + m % GROUP)[:, None] * DIM + d[None, :]
    there = (token < count)[:, None] & in_dim
    qs = tl.load(q + line * stride_q + at, mask=there, other=0.0)
    if sinks is not None:
        sink = load_logits(sinks, head * GROUP + m % GROUP, token < count)
    SCALED: tl.constexpr = (CAP > 0) or (slopes is not None)
    if slopes is not None:
        slope = load_logits(slopes, head * GROUP + m % GROUP, token < count)[:, None]

    table = tables + row.to(tl.int64) * stride_table
    keys = kv + head.to(tl.int64) * STRIDE_HEAD + d[None, :]
    values = keys + stride_half
    score_scale = scale
    v_scale = 1.0
    if CODES:
        if not TOKEN_SCALES:
            scale = scale * tl.load(scales + head)
            v_scale = tl.load(scales + KV_HEADS + head)
        qs, q_factors = as_keys(qs)
        scale = scale * q_factors
        score_scale = scale[:, None]
    best = tl.full([BLOCK_M], UNSEEN, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_P2], tl.float32)
    if SKEWED:
        # While the tensor cores multiply the last iteration's weights with V, the other units compute this iteration's
        # weights. They stay in float32: packed, they would overwrite registers that the WGMMA in flight still reads.
        p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        keep = tl.full([BLOCK_M], 1.0, tl.float32)
        for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            start = tl.multiple_of(start, BLOCK_N)
            exists = _exists(n, start, low, end, WINDOW)[:, None]
            offsets = _key_offsets(table, start, stride_table, BLOCK, BLOCK_N, STRIDE_BLOCK, DIM)
            k = tl.load(keys + offsets[:, None], mask=exists & in_dim, other=0.0)
            past = tl.multiple_of(tl.maximum(start - BLOCK_N, 0), BLOCK_N)
            exists = _exists(n, past, low, past + BLOCK_N, WINDOW)[:, None] & (start > begin)  # at first p is zero
            offsets = _key_offsets(table, past, stride_table, BLOCK, BLOCK_N, STRIDE_BLOCK, DIM)
            v = tl.load(values + offsets[:, None], mask=exists & in_dim, other=0.0)
            if CODES:
                k = decode(k, CODES, qs.dtype, FAST)
                v = decode(v, CODES, VALUES, FAST)
            scores = tl.dot(qs, tl.trans(k), input_precision=PRECISION)
            acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
            if TOKEN_SCALES:
                k_scales, v_scales = _token_scales(
                    scales + head * BLOCK, table, start, _exists(n, start, low, end, WINDOW), stride_table,
                    KV_HEADS, BLOCK, BLOCK_N, STRIDE_BLOCK // 4,
                )  # fmt: skip
                scores = scores * k_scales[None, :]
            if SCALED:
                scores = capped(scores * score_scale, CAP)
            if slopes is not None:
                scores += slope * (start + n[None, :] - position[:, None])
            scores = _mask(scores, start, n, position, limit, first, last, WINDOW, BLOCK_N)
            p, keep, best, weight = _softmax(scores, best, weight, scale, score_scale, SCALED)
            if TOKEN_SCALES:
                p = p * v_scales[None, :]
        start = tl.multiple_of((end - 1) // BLOCK_N * BLOCK_N, BLOCK_N)
        exists = _exists(n, start, low, end, WINDOW)[:, None]
        offsets = _key_offsets(table, start, stride_table, BLOCK, BLOCK_N, STRIDE_BLOCK, DIM)
        v = tl.load(values + offsets[:, None], mask=exists & in_dim, other=0.0)
        if CODES:
            v = decode(v, CODES, VALUES, FAST)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    else:
        for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            start = tl.multiple_of(start, BLOCK_N)
            exists = _exists(n, start, low, end, WINDOW)[:, None]
            offsets = _key_offsets(table, start, stride_table, BLOCK, BLOCK_N, STRIDE_BLOCK, DIM)
            k = tl.load(keys + offsets[:, None], mask=exists & in_dim, other=0.0)
            v = tl.load(values + offsets[:, None], mask=exists & in_dim, other=0.0)
            if CODES:
                k = decode(k, CODES, qs.dtype, FAST)
                v = decode(v, CODES, VALUES, FAST)
            scores = tl.dot(qs, tl.trans(k), input_precision=PRECISION)
            if TOKEN_SCALES:
                k_scales, v_scales = _token_scales(
                    scales + head * BLOCK, table, start, _exists(n, start, low, end, WINDOW), stride_table,
                    KV_HEADS, BLOCK, BLOCK_N, STRIDE_BLOCK // 4,
                )  # fmt: skip
                scores = scores * k_scales[None, :]
            if SCALED:
                scores = capped(scores * score_scale, CAP)
            if slopes is not None:
                scores += slope * (start + n[None, :] - position[:, None])
            scores = _mask(scores, start, n, position, limit, first, last, WINDOW, BLOCK_N)
            p, keep, best, weight = _softmax(scores, best, weight, scale, score_scale, SCALED)
            if TOKEN_SCALES:
                p = p * v_scales[None, :]
            acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    if sinks is not None:
        weight = with_sink(weight, best, sink)
    result = acc / weight[:, None]
    if CODES:
        result = result * v_scale
    result = result.to(out.dtype.element_ty)
    tl.store(out + line * (KV_HEADS * GROUP * DIM) + at, result, mask=there)


def plan_tiles(
    query_starts: torch.Tensor, context_lens: torch.Tensor, rows: torch.Tensor, first_row: int, num_rows: int,
    num_tokens: int, tile_tokens: int,
) -> torch.Tensor:  # fmt: skip
    """The tiles of scheduled rows first_row to num_rows, for every layer of this step: [bound, 4] int32, see `_plan`.

    query_starts [S + 1] and context_lens [S] int32 as in AttentionInputs; row i of the batch's tables is rows[i] [S].
    Each row before `first_row` has one of the step's `num_tokens` tokens. `tile_tokens`: Tile.tokens(group).
    """
    # Full tiles are at most tokens / tile_tokens, and each row has at most one partial tile.
    bound = (num_tokens - first_row) // tile_tokens + num_rows - first_row
    tiles = torch.empty(bound, 4, dtype=torch.int32, device=query_starts.device)
    _plan[(num_rows - first_row + 1,)](
        query_starts, context_lens, rows, tiles, first_row, num_rows, bound, TOKENS=tile_tokens, AT_ONCE=256,
        num_warps=4, **pdl(),
    )  # fmt: skip
    return tiles


def prefill_attention(
    q: torch.Tensor, kv: LayerKV, out: torch.Tensor, tables: torch.Tensor, tiles: torch.Tensor, scale: float,
    window: int | None, tile: PrefillTile | None = None, soft_cap: float | None = None,
    sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None, ahead: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Causal attention of the tokens that `tiles` lists into their rows of `out`; see AttentionBackend.attend.

    q [T, heads, head_dim], heads contiguous, any stride between tokens; out [T, heads * head_dim] contiguous; kv one
    layer's cache; tables [batch rows, max_blocks] int32, fastest when max_blocks is a multiple of 16. `tile` must be
    the one `tiles` was planned with. Scale, window, soft cap, sinks and slopes as in `AttentionSpec`; `ahead` as in
    `AttentionInputs`.
    """
    _, heads, dim = q.shape
    _, _, kv_heads, block_size, _ = kv.shape
    stride_block, stride_half, stride_head, _, _ = kv.stride()
    tile = tile or prefill_tile(dim, q.element_size())
    factor, cap = score_arguments(scale, soft_cap)
    _prefill[(tiles.shape[0] * kv_heads,)](
        q, kv.codes if isinstance(kv, QuantizedKV) else kv, out, tables, tiles, sinks, slopes, ahead, factor,
        q.stride(0), stride_half, tables.stride(0),
        STRIDE_BLOCK=stride_block, STRIDE_HEAD=stride_head, WINDOW=window or 0, CAP=cap, GROUP=heads // kv_heads,
        KV_HEADS=kv_heads, DIM=dim, DIM_P2=max(16, triton.next_power_of_2(dim)), BLOCK=block_size,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.stages, SKEWED=tile.skewed,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.warps,
        **read_arguments(kv), **pdl(),
    )  # fmt: skip
