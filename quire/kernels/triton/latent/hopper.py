"""Absorbed latent attention on Hopper, for ranks of 512 and 64 rotated dimensions: what `decode._decode` computes.

A tile of 64 tokens is copied while the one before is multiplied. Triton's pipelining would need three tiles of
[64, 576] in shared memory beside the queries; here two suffice, because the copy of the next is issued before the
products of this one. Both products read the one tile: as keys and, without the rotated part, as values.

A row's queries are its token of the same number or, if QUERIES is more than 1, tokens starts[row] to starts[row + 1].

`_many_heads`: 64 heads times queries are the rows of the products. Shared memory: queries 72 KiB, two tiles 144 KiB,
weights 8 KiB. The accumulator [64, 512] in float32 is 128 registers of each of 256 threads.
`_few_heads`: 16 or 32 of them are the columns, and the tokens are the rows, of which WGMMA needs 64.

Written in Gluon, which has no interpreter: `decode.py` is what tests on a CPU walk through.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait

HEADER_SIZE: gl.constexpr = gl.constexpr(8)
ENTRY_SIZE: gl.constexpr = gl.constexpr(8)


@gluon.jit
def _blocks(table, start, length, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """The blocks of a tile's tokens, in the layout of rows of `LAYOUT`."""
    position = start + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(table + position // BLOCK, mask=position < length, other=0)


@gluon.jit
def _copy(kv, blocks, start, length, stride_block, ring, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
          WIDTH: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Start copying columns FIRST to FIRST + COLUMNS of a tile's tokens; zeros past the end."""
    position = start + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    at = blocks.to(gl.int64) * stride_block + (position % BLOCK) * WIDTH
    async_copy.async_copy_global_to_shared(ring, kv + at[:, None] + column[None, :], (position < length)[:, None])


@gluon.jit
def _many_heads(
    q, absorbed, kv, tables, rows, lens, starts, plan, partial, stats, scale, stride_token, stride_head, stride_block,
    stride_table,
    HEADS: gl.constexpr, EACH: gl.constexpr, QUERIES: gl.constexpr, NOPE: gl.constexpr, BLOCK: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    RANK: gl.constexpr = 512
    ROPE: gl.constexpr = 64
    WIDTH: gl.constexpr = RANK + ROPE
    HEAD_TILES: gl.constexpr = (HEADS + EACH - 1) // EACH
    OWN: gl.constexpr = EACH * QUERIES
    DTYPE: gl.constexpr = kv.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    qc = gl.allocate_shared_memory(DTYPE, [64, RANK], SHARED)
    qr = gl.allocate_shared_memory(DTYPE, [64, ROPE], SHARED)
    latents = gl.allocate_shared_memory(DTYPE, [2, 64, RANK], SHARED)
    rotated = gl.allocate_shared_memory(DTYPE, [2, 64, ROPE], SHARED)
    shares = gl.allocate_shared_memory(DTYPE, [64, 64], SHARED)

    program = gl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    entry = plan + HEADER_SIZE + program * ENTRY_SIZE
    row = gl.load(entry)
    head_tile = gl.load(entry + 1)
    tile = gl.load(entry + 2)
    count = gl.load(entry + 3)
    length = gl.load(entry + 4)
    line = gl.load(entry + 5)
    while count > 0:
        first, queries = row, 1
        if QUERIES > 1:
            first = gl.load(starts + row)
            queries = gl.load(starts + row + 1) - first
        tiles = (length + 63) // 64
        take = gl.minimum(count, tiles - tile)
        table = tables + line.to(gl.int64) * stride_table
        begin = tile * 64
        gl.thread_barrier()  # the last segment's products have read the queries and both tiles
        _copy(kv, _blocks(table, begin, length, BLOCK, WIDE), begin, length, stride_block, latents.index(0), 0, RANK,
              WIDTH, BLOCK, WIDE)  # fmt: skip
        _copy(kv, _blocks(table, begin, length, BLOCK, NARROW), begin, length, stride_block, rotated.index(0), RANK,
              ROPE, WIDTH, BLOCK, NARROW)  # fmt: skip
        # Queries: row g is query g // EACH, head g % EACH of the tile.
        g = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
        head = head_tile * EACH + g % EACH
        token = (first + g // EACH).to(gl.int64)
        there = (g < EACH * queries) & (head < HEADS)
        d = gl.arange(0, RANK, layout=gl.SliceLayout(0, WIDE))
        at = (token * HEADS + head) * RANK
        async_copy.async_copy_global_to_shared(qc, absorbed + at[:, None] + d[None, :], there[:, None])
        g = gl.arange(0, 64, layout=gl.SliceLayout(1, NARROW))
        head = head_tile * EACH + g % EACH
        token = (first + g // EACH).to(gl.int64)
        there = (g < EACH * queries) & (head < HEADS)
        e = gl.arange(0, ROPE, layout=gl.SliceLayout(0, NARROW))
        at = token * stride_token + head * stride_head + NOPE
        async_copy.async_copy_global_to_shared(qr, q + at[:, None] + e[None, :], there[:, None])
        async_copy.commit_group()
        next_wide = _blocks(table, begin + 64, length, BLOCK, WIDE)
        next_narrow = _blocks(table, begin + 64, length, BLOCK, NARROW)

        g = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        last_seen = length - queries + g // EACH
        n = gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
        best = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        weight = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES))
        acc = gl.zeros([64, RANK], gl.float32, layout=SUMS)
        for step in range(take):
            start = begin + step * 64
            stage = step % 2
            async_copy.wait_group(0)
            fence_async_shared()
            gl.thread_barrier()  # this tile is there, and the last one's products are done in all warps
            if step + 1 < take:
                ahead = start + 64
                other = 1 - stage
                _copy(kv, next_wide, ahead, length, stride_block, latents.index(other), 0, RANK, WIDTH, BLOCK, WIDE)
                _copy(kv, next_narrow, ahead, length, stride_block, rotated.index(other), RANK, ROPE, WIDTH, BLOCK,
                      NARROW)  # fmt: skip
                next_wide = _blocks(table, ahead + 64, length, BLOCK, WIDE)
                next_narrow = _blocks(table, ahead + 64, length, BLOCK, NARROW)
            async_copy.commit_group()
            scores = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, layout=SCORES))
            scores = warpgroup_mma(qc, latents.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(qr, rotated.index(stage).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
            scores = scores * scale
            if QUERIES > 1:
                scores = gl.where((start + n)[None, :] <= last_seen[:, None], scores, float("-inf"))
            elif start + 64 > length:
                scores = gl.where((start + n < length)[None, :], scores, float("-inf"))
            higher = gl.maximum(best, gl.max(scores, 1))
            safe = gl.where(higher == float("-inf"), 0.0, higher)
            keep = gl.exp2(best - safe)
            p = gl.exp2(scores - safe[:, None])
            weight = weight * keep + gl.sum(p, 1)
            best = higher
            shares.store(p.to(DTYPE))
            fence_async_shared()
            acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, SUMS))[:, None]
            gl.thread_barrier()  # all warps have stored their weights
            sums = warpgroup_mma(shares, latents.index(stage), warpgroup_mma_init(acc), is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        async_copy.wait_group(0)

        g = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
        head = head_tile * EACH + g % EACH
        token = (first + g // EACH).to(gl.int64)
        there = (g < EACH * queries) & (head < HEADS)
        d = gl.arange(0, RANK, layout=gl.SliceLayout(0, SUMS))
        if take == tiles:
            mass = gl.convert_layout(weight, gl.SliceLayout(1, SUMS))
            share = 1.0 / gl.where(mass == 0.0, 1.0, mass)
            own = (token * HEADS + head) * RANK
            gl.store(absorbed + own[:, None] + d[None, :], (acc * share[:, None]).to(DTYPE), mask=there[:, None])
        else:
            slot = program * 2 + (tile == 0).to(gl.int32)
            part = (slot * OWN + g).to(gl.int64) * RANK
            gl.store(partial + part[:, None] + d[None, :], acc, mask=there[:, None])
            lane = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
            kept = (lane < EACH * queries) & (head_tile * EACH + lane % EACH < HEADS)
            gl.store(stats + (slot * OWN + lane) * 2, best, mask=kept)
            gl.store(stats + (slot * OWN + lane) * 2 + 1, weight, mask=kept)
        count -= take
        tile = 0
        head_tile += 1
        if head_tile == HEAD_TILES:
            head_tile = 0
            row += 1
            length = gl.load(lens + row, mask=count > 0, other=0)
            while (length == 0) & (count > 0):  # ended rows and padding
                row += 1
                length = gl.load(lens + row)
            line = gl.load(rows + row, mask=count > 0, other=0).to(gl.int32)


@gluon.jit
def _few_heads(
    q, absorbed, kv, tables, rows, lens, starts, plan, partial, stats, scale, stride_token, stride_head, stride_block,
    stride_table,
    HEADS: gl.constexpr, EACH: gl.constexpr, QUERIES: gl.constexpr, NOPE: gl.constexpr, BLOCK: gl.constexpr,
    M: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    RANK: gl.constexpr = 512
    ROPE: gl.constexpr = 64
    WIDTH: gl.constexpr = RANK + ROPE
    HEAD_TILES: gl.constexpr = (HEADS + EACH - 1) // EACH
    OWN: gl.constexpr = EACH * QUERIES
    DTYPE: gl.constexpr = kv.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    STORED: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [4, 1], [0, 1])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    qc = gl.allocate_shared_memory(DTYPE, [M, RANK], SHARED)
    qr = gl.allocate_shared_memory(DTYPE, [M, ROPE], SHARED)
    latents = gl.allocate_shared_memory(DTYPE, [2, 64, RANK], SHARED)
    rotated = gl.allocate_shared_memory(DTYPE, [2, 64, ROPE], SHARED)
    shares = gl.allocate_shared_memory(DTYPE, [M, 64], SHARED)

    program = gl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    entry = plan + HEADER_SIZE + program * ENTRY_SIZE
    row = gl.load(entry)
    head_tile = gl.load(entry + 1)
    tile = gl.load(entry + 2)
    count = gl.load(entry + 3)
    length = gl.load(entry + 4)
    line = gl.load(entry + 5)
    while count > 0:
        first, queries = row, 1
        if QUERIES > 1:
            first = gl.load(starts + row)
            queries = gl.load(starts + row + 1) - first
        tiles = (length + 63) // 64
        take = gl.minimum(count, tiles - tile)
        table = tables + line.to(gl.int64) * stride_table
        begin = tile * 64
        gl.thread_barrier()  # the last segment's products have read the queries and both tiles
        _copy(kv, _blocks(table, begin, length, BLOCK, WIDE), begin, length, stride_block, latents.index(0), 0, RANK,
              WIDTH, BLOCK, WIDE)  # fmt: skip
        _copy(kv, _blocks(table, begin, length, BLOCK, NARROW), begin, length, stride_block, rotated.index(0), RANK,
              ROPE, WIDTH, BLOCK, NARROW)  # fmt: skip
        g = gl.arange(0, M, layout=gl.SliceLayout(1, WIDE))
        head = head_tile * EACH + g % EACH
        token = (first + g // EACH).to(gl.int64)
        there = (g < EACH * queries) & (head < HEADS)
        d = gl.arange(0, RANK, layout=gl.SliceLayout(0, WIDE))
        at = (token * HEADS + head) * RANK
        async_copy.async_copy_global_to_shared(qc, absorbed + at[:, None] + d[None, :], there[:, None])
        g = gl.arange(0, M, layout=gl.SliceLayout(1, NARROW))
        head = head_tile * EACH + g % EACH
        token = (first + g // EACH).to(gl.int64)
        there = (g < EACH * queries) & (head < HEADS)
        e = gl.arange(0, ROPE, layout=gl.SliceLayout(0, NARROW))
        at = token * stride_token + head * stride_head + NOPE
        async_copy.async_copy_global_to_shared(qr, q + at[:, None] + e[None, :], there[:, None])
        async_copy.commit_group()
        next_wide = _blocks(table, begin + 64, length, BLOCK, WIDE)
        next_narrow = _blocks(table, begin + 64, length, BLOCK, NARROW)

        g = gl.arange(0, M, layout=gl.SliceLayout(0, SCORES))
        last_seen = length - queries + g // EACH
        n = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        best = gl.full([M], float("-inf"), gl.float32, layout=gl.SliceLayout(0, SCORES))
        weight = gl.zeros([M], gl.float32, layout=gl.SliceLayout(0, SCORES))
        acc = gl.zeros([RANK, M], gl.float32, layout=SCORES)
        for step in range(take):
            start = begin + step * 64
            stage = step % 2
            async_copy.wait_group(0)
            fence_async_shared()
            gl.thread_barrier()  # this tile is there, and the last one's products are done in all warps
            if step + 1 < take:
                ahead = start + 64
                other = 1 - stage
                _copy(kv, next_wide, ahead, length, stride_block, latents.index(other), 0, RANK, WIDTH, BLOCK, WIDE)
                _copy(kv, next_narrow, ahead, length, stride_block, rotated.index(other), RANK, ROPE, WIDTH, BLOCK,
                      NARROW)  # fmt: skip
                next_wide = _blocks(table, ahead + 64, length, BLOCK, WIDE)
                next_narrow = _blocks(table, ahead + 64, length, BLOCK, NARROW)
            async_copy.commit_group()
            scores = warpgroup_mma_init(gl.zeros([64, M], gl.float32, layout=SCORES))
            scores = warpgroup_mma(latents.index(stage), qc.permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(rotated.index(stage), qr.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
            scores = scores * scale
            if QUERIES > 1:
                scores = gl.where((start + n)[:, None] <= last_seen[None, :], scores, float("-inf"))
            elif start + 64 > length:
                scores = gl.where((start + n < length)[:, None], scores, float("-inf"))
            higher = gl.maximum(best, gl.max(scores, 0))
            safe = gl.where(higher == float("-inf"), 0.0, higher)
            keep = gl.exp2(best - safe)
            p = gl.exp2(scores - safe[None, :])
            weight = weight * keep + gl.sum(p, 0)
            best = higher
            shares.permute((1, 0)).store(p.to(DTYPE))
            fence_async_shared()
            acc = acc * keep[None, :]
            gl.thread_barrier()  # all warps have stored their weights
            sums = warpgroup_mma(
                latents.index(stage).permute((1, 0)), shares.permute((1, 0)), warpgroup_mma_init(acc), is_async=True
            )
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        async_copy.wait_group(0)

        g = gl.arange(0, M, layout=gl.SliceLayout(0, STORED))
        head = head_tile * EACH + g % EACH
        token = (first + g // EACH).to(gl.int64)
        there = (g < EACH * queries) & (head < HEADS)
        d = gl.arange(0, RANK, layout=gl.SliceLayout(1, STORED))
        if take == tiles:
            share = 1.0 / gl.where(weight == 0.0, 1.0, weight)
            own = (token * HEADS + head) * RANK
            values = gl.convert_layout((acc * share[None, :]).to(DTYPE), STORED)
            gl.store(absorbed + own[None, :] + d[:, None], values, mask=there[None, :])
        else:
            slot = program * 2 + (tile == 0).to(gl.int32)
            part = (slot * OWN + g).to(gl.int64) * RANK
            gl.store(partial + part[None, :] + d[:, None], gl.convert_layout(acc, STORED), mask=there[None, :])
            lane = gl.arange(0, M, layout=gl.SliceLayout(0, SCORES))
            kept = (lane < EACH * queries) & (head_tile * EACH + lane % EACH < HEADS)
            gl.store(stats + (slot * OWN + lane) * 2, best, mask=kept)
            gl.store(stats + (slot * OWN + lane) * 2 + 1, weight, mask=kept)
        count -= take
        tile = 0
        head_tile += 1
        if head_tile == HEAD_TILES:
            head_tile = 0
            row += 1
            length = gl.load(lens + row, mask=count > 0, other=0)
            while (length == 0) & (count > 0):  # ended rows and padding
                row += 1
                length = gl.load(lens + row)
            line = gl.load(rows + row, mask=count > 0, other=0).to(gl.int32)
