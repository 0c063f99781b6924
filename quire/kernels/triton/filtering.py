# ruff: noqa: N803
"""Which tokens the scalar filters leave: the second of three launches of a draw, for steps that have filtered rows.

A row's filters apply in this order, after its temperature: top-n-sigma and min-p, which set a floor under the logits;
top-k and top-p (`threshold_search.py`); XTC, which excludes the top choices of what is left. So a row keeps the logits
from a threshold to a ceiling. The maxima and sums of weights of groups that the first launch measured (`sampling.py`)
are rewritten as if the others were not there: the largest maximum left is the ceiling.

One program per row, no atomics, and every sum in a fixed order: what is left does not depend on other rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.threshold_search import LOG2E, LOWEST, find_threshold, list_live, load_live
from quire.messages.sampling import COLUMN, SCALARS
from quire.messages.sampling import XTC_STREAM as _XTC_STREAM

if TYPE_CHECKING:
    from quire.kernels.triton.sampling import BatchColumns, SamplingWorkspace

GREEDY_BELOW = tl.constexpr(1e-5)
"""Rows colder than this take the best token (`SamplingParams.is_greedy`)."""
# Columns of the scalar sampling parameters.
NUM_SCALARS = tl.constexpr(len(SCALARS))
TEMPERATURE = tl.constexpr(COLUMN["temperature"])
TOP_K = tl.constexpr(COLUMN["top_k"])
TOP_P = tl.constexpr(COLUMN["top_p"])
MIN_P = tl.constexpr(COLUMN["min_p"])
TOP_N_SIGMA = tl.constexpr(COLUMN["top_n_sigma"])
XTC_PROBABILITY = tl.constexpr(COLUMN["xtc_probability"])
XTC_THRESHOLD = tl.constexpr(COLUMN["xtc_threshold"])

XTC_STREAM = tl.constexpr(_XTC_STREAM)


def filter_groups(
    logits: torch.Tensor,
    rows: torch.Tensor,
    columns: BatchColumns,
    workspace: SamplingWorkspace,
    offsets: torch.Tensor | None = None,
) -> None:
    """Write each draw's threshold (-inf: none) and take what is excluded out of its groups' maxima and sums.

    logits [S, vocab] any row stride; rows [S] the batch row of each. workspace.maxima and .sums are as
    `sampling.draw_and_commit` measured them; .live and .spans are scratch, left dirty. `offsets` [S] int32: tokens that
    each draw is behind its row's next one.

    Bytes per row: 10 per group, and three times the logits of the groups that reach the cut (16 KB in bfloat16).
    top-n-sigma adds all logits, twice; XTC adds 4 per group and, twice, the logits of the few groups that hold top
    choices. A row without filters reads its parameters and writes its threshold.
    """
    groups = workspace.maxima.shape[1]
    # 128 registers: two programs fit on a multiprocessor, so that 256 rows take one round of an H200.
    _filter_kernel[(len(rows),)](
        logits, logits.stride(0), rows, columns.scalars,
        columns.seed, columns.sequence, columns.prompt_len, columns.num_tokens,
        workspace.maxima, workspace.sums, workspace.thresholds, workspace.live, workspace.spans,
        columns.scalars.shape[0] - 1, offsets,
        VOCAB=logits.shape[1], GROUP=workspace.group, GROUPS=groups, WIDTH=triton.next_power_of_2(groups),
        TILE=workspace.tile, ROOM=workspace.spans.shape[1], SHIFT=_unused_bits(logits.dtype), num_warps=8, maxnreg=128,
        **pdl(),
    )  # fmt: skip


def _unused_bits(dtype: torch.dtype) -> int:
    """Low bits that are always zero when a number of this type is written as a float32: not worth bisecting."""
    return {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[dtype]


@triton.jit
def load_scalar(scalars, row, INDEX: tl.constexpr):
    """A row's float parameter; its bits are among the integers."""
    return tl.load(scalars + row * NUM_SCALARS + INDEX).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["padding_row"])
