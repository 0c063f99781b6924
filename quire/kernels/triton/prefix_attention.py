"""Paged attention over a prefix that many rows share (a system prompt, sequences of one prompt), read once for all.

Rows that begin with the same blocks are a *group*. The queries of up to a few dozen members form one query tile, the
rows of a tensor-core product with the shared tokens. The result is each row's online-softmax state after its shared
tokens, from which `decode_attention.py` continues. Work is balanced as there (stream-K): the token tiles of all query
tiles and KV heads form one list, every program takes an equal range of it, and the last program to finish a query
tile merges the partials, always in the same order. Groups are in persistent buffers and counted on the device, so one
captured CUDA graph serves any groups.

Bytes: a group's shared K and V once per query tile (2 * shared * kv_heads * head_dim values; from L2 for all tiles but
the first) instead of once per row; and for each member 4 * heads * (head_dim + 2) bytes of state, written here and
read by the decode kernel. Operations: 4 * shared * heads * head_dim per member, plus those of unused tile rows.
Sums of codes are not multiplied by the layer's scale of values here: the decode kernel does that. Biases by distance
(ALiBi) are relative to the end of the shared tokens, not to each member's query.
"""

# ruff: noqa: N803

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.kv import LayerKV, QuantizedKV
from quire.kernels.triton.attention_scores import capped, load_logits, score_arguments
from quire.kernels.triton.decode_attention import (
    ENTRY,
    ENTRY_SIZE,
    HEADER,
    HEADER_SIZE,
    PLANNED_AT_ONCE,
    PrefixState,
    merge_partials,
    online_softmax,
    plan_ranges,
    scaled_softmax,
)
from quire.kernels.triton.kv_codes import as_keys, decode, read_arguments
from quire.kernels.triton.launch import INTERPRETED, gdc_launch_dependents, gdc_wait, num_sms, pdl

SEARCHED_AT_ONCE = 128
"""Rows of the step that the search for members compares at a time."""
MIN_TILES = 2
"""Tiles per program, at least: with fewer, merging costs more than it saves."""
MIN_MEMBERS = 2
"""Rows of a group, at least."""


@dataclass(frozen=True)
class PrefixTile:
    """Tile shape: queries and tokens per tile, warps, pipeline stages, and programs per multiprocessor."""

    queries: int
    tokens: int
    warps: int
    stages: int
    programs: int


@functools.cache
def prefix_tile(head_dim: int, itemsize: int) -> PrefixTile:
    """The tile shape for a head size; candidates are in benchmarks/gpu/prefix_attention.py."""
    if INTERPRETED:
        return PrefixTile(16, 16, 4, 1, 2)
    if itemsize > 2:  # no tensor cores: a larger tile would spill registers
        return PrefixTile(16, 32, 4, 2, 2)
    if head_dim > 256:  # with 64 queries it would spill registers
        return PrefixTile(32, 32, 8, 3, 1)
    if head_dim > 128:
        return PrefixTile(64, 32, 8, 3, 1)
    return PrefixTile(64, 64, 4, 3, 2)


