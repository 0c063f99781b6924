# ruff: noqa: N803
"""Samples one token per row and commits it, on the GPU: two launches, three with filters, without sorting.

The vocabulary is divided into groups of 128 adjacent tokens. The first launch reads the logits once and writes each
group's maximum and sum of weights exp((logit - maximum) / temperature). The last one merges those in vocabulary order,
finds the group that contains the row's uniform number (greedy: the first that contains the maximum), reads that group
again, picks the token and commits it. In between `filtering.py` may exclude unlikely tokens. In a step that verifies
drafts a row draws at several places, and `verify.py` commits.

A group's sum does not depend on the number of rows or programs, so neither does a row's token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.filtering import GREEDY_BELOW, TEMPERATURE, filter_groups, load_scalar, uniform
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.threshold_search import LOG2E

STOPPED, INVALID = 1, 2
"""Flags in the results: the token is one of the row's stop ids; the row's logits had NaN, or nothing finite."""


@dataclass
class BatchColumns:
    """The batch's columns that a draw reads and writes. The last row of each is padding: draws for it do nothing."""

    last_token: torch.Tensor
    """[rows] int64, like all of them unless noted."""
    num_tokens: torch.Tensor
    prompt_len: torch.Tensor
    limit: torch.Tensor
    active: torch.Tensor
    """[rows] bool."""
    seed: torch.Tensor
    sequence: torch.Tensor
    scalars: torch.Tensor
    """[rows, scalars] int32: parameters in the order of `quire.messages.sampling.SCALARS`, floats by their bits."""
    stop_ids: torch.Tensor
    """[rows, width], padded with -1."""
    num_drafts: torch.Tensor | None = None
    """[rows] int32: set to 0 when a token is committed; None: rows have no drafts."""


@dataclass
class DrawPlaces:
    """Where the draws of a step that verifies drafts are kept, a line for each place."""

    tokens: torch.Tensor
    """[places] int32."""
    invalid: torch.Tensor
    """[places] int32: 1 if the logits had NaN, or nothing finite."""
    offsets: torch.Tensor
    """[places] int32: how far each place is behind the first of its draw."""

    def after(self, start: int) -> DrawPlaces:
        """The places from `start` on."""
        return DrawPlaces(self.tokens[start:], self.invalid[start:], self.offsets[start:])


@dataclass
class SamplingWorkspace:
    """Intermediate results between the launches, allocated once so that a graph can hold them. Needs no clearing."""

    maxima: torch.Tensor
    """[draws, groups] float32: each group's largest logit, -inf past the end (groups are whole tiles)."""
    sums: torch.Tensor
    """[draws, groups] float32: the weights of each group, relative to its maximum."""
    thresholds: torch.Tensor
    """[draws] float32: the lowest logit that may be drawn."""
    live: torch.Tensor
    """[draws, groups] int32: numbers of the groups a filter looks into."""
    spans: torch.Tensor
    """[draws, room] int32: where the logits are among which a filter looks for the threshold."""
    group: int
    """Tokens in a group."""
    tile: int
    """Groups a program reads at a time."""


