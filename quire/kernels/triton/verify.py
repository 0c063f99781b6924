# ruff: noqa: N803
"""Drafts on the GPU: runs from the host become a row's drafts, draws are compared with them, and new ones reported.

A step that verifies drafts draws at every *place*: a row's last token and each of its drafts. `verify_drafts` finds how
many of a row's draws count (up to the first that is not the draft after it), commits them, and writes the results for
the host. All of it is bound by latency: a few hundred bytes a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.filtering import uniform
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.sampling import BatchColumns, DrawPlaces
from quire.messages.plan import MAX_WIDTH
from quire.messages.sampling import ACCEPT_STREAM

MAX_DRAFTS = MAX_WIDTH - 1
RESULT_INTS = MAX_WIDTH
"""Integers of a draw's drafts in the results: MAX_DRAFTS tokens, then how many of them there are."""
RUN_INTS = 4
"""Integers of a run from the host: row, position of its first token, tokens, where they begin among all."""
_WIDTH = tl.constexpr(MAX_WIDTH)
_DRAFTS = tl.constexpr(MAX_DRAFTS)
_RUN = tl.constexpr(RUN_INTS)
_ACCEPT_STREAM = tl.constexpr(ACCEPT_STREAM)
MIN_RUN = 64
"""Tokens of a run that one kernel takes: longer ones get a kernel of their own, which is rare."""


