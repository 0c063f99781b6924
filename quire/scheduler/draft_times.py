"""How long steps of decodes take, by the number of rows, and by the drafts that are verified and made.

Times are kept by classes of numbers of rows, and compared at equal contexts: attention to longer ones takes longer
whatever is verified. What was not measured follows from prices of a draft and of a proposal, fitted to what was.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
LEAST_SHARE = 0.1
"""With shorter contexts a step takes at least this share of its time: the price of a token is an estimate."""

Floats = NDArray[np.float64]


def size_class(rows: int) -> int:
    """Numbers of rows about 20% apart have the same step times."""
    return round(4 * math.log2(rows))


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

    def moved(self, seconds: float, tokens: float) -> float:
        """What a step of so many seconds takes with so many tokens more."""
        return max(LEAST_SHARE * seconds, seconds + self.seconds * tokens)

    def note(self, tokens: float, seconds: float) -> None:
        """A step with so many tokens more than others of its kind and number of rows took so much longer."""
        self._xx = CONTEXT_MEMORY * self._xx + tokens * tokens
        self._xy = CONTEXT_MEMORY * self._xy + tokens * seconds


class _Seen:
    """The last times of steps of one kind."""

    def __init__(self) -> None:
        self.steps: deque[tuple[float, int, int]] = deque(maxlen=WINDOW)
        """Seconds, tokens of the contexts, and rows."""
        self.at = 0
        """Measurements of the size class up to the last of these."""

    @property
    def is_known(self) -> bool:
        """Whether there are enough: a single one may have been disturbed."""
        return len(self.steps) >= LEAST_MEASURED

    def median(self, context: int, price: ContextPrice) -> float:
        """Of what they would have taken with such contexts."""
        return statistics.median_low(price.moved(seconds, context - own) for seconds, own, _ in self.steps)

    def difference(self, seconds: float, context: int, rows: int) -> tuple[float, float]:
        """Tokens and seconds that a step has more than the medians of those with as many rows; zeros if there are too
        few of them."""
        alike = [(each, own) for each, own, count in self.steps if count == rows]
        if len(alike) < LEAST_MEASURED:
            return 0.0, 0.0
        times, contexts = zip(*alike, strict=True)
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

    def note(self, key: tuple[int, int], rows: int, context: int, seconds: float) -> None:
        """A step took so long."""
        if self.base:
            self.base = self._context_price.moved(self.base, context - self.context)
        self.context = context
        self._expected.clear()
        seen = self.seen.setdefault(key, _Seen())
        if self.base:
            expected = self.expected(key)
            if seen.is_known and abs(seconds - expected) < expected / 2:
                tokens, more = seen.difference(seconds, context, rows)
                if tokens:
                    self._context_price.note(tokens, more)
            seconds = min(seconds, OUTLIER * expected)
        self._count += 1
        self._expected.clear()
        seen.steps.append((seconds, context, rows))
        seen.at = self._count
        if not self.base or self._count % REFIT_STEPS == 0 or len(seen.steps) == LEAST_MEASURED:
            self._fit()

    def expected(self, key: tuple[int, int]) -> float:
        """Seconds of a step: as measured, or from prices."""
        if (found := self._expected.get(key)) is None:
            if (seen := self.seen.get(key)) is not None and seen.is_known:
                found = seen.median(self.context, self._context_price)
            else:
                found = self.base * (1 + self.draft * key[0] / 4 + self.proposal * key[1])
            self._expected[key] = found
        return found

    def _fit(self) -> None:
        """Prices by least squares over times relative to a step without drafts."""
        self.seen = {key: seen for key, seen in self.seen.items() if self._count - seen.at < OLDEST or key == PLAIN}
        known = {key: seen for key, seen in self.seen.items() if seen.is_known or key == PLAIN}
        points = {key: seen.median(self.context, self._context_price) for key, seen in known.items()}
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
        self._classes[size].note(key, rows, context, seconds)

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

    def seconds_of(self, rows: int) -> Callable[[int, int], float]:
        """`expected`, as a function of the drafts and proposals of one step."""
        own = self._nearest(rows)
        if own is None:
            return lambda drafts, proposals: 1 + DRAFT_COST * drafts / rows + PROPOSAL_COST * proposals
        return lambda drafts, proposals: own.expected(
            (max((8 * drafts + rows) // (2 * rows), min(drafts, 1)), proposals)
        )

    def _nearest(self, rows: int, within: int = 1 << 30) -> _SizeClass | None:
        """The class of this size, or the nearest that was measured, at most so far away."""
        own = size_class(rows)
        measured = [known for known, one in self._classes.items() if one.base and abs(known - own) <= within]
        return self._classes[min(measured, key=lambda known: abs(known - own))] if measured else None


def _quarters(drafts: Any, rows: int) -> Any:
    """Drafts of an average row, in quarters. None are only those of a step without any."""
    return np.maximum((8 * drafts + rows) // (2 * rows), np.minimum(drafts, 1))
