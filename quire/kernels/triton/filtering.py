# ruff: noqa: N803, N806
"""Which tokens min-p, top-k and top-p leave: one threshold a row, found without sorting.

A row is cut into groups of 128 neighbouring tokens, and the pass that every draw begins with has left each group's
largest logit and sum of weights (`sampling.py`). Those maxima are an index: a group whose maximum is below a cut holds
nothing above it, and the k-th largest maximum is a lower bound on the k-th largest logit. So one program a row

1. picks a cut from the maxima alone, such that a few dozen groups reach it;
2. copies what those groups have above the cut (a few hundred logits) side by side;
3. bisects the threshold among them, over the ordered bits of a float, which ends at an exact value of a logit;
4. rewrites the groups' sums of weights as if what is below the threshold were not there.

Where the cut was too high (a wide nucleus) the search goes on below it; where more lies above it than fits, between the
two. Those rows read the whole row a few times; the others read about a twentieth of it.

No atomics, and every sum in a fixed order: a row's threshold does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl

LOG2E = tl.constexpr(1.4426950408889634)
GREEDY_BELOW = tl.constexpr(1e-5)
"""Rows colder than this take the best token (`SamplingParams.is_greedy`)."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32: a threshold that excludes only -inf."""
FAR = tl.constexpr(64.0)
"""Nats below the maximum where no mass is left: past them the search goes by bits, not by value."""


def filter_groups(
    logits: torch.Tensor,
    rows: torch.Tensor,
    top_k: torch.Tensor,
    floats: torch.Tensor,
    maxima: torch.Tensor,
    sums: torch.Tensor,
    thresholds: torch.Tensor,
    live: torch.Tensor,
    candidates: torch.Tensor,
    group: int,
    tile: int,
) -> None:
    """Write each draw's threshold (-inf: nothing excluded) and take what is below it out of its groups' sums.

    logits     [S, vocab] any row stride; rows [S] the batch row of each, whose parameters are
    top_k      [rows] int64 and floats [rows, 6] float32 (temperature, top_p, min_p, ...)
    maxima, sums [S, groups] float32: as `sampling.draw_and_commit` measured them; sums are rewritten
    thresholds [S] float32: out
    live, candidates [S, groups] int32 and [S, capacity] float32: scratch, left dirty

    Bytes a row: 10 bytes a group, and the groups that reach the cut twice (32 KB each time in bfloat16). A row without
    filters reads its parameters and writes its threshold.
    """
    vocab = logits.shape[1]
    groups = triton.cdiv(vocab, group)
    _filter_kernel[(len(rows),)](
        logits, logits.stride(0), rows, top_k, floats, floats.stride(0), maxima, sums, maxima.stride(0), thresholds,
        live, live.stride(0), candidates, floats.shape[0] - 1,
        VOCAB=vocab, GROUP=group, GROUPS=groups, WIDTH=triton.next_power_of_2(groups), TILE=tile,
        CAPACITY=candidates.shape[1], SHIFT=_unused_bits(logits.dtype), num_warps=8, **pdl(),
    )  # fmt: skip


