# ruff: noqa: N803, N806
"""min-p, top-k and top-p: one logit threshold a row, found without sorting.

A row is divided into groups of 128 adjacent tokens, and the first pass of every draw has written each group's largest
logit and sum of weights (`sampling.py`). Those maxima are an index: a group whose maximum is below a value contains
nothing above it, and the k-th largest maximum is a lower bound on the k-th largest logit. So one program a row

1. picks a cut from the maxima alone, such that a few dozen groups reach it;
2. counts the logits, and their mass, that those groups have above the cut. If the threshold is below it (a wide
   nucleus) or too many logits are above, it continues with other pivots;
3. once at most 512 logits are between two pivots, records their positions, and bisects the threshold among them over
   the ordered bits of a float, which ends at the exact value of a logit;
4. recomputes the groups' sums of weights without the logits below the threshold.

Most rows read a twentieth of their logits, three times; rows with wide nuclei read all of them, a few times.

No atomics, and every sum in a fixed order: a row's threshold does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl

LOG2E = tl.constexpr(1.4426950408889634)
GREEDY_BELOW = tl.constexpr(1e-5)
"""Temperatures below this are greedy (`SamplingParams.is_greedy`)."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32: a threshold that excludes only -inf."""
FAR = tl.constexpr(64.0)
"""Nats below the maximum at which no mass is left: wider brackets are split by bits, not by value."""
SPAN = tl.constexpr(8)
"""Adjacent tokens that are recorded as one: 16 bytes of bfloat16, which a thread loads at once."""


def filter_groups(
    logits: torch.Tensor,
    rows: torch.Tensor,
    top_k: torch.Tensor,
    floats: torch.Tensor,
    maxima: torch.Tensor,
    sums: torch.Tensor,
    thresholds: torch.Tensor,
    live: torch.Tensor,
    spans: torch.Tensor,
    group: int,
    tile: int,
) -> None:
    """Write each draw's threshold (-inf: nothing excluded) and remove what is below it from its groups' sums.

    logits     [S, vocab] any row stride; rows [S] the batch row of each, whose parameters are
    top_k      [rows] int64 and floats [rows, 6] float32 (temperature, top_p, min_p, ...)
    maxima, sums [S, groups] float32: as `sampling.draw_and_commit` measured them; sums are rewritten
    thresholds [S] float32: out
    live, spans [S, groups] and [S, room] int32: scratch, left dirty

    Bytes a row: 10 a group, and the logits of the groups that reach the cut three times (16 KB each time in bfloat16).
    A row without filters reads its parameters and writes its threshold.
    """
    groups = maxima.shape[1]
    # 128 registers: two programs fit on a multiprocessor, so that 256 rows take one round of an H200.
    _filter_kernel[(len(rows),)](
        logits, logits.stride(0), rows, top_k, floats, floats.stride(0), maxima, sums, thresholds, live, spans,
        floats.shape[0] - 1,
        VOCAB=logits.shape[1], GROUP=group, GROUPS=groups, WIDTH=triton.next_power_of_2(groups), TILE=tile,
        ROOM=spans.shape[1], SHIFT=_unused_bits(logits.dtype), num_warps=8, maxnreg=128, **pdl(),
    )  # fmt: skip