def _filter_kernel(
    logits, row_stride, rows, scalars, seed, sequence, prompt_len, num_tokens,
    maxima, sums, thresholds, live, spans, padding_row, offsets,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    ROOM: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per draw. Operations: about 10 per logit counted, 4 per logit listed and threshold bit."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    draw = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + draw).to(tl.int64)
    temperature = load_scalar(scalars, row, TEMPERATURE)
    top_p = load_scalar(scalars, row, TOP_P)
    min_p = load_scalar(scalars, row, MIN_P)
    k = tl.load(scalars + row * NUM_SCALARS + TOP_K)
    k = tl.where(k > 0, tl.minimum(k, VOCAB), VOCAB)
    num_sigmas = load_scalar(scalars, row, TOP_N_SIGMA)
    cuts = (k < VOCAB) | (top_p < 1.0) | (min_p > 0.0) | (num_sigmas > 0.0)
    xtc_probability = load_scalar(scalars, row, XTC_PROBABILITY)
    excludes = xtc_probability > 0.0
    if excludes:
        drawn = tl.load(num_tokens + row) - tl.load(prompt_len + row)
        if offsets is not None:
            drawn += tl.load(offsets + draw)
        excludes = uniform(tl.load(seed + row), drawn, tl.load(sequence + row) + XTC_STREAM) < xtc_probability
    threshold = float("-inf")
    if (cuts | excludes) & (temperature >= GREEDY_BELOW) & (row != padding_row):
        maxima += draw * GROUPS
        sums += draw * GROUPS
        group = tl.arange(0, WIDTH)
        peaks = tl.load(maxima + group, mask=group < GROUPS, other=float("-inf"))
        best = tl.max(peaks)
        scale = LOG2E / temperature
        mass = tl.sum(tl.load(sums + group, mask=group < GROUPS, other=0.0) * tl.exp2((peaks - best) * scale))
        # Rows with NaN, +inf or nothing finite are left to the draw, which reports them.
        if (best > float("-inf")) & (best < float("inf")) & (mass == mass):
            row_logits = logits + draw * row_stride
            live += draw * GROUPS
            if cuts:
                bottom = LOWEST
                if min_p > 0.0:
                    bottom = tl.maximum(best + temperature * tl.log(min_p), LOWEST)
                if num_sigmas > 0.0:
                    bottom = tl.maximum(best - num_sigmas * _deviation(row_logits, VOCAB, GROUP * TILE), bottom)
                threshold = find_threshold(
                    row_logits, peaks, best, mass, k, top_p, bottom, temperature, live, spans + draw * ROOM,
                    VOCAB, GROUP, GROUPS, TILE, ROOM, SHIFT,
                )  # fmt: skip
                tl.store(sums + group, tl.zeros([WIDTH], tl.float32), mask=(group < GROUPS) & (peaks < threshold))
                _sum_kept(row_logits, maxima, sums, peaks, threshold, scale, live, VOCAB, GROUP, TILE)
            if excludes:
                share = load_scalar(scalars, row, XTC_THRESHOLD)
                _exclude_top_choices(
                    row_logits, maxima, sums, peaks, best, threshold, share, temperature, live,
                    VOCAB, GROUP, GROUPS, WIDTH, TILE,
                )  # fmt: skip
    tl.store(thresholds + draw, threshold)


@triton.jit
def _deviation(row_logits, VOCAB: tl.constexpr, SIZE: tl.constexpr):
    """The standard deviation of the finite logits. Two passes: squares less the squared mean would lose digits."""
    token = tl.arange(0, SIZE)
    counts = tl.zeros([SIZE], tl.float32)
    totals = tl.zeros([SIZE], tl.float32)
    for start in tl.range(0, VOCAB, SIZE, num_stages=3):
        x = tl.load(row_logits + start + token, mask=start + token < VOCAB, other=float("-inf")).to(tl.float32)
        counts += tl.where(x > float("-inf"), 1.0, 0.0)
        totals += tl.where(x > float("-inf"), x, 0.0)
    count = tl.sum(counts)
    mean = tl.sum(totals) / count
    squares = tl.zeros([SIZE], tl.float32)
    for start in tl.range(0, VOCAB, SIZE, num_stages=3):
        x = tl.load(row_logits + start + token, mask=start + token < VOCAB, other=float("-inf")).to(tl.float32)
        distance = tl.where(x > float("-inf"), x - mean, 0.0)
        squares += distance * distance
    return tl.sqrt(tl.sum(squares) / count)


@triton.jit
def _sum_kept(
    row_logits, maxima, sums, peaks, threshold, scale, live,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum the weights of the logits kept again, for each group that keeps some."""
    num_live = list_live(peaks, threshold, live)
    for start in tl.range(0, num_live, TILE, num_stages=3):
        group, x = load_live(row_logits, live, start, num_live, VOCAB, GROUP, TILE)
        exists = start + tl.arange(0, TILE) < num_live
        peak = tl.load(maxima + group, mask=exists, other=0.0)
        weights = tl.where(x >= threshold, tl.exp2((x - peak[:, None]) * scale), 0.0)
        tl.store(sums + group, tl.sum(weights, axis=1), mask=exists)


@triton.jit
def _exclude_top_choices(
    row_logits, maxima, sums, peaks, best, threshold, share, temperature, live,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """XTC: of the logits that have at least `share` of the mass left, keep the lowest and its ties.

    The others are all above it. At most 1 / share logits, so as many groups, are looked into.
    """
    scale = LOG2E / temperature
    group = tl.arange(0, WIDTH)
    tl.debug_barrier()  # other threads have written the sums
    totals = tl.load(sums + group, mask=group < GROUPS, other=0.0)
    mass = tl.sum(totals * tl.exp2((peaks - best) * scale))
    bar = tl.maximum(tl.maximum(best + temperature * tl.log(share * mass), threshold), LOWEST)
    num_live = list_live(peaks, bar, live)
    lowest = tl.full([TILE, GROUP], float("inf"), tl.float32)
    for start in tl.range(0, num_live, TILE, num_stages=3):
        _, x = load_live(row_logits, live, start, num_live, VOCAB, GROUP, TILE)
        lowest = tl.minimum(lowest, tl.where(x >= bar, x, float("inf")))
    ceiling = tl.min(lowest)
    for start in tl.range(0, num_live, TILE, num_stages=3):
        number, x = load_live(row_logits, live, start, num_live, VOCAB, GROUP, TILE)
        exists = start + tl.arange(0, TILE) < num_live
        is_kept = (x >= threshold) & (x <= ceiling)
        peak = tl.max(tl.where(is_kept, x, float("-inf")), axis=1)
        base = tl.where(peak > float("-inf"), peak, 0.0)
        weights = tl.where(is_kept, tl.exp2((x - base[:, None]) * scale), 0.0)
        tl.store(maxima + number, peak, mask=exists)
        tl.store(sums + number, tl.sum(weights, axis=1), mask=exists)


@triton.jit
def uniform(seed, counter, stream):
    """As `quire.worker.sampler.uniform`: a double in [0, 1) for each (seed, counter, stream) of int64."""
    bits, _, _, _ = tl.philox(
        seed,
        (counter & 0xFFFFFFFF).to(tl.uint32),
        ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32),
        (stream & 0xFFFFFFFF).to(tl.uint32),
        ((stream >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )
    return bits.to(tl.float64) * (1.0 / 4294967296.0)
