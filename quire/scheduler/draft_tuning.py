"""How many drafts pay: the number that maximizes expected tokens per second.

Two things are measured continuously. *Acceptance*: how often the i-th draft of a decode is right if all before it were,
by row, and over all rows for those that have shown little yet. *Step times* of decodes alone, by rows, drafts and what
the device's proposer was asked for.

A further draft of a row is worth the probability that it is accepted: the product of the acceptances up to its place.
All rows' drafts are ranked by that, and cut where expected tokens over expected time is largest. A row whose drafts are
not worth their time is asked again now and then: at intervals that double, and within a budget of time, so that drafts
that are never accepted cost a bounded share of it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.messages.plan import MAX_WIDTH

PLACES = MAX_WIDTH - 1
FIRST_GUESS = 0.6
"""Acceptance before anything is measured."""
ROW_MEMORY = 0.9
"""A row's earlier drafts count for this much less with each further one…"""
ALL_MEMORY = 0.99
"""…and those of all rows for this much less."""
PRIOR_WEIGHT, MOST_PRIOR_WEIGHT = 2.0, 50.0
"""Drafts of a row that what all rows have shown counts as, at least and at most."""
COMPARED_ROWS = 8
"""With fewer rows nobody can tell whether they differ."""
WINDOW = 9
"""Steps whose median is taken, so that one disturbed step changes nothing."""
OUTLIER = 4.0
"""A measured time is capped at this multiple of what was expected."""
DRAFT_COST = 0.03
"""Share of a step's time that one more draft for every row costs, before it is measured…"""
PROPOSAL_COST = 0.03
"""…and one more proposal."""
PRIOR_STEPS = 0.5
"""Measurements that these two count as."""
FREE_COST = 0.004
"""A proposer that takes less than this share of a step is asked in every step."""
LEAST_GAIN = 1.015
"""Drafts are verified if that is expected to be so many times as fast: less may be an error of measurement."""
PROBE_SHARE = 0.01
"""Share of all time that drafts may cost which are not expected to pay."""
PROBE_DRAFTS = 2
"""Drafts with which a row is tried again."""
FIRST_PAUSE = 16
"""Draws until a row is tried again; each time in vain doubles it…"""
LAST_PAUSE = 1024
"""…up to this."""
REFIT_STEPS = 8
"""Measurements after which prices are computed again."""
LEAST_MEASURED = 2
"""Steps of a kind after which its time is known. Those without drafts are measured first, for each size of a batch…"""
REFRESH_STEPS = 256
"""…and once more after this many others."""
OLDEST = 1024
"""A measurement that was not repeated for this many steps is forgotten: it may be wrong by now."""
SIMILAR = 4
"""A batch's size that has no times begins with prices of the nearest that is at most so many size classes away, twice
as large or half…"""
LATE_PLAIN = 32
"""…and is measured without drafts only after so many steps: numbers of rows often change sooner."""
LEAST_BASE = 0.5
"""Its steps take at least this share of what those of the other size take."""
CONTEXT_MEMORY = 0.995
"""Earlier differences between steps with other contexts count for this much less with each further one."""
LEAST_CONTEXT = 4096
"""Tokens of contexts by which steps must differ to show what a token costs."""

Floats = NDArray[np.float64]


def size_class(rows: int) -> int:
    """Numbers of rows about 20% apart have the same step times."""
    return round(4 * math.log2(rows))


