"""Kernels of the device-resident batch: apply a plan's differences, and expand its rows into a step's tokens.

Both read little and are bound by latency. `apply_plan` reads the plan from pinned host memory: a few kilobytes over the
bus, without a copy or a synchronization.
"""

# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.messages.plan import MAX_WIDTH
from quire.messages.sampling import SCALARS

NEW_ROW_HEAD = 8
"""A new row begins with: row, num_tokens, num_computed, prompt_len, limit, sequence, seed (two halves)."""
NEW_ROW_INTS = NEW_ROW_HEAD + len(SCALARS)
"""Then its scalar sampling parameters, in the order of their table."""
BLOCK = 256
_HEAD = tl.constexpr(NEW_ROW_HEAD)
_INTS = tl.constexpr(NEW_ROW_INTS)
_SCALARS = tl.constexpr(len(SCALARS))
_DRAFTS = tl.constexpr(MAX_WIDTH - 1)


@triton.jit(
    do_not_specialize=[
        "drops", "blocks", "rows", "fresh", "draws", "added", "padded", "slot_number", "width", "verified", "follows"
    ]
)  # fmt: skip
def _apply(
    packed, step_rows, query_starts, tokens, picks, draw_rows, slot, tables, active, num_tokens, num_computed,
    prompt_len, limit, sequence, seed, scalars, stop_ids, num_drafts, offsets, place_starts, following,
    drops, blocks, rows, fresh, draws, added, padded, slot_number, width, verified, follows, stride_table,
    PAD_ROW: tl.constexpr, VERIFIES: tl.constexpr, FOLLOWS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """VERIFIES  the step draws at several places of a row: `draws` are places, of `verified` draws
    FOLLOWS   the plan says which tokens follow the chunks of prompts
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    at = packed
    dropped = tl.load(at + e, mask=e < drops, other=0)
    at += drops
    block_row = tl.load(at + e, mask=e < blocks, other=0)
    block_index = tl.load(at + blocks + e, mask=e < blocks, other=0)
    block = tl.load(at + 2 * blocks + e, mask=e < blocks, other=0)
    at += 3 * blocks
    row = tl.load(at + e, mask=e < rows, other=PAD_ROW)
    start = tl.load(at + rows + e, mask=e <= rows, other=0)
    at += 2 * rows + 1
    token = tl.load(at + e, mask=e < fresh, other=0)
    at += fresh
    pick = tl.load(at + e, mask=e < draws, other=0)
    draw_row = tl.load(at + draws + e, mask=e < draws, other=0)
    at += 2 * draws
    if VERIFIES:
        tl.store(offsets + e, tl.load(at + e, mask=e < draws, other=0), mask=e < draws)
        tl.store(place_starts + e, tl.load(at + draws + e, mask=e <= verified, other=0), mask=e <= verified)
        at += draws + verified + 1
    if FOLLOWS:
        tl.store(following + e, tl.load(at + e, mask=e < follows, other=0), mask=e < follows)
        at += follows
    tl.store(active + dropped, 0, mask=e < drops)
    tl.store(tables + block_row.to(tl.int64) * stride_table + block_index, block, mask=e < blocks)
    tl.store(step_rows + e, row, mask=e < padded)
    tl.store(query_starts + e, tl.where(e <= rows, start, e), mask=e <= padded)  # padding rows have a token each
    tl.store(tokens + e, token, mask=e < fresh)
    tl.store(picks + e, pick, mask=e < draws)
    tl.store(draw_rows + e, draw_row, mask=e < draws)
    if tl.program_id(0) == 0:
        tl.store(slot, slot_number)
    new = e < added
    field = at + e * _INTS
    target = tl.load(field, mask=new, other=0)
    tl.store(num_tokens + target, tl.load(field + 1, mask=new, other=0).to(tl.int64), mask=new)
    tl.store(num_computed + target, tl.load(field + 2, mask=new, other=0).to(tl.int64), mask=new)
    tl.store(prompt_len + target, tl.load(field + 3, mask=new, other=0).to(tl.int64), mask=new)
    tl.store(limit + target, tl.load(field + 4, mask=new, other=0).to(tl.int64), mask=new)
    tl.store(sequence + target, tl.load(field + 5, mask=new, other=0).to(tl.int64), mask=new)
    low = tl.load(field + 6, mask=new, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(field + 7, mask=new, other=0).to(tl.int64)
    tl.store(seed + target, low | (high << 32), mask=new)
    for i in tl.static_range(_SCALARS):
        tl.store(scalars + target * _SCALARS + i, tl.load(field + _HEAD + i, mask=new, other=0), mask=new)
    tl.store(active + target, 1, mask=new)
    if num_drafts is not None:
        tl.store(num_drafts + target, 0, mask=new)
    stops = at + added * _INTS
    stopping = e < added * width
    stop_row = tl.load(at + (e // width) * _INTS, mask=stopping, other=0)
    tl.store(stop_ids + stop_row * width + e % width, tl.load(stops + e, mask=stopping, other=0).to(tl.int64),
             mask=stopping)  # fmt: skip


@triton.jit(do_not_specialize=["decodes", "before"])
def _expand(
    step_rows, query_starts, fresh, last_token, num_computed, active, tables, token_ids, drafts, num_drafts,
    tokens, positions, slots, context, live_rows, decodes, before, stride_table, stride_group, stride_slots, stride_ids,
    PAD_ROW: tl.constexpr, VERIFIES: tl.constexpr, GROUPS: tl.constexpr, BY_ROW: tl.constexpr, STATES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a scheduled row: its tokens, their positions and cache slots, and its length after the step.

    VERIFIES  decodes compute drafts after their last token, any token where they have fewer; they have `before` tokens
    GROUPS  cache groups whose blocks hold tokens, each with its own tables and slots
    BY_ROW  token ids are in rows of `token_ids`, not in pages that have the slots of the first group
    STATES  there is a group of recurrent states: rows that are active are written to `live_rows`
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.program_id(0)
    row = tl.load(step_rows + i).to(tl.int64)
    is_active = tl.load(active + row) != 0
    start = tl.load(num_computed + row)
    is_decode = i < decodes
    if VERIFIES:
        first = tl.load(query_starts + i)
        count = tl.load(query_starts + i + 1) - first
        held = tl.load(num_drafts + row)
    else:
        before = decodes
        first = tl.load(query_starts + i, mask=i >= decodes, other=i)
        count = tl.load(query_starts + i + 1, mask=i >= decodes, other=i + 1) - first
    last = tl.load(last_token + row)
    live = tl.where(is_active, row, PAD_ROW)
    # A row that ended on the device, which the host has not seen yet, writes to block 0 and attends to nothing.
    for offset in range(0, count, SIZE):
        j = offset + tl.arange(0, SIZE)
        inside = j < count
        position = tl.where(is_active, start + j, 0)
        given = tl.load(fresh + first - before + j, mask=inside & (i >= decodes), other=0).to(tl.int64)
        token = tl.where(is_decode, last, given)
        if VERIFIES:
            draft = tl.load(drafts + row * _DRAFTS + j - 1, mask=inside & is_decode & (j > 0) & (j <= held), other=0)
            token = tl.where(is_decode & (j > 0), draft.to(tl.int64), token)
        tl.store(tokens + first + j, token, mask=inside)
        tl.store(positions + first + j, position, mask=inside)
        if GROUPS == 0:  # slots only tell active rows from others: any page of the state
            block = tl.load(tables + row * stride_table + j * 0, mask=inside & is_active, other=0)
            tl.store(slots + first + j, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
        for group in tl.static_range(GROUPS):
            table = tables + group * stride_group + row * stride_table
            block = tl.load(table + position // BLOCK_SIZE, mask=inside & is_active, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(slots + group * stride_slots + first + j, slot, mask=inside)
            if group == 0 and not BY_ROW:
                tl.store(token_ids + slot, token.to(tl.int32), mask=inside)
        if BY_ROW:
            tl.store(token_ids + live * stride_ids + position, token.to(tl.int32), mask=inside)
    tl.store(context + i, tl.where(is_active, start + count, 0).to(tl.int32))
    tl.store(num_computed + row, tl.where(is_active, start + count, start))
    if STATES:
        tl.store(live_rows + i, live.to(tl.int32))


def apply_plan(packed: torch.Tensor, sizes: dict[str, int], longest: int, buffers: Any, columns: Any) -> None:
    """Apply the differences of one plan. `packed` is int32 in pinned memory: sections in the order `_apply` reads them.

    sizes    the sections' lengths, by the kernel's argument names
    longest  of all sections
    buffers  where the step's rows, offsets, tokens and draws go (`worker/cuda_batch.py`)
    columns  the batch
    """
    _apply[(-(-longest // BLOCK),)](
        packed, buffers.rows, buffers.query_starts, buffers.tokens, buffers.picks, buffers.draw_rows, buffers.slot,
        columns.block_tables, columns.active.view(torch.uint8), columns.num_tokens, columns.num_computed,
        columns.prompt_len, columns.limit, columns.sequence, columns.seed, columns.scalars, columns.stop_ids,
        columns.num_drafts if columns.speculates else None, buffers.offsets, buffers.place_starts, buffers.following,
        **sizes, width=columns.stop_ids.shape[1], stride_table=columns.block_tables.stride(1),
        PAD_ROW=columns.pad_row, VERIFIES=sizes["verified"] > 0, FOLLOWS=sizes["follows"] > 0, SIZE=BLOCK,
        num_warps=4, **pdl(),
    )  # fmt: skip


def expand_rows(
    buffers: Any, columns: Any, num_rows: int, decodes: int, tokens: torch.Tensor, positions: torch.Tensor,
    slots: torch.Tensor, context: torch.Tensor, verified: int = 0,
) -> None:  # fmt: skip
    """Lay out the step: the first `decodes` rows compute their last sampled token, the others the plan's tokens.
    `slots`: [groups whose blocks hold tokens, tokens]. `verified`: the tokens of the decodes, if they verify drafts."""
    geometry, tables = columns.kv.geometry, columns.block_tables
    by_row = not columns.kv.has_tokens
    if num_rows:
        _expand[(num_rows,)](
            buffers.rows, buffers.query_starts, buffers.tokens, columns.last_token, columns.num_computed,
            columns.active.view(torch.uint8), tables, columns.token_ids if by_row else columns.kv.tokens,
            columns.drafts, columns.num_drafts, tokens,
            positions, slots, context, buffers.live_rows, decodes, verified, tables.stride(1), tables.stride(0),
            slots.stride(0), columns.token_ids.stride(0), PAD_ROW=columns.pad_row, VERIFIES=verified > 0,
            GROUPS=geometry.num_block_groups, BY_ROW=by_row,
            STATES=len(geometry.groups) > geometry.num_block_groups, BLOCK_SIZE=columns.kv.block_size,
            SIZE=16 if num_rows == decodes else 512, num_warps=1 if num_rows == decodes else 4, **pdl(),
        )  # fmt: skip


@triton.jit(do_not_specialize=["distance"])
def _ahead(
    rows, active, num_tokens, limit, tables, positions, slots, context, live_rows, distance, stride_table, stride_group,
    stride_slots, PAD_ROW: tl.constexpr, GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: where its token `distance` after the last one goes."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    position = tl.load(num_tokens + row) - 1 + distance
    is_active = tl.load(active + row) != 0
    inside = is_active & (position < tl.load(limit + row))
    position = tl.where(inside, position, 0)
    tl.store(positions + i, position)
    for group in tl.static_range(GROUPS):
        table = tables + group * stride_group + row * stride_table
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        tl.store(slots + group * stride_slots + i, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(context + i, tl.where(inside, position + 1, 0).to(tl.int32))
    tl.store(live_rows + i, tl.where(is_active, row, PAD_ROW).to(tl.int32))


def lay_out_ahead(
    rows: torch.Tensor, distance: int, columns: Any, positions: torch.Tensor, slots: torch.Tensor,
    context: torch.Tensor, live_rows: torch.Tensor,
) -> None:  # fmt: skip
    """A step of the tokens `distance` after these rows' last ones: positions [rows] int64, slots [groups, rows] int64,
    context [rows] int32. Rows that have ended, or would pass their limit, write to the null block and attend to
    nothing."""
    tables = columns.block_tables
    _ahead[(len(rows),)](
        rows, columns.active.view(torch.uint8), columns.num_tokens, columns.limit, tables, positions, slots, context,
        live_rows, distance, tables.stride(1), tables.stride(0), slots.stride(0), PAD_ROW=columns.pad_row,
        GROUPS=columns.kv.geometry.num_block_groups, BLOCK_SIZE=columns.kv.block_size, num_warps=1, **pdl(),
    )  # fmt: skip
