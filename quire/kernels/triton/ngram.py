# ruff: noqa: N803
"""Finds where a row's last tokens occurred before, on the GPU: two launches, whatever the length of the rows.

The first launch has several programs a row, each with a slice of its tokens. A program compares its tokens with the
row's last one, a block at a time, and looks at more only where a block has an equal one: about 4 bytes a token and as
many of the block table, which stays in the L1 cache. 128k tokens of one row are 512 KB in 32 slices. The best
place of each row is the maximum of (length of the match, position), by an atomic in 64 bits. The second launch copies
the tokens from there on into the row's drafts and clears the maximum for the next step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl

BLOCK = 1024
SLICE = 4 * BLOCK
"""Tokens that a program looks through."""
_PLACES = tl.constexpr(1 << 40)
"""A match is one number: its length times this, and the position after it."""


@triton.jit
def _token(tokens, table, position, mask, BY_ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Tokens at these positions of the row whose tokens (or block table) begin there."""
    if BY_ROW:
        return tl.load(tokens + position, mask=mask, other=-1)
    block = tl.load(table + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return tl.load(tokens + block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask, other=-1)


@triton.jit
def _search(
    rows, num_tokens, last_token, tokens, tables, best, stride_table, stride_ids,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, BY_ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLICE: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The place that follows the longest match in a slice of a row: between SHORTEST and LONGEST tokens, the latest."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    count = tl.load(num_tokens + row).to(tl.int32)
    first = tl.program_id(1) * SLICE
    end = tl.minimum(first + SLICE, count)  # a place is followed by a token: the row's last one at most
    if first < end:
        last = tl.load(last_token + row).to(tl.int32)
        ids = tokens + row * stride_ids if BY_ROW else tokens
        table = tables + row * stride_table
        found = tl.zeros([SIZE], tl.int64)
        for start in range(first, end, SIZE):
            place = start + tl.arange(0, SIZE)
            inside = (place < end) & (place > 0)
            matches = inside & (_token(ids, table, place - 1, inside, BY_ROW, BLOCK_SIZE) == last)
            if tl.max(matches.to(tl.int32), 0) > 0:
                length = matches.to(tl.int64)
                for i in tl.static_range(1, LONGEST):
                    there = matches & (place - 1 - i >= 0)
                    # A match begins before its place, so that this token too is one that was computed.
                    wanted = _token(ids, table, count - 1 - i, count - 1 - i >= 0, BY_ROW, BLOCK_SIZE)
                    matches = there & (_token(ids, table, place - 1 - i, there, BY_ROW, BLOCK_SIZE) == wanted)
                    length += matches.to(tl.int64)
                found = tl.maximum(found, tl.where(length >= SHORTEST, length * _PLACES + place, 0))
        longest = tl.max(found, 0)
        if longest > 0:
            tl.atomic_max(best + tl.program_id(0), longest)


@triton.jit(do_not_specialize=["wanted"])
def _write(
    rows, num_tokens, last_token, tokens, tables, best, drafts, num_drafts, wanted, stride_table, stride_ids,
    WIDTH: tl.constexpr, BY_ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: the tokens that follow the best place; the row's end is followed by the drafts themselves."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    count = tl.load(num_tokens + row).to(tl.int32)
    found = tl.load(best + tl.program_id(0))
    place = (found % _PLACES).to(tl.int32)
    is_found = (found > 0) & (place < count)
    j = tl.arange(0, SIZE)
    inside = is_found & (j < wanted)
    position = place + j % tl.maximum(count - place, 1)
    ids = tokens + row * stride_ids if BY_ROW else tokens
    is_last = position == count - 1
    token = _token(ids, tables + row * stride_table, position, inside & (position < count - 1), BY_ROW, BLOCK_SIZE)
    token = tl.where(is_last, tl.load(last_token + row).to(tl.int32), token)
    tl.store(drafts + row * WIDTH + j, token, mask=inside)
    tl.store(num_drafts + row, tl.where(is_found, wanted, 0))
    tl.store(best + tl.program_id(0), 0)


def propose_ngrams(
    batch: Any, rows: torch.Tensor, best: torch.Tensor, count: int, shortest: int, longest: int, max_context: int
) -> None:
    """Write `count` drafts for each of these rows, and their number, or 0 where nothing matches.

    best         at least [rows] int64, zeros; zeros again afterwards
    shortest, longest  of a match, in tokens
    max_context  bound on the tokens of any row
    """
    by_row = not batch.kv.has_tokens
    tokens = batch.token_ids if by_row else batch.kv.tokens
    strides = batch.block_table.stride(0), batch.token_ids.stride(0)
    shape = {"BY_ROW": by_row, "BLOCK_SIZE": batch.kv.block_size}
    _search[(len(rows), -(-max_context // SLICE))](
        rows, batch.num_tokens, batch.last_token, tokens, batch.block_table, best, *strides,
        SHORTEST=shortest, LONGEST=longest, SLICE=SLICE, SIZE=BLOCK, num_warps=8, **shape, **pdl(),
    )  # fmt: skip
    _write[(len(rows),)](
        rows, batch.num_tokens, batch.last_token, tokens, batch.block_table, best, batch.drafts, batch.num_drafts,
        count, *strides, WIDTH=batch.drafts.shape[1], SIZE=triton.next_power_of_2(batch.drafts.shape[1]), num_warps=1,
        **shape, **pdl(),
    )  # fmt: skip