@dataclass(frozen=True)
class PrefixPlan:
    """One step's query tiles, and the programs' ranges."""

    members: torch.Tensor
    """[tiles, members] int32: the index of each query in the step; -1: none."""
    rows: torch.Tensor
    """[tiles] int32: the line of the block tables that holds the shared blocks."""
    lens: torch.Tensor
    """[tiles] int32: shared tokens; used tiles come first, the others have 0."""
    ranges: torch.Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _plan_queries(
    members, starts, shared, rows, tile_members, tile_rows, tile_lens, num_rows,
    MAX_GROUPS: tl.constexpr, GROUPS_P2: tl.constexpr, MEMBERS: tl.constexpr, MEMBERS_P2: tl.constexpr,
    ROUND: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query tile per program: its group, and its members' indices in the step."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0)
    group = tl.arange(0, GROUPS_P2)
    in_groups = group < MAX_GROUPS
    first = tl.load(starts + group, mask=in_groups, other=0)
    last = tl.load(starts + group + 1, mask=in_groups, other=0)
    some = in_groups & (last > first)
    leader = tl.load(members + first, mask=some, other=0)
    length = tl.load(shared + leader, mask=some, other=0) // ROUND * ROUND
    tiles = tl.where(length > 0, (last - first + MEMBERS - 1) // MEMBERS, 0)
    ends = tl.cumsum(tiles, 0)
    passed = ends <= t
    mine = group == tl.sum(passed.to(tl.int32), 0)
    is_there = t < tl.sum(tiles, 0)
    tile = t - tl.max(tl.where(passed, ends, 0), 0)
    m = tl.arange(0, MEMBERS_P2)
    at = tl.sum(tl.where(mine, first, 0), 0) + tile * MEMBERS + m
    inside = is_there & (m < MEMBERS) & (at < tl.sum(tl.where(mine, last, 0), 0))
    member = tl.load(members + at, mask=inside, other=-1)
    index = tl.full([MEMBERS_P2], -1, tl.int32)
    for start in range(0, tl.where(is_there, num_rows, 0), AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        row = tl.load(rows + i, mask=i < num_rows, other=-2).to(tl.int32)
        index = tl.maximum(index, tl.max(tl.where(member[:, None] == row[None, :], i[None, :], -1), 1))
    tl.store(tile_members + t * MEMBERS + m, index, mask=m < MEMBERS)
    tl.store(tile_rows + t, tl.sum(tl.where(mine, leader, 0), 0))
    tl.store(tile_lens + t, tl.where(is_there, tl.sum(tl.where(mine, length, 0), 0), 0))


@triton.jit
def _prefix(
    q, kv, sums, stats, tables, tile_members, tile_rows, tile_lens, plan, partial, partial_stats, counters, scale,
    stride_q, stride_block, stride_half, stride_head, stride_table, slopes, scales,
    CAP: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_P2: tl.constexpr,
    M: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    CODES: tl.constexpr, TOKEN_SCALES: tl.constexpr, VALUES: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's range, segment by segment; a segment is the part of the range in one query tile and KV head."""
    program = tl.program_id(0)
    each = tl.load(plan)
    entry = plan + HEADER_SIZE + program * ENTRY_SIZE
    row = tl.load(entry)
    head = tl.load(entry + 1)
    tile = tl.load(entry + 2)
    count = tl.load(entry + 3)
    length = tl.load(entry + 4)
    line = tl.load(entry + 5)
    if PDL:  # the plan was written before the preceding kernel started: see `plan`
        gdc_wait()
        gdc_launch_dependents()
    start_tile = program * each
    r = tl.arange(0, M)
    d = tl.arange(0, DIM_P2)
    in_dim = d < DIM
    while count > 0:
        tiles = (length + TILE - 1) // TILE
        take = tl.minimum(count, tiles - tile)
        table = tables + line.to(tl.int64) * stride_table
        member = tl.load(tile_members + row * MEMBERS + r // GROUP, mask=r // GROUP < MEMBERS, other=-1).to(tl.int64)
        is_query = member >= 0
        query_head = head * GROUP + r % GROUP
        there = is_query[:, None] & in_dim[None, :]
        qs = tl.load(q + (member * stride_q + query_head * DIM)[:, None] + d[None, :], mask=there, other=0.0)
        keys = kv + head.to(tl.int64) * stride_head + d[None, :]
        best = tl.full([M], float("-inf"), tl.float32)
        weight = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DIM_P2], tl.float32)
        if CODES:
            factor = scale
            if not TOKEN_SCALES:
                factor = scale * tl.load(scales + head)
            qs, q_factors = as_keys(qs)
            q_factors = (q_factors * factor)[:, None]
        if slopes is not None:
            slope = load_logits(slopes, query_head, is_query)[:, None]
        for start in tl.range(tile * TILE, (tile + take) * TILE, TILE, num_stages=STAGES):
            position = start + tl.arange(0, TILE)
            seen = position < length
            block = tl.load(table + position // BLOCK, mask=seen, other=0).to(tl.int64)
            at = (block * stride_block + (position % BLOCK) * DIM)[:, None]
            held = seen[:, None] & in_dim[None, :]
            k = tl.load(keys + at, mask=held, other=0.0)
            v = tl.load(keys + stride_half + at, mask=held, other=0.0)
            if CODES:
                k = decode(k, CODES, qs.dtype, FAST)
                v = decode(v, CODES, VALUES, FAST)
                scores = tl.dot(qs, tl.trans(k), input_precision=PRECISION) * q_factors
                v_scales = 1.0
                if TOKEN_SCALES:
                    # One load for both: see `_token_scales` in prefill_attention.py.
                    at_scale = scales + block * (stride_block // 4) + head * BLOCK + position % BLOCK
                    both = at_scale[:, None] + (tl.arange(0, 2) * (KV_HEADS * BLOCK))[None, :]
                    k_scales, v_scales = tl.split(tl.load(both, mask=seen[:, None], other=0.0))
                    scores = scores * k_scales[None, :]
                scores = capped(scores, CAP)
                if slopes is not None:
                    scores += slope * (position - length)[None, :]
                scores = tl.where(seen[None, :], scores, float("-inf"))
                p, keep, best, weight = scaled_softmax(scores, v_scales, best, weight, TOKEN_SCALES)
                acc = tl.dot(p.to(VALUES), v, acc * keep[:, None], input_precision=PRECISION)
            else:
                scores = tl.dot(qs, tl.trans(k), input_precision=PRECISION) * scale
                scores = capped(scores, CAP)
                if slopes is not None:
                    scores += slope * (position - length)[None, :]
                scores = tl.where(seen[None, :], scores, float("-inf"))
                best, weight, acc = online_softmax(scores, v, best, weight, acc, PRECISION)
        is_done = take == tiles
        if take < tiles:
            slot = program * 2 + (tile == 0).to(tl.int32)
            tl.store(partial_stats + slot * (2 * M) + r, best)
            tl.store(partial_stats + slot * (2 * M) + M + r, weight)
            tl.store(partial + (slot * M + r[:, None]) * DIM + d[None, :], acc, mask=there)
            segment = start_tile - tile
            first = segment // each
            last = (segment + tiles - 1) // each
            tl.debug_barrier()  # all threads must have written before one counts the arrival
            counter = counters + row * KV_HEADS + head
            arrived = tl.atomic_add(counter, 1)
            is_done = arrived == last - first
            if is_done:
                tl.store(counter, 0)
                best, weight, acc = merge_partials(partial, partial_stats, first, last, M, M,
                                                DIM, DIM_P2, 1)  # fmt: skip
        if is_done:
            at_state = member * (KV_HEADS * GROUP) + query_head
            tl.store(stats + at_state * 2, best, mask=is_query)
            tl.store(stats + at_state * 2 + 1, weight, mask=is_query)
            tl.store(sums + at_state[:, None] * DIM + d[None, :], acc, mask=there)
        start_tile += take
        count -= take
        tile = 0
        head += 1
        if head == KV_HEADS:
            head = 0
            row += 1
            length = tl.load(tile_lens + row, mask=count > 0, other=0)
            line = tl.load(tile_rows + row, mask=count > 0, other=0)


class PrefixAttention:
    """The kernel and its workspace, for one configuration of heads. Created once; a plan lasts one step."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, max_rows: int, dtype: torch.dtype, device: torch.device,
        tile: PrefixTile | None = None, quantized: bool = False,
    ) -> None:  # fmt: skip
        """`dtype`: of queries, keys and values; `quantized`: keys and values are stored in few bits."""
        self._kv_heads = kv_heads
        group = heads // kv_heads
        self._tile = tile or prefix_tile(head_dim, dtype.itemsize)
        queries = max(self._tile.queries, triton.next_power_of_2(MIN_MEMBERS * group))
        self._members = queries // group
        # Groups have at least two members, and so do full tiles: at most half as many tiles as rows. Only if a tile
        # holds just two can there be more: three members take two tiles.
        self._tiles = max(1, max_rows * 2 // 3 if self._members == MIN_MEMBERS else max_rows // MIN_MEMBERS)
        self._programs = num_sms() * self._tile.programs
        self._partial = torch.empty(2 * self._programs * queries * head_dim, dtype=torch.float32, device=device)
        self._partial_stats = torch.empty(4 * self._programs * queries, dtype=torch.float32, device=device)
        self._counters = torch.zeros(self._tiles * kv_heads, dtype=torch.int32, device=device)
        self._sums = torch.empty(max_rows, heads, head_dim, dtype=torch.float32, device=device)
        self._stats = torch.empty(max_rows, heads, 2, dtype=torch.float32, device=device)
        self._constants = dict(
            GROUP=group,
            KV_HEADS=kv_heads,
            DIM=head_dim,
            DIM_P2=max(16, triton.next_power_of_2(head_dim)),
            M=queries,
            MEMBERS=self._members,
            TILE=self._tile.tokens,
            PRECISION="ieee" if dtype == torch.float32 else "tf32",
            STAGES=self._tile.stages,
            num_warps=8 if queries > self._tile.queries else self._tile.warps,
            **pdl(),
        )

    def plan(
        self, members: torch.Tensor, starts: torch.Tensor, shared: torch.Tensor, rows: torch.Tensor, num_rows: int,
        tile_tokens: int,
    ) -> PrefixPlan:  # fmt: skip
        """Query tiles of a step's groups, and the programs' ranges: two small kernels per step.

        Group i's members are the lines members[starts[i]] to members[starts[i + 1]] of the block tables; those among
        `rows`, the lines of the step's first `num_rows` rows, have a query. Line l shares shared[l] tokens, of which
        whole tiles of `tile_tokens` are computed here and skipped by the decode kernel. Another kernel must be launched
        between this and `attend`.
        """
        device, groups = shared.device, len(starts) - 1
        indices = torch.empty(self._tiles, self._members, dtype=torch.int32, device=device)
        lines, lens = torch.empty(2, self._tiles, dtype=torch.int32, device=device)
        _plan_queries[(self._tiles,)](
            members, starts, shared, rows, indices, lines, lens, num_rows, MAX_GROUPS=groups,
            GROUPS_P2=triton.next_power_of_2(groups), MEMBERS=self._members,
            MEMBERS_P2=triton.next_power_of_2(self._members), ROUND=tile_tokens, AT_ONCE=SEARCHED_AT_ONCE, num_warps=4,
            **pdl(),
        )  # fmt: skip
        planned = -(-self._programs // PLANNED_AT_ONCE)
        ranges = torch.empty(HEADER + ENTRY * planned * PLANNED_AT_ONCE, dtype=torch.int32, device=device)
        plan_ranges[(planned,)](
            lens, lines, lens, lens, ranges, self._tiles, self._programs, WINDOW=0, KV_HEADS=self._kv_heads,
            TILE=self._tile.tokens, ROWS=max(16, triton.next_power_of_2(self._tiles)), AT_ONCE=PLANNED_AT_ONCE,
            MIN_TILES=MIN_TILES, SHARED=False, RAGGED=False, num_warps=4, **pdl(),
        )  # fmt: skip
        return PrefixPlan(indices, lines, lens, ranges)

    def attend(
        self, q: torch.Tensor, kv: LayerKV, tables: torch.Tensor, shared: torch.Tensor, plan: PrefixPlan,
        scale: float, soft_cap: float | None = None, slopes: torch.Tensor | None = None,
    ) -> PrefixState:  # fmt: skip
        """The members' online-softmax state after their shared tokens, for `DecodeAttention.attend`.

        q [*, heads, head_dim], heads contiguous; kv one layer's cache.
        """
        stride_block, stride_half, stride_head, _, _ = kv.stride()
        factor, cap = score_arguments(scale, soft_cap)
        _prefix[(self._programs,)](
            q, kv.codes if isinstance(kv, QuantizedKV) else kv, self._sums, self._stats, tables, plan.members,
            plan.rows, plan.lens, plan.ranges, self._partial,
            self._partial_stats, self._counters, factor, q.stride(0), stride_block, stride_half, stride_head,
            tables.stride(0), slopes, CAP=cap, BLOCK=kv.shape[3], **read_arguments(kv), **self._constants,
        )  # fmt: skip
        return PrefixState(shared, self._sums, self._stats)
