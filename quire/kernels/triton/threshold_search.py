# ruff: noqa: N803, N806
"""The lowest logit that top-k and top-p keep, found without sorting.

A row is cut into groups of 128 adjacent tokens, and the pass that every draw begins with has left each group's
largest logit (`sampling.py`). Those maxima are an index: a group whose maximum is below a value holds nothing above it,
and the k-th largest maximum is a lower bound on the k-th largest logit. So the search

1. picks a cut from the maxima alone, such that a few dozen groups reach it;
2. tallies how many logits, and how much mass, those groups have above the cut. If the threshold is below it (a wide
   nucleus) or too much is left above, it continues with other pivots;
3. once at most 512 logits are between two pivots, lists where they are, and bisects the threshold among them
   over the ordered bits of a float, which ends at an exact value of a logit.

Most rows read a twentieth of their logits, three times; those with wide nuclei all of them, a few times.

No atomics, and every sum in a fixed order: a row's threshold does not depend on other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32: a threshold that excludes only -inf."""
FAR = tl.constexpr(64.0)
"""Nats below the maximum where no mass is left: brackets wider than this are split by bits, not by value."""
SPAN = tl.constexpr(8)
"""Adjacent tokens that are listed as one: 16 bytes of bfloat16, which a thread reads at once."""


