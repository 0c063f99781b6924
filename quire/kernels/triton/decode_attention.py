"""Paged decode attention: one to eight query tokens per row, persistent programs, balanced for any mix of lengths
(stream-K).

A row's cached tokens are divided into tiles; the tiles of all rows and KV heads form one list, and every program
takes an equal contiguous range of it. A range may end one row and begin another: a row that a program does not compute
alone is written as a partial result, and the last program to finish a row merges its partials, always in the same
order. So one long row occupies the whole GPU, and a thousand short ones do too; the grid depends only on the GPU, so
one captured CUDA graph serves any lengths.

Bytes: every K and V of every row once (2 * context * kv_heads * head_dim values); q, output and partials are small
in comparison. Operations: 4 * context * heads * head_dim per query, about 2 * group per byte: bound by memory.

A cache in few bits is half the bytes (and 4 of scale for head_dim of codes). Adjacent codes are loaded as 16-bit
integers, for which there are transposing loads from shared memory, and widened in registers (`kv_codes.py`, about 2.3
instructions per value): even and odd dimensions are separate products.

For rows that share a prefix, `prefix_attention.py` may read the shared blocks once for all of them: such a row's online
softmax then continues from the state that kernel wrote, at the row's first tile of its own.
"""

# ruff: noqa: N803, N806, SIM102 (compile-time branches stand alone)

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from quire.kernels.kv import LayerKV, QuantizedKV
from quire.kernels.triton.attention_scores import capped, load_logits, score_arguments, with_sink
from quire.kernels.triton.kv_codes import as_keys, decode_even, decode_odd, read_arguments
from quire.kernels.triton.launch import INTERPRETED, gdc_launch_dependents, gdc_wait, num_sms, pdl

PLANNED_AT_ONCE = 32
"""Ranges that one program of the planning kernel computes."""
HEADER = 8
"""Integers before a plan's entries; the first is the number of tiles per program."""
ENTRY = 8
"""Integers of an entry: row, KV head, tile, number of tiles, the row's length, its line in the block tables; then the
tokens of its prefix to skip or, with several queries a row, its first query token; and the number of these."""


@dataclass(frozen=True)
class DecodeTile:
    """Tile shape: tokens per tile, warps, pipeline stages, and programs per multiprocessor."""

    tokens: int
    warps: int
    stages: int
    programs: int
    """More than are resident at once: the rest start as others end, which evens out differences in speed."""
    min_tiles: int = 2
    """Tiles per program, at least: with fewer, merging costs more than it saves."""
    ahead: int = 0
    """Tokens of a segment whose keys and values are fetched into L2 before it begins; 0: none."""


@functools.cache
def decode_tile(head_dim: int, itemsize: int, quantized: bool = False, queries: int = 16) -> DecodeTile:
    """The tile shape for a head size; found with benchmarks/gpu/decode_attention.py and kv_formats.py on an H200.

    `queries`: rows of the tile's products, query tokens times heads of a group.
    """
    if INTERPRETED:
        return DecodeTile(16, 4, 1, 2)
    if queries > 32:  # four warps have the registers for their sums
        return DecodeTile(64 if quantized else 32, 4, 3, 2, min_tiles=1 if quantized else 2)
    if quantized and head_dim * itemsize <= 256:
        return DecodeTile(64, 2, 4, 4, min_tiles=1)
    if head_dim * itemsize > 256:
        return DecodeTile(32, 4, 3, 2)
    return DecodeTile(32, 2, 5, 4)


@dataclass(frozen=True)
class PrefixState:
    """The online-softmax state of rows after the prefix that `prefix_attention.py` computed."""

    shared: torch.Tensor
    """[lines of the block tables] int32: shared prefix tokens of a row; whole tiles of them are skipped."""
    sums: torch.Tensor
    """[rows, heads, head_dim] float32: the sum of values weighted by exp2(score - best)."""
    stats: torch.Tensor
    """[rows, heads, 2] float32: the best score, and the sum of the weights."""


