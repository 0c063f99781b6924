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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.messages.plan import MAX_WIDTH
from quire.scheduler.draft_times import Floats, StepTimes

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
"""Fewer rows do not show whether they differ."""
FREE_COST = 0.004
"""A proposer that takes less than this share of a step is asked in every step…"""
DEPTH_COST = 0.03
"""…and one that takes more than this for as many drafts as pay for all rows together: trying each number takes time."""
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
        if len(tried) < COMPARED_ROWS:
            return np.full(PLACES, PRIOR_WEIGHT)
        count = np.count_nonzero(tried, axis=0)
        noise = overall * (1 - overall)
        spread = ((right - tried * overall) ** 2 / np.maximum(tried, 1e-9)).sum(0)
        variance = np.maximum(spread - count * noise, 1e-9) / np.maximum(tried.sum(0), 1e-9)
        weight = np.clip(noise / variance, PRIOR_WEIGHT, MOST_PRIOR_WEIGHT)
        return np.where(count >= COMPARED_ROWS, weight, PRIOR_WEIGHT)


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
        if self._proposals_cost(len(rows)) < FREE_COST:
            return drafts, self._most
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
        if count == 1:
            return self._best_of_one(gains[0, :most].tolist(), proposes, ask_seconds)
        # A proposer on the device makes as many for all rows as one of them needs: each depth is tried.
        depths = range(1, most + 1) if proposes and self._proposals_cost(count) >= DEPTH_COST else [most]
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

    def _best_of_one(self, gains: list[float], proposes: bool, ask_seconds: float) -> tuple[NDArray[np.int64], int]:
        """`_best` for one row: without arrays, because its steps are short and a CPU does nothing else meanwhile."""
        seconds_of = self.times.seconds_of(1)
        plain = longest = seconds_of(0, 0)
        tokens, best, chosen = 1.0, LEAST_GAIN / plain, 0
        for drafts, gain in enumerate(gains[: self.times.reach(1)], 1):
            tokens += gain
            longest = max(longest, seconds_of(drafts, drafts if proposes else 0) + ask_seconds)
            if tokens / longest > best:
                best, chosen = tokens / longest, drafts
        return np.array([chosen]), chosen

    def _proposals_cost(self, rows: int) -> float:
        """Share of a step's time that all drafts which the device may make cost."""
        return self.times.prices(rows)[2] * self._most

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