@triton.jit
def find_threshold(
    row_logits, peaks, best, mass, k, top_p, bottom, temperature, live, spans,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The lowest logit that top-k, then top-p among the rest, keep of those from `bottom` on (LOWEST: all).

    A value is kept if fewer than k logits, and less than top_p of the mass, are above it. So the number of logits at or
    above a pivot, and their mass, show on which side of it the threshold is. `left` and `right` are keys of floats with
    left <= threshold < right; `left_count`, `left_mass` and so on cover the logits at or above them (counts are floats
    too: they are exact).
    """
    scale = LOG2E / temperature
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
                # All logits below this together have less mass than top-p cuts off.
                hopeless = best + temperature * (tl.log((1.0 - top_p) * mass / VOCAB) - 0.1)
                left = tl.minimum(tl.maximum(left, _key(hopeless, SHIFT)), right - 1)
            left, left_count, left_mass, right, right_count, right_mass, mass, passes = _close_in(
                row_logits, peaks, best, mass, k, top_p, temperature, bottom, live, stage, passes,
                left, left_count, left_mass, right, right_count, right_mass, VOCAB, GROUP, GROUPS, TILE, ROOM, SHIFT,
            )  # fmt: skip
            kept_count, kept_mass, floor = left_count, left_mass, left
            worth = tl.where(stage == 0, left_count, left_mass)
            goal = tl.where(stage == 0, k.to(tl.float32), top_p * mass)
            # Otherwise a single value is left, or even the bottom keeps less than it may.
            if (right - left > 1) & (worth >= goal):
                low, high = tl.maximum(_value(left, SHIFT), bottom), _value(right, SHIFT)
                if noted == 0:
                    _list_spans(row_logits, peaks, low, high, live, spans, VOCAB, GROUP, TILE, ROOM)
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
            # The mass that top-p is a share of: no more than k logits, however many equal the last of them.
            excess = tl.maximum(kept_count - k, 0.0)
            mass = kept_mass - excess * tl.exp2((threshold - best) * scale)
    return threshold


@triton.jit
def _close_in(
    row_logits, peaks, best, mass, k, top_p, temperature, bottom, live, stage, passes,
    left, left_count, left_mass, right, right_count, right_mass,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Tally at pivots between `left` and `right` until no more than ROOM logits are in between, or a single value."""
    searching = (passes == 0) | ((left_count - right_count > ROOM) & (right - left > 1))
    while searching:
        goal = tl.where(stage == 0, k.to(tl.float32), top_p * mass)
        left_worth = tl.where(stage == 0, left_count, left_mass)
        right_worth = tl.where(stage == 0, right_count, right_mass)
        # Where the goal is if the logarithm of the mass above falls off evenly, as it does in the tails.
        base = tl.maximum(right_worth, 1e-3 * goal)
        share = tl.log(goal / base) / tl.maximum(tl.log(left_worth / base), 1e-6)
        low, high = _pivots(peaks, best, temperature, bottom, k, left, right, share, passes, GROUPS, SHIFT)
        if (passes == 0) & (bottom > LOWEST):  # it usually leaves little, and top-p needs the mass of that
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
    """The highest key in [left, right) at or above which the values are worth `goal`; `left` if there is none."""
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
    """Two values to tally at, strictly between `left` and `right` or the bottom; the first not above the second."""
    left_value, right_value = _value(left, SHIFT), _value(right, SHIFT)
    width = right_value - left_value
    if passes > 10:
        # Thirds by bit pattern: slow if values are spread evenly, but it terminates for any values.
        low, high = left + (right - left) // 3, right - (right - left) // 3
    elif width > FAR * temperature:
        # A left end like the lowest float gives no hint: go down by the distance from the best, and more.
        step = best - right_value + temperature
        low, high = _key(right_value - 2.0 * step, SHIFT), _key(right_value - 0.5 * step, SHIFT)
    elif passes % 2 == 0:
        low, high = _key(left_value + 0.33 * width, SHIFT), _key(left_value + 0.67 * width, SHIFT)
    else:
        guess = right_value - share * width
        low, high = _key(guess - 0.06 * width, SHIFT), _key(guess + 0.06 * width, SHIFT)
    to_bottom = passes == 6  # it may be that nothing is cut off
    if passes < 2:
        # As many groups as top-k keeps tokens, or a few dozen; then a third of all groups.
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
    num_live = list_live(peaks, low, live)
    counts = tl.zeros([TILE, GROUP], tl.int32)  # of both: the upper halves count those >= `high`
    low_masses = tl.zeros([TILE, GROUP], tl.float32)
    high_masses = tl.zeros([TILE, GROUP], tl.float32)
    for start in tl.range(0, num_live, TILE, num_stages=3):
        _, x = load_live(row_logits, live, start, num_live, VOCAB, GROUP, TILE)
        weights = tl.exp2((x - best) * scale)
        counts += tl.where(x >= high, 0x10001, tl.where(x >= low, 1, 0))
        low_masses += tl.where(x >= low, weights, 0.0)
        high_masses += tl.where(x >= high, weights, 0.0)
    low_count = tl.sum(counts & 0xFFFF).to(tl.float32)
    high_count = tl.sum(counts >> 16).to(tl.float32)
    return low_count, tl.sum(low_masses), high_count, tl.sum(high_masses)


@triton.jit
def _list_spans(
    row_logits, peaks, low, high, live, spans,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """List the spans of SPAN tokens that have a logit in [low, high), in the order of the vocabulary, by first token.

    The list ends with -1. Spans are listed and not logits because a thread reads a whole one: one place to find, by a
    prefix sum across the threads, instead of eight.
    """
    num_live = list_live(peaks, low, live)
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
def list_live(peaks, low, live):
    """Write the numbers of the groups that reach `low` (finite) to `live`, in order; returns how many."""
    reaches = (peaks >= low).to(tl.int32)
    tl.debug_barrier()  # other threads may still be reading the previous list
    tl.store(live + tl.cumsum(reaches, axis=0) - 1, tl.arange(0, peaks.shape[0]), mask=reaches == 1)
    tl.debug_barrier()
    return tl.sum(reaches)


@triton.jit
def load_live(row_logits, live, start, num_live, VOCAB: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """TILE listed groups, beginning with the start-th: their numbers and logits [TILE, GROUP]."""
    place = start + tl.arange(0, TILE)
    group = tl.load(live + place, mask=place < num_live, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = (place < num_live)[:, None] & (token < VOCAB)
    return group, tl.load(row_logits + token, mask=exists, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """A float's place among all floats, counted from zero in steps of the logits' type, rounded down."""
    magnitude = tl.abs(x).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(x < 0.0, -magnitude, magnitude) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float at that place."""
    magnitude = (tl.abs(key) << SHIFT).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -magnitude, magnitude)