def workspace(
    max_draws: int,
    vocab: int,
    device: torch.device | str,
    *,
    group: int = 128,
    tile: int = 32,
    room: int = 512,
) -> SamplingWorkspace:
    """Room for `max_draws` draws: 12 bytes per group and 4 per span, so 16 KB per draw for a vocabulary of 150,000."""
    groups = -(-vocab // (group * tile)) * tile
    return SamplingWorkspace(
        maxima=torch.empty(max_draws, groups, dtype=torch.float32, device=device),
        sums=torch.empty(max_draws, groups, dtype=torch.float32, device=device),
        thresholds=torch.empty(max_draws, dtype=torch.float32, device=device),
        live=torch.empty(max_draws, groups, dtype=torch.int32, device=device),
        spans=torch.empty(max_draws, room, dtype=torch.int32, device=device),
        group=group,
        tile=tile,
    )


def draw_and_commit(
    logits: torch.Tensor,
    rows: torch.Tensor,
    columns: BatchColumns,
    results: torch.Tensor,
    slot: torch.Tensor,
    filtered: bool,
    workspace: SamplingWorkspace,
    places: DrawPlaces | None = None,
) -> None:
    """Draw a token for each of `rows` [S] from logits [S, vocab], and commit it; with `places`, only keep it there.

    A token is the first whose cumulative probability, in the order of the vocabulary, passes the row's number from
    Philox (seed, number of tokens drawn so far, sequence). `filtered`: some row may have a filter (top-k, top-p, ...);
    without it they are ignored. results and slot: as in `commit`.

    Bytes: the logits once; 16 per group; one group per draw. Operations: about 8 per logit.
    """
    draws, vocab = logits.shape
    if draws == 0:
        return
    group, tile = workspace.group, workspace.tile
    groups = workspace.maxima.shape[1]
    _measure_kernel[(groups // tile, draws)](
        logits, logits.stride(0), rows, columns.scalars,
        workspace.maxima, workspace.sums,
        VOCAB=vocab, GROUP=group, GROUPS=groups, TILE=tile, num_warps=4, **pdl(),
    )  # fmt: skip
    if filtered:
        filter_groups(logits, rows, columns, workspace, None if places is None else places.offsets)
    _draw_kernel[(draws,)](
        logits, logits.stride(0), rows, columns.scalars,
        workspace.maxima, workspace.sums, workspace.thresholds,
        columns.seed, columns.sequence, columns.prompt_len,
        columns.last_token, columns.num_tokens, columns.limit, columns.active, columns.stop_ids,
        columns.stop_ids.shape[1], results, results.stride(0), results.stride(1), slot, columns.active.shape[0] - 1,
        columns.num_drafts, *_fields(places),
        VOCAB=vocab, GROUP=group, GROUPS=groups, WIDTH=triton.next_power_of_2(groups), FILTERED=filtered,
        num_warps=4, **pdl(),
    )  # fmt: skip


def commit(
    tokens: torch.Tensor,
    invalid: torch.Tensor,
    rows: torch.Tensor,
    columns: BatchColumns,
    results: torch.Tensor,
    slot: torch.Tensor,
) -> None:
    """Write drawn `tokens` [S] back and end the rows that are done.

    results [slots, 2, max_draws] int32, in pinned host memory on a GPU: draw i's token goes to results[slot[0], 0, i]
    and its flags to results[slot[0], 1, i]. The slot is read on the device, so that a graph writes to another one each
    time. Draws for the padding row leave no trace.
    """
    if len(rows) == 0:
        return
    _commit_kernel[(len(rows),)](
        tokens, invalid, rows,
        columns.last_token, columns.num_tokens, columns.limit, columns.active, columns.stop_ids,
        columns.stop_ids.shape[1], results, results.stride(0), results.stride(1), slot, columns.active.shape[0] - 1,
        columns.num_drafts, num_warps=1, **pdl(),
    )  # fmt: skip


def _fields(places: DrawPlaces | None) -> tuple[torch.Tensor | None, ...]:
    return (None, None, None) if places is None else (places.tokens, places.invalid, places.offsets)


@triton.jit
def _measure_kernel(
    logits, row_stride, rows, scalars, maxima, sums,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each group's maximum and sum of weights: TILE groups per program, 8 KB in bfloat16."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    draw = tl.program_id(1).to(tl.int64)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + draw * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    scale = _scale(load_scalar(scalars, tl.load(rows + draw).to(tl.int64), TEMPERATURE))
    peak = tl.max(x, axis=1)
    # Relative to 0 where nothing is finite: -inf minus -inf would be NaN, which must mean NaN among the logits.
    base = tl.where(peak > float("-inf"), peak, 0.0)
    total = tl.sum(tl.exp2((x - base[:, None]) * scale), axis=1)
    tl.store(maxima + draw * GROUPS + group, peak)
    tl.store(sums + draw * GROUPS + group, total)


@triton.jit(do_not_specialize=["stop_width", "slot_stride", "result_stride", "padding_row"])
def _draw_kernel(
    logits, row_stride, rows, scalars, maxima, sums, thresholds,
    seed, sequence, prompt_len, last_token, num_tokens, limit, active, stop_ids, stop_width,
    results, slot_stride, result_stride, slot, padding_row, num_drafts, placed, placed_invalid, offsets,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, FILTERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Pick the group, then its token, then commit. One program per draw: 8 bytes per group, and one group's logits."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    draw = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + draw).to(tl.int64)
    group = tl.arange(0, WIDTH)
    peaks = tl.load(maxima + draw * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
    totals = tl.load(sums + draw * GROUPS + group, mask=group < GROUPS, other=0.0)
    if row != padding_row:
        temperature = load_scalar(scalars, row, TEMPERATURE)
        greedy = temperature < GREEDY_BELOW
        scale = _scale(temperature)
        counter = tl.load(num_tokens + row) - tl.load(prompt_len + row)
        if placed is not None:
            counter += tl.load(offsets + draw)
        number = uniform(tl.load(seed + row), counter, tl.load(sequence + row))

        best = tl.max(peaks)
        # Doubles from here on, so that the only rounding is that of the weights.
        masses = (totals * tl.exp2((peaks - best) * scale)).to(tl.float64)
        through = tl.cumsum(masses, axis=0)
        whole = tl.sum(masses)
        invalid = ((best > float("-inf")) & (best < float("inf")) & (whole == whole)) == 0
        goal = number * whole
        chosen = tl.min(tl.where(tl.where(greedy, peaks == best, through > goal), group, GROUPS - 1))
        is_chosen = group == chosen
        peak = tl.sum(tl.where(is_chosen, peaks, 0.0))
        before = tl.sum(tl.where(is_chosen, through - masses, 0.0))

        inner = tl.arange(0, GROUP)
        token = chosen * GROUP + inner
        x = tl.load(logits + draw * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        weights = tl.exp2((x - peak) * scale)
        if FILTERED:
            # What XTC excluded is above the best of what is left.
            weights = tl.where((x >= tl.load(thresholds + draw)) & (x <= best), weights, 0.0)
        rest = tl.maximum((goal - before) / tl.exp2((peak - best) * scale).to(tl.float64), 0.0)
        reached = tl.where(greedy, x == peak, tl.cumsum(weights.to(tl.float64), axis=0) > rest)
        # If rounding puts the number past the group's end: the last token that can be drawn.
        last = tl.max(tl.where(weights > 0.0, inner, 0))
        drawn = tl.minimum(chosen * GROUP + tl.min(tl.where(reached, inner, last)), VOCAB - 1)
        if placed is not None:
            tl.store(placed + draw, drawn)
            tl.store(placed_invalid + draw, invalid.to(tl.int32))
        else:
            _commit(
                draw, row, drawn, invalid, last_token, num_tokens, limit, active, stop_ids, stop_width,
                results, slot_stride, result_stride, slot, num_drafts,
            )  # fmt: skip


@triton.jit(do_not_specialize=["stop_width", "slot_stride", "result_stride", "padding_row"])
def _commit_kernel(
    tokens, invalid, rows, last_token, num_tokens, limit, active, stop_ids, stop_width,
    results, slot_stride, result_stride, slot, padding_row, num_drafts, PDL: tl.constexpr,
):  # fmt: skip
    """`_commit` for a token drawn elsewhere. One program per draw, about 100 bytes each."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    draw = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + draw).to(tl.int64)
    if row != padding_row:
        _commit(
            draw, row, tl.load(tokens + draw).to(tl.int32), tl.load(invalid + draw), last_token, num_tokens, limit,
            active, stop_ids, stop_width, results, slot_stride, result_stride, slot, num_drafts,
        )  # fmt: skip


@triton.jit
def _commit(
    draw, row, token, invalid, last_token, num_tokens, limit, active, stop_ids, stop_width,
    results, slot_stride, result_stride, slot, num_drafts,
):  # fmt: skip
    """Write a row's token back, end the row if it is done, and write the result for the host."""
    stopped = 0
    lane = tl.arange(0, 16)
    for start in range(0, stop_width, 16):
        ids = tl.load(stop_ids + row * stop_width + start + lane, mask=start + lane < stop_width, other=-1)
        stopped = tl.maximum(stopped, tl.max((ids == token).to(tl.int32)))
    length = tl.load(num_tokens + row) + 1
    done = (stopped == 1) | (length >= tl.load(limit + row))
    tl.store(last_token + row, token.to(tl.int64))
    tl.store(num_tokens + row, length)
    if num_drafts is not None:
        tl.store(num_drafts + row, 0)
    if done:
        tl.store(active + row, False)
    out = results + tl.load(slot).to(tl.int64) * slot_stride + draw
    tl.store(out, token)
    tl.store(out + result_stride, stopped + 2 * invalid.to(tl.int32))


@triton.jit
def _scale(temperature):
    """The factor that makes a difference of logits an exponent of 2. Greedy rows use their sums to detect NaN only."""
    return LOG2E / tl.where(temperature < GREEDY_BELOW, 1.0, temperature)