@triton.jit
def _skipped_tokens(shared, line, length, mask, TILE: tl.constexpr):
    """Prefix tokens of a row that another kernel has computed; 0 if the row has ended (its length is 0)."""
    tokens = tl.load(shared + line, mask=mask, other=0)
    return tl.where(length > tokens, tokens // TILE * TILE, 0)


@triton.jit(do_not_specialize=["num_rows"])
def plan_ranges(
    lens, rows, shared, starts, plan, num_rows, programs, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, MIN_TILES: tl.constexpr, SHARED: tl.constexpr,
    RAGGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For each program of an attention kernel: the row, head and tile its range begins at, and its number of tiles.

    RAGGED: rows have several query tokens, row i those from starts[i] to before starts[i + 1].
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.arange(0, ROWS)
    length = tl.load(lens + index, mask=index < num_rows, other=0)
    tiles = (length + TILE - 1) // TILE
    if WINDOW > 0:
        before = length - WINDOW
        if RAGGED:
            first = tl.load(starts + index, mask=index < num_rows, other=0)
            before -= tl.load(starts + index + 1, mask=index < num_rows, other=0) - first - 1
        tiles -= tl.maximum(before, 0) // TILE
    if SHARED:
        own_line = tl.load(rows + index, mask=index < num_rows, other=0)
        tiles -= _skipped_tokens(shared, own_line, length, index < num_rows, TILE) // TILE
    tiles = tl.where(index < num_rows, tiles, 0)
    ends = tl.cumsum(tiles, 0) * KV_HEADS
    total = tl.sum(tiles, 0) * KV_HEADS
    p = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    # The same whole number of tiles for each, though some programs may get none: rows of equal length then tend to end
    # where ranges do and need no merging, and no program has more than with fractional shares.
    each = tl.maximum((total + programs - 1) // programs, MIN_TILES)
    begin = p * each
    count = tl.minimum(each, total - begin)
    passed = ends[None, :] <= begin[:, None]
    row = tl.sum(passed.to(tl.int32), 1)
    offset = begin - tl.max(tl.where(passed, ends[None, :], 0), 1)
    own = tl.maximum(tl.sum(tl.where(index[None, :] == row[:, None], tiles[None, :], 0), 1), 1)
    head = offset // own
    tile = offset % own
    here = begin < total
    entry = plan + HEADER_SIZE + p * ENTRY_SIZE
    tl.store(entry, row)
    tl.store(entry + 1, head)
    tl.store(entry + 2, tile)
    tl.store(entry + 3, tl.where(here, count, 0))
    here = here & (count > 0)
    length = tl.load(lens + row, mask=here, other=0)
    line = tl.load(rows + row, mask=here, other=0).to(tl.int32)
    tl.store(entry + 4, length)
    tl.store(entry + 5, line)
    if SHARED:
        tl.store(entry + 6, _skipped_tokens(shared, line, length, here, TILE))
    if RAGGED:
        first = tl.load(starts + row, mask=here, other=0)
        tl.store(entry + 6, first)
        tl.store(entry + 7, tl.load(starts + row + 1, mask=here, other=0) - first)
    if tl.program_id(0) == 0:
        tl.store(plan, each)


HEADER_SIZE: tl.constexpr = tl.constexpr(HEADER)
ENTRY_SIZE: tl.constexpr = tl.constexpr(ENTRY)


@triton.jit
def online_softmax(scores, v, best, weight, acc, PRECISION: tl.constexpr):
    """Update the online-softmax state with a tile: scores [queries, tokens], values [tokens, dim]."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    keep = tl.exp2(best - safe)
    p = tl.exp2(scores - safe[:, None])
    weight = weight * keep + tl.sum(p, 1)
    acc = acc * keep[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return new_best, weight, acc


@triton.jit
def scaled_softmax(scores, v_scales, best, weight, TOKEN_SCALES: tl.constexpr):
    """Update the online-softmax state: (weights for the product with V, factor of earlier sums, best, sum of
    weights)."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    keep = tl.exp2(best - safe)
    p = tl.exp2(scores - safe[:, None])
    weight = weight * keep + tl.sum(p, 1)
    if TOKEN_SCALES:
        p = p * v_scales[None, :]
    return p, keep, new_best, weight


@triton.jit
def _fetch(keys, table, begin, end, stride_block, stride_half, BLOCK: tl.constexpr, DIM: tl.constexpr,
           LINES: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Fetch the keys and values of at most TOKENS tokens, from `begin` to before `end`, into L2. `keys`: of a head;
    LINES: cache lines of a token's keys. Nothing waits for it."""
    i = tl.arange(0, TOKENS * LINES * 2)
    token = tl.minimum(begin + i // (2 * LINES), end - 1)
    block = tl.load(table + token // BLOCK).to(tl.int64)
    part = i % LINES * (DIM // LINES)
    at = block * stride_block + (token % BLOCK) * DIM + part + (i // LINES % 2).to(tl.int64) * stride_half
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [keys + at], tl.int32, False, 1)


@triton.jit
def _lines(first, head, g, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, QUERIES: tl.constexpr):
    """Indices in [tokens, heads] of a row's queries for a KV head, from its token `first` on: g is query * GROUP + head
    of the group."""
    if QUERIES == 1:
        return (first * KV_HEADS + head).to(tl.int64) * GROUP + g
    else:  # noqa: RET505 (a compile-time branch)
        return ((first + g // GROUP).to(tl.int64) * KV_HEADS + head) * GROUP + g % GROUP


@triton.jit
def _lowest(length, queries, WINDOW: tl.constexpr):
    """The first token that one of a row's last `queries` tokens sees."""
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - (WINDOW + queries - 1), 0)
    return low


@triton.jit
def merge_partials(partial, stats, first, last, GROUP: tl.constexpr, GROUP_P2: tl.constexpr, DIM: tl.constexpr,
           DIM_P2: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Merge the partials of programs first to last: best scores, weights [GROUP_P2], sums [GROUP_P2, DIM_P2]."""
    g = tl.arange(0, GROUP_P2)
    d = tl.arange(0, DIM_P2)
    best = tl.full([GROUP_P2], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_P2], tl.float32)
    total = tl.zeros([GROUP_P2, DIM_P2], tl.float32)
    own = g < GROUP
    inside = own[:, None] & (d < DIM)[None, :]
    for start in range(first, last + 1, PARTS):
        # One after another, which the compiler unrolls: their loads overlap, and nothing is summed across threads.
        for i in tl.static_range(PARTS):
            part = start + i
            there = part <= last
            slot = part * 2 + (part == first).to(tl.int32)  # the first program has this row at the end of its range
            at = slot * (2 * GROUP) + g
            high = tl.load(stats + at, mask=own & there, other=float("-inf"), cache_modifier=".cg")
            mass = tl.load(stats + at + GROUP, mask=own & there, other=0.0, cache_modifier=".cg")
            values = tl.load(partial + (slot * GROUP + g[:, None]) * DIM + d[None, :], mask=inside & there, other=0.0,
                             cache_modifier=".cg")  # fmt: skip
            new_best = tl.maximum(best, high)
            safe = tl.where(new_best == float("-inf"), 0.0, new_best)
            keep = tl.exp2(best - safe)
            share = tl.exp2(high - safe)
            weight = weight * keep + share * mass
            total = total * keep[:, None] + share[:, None] * values
            best = new_best
    return best, weight, total


@triton.jit
def _decode(
    q, kv, out, tables, rows, lens, starts, plan, partial, stats, counters, shared, seen_sums, seen_stats, sinks,
    slopes, scale, stride_q, stride_block, stride_half, stride_head, stride_table, scales,
    WINDOW: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, OWN_P2: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_P2: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, SHARED: tl.constexpr, CODES: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, VALUES: tl.constexpr, FAST: tl.constexpr, MIXED: tl.constexpr, AHEAD: tl.constexpr,
    FETCHED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's range of tiles, segment by segment; a segment is the part of the range in one row and KV head.

    QUERIES: most query tokens of a row. 1: row i's is token i; else they are starts[i] to before starts[i + 1].
    """
    # tl.dot needs at least 16 rows; the row's queries of a group (OWN) fill some of them.
    OWN: tl.constexpr = GROUP * QUERIES
    M: tl.constexpr = 16 if OWN_P2 < 16 else OWN_P2
    program = tl.program_id(0)
    each = tl.load(plan)
    entry = plan + HEADER_SIZE + program * ENTRY_SIZE
    row = tl.load(entry)
    head = tl.load(entry + 1)
    tile = tl.load(entry + 2)
    count = tl.load(entry + 3)
    length = tl.load(entry + 4)
    line = tl.load(entry + 5)
    skipped = 0
    if SHARED:
        skipped = tl.load(entry + 6)
    if QUERIES > 1:
        own_first = tl.load(entry + 6)
        own_queries = tl.load(entry + 7)
    WIDTH: tl.constexpr = DIM // 2 if CODES else DIM  # elements of a token's keys: of a cache in few bits, pairs
    if AHEAD:
        if count > 0:
            low = _lowest(length, 1 if QUERIES == 1 else own_queries, WINDOW)
            if SHARED:
                low = skipped
            _fetch(kv + head.to(tl.int64) * stride_head, tables + line.to(tl.int64) * stride_table,
                   (low // TILE + tile) * TILE, length, stride_block, stride_half, BLOCK, WIDTH, FETCHED,
                   AHEAD)  # fmt: skip
    if PDL:  # plan and tables were written before the preceding kernel started: see `plan`
        gdc_wait()
        gdc_launch_dependents()
    start_tile = program * each  # of this range in the list of all tiles
    g = tl.arange(0, M)
    d = tl.arange(0, DIM_P2)
    in_dim = d < DIM
    while count > 0:
        first, queries = row, 1
        if QUERIES > 1:
            first, queries = own_first, own_queries
        low = _lowest(length, queries, WINDOW)
        if SHARED:
            low = skipped
        first_tile = low // TILE
        tiles = tl.maximum((length + TILE - 1) // TILE - first_tile, 1)
        take = tl.minimum(count, tiles - tile)
        # The segment after this one is looked up now, so that nothing waits for it.
        next_row, next_head, next_length, next_line, next_skipped = row, head + 1, length, line, skipped
        next_first, next_queries = first, queries
        goes_on = count > take
        if next_head == KV_HEADS:
            next_head = 0
            next_row = row + 1
            next_length = tl.load(lens + next_row, mask=goes_on, other=0)
            while (next_length == 0) & goes_on:  # ended rows and padding
                next_row += 1
                next_length = tl.load(lens + next_row)
            next_line = tl.load(rows + next_row, mask=goes_on, other=0).to(tl.int32)
            if SHARED:
                next_skipped = _skipped_tokens(shared, next_line, next_length, goes_on, TILE)
            if QUERIES > 1:
                next_first = tl.load(starts + next_row, mask=goes_on, other=0)
                next_queries = tl.load(starts + next_row + 1, mask=goes_on, other=0) - next_first
        if AHEAD:
            if goes_on:
                low_ahead = _lowest(next_length, next_queries, WINDOW)
                if SHARED:
                    low_ahead = next_skipped
                _fetch(kv + next_head.to(tl.int64) * stride_head, tables + next_line.to(tl.int64) * stride_table,
                       low_ahead // TILE * TILE, next_length, stride_block, stride_half, BLOCK, WIDTH, FETCHED,
                       AHEAD)  # fmt: skip
        table = tables + line.to(tl.int64) * stride_table
        is_query = g < GROUP * queries
        lines = _lines(first, head, g, GROUP, KV_HEADS, QUERIES)
        if QUERIES == 1:
            query = q + row.to(tl.int64) * stride_q + (head * GROUP + g[:, None]) * DIM
        else:
            token = (first + g // GROUP).to(tl.int64)
            query = q + (token * stride_q + (head * GROUP + g % GROUP) * DIM)[:, None]
        factor = scale
        if CODES:
            e = tl.arange(0, DIM_P2 // 2)
            in_pairs = (e < DIM // 2)[None, :]
            qs = tl.load(query + d[None, :], mask=is_query[:, None] & in_dim[None, :], other=0.0)
            qs, q_factors = as_keys(qs)
            q_even, q_odd = tl.split(tl.reshape(qs, [M, DIM_P2 // 2, 2]))
            keys = kv + head.to(tl.int64) * stride_head + e[None, :]
            if not TOKEN_SCALES:
                factor = scale * tl.load(scales + head)
            q_factors = (q_factors * factor)[:, None]
        else:
            qs = tl.load(query + d[None, :], mask=is_query[:, None] & in_dim[None, :], other=0.0)
            keys = kv + head.to(tl.int64) * stride_head + d[None, :]
        best = tl.full([M], float("-inf"), tl.float32)
        weight = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DIM_P2], tl.float32)
        if SHARED:  # continue from the prefix's state
            begins = is_query & (tile == 0) & (skipped > 0)
            best = tl.load(seen_stats + lines * 2, mask=begins, other=float("-inf"))
            if slopes is not None:  # there distances are from the prefix's end, here from the row's last token
                best += load_logits(slopes, head * GROUP + g % GROUP, is_query) * (skipped - length + 1)
            weight = tl.load(seen_stats + lines * 2 + 1, mask=begins, other=0.0)
            acc = tl.load(seen_sums + lines[:, None] * DIM + d[None, :], mask=begins[:, None] & in_dim[None, :],
                          other=0.0)  # fmt: skip
        if CODES:
            acc_even, acc_odd = tl.split(tl.reshape(acc, [M, DIM_P2 // 2, 2]))
        if sinks is not None:
            sink = load_logits(sinks, head * GROUP + g % GROUP, is_query)
        if slopes is not None:
            slope = load_logits(slopes, head * GROUP + g % GROUP, is_query)[:, None]
        begin = (first_tile + tile) * TILE
        for start in tl.range(begin, begin + take * TILE, TILE, num_stages=STAGES):
            position = start + tl.arange(0, TILE)
            seen = position < length
            if WINDOW > 0:
                seen = seen & (position >= low)
            block = tl.load(table + position // BLOCK, mask=seen, other=0).to(tl.int64)
            visible = seen[None, :]
            if QUERIES > 1:
                own_position = (length - queries + g // GROUP)[:, None]
                visible = visible & (position[None, :] <= own_position)
                if WINDOW > 0:
                    visible = visible & (position[None, :] > own_position - WINDOW)
            if CODES:
                at = (block * stride_block + (position % BLOCK) * (DIM // 2))[:, None]
                # Not masked: every position has a block, if only block 0, and no code is NaN, unless the block held
                # other data before.
                if 2 * (DIM // 2) == DIM_P2:
                    k = tl.trans(tl.load(keys + at))
                    if MIXED:
                        v = tl.load(keys + stride_half + at, mask=seen[:, None], other=0)
                    else:
                        v = tl.load(keys + stride_half + at)
                else:
                    k = tl.trans(tl.load(keys + at, mask=in_pairs, other=0))
                    v = tl.load(keys + stride_half + at, mask=in_pairs & seen[:, None], other=0)
                scores = tl.dot(q_even, decode_even(k, CODES, q_even.dtype, FAST), input_precision=PRECISION)
                scores = tl.dot(q_odd, decode_odd(k, CODES, q_odd.dtype, FAST), scores, input_precision=PRECISION)
                scores = scores * q_factors
                v_scales = 1.0
                if TOKEN_SCALES:
                    at_scale = scales + block * (stride_block // 2) + head * BLOCK + position % BLOCK
                    scores = scores * tl.load(at_scale, mask=seen, other=0.0)[None, :]
                    v_scales = tl.load(at_scale + KV_HEADS * BLOCK, mask=seen, other=0.0)
                scores = capped(scores, CAP)
                if slopes is not None:
                    scores += slope * (position - length + 1)[None, :]
                scores = tl.where(visible, scores, float("-inf"))
                p, keep, best, weight = scaled_softmax(scores, v_scales, best, weight, TOKEN_SCALES)
                p = p.to(VALUES)
                acc_even = tl.dot(p, decode_even(v, CODES, VALUES, FAST), acc_even * keep[:, None],
                                  input_precision=PRECISION)  # fmt: skip
                acc_odd = tl.dot(p, decode_odd(v, CODES, VALUES, FAST), acc_odd * keep[:, None],
                                 input_precision=PRECISION)  # fmt: skip
            else:
                at = (block * stride_block + (position % BLOCK) * DIM)[:, None]
                there = seen[:, None] & in_dim[None, :]
                k = tl.load(keys + at, mask=there, other=0.0)
                v = tl.load(keys + stride_half + at, mask=there, other=0.0)  # zeros: uninitialized memory may be NaN
                scores = tl.dot(qs, tl.trans(k), input_precision=PRECISION) * scale
                scores = capped(scores, CAP)
                if slopes is not None:
                    scores += slope * (position - length + 1)[None, :]
                scores = tl.where(visible, scores, float("-inf"))
                best, weight, acc = online_softmax(scores, v, best, weight, acc, PRECISION)
        value_scale = 1.0
        if CODES:
            acc = tl.reshape(tl.join(acc_even, acc_odd), [M, DIM_P2])
            if not TOKEN_SCALES:
                value_scale = tl.load(scales + KV_HEADS + head)
        if take == tiles:
            if sinks is not None:
                weight = with_sink(weight, best, sink)
            values = acc / tl.where(weight == 0.0, 1.0, weight)[:, None]
            if CODES:
                values = values * value_scale
            tl.store(out + lines[:, None] * DIM + d[None, :], values.to(out.dtype.element_ty),
                     mask=is_query[:, None] & in_dim[None, :])  # fmt: skip
        else:
            begins_here = tile == 0
            slot = program * 2 + begins_here.to(tl.int32)
            tl.store(stats + slot * (2 * OWN) + g, best, mask=is_query)
            tl.store(stats + slot * (2 * OWN) + OWN + g, weight, mask=is_query)
            tl.store(partial + (slot * OWN + g[:, None]) * DIM + d[None, :], acc,
                     mask=is_query[:, None] & in_dim[None, :])  # fmt: skip
            segment = start_tile - tile
            earliest = segment // each
            last = (segment + tiles - 1) // each
            tl.debug_barrier()  # all threads must have written before one counts the arrival
            counter = counters + row * KV_HEADS + head
            arrived = tl.atomic_add(counter, 1)
            if arrived == last - earliest:
                tl.store(counter, 0)
                high, mass, merged = merge_partials(partial, stats, earliest, last, OWN, OWN_P2,
                                                    DIM, DIM_P2, PARTS)  # fmt: skip
                h = tl.arange(0, OWN_P2)
                if sinks is not None:
                    mass = with_sink(mass, high, load_logits(sinks, head * GROUP + h % GROUP, h < OWN))
                merged = merged / tl.where(mass == 0.0, 1.0, mass)[:, None]
                if CODES:
                    merged = merged * value_scale
                merged_lines = _lines(first, head, h, GROUP, KV_HEADS, QUERIES)
                tl.store(out + merged_lines[:, None] * DIM + d[None, :], merged.to(out.dtype.element_ty),
                         mask=(h < GROUP * queries)[:, None] & in_dim[None, :])  # fmt: skip
        start_tile += take
        count -= take
        tile = 0
        row, head, length, line, skipped = next_row, next_head, next_length, next_line, next_skipped
        if QUERIES > 1:
            own_first, own_queries = next_first, next_queries


class DecodeAttention:
    """The kernel and its workspace, for one configuration of heads. Created once; a plan lasts one step."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, max_rows: int, dtype: torch.dtype, device: torch.device,
        tile: DecodeTile | None = None, quantized: bool = False, queries: int = 1,
    ) -> None:  # fmt: skip
        """`dtype`: of queries, keys and values; `quantized`: keys and values are stored in few bits; `queries`: most
        query tokens of a row, the last of its context, 1 to 8. With more than one, rows may have different numbers."""
        self._kv_heads = kv_heads
        self._group = heads // kv_heads
        self.queries = queries
        own = self._group * queries
        own_p2 = triton.next_power_of_2(own)
        self._tile = tile or decode_tile(head_dim, dtype.itemsize, quantized, own_p2 if queries > 1 else 16)
        if tile is None and queries > 1:  # partial results are larger: fewer of them
            self._tile = replace(self._tile, min_tiles=2 * self._tile.min_tiles)
        self._rows = max(16, triton.next_power_of_2(max_rows))
        self._programs = num_sms() * self._tile.programs
        self._planned = -(-self._programs // PLANNED_AT_ONCE) * PLANNED_AT_ONCE
        partials = 2 * self._programs * own
        self._partial = torch.empty(partials * head_dim, dtype=torch.float32, device=device)
        self._stats = torch.empty(2 * partials, dtype=torch.float32, device=device)
        self._counters = torch.zeros(self._rows * kv_heads, dtype=torch.int32, device=device)
        self._constants = dict(
            GROUP=self._group,
            QUERIES=queries,
            OWN_P2=own_p2,
            KV_HEADS=kv_heads,
            DIM=head_dim,
            DIM_P2=max(32 if quantized else 16, triton.next_power_of_2(head_dim)),
            TILE=self._tile.tokens,
            PARTS=(8 if own <= 4 else 4) if queries == 1 else _merged_at_once(own_p2 * head_dim, self._tile.warps),
            PRECISION="ieee" if dtype == torch.float32 else "tf32",
            STAGES=self._tile.stages,
            AHEAD=self._tile.ahead,
            FETCHED=max(1, head_dim * (1 if quantized else dtype.itemsize) // LINE_BYTES),
            num_warps=self._tile.warps,
            **pdl(),
        )

    @property
    def tile_tokens(self) -> int:
        """Tokens per tile: prefixes are skipped by whole tiles."""
        return self._tile.tokens

    def plan(
        self, lens: torch.Tensor, rows: torch.Tensor, num_rows: int, window: int | None,
        shared: torch.Tensor | None = None, starts: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The ranges of the programs, for rows of these lengths [num_rows] int32: one small kernel per step.

        `shared`: as in `PrefixState`, if `attend` will get one; the window must be None then.
        `starts` [num_rows + 1] int32, for a kernel of several queries a row: row i's are tokens starts[i] to before
        starts[i + 1]. Rows of length 0 may have any number of them, others at least one.

        Lengths count the row's own query tokens. Another kernel must be launched between this and `attend`, which reads
        the plan before its `gdc_wait`.
        """
        plan = torch.empty(HEADER + ENTRY * self._planned, dtype=torch.int32, device=lens.device)
        width = min(self._rows, 32 if num_rows <= 32 else 256 if num_rows <= 256 else self._rows)
        plan_ranges[(self._planned // PLANNED_AT_ONCE,)](
            lens, rows, lens if shared is None else shared, lens if starts is None else starts, plan, num_rows,
            self._programs, WINDOW=window or 0,
            KV_HEADS=self._kv_heads, TILE=self._tile.tokens, ROWS=width, AT_ONCE=PLANNED_AT_ONCE,
            MIN_TILES=self._tile.min_tiles, SHARED=shared is not None, RAGGED=starts is not None, num_warps=4, **pdl(),
        )  # fmt: skip
        return plan

    def attend(
        self, q: torch.Tensor, kv: LayerKV, out: torch.Tensor, tables: torch.Tensor, rows: torch.Tensor,
        lens: torch.Tensor, plan: torch.Tensor, num_rows: int, scale: float, window: int | None,
        prefix: PrefixState | None = None, soft_cap: float | None = None, sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None, starts: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attention of the first `num_rows` rows' tokens in q, row after row, into the same rows of `out`; rows of
        length 0 are skipped.

        `prefix`: the state after the shared prefix; the plan must have been made with its `shared`, or with `starts`.
        Scale, window, soft cap, sinks and slopes as in `AttentionSpec`.
        q [*, heads, head_dim], heads contiguous; kv one layer's cache; row i's blocks are tables[rows[i]].
        """
        codes = kv.pairs if isinstance(kv, QuantizedKV) else kv
        stride_block, stride_half, stride_head, _, _ = codes.stride()
        seen = (lens, self._partial, self._stats) if prefix is None else (prefix.shared, prefix.sums, prefix.stats)
        factor, cap = score_arguments(scale, soft_cap)
        _decode[(self._programs,)](
            q, codes, out, tables, rows, lens, lens if starts is None else starts, plan, self._partial, self._stats,
            self._counters, *seen, sinks, slopes, factor, q.stride(0), stride_block, stride_half, stride_head,
            tables.stride(0),
            WINDOW=window or 0, CAP=cap, BLOCK=kv.shape[3], SHARED=prefix is not None,
            MIXED=isinstance(kv, QuantizedKV) and kv.mixed, **read_arguments(kv), **self._constants,
        )  # fmt: skip


def verified_queries(group: int, width: int) -> int | None:
    """The `queries` of the kernel that decodes of at most `width` query tokens run; None: they are more than its tile
    takes. Few kinds, so that few kernels are compiled: `group` query heads of a KV head share a tile of at least 16."""
    queries = 4 if width <= 4 else 8
    return queries if group * queries <= MOST_QUERIES else None


MOST_QUERIES = 64
"""Rows of a tile's products, query tokens times heads of a group: with more, registers are spilled."""


def _merged_at_once(values: int, warps: int) -> int:
    """Partial results of so many values that a program merges at a time: few enough for its registers."""
    return max(1, warps * (4096 if values <= 2048 else 2048) // triton.next_power_of_2(values))


LINE_BYTES = 128
"""Of a cache line."""