def _unused_bits(dtype: torch.dtype) -> int:
    """Low bits that are always zero when a number of this type is written as a float32: not worth bisecting."""
    return {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[dtype]


@triton.jit(do_not_specialize=["float_stride", "padding_row"])
def _filter_kernel(
    logits, row_stride, rows, top_k, floats, float_stride, maxima, sums, group_stride, thresholds,
    live, live_stride, candidates, padding_row,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    CAPACITY: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a draw. Operations: ~10 a logit read, and ~3 a candidate for each bit of the threshold."""
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
        maxima += draw * group_stride
        sums += draw * group_stride
        group = tl.arange(0, WIDTH)
        peaks = tl.load(maxima + group, mask=group < GROUPS, other=float("-inf"))
        best = tl.max(peaks)
        scale = LOG2E / temperature
        masses = tl.load(sums + group, mask=group < GROUPS, other=0.0) * tl.exp2((peaks - best) * scale)
        mass = tl.sum(masses)
        # Rows with NaN, +inf or nothing finite are left to the draw, which reports them.
        if (best > float("-inf")) & (best < float("inf")) & (mass == mass):
            row_logits = logits + draw * row_stride
            live += draw * live_stride
            threshold = _threshold(
                row_logits, peaks, best, mass, k, top_p, min_p, temperature, live, candidates + draw * CAPACITY,
                VOCAB, GROUP, GROUPS, TILE, CAPACITY, SHIFT,
            )  # fmt: skip
            tl.store(sums + group, tl.zeros([WIDTH], tl.float32), mask=(group < GROUPS) & (peaks < threshold))
            _sum_kept(row_logits, maxima, sums, peaks, threshold, scale, live, VOCAB, GROUP, TILE)
    tl.store(thresholds + draw, threshold)


@triton.jit
def _threshold(
    row_logits, peaks, best, mass, k, top_p, min_p, temperature, live, candidates,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The lowest logit kept.

    A value is kept if fewer than k logits, and less than top_p of the mass, are above it: so for any pivot the logits
    from it on tell on which side of it the threshold is. The search holds the logits of [low, high) as candidates and
    knows how many (`over`), and how much mass (`mass_over`), are above those.
    """
    scale = LOG2E / temperature
    bottom = LOWEST
    if min_p > 0.0:
        bottom = tl.maximum(best + temperature * tl.log(min_p), LOWEST)
    # With min-p, its floor is the cut: what it leaves is usually little, and top-p needs to know its mass.
    low = bottom
    if min_p <= 0.0:
        fewest = tl.where(k <= 512, tl.maximum(k, 16), 64)
        low = _cut(peaks, best, temperature, bottom, fewest, 2 * fewest, SHIFT)
    high = _value(_key(best, SHIFT) + 1, SHIFT)
    over, mass_over, count, mass_in = 0, 0.0, 0, 0.0
    stale = 1

    threshold = bottom
    for stage in range(2):  # top-k, then top-p among the rest
        if ((stage == 0) & (k < VOCAB)) | ((stage == 1) & (top_p < 1.0)):
            count_goal = tl.where(stage == 0, k, VOCAB + 1)
            mass_goal = float("inf")
            # The threshold is at least `floor`: known in the second stage, in the first once a pass has been there.
            floor = _key(threshold, SHIFT)
            proven = stage
            passes = 0
            fits = 0
            all_kept = 0
            searching = 1
            while searching == 1:
                if stale == 1:
                    count, mass_in = _collect(
                        row_logits, peaks, low, high, best, scale, live, candidates, VOCAB, GROUP, TILE, CAPACITY
                    )  # fmt: skip
                    stale = 0
                    if (k >= VOCAB) & (over == 0) & (low <= bottom):
                        mass = mass_in
                if stage == 1:
                    mass_goal = top_p * mass
                reached = (over + count >= count_goal) | (mass_over + mass_in >= mass_goal)
                passed = (over >= count_goal) | (mass_over >= mass_goal)
                fits = (reached & (passed == 0) & (count <= CAPACITY)).to(tl.int32)
                all_kept = ((reached == 0) & (low <= bottom)).to(tl.int32)
                searching = 1 - (fits | all_kept)
                if searching == 1:
                    if passed:  # what top-k left behind is of no use: start again from the top
                        floor = tl.maximum(floor, _key(high, SHIFT))
                        high = _value(_key(best, SHIFT) + 1, SHIFT)
                        over, mass_over = 0, 0.0
                        proven = 1
                    elif reached:
                        floor = tl.maximum(floor, _key(low, SHIFT))
                        proven = 1
                    else:
                        high = low
                        over += count
                        mass_over += mass_in
                    if stage == 1:
                        # All that lies below this cannot make up the share of the mass that top-p cuts off.
                        hopeless = best + temperature * (tl.log((1.0 - top_p) * mass / VOCAB) - 0.1)
                        floor = tl.maximum(floor, _key(hopeless, SHIFT))
                    ceiling = _key(high, SHIFT)
                    if ceiling - floor <= 1:  # one value left: more logits equal it than there is room for
                        searching = 0
                    else:
                        low = _pivot(peaks, best, temperature, floor, ceiling, passes, GROUPS, SHIFT)
                        if (passes == 1) & (proven == 0):
                            low = bottom
                        low = tl.maximum(low, bottom)
                        passes += 1
                        stale = 1

            above, mass_above = over, mass_over
            if fits == 1:
                index = tl.arange(0, CAPACITY)
                values = tl.load(candidates + index, mask=index < count, other=float("-inf"))
                weights = tl.exp2((values - best) * scale)
                floor = _key(low, SHIFT)
                ceiling = _key(high, SHIFT)
                while ceiling - floor > 1:
                    middle = (floor + ceiling) >> 1
                    kept = values >= _value(middle, SHIFT)
                    above = over + tl.sum(kept.to(tl.int32))
                    mass_above = mass_over + tl.sum(tl.where(kept, weights, 0.0))
                    if (above >= count_goal) | (mass_above >= mass_goal):
                        floor = middle
                    else:
                        ceiling = middle
                kept = values > _value(floor, SHIFT)
                above = over + tl.sum(kept.to(tl.int32))
                mass_above = mass_over + tl.sum(tl.where(kept, weights, 0.0))
            if all_kept == 1:
                floor = _key(bottom, SHIFT)
                mass = mass_over + mass_in
            else:
                # What top-p takes its share of: exactly k logits, however many equal the last of them.
                mass = mass_above + (k - above).to(tl.float32) * tl.exp2((_value(floor, SHIFT) - best) * scale)
            threshold = tl.maximum(_value(floor, SHIFT), bottom)
    return threshold


@triton.jit
def _cut(peaks, best, temperature, bottom, fewest, most, SHIFT: tl.constexpr):
    """A value that at least `fewest` and at most `most` groups reach, if there is one to be found quickly."""
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
        cut = tl.maximum(_value(_key(cut, SHIFT), SHIFT), bottom)
    return cut


@triton.jit
def _pivot(peaks, best, temperature, floor, ceiling, passes, GROUPS: tl.constexpr, SHIFT: tl.constexpr):
    """Where to look next, strictly between two keys."""
    left, right = _value(floor, SHIFT), _value(ceiling, SHIFT)
    pivot = _key(0.5 * (left + right), SHIFT)
    if (passes > 24) | (right - left > FAR * temperature):
        pivot = (floor + ceiling) >> 1
    if passes == 0:
        # Most groups reach this: about three logits a group are above it, if likely tokens are spread evenly.
        guess = _key(_cut(peaks, best, temperature, left, GROUPS * 9 // 10, GROUPS * 97 // 100, SHIFT), SHIFT)
        pivot = tl.where((guess > floor) & (guess < ceiling), guess, pivot)
    return _value(tl.minimum(tl.maximum(pivot, floor + 1), ceiling - 1), SHIFT)


@triton.jit
def _collect(
    row_logits, peaks, low, high, best, scale, live, candidates,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Copy the logits in [low, high) to `candidates` in the order of the vocabulary, as many as fit.

    Returns how many there are, and their mass relative to the best.
    """
    num_live = _list_live(peaks, low, live)
    count = 0
    masses = tl.zeros([TILE, GROUP], tl.float32)
    for start in range(0, num_live, TILE):
        _, x = _load_live(row_logits, live, start, num_live, VOCAB, GROUP, TILE)
        inside = (x >= low) & (x < high)
        rank = tl.cumsum(inside.to(tl.int32), axis=1)
        sizes = tl.sum(inside.to(tl.int32), axis=1)
        begins = count + tl.cumsum(sizes, axis=0) - sizes
        place = begins[:, None] + rank - 1
        tl.store(candidates + place, x, mask=inside & (place < CAPACITY))
        masses += tl.where(inside, tl.exp2((x - best) * scale), 0.0)
        count += tl.sum(sizes)
    tl.debug_barrier()  # the candidates are read by other threads than wrote them
    return count, tl.sum(masses)


@triton.jit
def _sum_kept(
    row_logits, maxima, sums, peaks, threshold, scale, live,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum the weights of what is kept, anew for each group that keeps something."""
    num_live = _list_live(peaks, threshold, live)
    for start in range(0, num_live, TILE):
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
    token = tl.max_contiguous(token, [1, 1])
    exists = (place < num_live)[:, None] & (token < VOCAB)
    return group, tl.load(row_logits + token, mask=exists, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """A float's place among all floats: integers in the same order, one apart where the logits' type has no other."""
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float at that place."""
    bits = key << SHIFT
    bits = tl.where(key < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)
