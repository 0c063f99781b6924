# ruff: noqa: N803
"""Which tokens the scalar filters leave: the second of three launches of a draw, for steps that have filtered rows.

A row's filters apply in this order, after its temperature: min-p, which sets a floor under the logits; top-k and top-p
(`threshold_search.py`). Together they leave one threshold a row. The sums of weights of groups that the first launch
measured (`sampling.py`) are rewritten as if the excluded logits were not there.

One program a row, no atomics, and every sum in a fixed order: what is left does not depend on the rows beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.threshold_search import LOG2E, LOWEST, find_threshold, list_live, load_live
from quire.messages.sampling import COLUMN, SCALARS

if TYPE_CHECKING:
    from quire.kernels.triton.sampling import Columns, Workspace

GREEDY_BELOW = tl.constexpr(1e-5)
"""Rows colder than this take the best token (`SamplingParams.is_greedy`)."""
# Columns of the scalar sampling parameters.
NUM_SCALARS = tl.constexpr(len(SCALARS))
TEMPERATURE = tl.constexpr(COLUMN["temperature"])
TOP_K = tl.constexpr(COLUMN["top_k"])
TOP_P = tl.constexpr(COLUMN["top_p"])
MIN_P = tl.constexpr(COLUMN["min_p"])


def filter_groups(logits: torch.Tensor, rows: torch.Tensor, columns: Columns, workspace: Workspace) -> None:
    """Write each draw's threshold (-inf: nothing excluded) and take what is excluded out of its groups' sums.

    logits [S, vocab] any row stride; rows [S] the batch row of each. workspace.maxima and .sums are as
    `sampling.draw_and_commit` measured them; .live and .spans are scratch, left dirty.

    Bytes a row: 10 a group, and the logits of the groups that reach the cut three times (16 KB each time in bfloat16).
    A row without filters reads its parameters and writes its threshold.
    """
    groups = workspace.maxima.shape[1]
    # 128 registers: two programs fit on a multiprocessor, so that 256 rows take one round of an H200.
    _filter_kernel[(len(rows),)](
        logits, logits.stride(0), rows, columns.scalars,
        workspace.maxima, workspace.sums, workspace.thresholds, workspace.live, workspace.spans,
        columns.scalars.shape[0] - 1,
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
    logits, row_stride, rows, scalars, maxima, sums, thresholds, live, spans, padding_row,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    ROOM: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a draw. Operations: about 10 a logit tallied, and 4 a logit noted for each bit of the threshold."""
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
    filtered = (k < VOCAB) | (top_p < 1.0) | (min_p > 0.0)
    threshold = float("-inf")
    if filtered & (temperature >= GREEDY_BELOW) & (row != padding_row):
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
            bottom = LOWEST
            if min_p > 0.0:
                bottom = tl.maximum(best + temperature * tl.log(min_p), LOWEST)
            threshold = find_threshold(
                row_logits, peaks, best, mass, k, top_p, bottom, temperature, live, spans + draw * ROOM,
                VOCAB, GROUP, GROUPS, TILE, ROOM, SHIFT,
            )  # fmt: skip
            tl.store(sums + group, tl.zeros([WIDTH], tl.float32), mask=(group < GROUPS) & (peaks < threshold))
            _sum_kept(row_logits, maxima, sums, peaks, threshold, scale, live, VOCAB, GROUP, TILE)
    tl.store(thresholds + draw, threshold)


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
