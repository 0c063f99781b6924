"""Limits the prompt tokens of a step that running requests wait for, by time.

A stream's next token comes when the step ends. A chunk of a prompt makes the step longer, by how much depends on the
device, the model and other load on the machine. So step times are measured, and a chunk is sized such that the step
takes at most `stretch` times what it would take without.

Two things are measured continuously: how long a step of decodes alone takes, by its number of rows; and what prompt
tokens add to that, as a fixed part (such a step has no captured graph) and a price per token.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

STREAM_STRETCH = 1.7
"""Default stretch of an engine that streams."""
LEAST_CHUNK = 4
"""Prompt tokens a step may always have, so that prompts progress on any device."""
PRESSURE = 8.0
"""Running requests that each further waiting prompt counts as, when the time of a step is divided."""
REFRESH_STEPS = 24
"""After this many steps with prompts in a row there is one without, to measure decodes alone again."""
WINDOW = 9
"""Decode steps whose median is taken, so that one disturbed step changes nothing."""
NEWEST_WEIGHT = 0.15
"""Weight of the newest step in the averages of prompt costs."""
OUTLIER = 1.4
"""A measured price counts as at most this multiple of the average, and at least the average divided by it: other load
on the machine makes some steps much longer and none much shorter, which would make chunks too small…"""
CHANGED = 3
"""…unless so many in a row are above, or below: then costs have changed."""
GROWTH = 2.0
"""A chunk is at most this many times as large as those measured recently."""


@dataclass(frozen=True)
class _Launched:
    """A launched step: its decodes and prompt tokens, and when it was launched."""

    decodes: int
    tokens: int
    at: float
    is_measured: bool

    @property
    def kind(self) -> tuple[bool, bool]:
        return self.decodes > 0, self.tokens > 0


class NoPacer:
    """Step times are not bounded, and not measured."""

    is_on = False

    def allowance(self, decodes: int, older_streams: int, pending: int, drafts: int = 0) -> int:
        raise RuntimeError("there is no pacer to give an allowance")

    def launched(self, decodes: int, tokens: int, now: float, is_measured: bool = True) -> None: ...

    def collected(self, now: float) -> None: ...

    def forget_in_flight(self) -> None: ...


class Pacer:
    """Measures steps, and limits the prompt tokens of the next one."""

    is_on = True

    def __init__(self, stretch: float) -> None:
        """`stretch`: a step with prompts takes at most this many times as long as one without."""
        self.stretch = stretch
        self._decodes = DecodeTimes()
        self._prompts = PromptCosts()
        self._in_flight: deque[_Launched] = deque()
        self._last: _Launched | None = None
        """The step collected last."""
        self._collected = -math.inf
        """When it was collected."""
        self._since_decodes = 0
        """Steps with prompts since decodes alone were measured."""

    def allowance(self, decodes: int, older_streams: int, pending: int, drafts: int = 0) -> int:
        """Prompt tokens the next step may have beside `decodes` decodes, which verify `drafts` drafts.

        `pending`: prompts that could use them. `older_streams`: decodes whose stream began before the first of these
        prompts arrived; the others may be slowed down more. Returns 0 if the step is to measure decodes alone.
        """
        base = self._decodes.of(decodes + drafts)
        if base is None or self._since_decodes >= REFRESH_STEPS:
            return 0
        share = max(self.stretch - 1, PRESSURE * (pending - 1) / decodes) * decodes / older_streams
        return max(LEAST_CHUNK, self._prompts.tokens_within(share * base))

    # Measuring

    def launched(self, decodes: int, tokens: int, now: float, is_measured: bool = True) -> None:
        """A step is launched, with so many tokens of decodes and of prompts. `is_measured` is False if it waits for
        something other than computation."""
        self._in_flight.append(_Launched(decodes, tokens, now, is_measured))

    def collected(self, now: float) -> None:
        """The oldest step in flight is collected."""
        step = self._in_flight.popleft()
        seconds = now - max(step.at, self._collected)
        is_learned = self._is_own_time(step)
        self._last, self._collected = step, now
        if step.tokens and step.decodes:
            self._since_decodes += 1
        if is_learned:
            self._learn(step, seconds)

    def forget_in_flight(self) -> None:
        """The steps in flight will not be collected."""
        self._in_flight.clear()
        self._last = None

    def _is_own_time(self, step: _Launched) -> bool:
        """Whether the time since the last collect was spent on this step.

        It was, if nothing else is in flight. Where steps overlap, a device that launches slowly, or that is done when a
        launch returns, spends part of it on a neighbour; that does not matter if the neighbour is of the same kind.
        """
        if not step.is_measured:
            return False
        if not self._in_flight and step.at >= self._collected:
            return True
        is_overlapped = self._last is not None and step.at < self._collected and self._last.kind == step.kind
        return is_overlapped and all(other.kind == step.kind for other in self._in_flight)

    def _learn(self, step: _Launched, seconds: float) -> None:
        if not step.tokens:
            self._decodes.note(step.decodes, seconds, after_pause=self._since_decodes >= REFRESH_STEPS)
            self._since_decodes = 0
        else:
            self._prompts.note(step.tokens, seconds - (self._decodes.of(max(1, step.decodes)) or 0.0))


class DecodeTimes:
    """How long a step of decodes alone takes, by its rows, in size classes about 20% apart."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def note(self, rows: int, seconds: float, after_pause: bool = False) -> None:
        """A step of `rows` decodes took `seconds`. After a pause, older measurements count for less."""
        seen = self._seconds.setdefault(_size_class(rows), deque(maxlen=WINDOW))
        for _ in range(-(-len(seen) // 2) if after_pause else 0):
            seen.popleft()
        seen.append(seconds)

    def of(self, rows: int) -> float | None:
        """Expected seconds for `rows` decodes, from the nearest smaller size measured; None if none was."""
        if not self._seconds:
            return None
        own = _size_class(rows)
        nearest = max((known for known in self._seconds if known <= own), default=min(self._seconds))
        return statistics.median_low(self._seconds[nearest])


def _size_class(rows: int) -> int:
    return round(4 * math.log2(rows))


class PromptCosts:
    """What prompt tokens add to a step's time: a fixed part and a price per token, from steps weighted by age.

    Seconds per token are a straight line over 1 / tokens: its intercept is the price, its slope the fixed part. Fitted
    that way a step of ten tokens counts as much as one of a thousand, and the costs of other sizes do not matter here.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._x = self._y = self._xx = self._xy = 0.0
        """Weighted means of 1 / tokens, seconds per token, and their products."""
        self._reach = 0.0
        """About the largest number of tokens measured recently."""
        self._beyond = 0
        """Prices in a row that were above what may count; negative: below."""

    def note(self, tokens: int, seconds: float) -> None:
        """`tokens` prompt tokens added `seconds` to a step."""
        x, y = 1 / tokens, max(0.0, seconds) / tokens
        if self._steps > 2:
            price, fixed = self._line()
            y = self._bounded(y, price + fixed * x)
        self._steps += 1
        weight = max(NEWEST_WEIGHT, 1 / self._steps)
        self._x += weight * (x - self._x)
        self._y += weight * (y - self._y)
        self._xx += weight * (x * x - self._xx)
        self._xy += weight * (x * y - self._xy)
        self._reach = max(tokens, self._reach * (1 - NEWEST_WEIGHT / 4))

    def _bounded(self, y: float, expected: float) -> float:
        """`y`, or the bound that it is beyond, if few before it were too."""
        side = (y > OUTLIER * expected) - (y < expected / OUTLIER)
        self._beyond = side + (self._beyond if side * self._beyond > 0 else 0)
        if abs(self._beyond) >= CHANGED:
            return y
        return min(max(y, expected / OUTLIER), OUTLIER * expected)

    def tokens_within(self, seconds: float) -> int:
        """How many tokens can be added in `seconds`; 0 if nothing was measured."""
        price, fixed = self._line()
        most = GROWTH * self._reach
        return int(min(most, (seconds - fixed) / price)) if price > 0 else int(most)

    def _line(self) -> tuple[float, float]:
        """(price, fixed part). With steps of one size only, all of it counts as price."""
        spread = self._xx - self._x**2
        fixed = max(0.0, self._xy - self._x * self._y) / (spread + 0.05 * self._x**2) if self._steps else 0.0
        return max(self._y - fixed * self._x, 0.2 * self._y), fixed