class Acceptance:
    """How often the draft at each place is accepted if all before it are, by row."""

    def __init__(self, rows: int) -> None:
        self._tried = np.zeros((rows, PLACES))
        self._right = np.zeros((rows, PLACES))
        self._all_tried = np.zeros(PLACES)
        self._all_right = np.zeros(PLACES)

    def start(self, row: int) -> None:
        """The row has a new owner."""
        self._tried[row] = self._right[row] = 0.0

    def note(self, rows: NDArray[np.int64], drafts: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Each row has verified so many drafts, of which so many were accepted."""
        places = np.arange(PLACES)
        tried = places < np.minimum(drafts, accepted + 1)[:, None]
        right = places < accepted[:, None]
        self._tried[rows] = np.where(tried, ROW_MEMORY * self._tried[rows] + 1, self._tried[rows])
        self._right[rows] = np.where(tried, ROW_MEMORY * self._right[rows] + right, self._right[rows])
        count = tried.sum(0)
        forgotten = ALL_MEMORY**count
        self._all_tried = forgotten * self._all_tried + count
        self._all_right = forgotten * self._all_right + (right & tried).sum(0)

    def overall(self) -> Floats:
        """Of all rows, by place. A place that was seldom tried is taken to be like the one before."""
        rates, before = np.empty(PLACES), FIRST_GUESS
        for place in range(PLACES):
            tried, right = self._all_tried[place], self._all_right[place]
            before = rates[place] = (PRIOR_WEIGHT * before + right) / (PRIOR_WEIGHT + tried)
        return rates

    def gains(self, rows: NDArray[np.int64]) -> Floats:
        """[rows, places]: tokens that each further draft is expected to yield. Never rises along a row."""
        tried, right, overall = self._tried[rows], self._right[rows], self.overall()
        weight = self._prior_weight(tried, right, overall)
        return np.asarray(np.cumprod((weight * overall + right) / (weight + tried), axis=1), np.float64)

    def _prior_weight(self, tried: Floats, right: Floats, overall: Floats) -> Floats:
        """By place: drafts of a row that what all rows have shown counts as. The less rows differ, beyond what chance
        explains, the more: otherwise rows that were lucky would get the drafts of those that were not."""
        count = np.count_nonzero(tried, axis=0)
        noise = overall * (1 - overall)
        spread = ((right - tried * overall) ** 2 / np.maximum(tried, 1e-9)).sum(0)
        variance = np.maximum(spread - count * noise, 1e-9) / np.maximum(tried.sum(0), 1e-9)
        weight = np.clip(noise / variance, PRIOR_WEIGHT, MOST_PRIOR_WEIGHT)
        return np.where(count >= COMPARED_ROWS, weight, PRIOR_WEIGHT)


PLAIN = (0, 0)
"""A step without drafts and proposals."""


class ContextPrice:
    """Seconds that a token of the decodes' contexts adds to a step, from steps of one kind with different contexts."""

    def __init__(self) -> None:
        self._xx = self._xy = 0.0
        """Sums of squares of differences in tokens, and of their products with differences in seconds."""

    @property
    def seconds(self) -> float:
        """Of a token; 0 until differences are large enough to show."""
        return max(0.0, self._xy / (self._xx + LEAST_CONTEXT**2))

    def note(self, tokens: float, seconds: float) -> None:
        """A step with so many tokens more than others of its kind took so much longer."""
        self._xx = CONTEXT_MEMORY * self._xx + tokens * tokens
        self._xy = CONTEXT_MEMORY * self._xy + tokens * seconds


class _Seen:
    """The last times of steps of one kind."""

    def __init__(self) -> None:
        self.steps: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        """Seconds, and tokens of the contexts."""
        self.at = 0
        """Measurements of the size class up to the last of these."""

    @property
    def is_known(self) -> bool:
        """Whether there are enough: a single one may have been disturbed."""
        return len(self.steps) >= LEAST_MEASURED

    def median(self, context: int, price: float) -> float:
        """Of what they would have taken with such contexts."""
        return statistics.median_low(seconds + price * (context - own) for seconds, own in self.steps)

    def difference(self, seconds: float, context: int) -> tuple[float, float]:
        """Tokens and seconds that a step has more than the medians of these."""
        times, contexts = zip(*self.steps, strict=True)
        return context - statistics.median(contexts), seconds - statistics.median(times)


class _SizeClass:
    """Times and prices of steps of about the same number of rows, all for contexts as in the last of them."""

    def __init__(self, rows: int, context: int, context_price: ContextPrice, like: _SizeClass | None = None) -> None:
        """`like`: a class of a similar number of rows. Its prices of a token and of a proposal hold until ours are
        known."""
        self.seen: dict[tuple[int, int], _Seen] = {}
        """By quarters of drafts a row, and proposals."""
        self.rows, self.context = rows, context
        self.base = 0.0
        """Seconds of a step without drafts; 0: not known."""
        self.draft, self.proposal = DRAFT_COST, PROPOSAL_COST
        """The shares of it that a draft a row and a proposal cost."""
        self._context_price = context_price
        self._expected: dict[tuple[int, int], float] = {}
        """What was asked for since the last measurement."""
        self._count = 0
        self._is_like = like is not None and like.base > 0
        self._reach = 0
        if like is not None and like.base:
            token = like.draft * like.base / like.rows
            more = token * (rows - like.rows) + context_price.seconds * (context - like.context)
            self.base = max(LEAST_BASE * like.base, like.base + more)
            self.draft, self.proposal = token * rows / self.base, like.proposal * like.base / self.base
            self._reach = like.reach
        self._first_prices = self.draft, self.proposal

    @property
    def needs_plain(self) -> bool:
        """Whether the next step should be one without drafts."""
        # A proposer with a cache may make drafts in these, too.
        plain = [seen.at for (quarters, _), seen in self.seen.items() if not quarters and seen.is_known]
        if not plain:
            return not self._is_like or self._count >= LATE_PLAIN
        return self._count - max(plain) >= REFRESH_STEPS

    @property
    def reach(self) -> int:
        """Quarters of drafts a row to try at most: somewhat more than was measured."""
        measured = max((quarters for (quarters, _), seen in self.seen.items() if seen.is_known), default=0)
        return max(self._reach, 2 + 2 * measured)

    def note(self, key: tuple[int, int], context: int, seconds: float) -> None:
        """A step took so long."""
        if self.base:
            self.base += self._context_price.seconds * (context - self.context)
        self.context = context
        self._expected.clear()
        seen = self.seen.setdefault(key, _Seen())
        if self.base:
            expected = self.expected(key)
            if seen.is_known and abs(seconds - expected) < expected / 2:
                self._context_price.note(*seen.difference(seconds, context))
            seconds = min(seconds, OUTLIER * expected)
        self._count += 1
        self._expected.clear()
        seen.steps.append((seconds, context))
        seen.at = self._count
        if not self.base or self._count % REFIT_STEPS == 0 or len(seen.steps) == LEAST_MEASURED:
            self._fit()

    def expected(self, key: tuple[int, int]) -> float:
        """Seconds of a step: as measured, or from prices."""
        if (found := self._expected.get(key)) is None:
            if (seen := self.seen.get(key)) is not None and seen.is_known:
                found = seen.median(self.context, self._context_price.seconds)
            else:
                found = self.base * (1 + self.draft * key[0] / 4 + self.proposal * key[1])
            self._expected[key] = found
        return found

    def _fit(self) -> None:
        """Prices by least squares over times relative to a step without drafts."""
        self.seen = {key: seen for key, seen in self.seen.items() if self._count - seen.at < OLDEST or key == PLAIN}
        known = {key: seen for key, seen in self.seen.items() if seen.is_known or key == PLAIN}
        price = self._context_price.seconds
        points = {key: seen.median(self.context, price) for key, seen in known.items()}
        if PLAIN in points:
            self.base = points[PLAIN]
        elif points:
            self.base = statistics.median_low(
                seconds / (1 + self.draft * key[0] / 4 + self.proposal * key[1]) for key, seconds in points.items()
            )
        else:
            return
        xx = yy = PRIOR_STEPS
        xy, xt, yt = 0.0, PRIOR_STEPS * self._first_prices[0], PRIOR_STEPS * self._first_prices[1]
        for (quarters, proposals), seconds in points.items():
            x, y, more = quarters / 4, float(proposals), seconds / self.base - 1
            xx, yy, xy, xt, yt = xx + x * x, yy + y * y, xy + x * y, xt + x * more, yt + y * more
        split = xx * yy - xy * xy
        draft, proposal = (xt * yy - yt * xy) / split, (yt * xx - xt * xy) / split
        if draft < 0:
            draft, proposal = 0.0, yt / yy
        elif proposal < 0:
            draft, proposal = xt / xx, 0.0
        self.draft, self.proposal = max(0.0, draft), max(0.0, proposal)


class StepTimes:
    """Seconds of steps of decodes alone, by size of the batch, drafts and proposals."""

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}
        self._context_price = ContextPrice()
        self._shapes: set[tuple[int, int, int]] = set()

    def note(self, rows: int, drafts: int, proposals: int, seconds: float, context: int = 0) -> None:
        """A step took so long. `context`: tokens that its decodes attend to, all together. The first step of its kind
        is ignored: it may have been captured or compiled."""
        key, size = (int(_quarters(drafts, rows)), proposals), size_class(rows)
        if (size, *key) not in self._shapes:
            self._shapes.add((size, *key))
            return
        if size not in self._classes:
            self._classes[size] = _SizeClass(rows, context, self._context_price, self._nearest(rows, SIMILAR))
        self._classes[size].note(key, context, seconds)

    def needs_plain(self, rows: int) -> bool:
        """Whether a step of so many decodes should be one without drafts, to measure that."""
        own = self._classes.get(size_class(rows))
        return self._nearest(rows, SIMILAR) is None if own is None else own.needs_plain

    def reach(self, rows: int) -> int:
        """Drafts to try at most with so many decodes. It grows with what was measured: the first step with drafts must
        not be one that takes many times as long."""
        own = self._classes.get(size_class(rows)) or self._nearest(rows, SIMILAR)
        return max(1, (2 if own is None else own.reach) * rows // 4)

    @property
    def is_measured(self) -> bool:
        """Whether the time of any step is known."""
        return any(one.base for one in self._classes.values())

    def prices(self, rows: int) -> tuple[float, float, float]:
        """Seconds without drafts, and the shares of it that a draft a row and a proposal cost."""
        own = self._nearest(rows)
        return (1.0, DRAFT_COST, PROPOSAL_COST) if own is None else (own.base, own.draft, own.proposal)

    def expected(self, rows: int, drafts: NDArray[np.int64], proposals: NDArray[np.int64]) -> Floats:
        """Seconds of steps of `rows` decodes that verify `drafts` drafts in all, and then make `proposals` for each."""
        own = self._nearest(rows)
        if own is None:
            return 1 + DRAFT_COST * drafts / rows + PROPOSAL_COST * proposals
        keys = zip(_quarters(drafts, rows).tolist(), proposals.tolist(), strict=True)
        return np.array([own.expected(key) for key in keys])

    def _nearest(self, rows: int, within: int = 1 << 30) -> _SizeClass | None:
        """The class of this size, or the nearest that was measured, at most so far away."""
        own = size_class(rows)
        measured = [known for known, one in self._classes.items() if one.base and abs(known - own) <= within]
        return self._classes[min(measured, key=lambda known: abs(known - own))] if measured else None


def _quarters(drafts: Any, rows: int) -> Any:
    """Drafts of an average row, in quarters. None are only those of a step without any."""
    return np.maximum((8 * drafts + rows) // (2 * rows), np.minimum(drafts, 1))


@dataclass(frozen=True)
class Choice:
    """What was chosen for a step, and from what."""

    drafts: float
    """Drafts that a decode verifies, on average."""
    tokens: float
    """Tokens that it is expected to yield."""
    acceptance: list[float]
    """By place: the share of drafts that are expected to be accepted if all before them are."""
    seconds: list[float]
    """By drafts of each decode, from none on: the expected time of a step with as many decodes; empty: not known."""
    draft_cost: float
    """Share of the time of a step without drafts that a draft for every decode costs…"""
    proposal_cost: float
    """…and a proposal."""


class Tuner:
    """Chooses numbers of drafts from what it has measured."""

    def __init__(self, rows: int, most: int) -> None:
        self.acceptance = Acceptance(rows)
        self.times = StepTimes()
        self.probes = 0
        """Decodes with drafts that were not expected to pay, to find out whether that has changed."""
        self._most = most
        self._credit = 0.0
        """Seconds that unpromising drafts may cost now."""
        self._draws = np.zeros(rows, np.int64)
        """By row: draws since drafts were last verified."""
        self._pause = np.full(rows, FIRST_PAUSE)
        """By row: draws after which it is tried again."""

    def start(self, row: int) -> None:
        """The row has a new owner."""
        self.acceptance.start(row)
        self._draws[row], self._pause[row] = 0, FIRST_PAUSE

    # Choosing

    def choose(
        self, rows: NDArray[np.int64], most: NDArray[np.int64], proposes: bool, ask_seconds: float = 0.0
    ) -> tuple[NDArray[np.int64], int]:
        """Drafts to verify for each row, at most `most`, and the drafts to make for the next step.

        `proposes`: the device makes drafts, for all rows that draw, at a price. `ask_seconds`: what it takes to find
        drafts for a row on the host, while the device waits.
        """
        if not len(rows) or self.times.needs_plain(len(rows)):
            return np.zeros(len(rows), np.int64), 0
        places = np.arange(1, PLACES + 1)
        gains = np.where(places <= self._most, self.acceptance.gains(rows), 0.0)
        best, depth = self._best(np.where(places <= most[:, None], gains, 0.0), proposes, ask_seconds)
        drafts = np.maximum(best, self._probes(rows, most, best))
        if not proposes:
            return drafts, 0
        if ask_seconds or most.min() < self._most:
            _, depth = self._best(gains, True)
        return drafts, self._proposals(rows, depth)

    def first_proposals(self) -> int:
        """Drafts to make for rows whose prompt ends, in a step without decodes."""
        if self.times.needs_plain(1):
            return 0
        gains = np.cumprod(self.acceptance.overall())[None]
        return self._best(np.where(np.arange(PLACES) < self._most, gains, 0.0), True)[1]

    def _best(self, gains: Floats, proposes: bool, ask_seconds: float = 0.0) -> tuple[NDArray[np.int64], int]:
        """Drafts for each row such that tokens per second are the most, and the most of any row."""
        count = len(gains)
        most = int(np.count_nonzero(gains.max(0)))
        if not most:
            return np.zeros(count, np.int64), 0
        # A proposer on the device makes as many for all rows as one of them needs: each depth is tried.
        depths = range(1, most + 1) if proposes and self._proposals_cost(count) else [most]
        order = np.argsort(-gains, axis=None, kind="stable")
        every, places = gains.ravel()[order], order % gains.shape[1]
        reach = self.times.reach(count)
        plain, best, chosen = 0.0, 0.0, (0, 0, 0)
        for depth in depths:
            ranked = every[places < depth]
            ranked = ranked[: min(np.count_nonzero(ranked), reach)]
            levels = np.unique(np.minimum(np.arange(4 * depth + 1) * max(count, 4) // 4, len(ranked)))
            expected = count + np.concatenate(([0.0], np.cumsum(ranked)))[levels]
            # The least gain of those chosen says how far they reach: gains never rise along a row.
            deepest = gains[:, :depth].max(0)
            proposals = (deepest >= ranked[np.maximum(levels, 1) - 1, None]).sum(1) * (levels > 0)
            seconds = self.times.expected(count, levels, proposals if proposes else np.zeros_like(proposals))
            if ask_seconds:
                seconds += ask_seconds * np.minimum(levels, count)
            speeds = expected / np.maximum.accumulate(seconds)
            at = int(np.argmax(speeds))
            plain = speeds[0]
            if levels[at] and speeds[at] > best:
                best, chosen = speeds[at], (depth, int(levels[at]), int(proposals[at]))
        if best < LEAST_GAIN * plain:
            return np.zeros(count, np.int64), 0
        depth, level, made = chosen
        is_chosen = np.zeros(gains.size, np.bool_)
        is_chosen[order[places < depth][:level]] = True
        return is_chosen.reshape(gains.shape).sum(1), made

    def _proposals_cost(self, rows: int) -> bool:
        """Whether drafts that the device makes in vain cost something."""
        return self.times.prices(rows)[2] * self._most >= FREE_COST

    def _probes(self, rows: NDArray[np.int64], most: NDArray[np.int64], drafts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Drafts for rows that are due to be tried again, as far as the time for that allows."""
        due = (drafts == 0) & (most > 0) & (self._draws[rows] >= self._pause[rows])
        if not due.any():
            return np.zeros(len(rows), np.int64)
        chosen = int(drafts.sum())
        levels = np.array([chosen, chosen + PROBE_DRAFTS])
        seconds = self.times.expected(len(rows), levels, np.zeros(2, np.int64))
        each = max(float(seconds[1] - seconds[0]), 1e-9)
        affordable = int(self._credit / each)
        probed = min(affordable, int(due.sum()))
        self.probes += probed
        self._credit -= probed * each
        return np.where(due & (np.cumsum(due) <= affordable), np.minimum(most, PROBE_DRAFTS), 0)

    def _proposals(self, rows: NDArray[np.int64], depth: int) -> int:
        """Drafts that the device is to make for the next step; `depth`: as many as pay for some row."""
        base, draft, price = self.times.prices(len(rows))
        if not self._proposals_cost(len(rows)):
            return self._most
        if depth:
            return depth
        # For rows that are tried again in the next step; the proposer works for all rows at once.
        probed = min(self._most, PROBE_DRAFTS)
        cost = base * (price * probed + draft * probed / len(rows))
        if self._credit >= cost and (self._draws[rows] + 1 >= self._pause[rows]).any():
            self._credit -= cost
            return probed
        return 0

    def explain(self, rows: NDArray[np.int64], drafts: NDArray[np.int64], proposes: bool) -> Choice:
        """A step in which each of these rows verifies so many drafts, as far as it is known now."""
        count = max(1, len(rows))
        gains = np.where(np.arange(PLACES) < drafts[:, None], self.acceptance.gains(rows), 0.0)
        each = np.arange(self._most + 1)
        times = self.times
        seconds = times.expected(count, each * count, each if proposes else 0 * each) if times.is_measured else each[:0]
        _, draft, proposal = times.prices(count)
        acceptance = self.acceptance.overall()[: self._most]
        return Choice(
            float(drafts.sum()) / count, 1 + float(gains.sum()) / count, acceptance.tolist(), seconds.tolist(),
            draft, proposal,
        )  # fmt: skip

    # Measuring

    def note_draws(self, rows: NDArray[np.int64], drafts: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Each row has drawn, and verified so many drafts, of which so many were accepted."""
        self._draws[rows] += 1
        tried = np.flatnonzero(drafts > 0)
        if not len(tried):
            return
        own = rows[tried]
        self.acceptance.note(own, drafts[tried], accepted[tried])
        self._draws[own] = 0
        longer = np.minimum(2 * self._pause[own], LAST_PAUSE)
        self._pause[own] = np.where(accepted[tried] > 0, FIRST_PAUSE, longer)

    def note_step(self, rows: int, drafts: int, proposals: int, seconds: float, context: int = 0) -> None:
        """A step of decodes alone took so long. `context`: tokens that they attend to, all together."""
        self.times.note(rows, drafts, proposals, max(seconds, 1e-6), context)
        base, _, _ = self.times.prices(rows)
        self._credit = min(self._credit + PROBE_SHARE * base, 4 * base)