def _unused_bits(dtype: torch.dtype) -> int:
    """Low bits that are always zero in a number of this type as a float32: they need no bisection."""
    return {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[dtype]


@triton.jit(do_not_specialize=["float_stride", "padding_row"])
def _filter_kernel(
    logits, row_stride, rows, top_k, floats, float_stride, maxima, sums, thresholds, live, spans, padding_row,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    ROOM: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a draw. Operations: about 10 a logit counted, and 4 a recorded logit and bit of the threshold."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    draw = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + draw).to(tl.int64)
    temperature = tl.load(floats + row * float_stride)
    top_p = tl.load(floats + row * float_stride + 1)
    min_p = tl.load(floats + row * float_stride + 2)
    k = tl.minimum(tl.load(top_k + row), VOCAB).to(tl.int32)
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
        # Rows with NaN, +inf or nothing finite are reported by the draw kernel.
        if (best > float("-inf")) & (best < float("inf")) & (mass == mass):
            row_logits = logits + draw * row_stride
            live += draw * GROUPS
            threshold = _threshold(
                row_logits, peaks, best, mass, k, top_p, min_p, temperature, live, spans + draw * ROOM,
                VOCAB, GROUP, GROUPS, TILE, ROOM, SHIFT,
            )  # fmt: skip
            tl.store(sums + group, tl.zeros([WIDTH], tl.float32), mask=(group < GROUPS) & (peaks < threshold))
            _sum_kept(row_logits, maxima, sums, peaks, threshold, scale, live, VOCAB, GROUP, TILE)
    tl.store(thresholds + draw, threshold)


@triton.jit
def _threshold(
    row_logits, peaks, best, mass, k, top_p, min_p, temperature, live, spans,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The lowest logit kept.

    A value is kept if fewer than k logits, and less than top_p of the mass, are above it. So the number of logits from
    a pivot on, and their mass, tell on which side of it the threshold is. `left` and `right` are keys of floats with
    left <= threshold < right; `left_count`, `left_mass` and so on are what lies from there on (counts as floats too:
    they are exact).
    """
    scale = LOG2E / temperature
    bottom = LOWEST
    if min_p > 0.0:
        bottom = tl.maximum(best + temperature * tl.log(min_p), LOWEST)
    top = _key(best, SHIFT) + 1
    left, right = _key(bottom, SHIFT), top
    left_count, left_mass, right_count, right_mass = VOCAB * 1.0, mass, 0.0, 0.0
    threshold = bottom
    passes = 0
    noted = 0
    for stage in range(2):  # top-k, then top-p among the rest
        if ((stage == 0) & (k < VOCAB)) | ((stage == 1) & (top_p < 1.0)):
            if (stage == 1) & (right_mass >= top_p * mass):  # top-k went below it: start again from the top
                right, right_count, right_mass = top, 0.0, 0.0
                noted = 0
            if (stage == 1) & (noted == 0):
                # All logits below this value cannot add up to the mass that top-p excludes.
                hopeless = best + temperature * (tl.log((1.0 - top_p) * mass / VOCAB) - 0.1)
                left = tl.minimum(tl.maximum(left, _key(hopeless, SHIFT)), right - 1)
            left, left_count, left_mass, right, right_count, right_mass, mass, passes = _close_in(
                row_logits, peaks, best, mass, k, top_p, min_p, temperature, bottom, live, stage, passes,
                left, left_count, left_mass, right, right_count, right_mass, VOCAB, GROUP, GROUPS, TILE, ROOM, SHIFT,
            )  # fmt: skip
            kept_count, kept_mass, floor = left_count, left_mass, left
            worth = tl.where(stage == 0, left_count, left_mass)
            goal = tl.where(stage == 0, k.to(tl.float32), top_p * mass)
            # Otherwise a single value is left, or even the bottom keeps less than the goal.
            if (right - left > 1) & (worth >= goal):
                low, high = tl.maximum(_value(left, SHIFT), bottom), _value(right, SHIFT)
                if noted == 0:
                    _note_spans(row_logits, peaks, low, high, live, spans, VOCAB, GROUP, TILE, ROOM)
                    noted = 1
                values = _load_spans(row_logits, spans, low, high, VOCAB, ROOM)
                weights = tl.exp2((values - best) * scale)
                floor = _bisect(
                    values, tl.where(stage == 0, 1.0, weights), tl.maximum(left, _key(threshold, SHIFT)), right,
                    goal - tl.where(stage == 0, right_count, right_mass), SHIFT,
                )  # fmt: skip
                kept = values >= _value(floor, SHIFT)
                kept_count = right_count + tl.sum(kept.to(tl.float32))
                kept_mass = right_mass + tl.sum(tl.where(kept, weights, 0.0))
            threshold = tl.maximum(_value(floor, SHIFT), bottom)
            # The mass that top-p is a share of: at most k logits, even if more equal the last of them.
            excess = tl.maximum(kept_count - k, 0.0)
            mass = kept_mass - excess * tl.exp2((threshold - best) * scale)
    return threshold


@triton.jit
def _close_in(
    row_logits, peaks, best, mass, k, top_p, min_p, temperature, bottom, live, stage, passes,
    left, left_count, left_mass, right, right_count, right_mass,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Count at pivots between `left` and `right` until at most ROOM logits are in between, or a single value."""
    searching = (passes == 0) | ((left_count - right_count > ROOM) & (right - left > 1))
    while searching:
        goal = tl.where(stage == 0, k.to(tl.float32), top_p * mass)
        left_worth = tl.where(stage == 0, left_count, left_mass)
        right_worth = tl.where(stage == 0, right_count, right_mass)
        # Interpolates the goal as if the logarithm of the mass above were linear, as it is in the tails.
        base = tl.maximum(right_worth, 1e-3 * goal)
        share = tl.log(goal / base) / tl.maximum(tl.log(left_worth / base), 1e-6)
        low, high = _pivots(peaks, best, temperature, bottom, k, left, right, share, passes, GROUPS, SHIFT)
        if (passes == 0) & (min_p > 0.0):  # it usually leaves few logits, and top-p needs their mass
            low = bottom
            high = bottom
        low_count, low_mass, high_count, high_mass = _tally(
            row_logits, peaks, low, high, best, LOG2E / temperature, live, VOCAB, GROUP, TILE
        )
        passes += 1
        if (low <= bottom) & (k >= VOCAB):
            mass = low_mass
            goal = top_p * mass
        all_kept = False
        if tl.where(stage == 0, high_count, high_mass) >= goal:
            left, left_count, left_mass = _key(high, SHIFT), high_count, high_mass
        elif tl.where(stage == 0, low_count, low_mass) >= goal:
            left, left_count, left_mass = _key(low, SHIFT), low_count, low_mass
            right, right_count, right_mass = _key(high, SHIFT), high_count, high_mass
        elif low <= bottom:
            left, left_count, left_mass = _key(bottom, SHIFT), low_count, low_mass
            all_kept = True
        else:
            right, right_count, right_mass = _key(low, SHIFT), low_count, low_mass
        searching = (left_count - right_count > ROOM) & (right - left > 1) & (all_kept == 0)
    return left, left_count, left_mass, right, right_count, right_mass, mass, passes


@triton.jit
def _bisect(values, worths, left, right, goal, SHIFT: tl.constexpr):
    """The highest key in [left, right) such that the values from it on sum to `goal`; `left` if there is none."""
    while right - left > 1:
        middle = (left + right) >> 1
        if tl.sum(tl.where(values >= _value(middle, SHIFT), worths, 0.0)) >= goal:
            left = middle
        else:
            right = middle
    return left


@triton.jit
def _pivots(
    peaks, best, temperature, bottom, k, left, right, share, passes, GROUPS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Two values to count at, strictly between `left` and `right` or the bottom; the first is at most the second."""
    left_value, right_value = _value(left, SHIFT), _value(right, SHIFT)
    width = right_value - left_value
    if passes > 10:
        # Thirds of the representable floats: slow where values are spread evenly, but it always terminates.
        low, high = left + (right - left) // 3, right - (right - left) // 3
    elif width > FAR * temperature:
        # A left end like the lowest float carries no information: go down by the distance from the best, and more.
        step = best - right_value + temperature
        low, high = _key(right_value - 2.0 * step, SHIFT), _key(right_value - 0.5 * step, SHIFT)
    elif passes % 2 == 0:
        low, high = _key(left_value + 0.33 * width, SHIFT), _key(left_value + 0.67 * width, SHIFT)
    else:
        guess = right_value - share * width
        low, high = _key(guess - 0.06 * width, SHIFT), _key(guess + 0.06 * width, SHIFT)
    to_bottom = passes == 6  # possibly nothing is excluded
    if passes < 2:
        # As many groups as tokens wanted, or a few dozen; then a third of all groups.
        fewest = tl.where(k <= 512, tl.maximum(k, 16), 32)
        fewest = tl.where(passes == 0, fewest, GROUPS // 4)
        most = tl.where(passes == 0, 2 * fewest, GROUPS * 2 // 5)
        cut = _cut(peaks, best, temperature, bottom, fewest, most)
        to_bottom = cut <= bottom
        if (_key(cut, SHIFT) > left) & (_key(cut, SHIFT) < right):
            low = _key(cut, SHIFT)
            high = low
    to_bottom &= left == _key(bottom, SHIFT)
    low_value = _value(tl.minimum(tl.maximum(low, left + 1), right - 1), SHIFT)
    high_value = _value(tl.minimum(tl.maximum(high, left + 1), right - 1), SHIFT)
    return tl.where(to_bottom, bottom, low_value), tl.where(to_bottom, bottom, high_value)


@triton.jit
def _cut(peaks, best, temperature, bottom, fewest, most):
    """A value that at least `fewest` and at most `most` groups reach, if one is found in 16 tries."""
    cut = bottom
    if tl.sum((peaks >= bottom).to(tl.int32)) > most:
        low = tl.maximum(best - FAR * temperature, bottom)
        cut = best
        tries = 0
        while tries < 16:
            middle = 0.5 * (low + cut)
            reach = tl.sum((peaks >= middle).to(tl.int32))
            tries += 1
            if reach > most:
                low = middle
            else:
                cut = middle
                if reach >= fewest:
                    tries = 16
    return cut


@triton.jit
def _tally(
    row_logits, peaks, low, high, best, scale, live, VOCAB: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """How many logits are at least `low`, and their mass relative to the best; and the same for `high` >= `low`."""
    num_live = _list_live(peaks, low, live)
    counts = tl.zeros([TILE, GROUP], tl.int32)  # of both: the upper halves count those from `high` on
    low_masses = tl.zeros([TILE, GROUP], tl.float32)
    high_masses = tl.zeros([TILE, GROUP], tl.float32)
    for start in tl.range(0, num_live, TILE, num_stages=3):
        _, x = _load_live(row_logits, live, start, num_live, VOCAB, GROUP, TILE)
        weights = tl.exp2((x - best) * scale)
        counts += tl.where(x >= high, 0x10001, tl.where(x >= low, 1, 0))
        low_masses += tl.where(x >= low, weights, 0.0)
        high_masses += tl.where(x >= high, weights, 0.0)
    low_count = tl.sum(counts & 0xFFFF).to(tl.float32)
    high_count = tl.sum(counts >> 16).to(tl.float32)
    return low_count, tl.sum(low_masses), high_count, tl.sum(high_masses)


@triton.jit
def _note_spans(
    row_logits, peaks, low, high, live, spans,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """List the spans of SPAN tokens that have a logit in [low, high), in the order of the vocabulary, by first token.

    The list ends with -1. Spans are listed and not logits because a thread reads a whole one: one place to find, by a
    prefix sum across the threads, instead of eight.
    """
    num_live = _list_live(peaks, low, live)
    IN_GROUP: tl.constexpr = GROUP // SPAN
    span = tl.arange(0, TILE * IN_GROUP)
    count = 0
    for start in tl.range(0, num_live, TILE, num_stages=3):
        place = start + span // IN_GROUP
        group = tl.load(live + place, mask=place < num_live, other=0)
        first = group * GROUP + span % IN_GROUP * SPAN
        token = first[:, None] + tl.arange(0, SPAN)[None, :]
        exists = (place < num_live)[:, None] & (token < VOCAB)
        x = tl.load(row_logits + token, mask=exists, other=float("-inf")).to(tl.float32)
        hit = tl.max(((x >= low) & (x < high)).to(tl.int32), axis=1)
        order = count + tl.cumsum(hit, axis=0) - 1
        tl.store(spans + order, first, mask=(hit == 1) & (order < ROOM))
        count += tl.sum(hit)
    if count < ROOM:
        tl.store(spans + count, -1)
    tl.debug_barrier()  # other threads read the list than wrote it


@triton.jit
def _load_spans(row_logits, spans, low, high, VOCAB: tl.constexpr, ROOM: tl.constexpr):
    """The logits in [low, high) of the spans listed [ROOM, SPAN], -inf in place of others."""
    first = tl.load(spans + tl.arange(0, ROOM))
    is_end = tl.min(tl.where(first < 0, tl.arange(0, ROOM), ROOM))
    token = first[:, None] + tl.arange(0, SPAN)[None, :]
    exists = (tl.arange(0, ROOM) < is_end)[:, None] & (token < VOCAB)
    x = tl.load(row_logits + token, mask=exists, other=float("-inf")).to(tl.float32)
    return tl.where((x >= low) & (x < high), x, float("-inf"))


@triton.jit
def _sum_kept(
    row_logits, maxima, sums, peaks, threshold, scale, live,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum the weights of what is kept, anew for each group that keeps something."""
    num_live = _list_live(peaks, threshold, live)
    for start in tl.range(0, num_live, TILE, num_stages=3):
        group, x = _load_live(row_logits, live, start, num_live, VOCAB, GROUP, TILE)
        exists = start + tl.arange(0, TILE) < num_live
        peak = tl.load(maxima + group, mask=exists, other=0.0)
        weights = tl.where(x >= threshold, tl.exp2((x - peak[:, None]) * scale), 0.0)
        tl.store(sums + group, tl.sum(weights, axis=1), mask=exists)


@triton.jit
def _list_live(peaks, low, live):
    """Write the numbers of the groups that reach `low` to `live`, in order; returns how many."""
    reaches = (peaks >= low).to(tl.int32)
    tl.debug_barrier()  # others may still be reading the list before this one
    tl.store(live + tl.cumsum(reaches, axis=0) - 1, tl.arange(0, peaks.shape[0]), mask=reaches == 1)
    tl.debug_barrier()
    return tl.sum(reaches)


@triton.jit
def _load_live(row_logits, live, start, num_live, VOCAB: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """TILE listed groups from the start-th on: their numbers and logits [TILE, GROUP]."""
    place = start + tl.arange(0, TILE)
    group = tl.load(live + place, mask=place < num_live, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = (place < num_live)[:, None] & (token < VOCAB)
    return group, tl.load(row_logits + token, mask=exists, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """A float's place among all floats, counted from zero in steps of the logits' type; in between, the one below."""
    magnitude = tl.abs(x).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(x < 0.0, -magnitude, magnitude) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float at that place."""
    magnitude = (tl.abs(key) << SHIFT).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -magnitude, magnitude)