@triton.jit(do_not_specialize=["runs"])
def _place_run(
    packed, runs, tables, token_ids, last_token, num_computed, drafts, num_drafts, stride_table, stride_ids,
    BY_ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a run: what the row has drawn since is dropped from it; all of it, if that differs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    entry = packed + tl.program_id(0) * _RUN
    row = tl.load(entry).to(tl.int64)
    start = tl.load(entry + 1)
    length = tl.load(entry + 2)
    first = tl.load(entry + 3)
    j = tl.arange(0, SIZE)
    inside = j < length
    token = tl.load(packed + runs * _RUN + first + j, mask=inside, other=0)
    # All tokens of a decode but its last are computed. Only the last pipeline stage knows `num_tokens`.
    last = tl.load(num_computed + row).to(tl.int32)
    position = start + j
    past = inside & (position < last)
    if BY_ROW:
        drawn = tl.load(token_ids + row * stride_ids + position, mask=past, other=0)
    else:
        block = tl.load(tables + row * stride_table + position // BLOCK_SIZE, mask=past, other=0).to(tl.int64)
        drawn = tl.load(token_ids + block * BLOCK_SIZE + position % BLOCK_SIZE, mask=past, other=0)
    drawn = tl.where(position == last, tl.load(last_token + row).to(tl.int32), drawn)
    differs = tl.max((inside & (position <= last) & (drawn != token)).to(tl.int32), 0)
    passed = last + 1 - start
    left = tl.minimum(tl.maximum(length - passed, 0), _DRAFTS)
    left = tl.where((differs == 1) | (passed < 0), 0, left)
    place = j - passed
    tl.store(drafts + row * _DRAFTS + place, token, mask=inside & (place >= 0) & (place < left))
    tl.store(num_drafts + row, left)


@triton.jit(do_not_specialize=["stop_width", "slot_stride", "flags_at", "counts_at", "padding_row"])
def _verify(
    draw_rows, starts, placed, placed_invalid, drafts, num_drafts, last_token, num_tokens, num_computed, limit, active,
    stop_ids, prompt_len, seed, sequence, rates, counts, results, slot, stop_width, slot_stride, flags_at, counts_at,
    padding_row, PDL: tl.constexpr,
):  # fmt: skip
    """One program a draw, whose places are those from starts[draw] to before starts[draw + 1].

    rates  None, or for each draft the probability that it is accepted, whatever the tokens
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    draw = tl.program_id(0)
    first = tl.load(starts + draw)
    row = tl.load(draw_rows + first).to(tl.int64)
    if row == padding_row:
        tl.store(counts + draw, 1)
    else:
        width = tl.load(starts + draw + 1) - first
        place = tl.arange(0, _WIDTH)
        inside = place < width
        token = tl.load(placed + first + place, mask=inside, other=-1)
        invalid = tl.load(placed_invalid + first + place, mask=inside, other=0)
        held = tl.minimum(tl.load(num_drafts + row), width - 1)
        draft = tl.load(drafts + row * _DRAFTS + place, mask=place < held, other=-2)
        stopped = tl.zeros([_WIDTH], tl.int32)
        lane = tl.arange(0, 16)
        for start in range(0, stop_width, 16):
            ids = tl.load(stop_ids + row * stop_width + start + lane, mask=start + lane < stop_width, other=-1)
            stopped = tl.maximum(stopped, tl.max((ids[None, :] == token[:, None]).to(tl.int32), 1))
        length = tl.load(num_tokens + row)
        ends = (stopped == 1) | (invalid != 0) | (length + place + 1 >= tl.load(limit + row))
        matches = token == draft
        if rates is not None:
            index = length - tl.load(prompt_len + row) + place
            number = uniform(tl.load(seed + row), index, tl.load(sequence + row) + _ACCEPT_STREAM)
            matches = (place < held) & (number < tl.load(rates + place, mask=place < _DRAFTS, other=0.0))
        last = tl.min(tl.where(matches & (ends == 0), _WIDTH, place), 0)
        is_last = place == last
        over = tl.sum(tl.where(is_last, ends.to(tl.int32), 0), 0)
        flags = tl.sum(tl.where(is_last, stopped + 2 * (invalid != 0).to(tl.int32), 0), 0)
        tl.store(last_token + row, tl.sum(tl.where(is_last, token, 0), 0).to(tl.int64))
        tl.store(num_tokens + row, length + last + 1)
        if tl.load(active + row):  # for a row that has ended nothing was computed
            tl.store(num_computed + row, tl.load(num_computed + row) + last + 1 - width)
        tl.store(num_drafts + row, 0)
        if over == 1:
            tl.store(active + row, False)
        tl.store(counts + draw, (last + 1).to(tl.int64))
        out = results + tl.load(slot).to(tl.int64) * slot_stride
        tl.store(out + first + place, token, mask=inside)
        tl.store(out + flags_at + draw, flags)
        tl.store(out + counts_at + draw, last + 1)


@triton.jit(do_not_specialize=["slot_stride"])
def _report(rows, starts, drafts, num_drafts, results, slot, slot_stride, PDL: tl.constexpr):
    """One program a draw: its row's drafts into the results."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    draw = tl.program_id(0)
    at = draw
    if starts is not None:
        at = tl.load(starts + draw)
    row = tl.load(rows + at).to(tl.int64)
    place = tl.arange(0, _WIDTH)
    tokens = tl.load(drafts + row * _DRAFTS + place, mask=place < _DRAFTS, other=0)
    out = results + tl.load(slot).to(tl.int64) * slot_stride + draw * _WIDTH
    tl.store(out + place, tl.where(place < _DRAFTS, tokens, tl.load(num_drafts + row)))


def place_runs(packed: torch.Tensor, runs: int, longest: int, batch: Any) -> None:
    """Make runs from the host the drafts of their rows. `packed` is int32 in pinned memory: RUN_INTS integers for each
    of the `runs`, then their tokens; `longest`: most tokens of a run."""
    by_row = not batch.kv.has_tokens
    _place_run[(runs,)](
        packed, runs, batch.block_table, batch.token_ids if by_row else batch.kv.tokens, batch.last_token,
        batch.num_computed, batch.drafts, batch.num_drafts, batch.block_table.stride(0), batch.token_ids.stride(0),
        BY_ROW=by_row, BLOCK_SIZE=batch.kv.block_size, SIZE=max(MIN_RUN, triton.next_power_of_2(longest)), num_warps=1,
        **pdl(),
    )  # fmt: skip


def verify_drafts(
    starts: torch.Tensor, rows: torch.Tensor, draws: int, places: DrawPlaces, columns: BatchColumns, batch: Any,
    counts: torch.Tensor, results: torch.Tensor, slot: torch.Tensor,
) -> None:  # fmt: skip
    """Commit what each of the first `draws` draws yields: its tokens up to the first that is not the draft after it, a
    stop id, or the row's last.

    starts [draws + 1]: draw i's places are starts[i] to before starts[i + 1], `rows` [places] the row of each; draws of
    the padding row leave no trace. counts [draws] int64: tokens each yields. results [slots, places + 2 * draws] int32,
    in pinned memory on a GPU: tokens, flags as in `sampling.commit`, counts; in the slot that the device reads.
    """
    total = (results.shape[1]) // (MAX_WIDTH + 2)
    _verify[(draws,)](
        rows, starts, places.tokens, places.invalid, batch.drafts, batch.num_drafts, columns.last_token,
        columns.num_tokens, batch.num_computed, columns.limit, columns.active, columns.stop_ids, columns.prompt_len,
        columns.seed, columns.sequence, batch.synthetic_rates, counts, results, slot,
        columns.stop_ids.shape[1], results.stride(0), total * MAX_WIDTH, total * (MAX_WIDTH + 1),
        columns.active.shape[0] - 1, num_warps=1, **pdl(),
    )  # fmt: skip


def report_drafts(
    rows: torch.Tensor, starts: torch.Tensor | None, draws: int, batch: Any, results: torch.Tensor, slot: torch.Tensor
) -> None:
    """Write the drafts that the rows of the first `draws` draws have to results [slots, draws, RESULT_INTS] int32, in
    pinned memory on a GPU. rows and `starts` as in `verify_drafts`; None: each draw has one place."""
    _report[(draws,)](
        rows, starts, batch.drafts, batch.num_drafts, results, slot, results.stride(0), num_warps=1, **pdl()
    )
