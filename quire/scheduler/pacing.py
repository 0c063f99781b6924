"""How many prompt tokens may share a step with running requests: as many as there is time for.

Who reads a stream feels every step: its next token comes when the step is over. A chunk of a prompt makes the step
longer, by how much depends on the device, the model and who else is on the machine. So step times are measured, and a
chunk is cut such that the step takes at most `stretch` times what it would take without.

Two things are learned, all the time: how long a step of decodes alone takes, by its number of rows; and what prompt
tokens add to that, as a fixed part (such a step is not one of the captured ones) and a price per token.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

STREAM_STRETCH = 1.7
"""What readers of streams are asked to bear, where nobody says otherwise."""
LEAST_CHUNK = 4
"""Prompt tokens a step may always have: a prompt gets on, however slow the device."""
PRESSURE = 8.0
"""A prompt that waits behind another counts as much as so many running requests when time is shared out."""
REFRESH_STEPS = 24
"""After so many steps with prompts in a row there is one without: the time of decodes alone is measured again."""
WINDOW = 9
"""Decode steps whose median is taken: one that was disturbed changes nothing."""
MEMORY = 0.15
"""Weight of the newest step among those that say what prompt tokens cost."""
OUTLIER = 4.0
"""A price so many times the usual one is taken for this much: it was a disturbance, or others will confirm it."""
GROWTH = 2.0
"""A chunk is at most so many times as large as those that were measured lately."""


@dataclass(frozen=True)
class _Launched:
    decodes: int
    tokens: int
    at: float
    is_measured: bool

    @property
    def kind(self) -> tuple[bool, bool]:
        return self.decodes > 0, self.tokens > 0


class Pacer:
    """Watches steps come and go, and says how many prompt tokens the next one may have."""

    def __init__(self, stretch: float) -> None:
        """`stretch`: a step with prompts takes at most so many times as long as one without."""
        self.stretch = stretch
        self._decodes = DecodeTimes()
        self._prompts = PromptCosts()
        self._in_flight: deque[_Launched] = deque()
        self._last: _Launched | None = None
        """The step collected last…"""
        self._collected = -math.inf
        """…and when."""
        self._since_decodes = 0
        """Steps with prompts since decodes alone were measured."""

    def allowance(self, decodes: int, elder: int, pending: int) -> int:
        """Prompt tokens the next step may have beside so many decodes; `pending` prompts could use them, and `elder`
        of the decodes streamed before the first of these came. Others found it waiting, and have less of a claim.

        0: none this once, so that decodes alone are measured.
        """
        base = self._decodes.of(decodes)
        if base is None or self._since_decodes >= REFRESH_STEPS:
            return 0
        share = max(self.stretch - 1, PRESSURE * (pending - 1) / decodes) * decodes / elder
        return max(LEAST_CHUNK, self._prompts.tokens_within(share * base))

    # What is measured

    def launched(self, decodes: int, tokens: int, now: float, is_measured: bool = True) -> None:
        """A step goes to the device, with so many decodes and prompt tokens. One that waits for something else is not
        measured."""
        self._in_flight.append(_Launched(decodes, tokens, now, is_measured))

    def collected(self, now: float) -> None:
        """The oldest step in flight has come back."""
        step = self._in_flight.popleft()
        seconds = now - max(step.at, self._collected)
        is_learned = self._is_telling(step)
        self._last, self._collected = step, now
        if step.tokens and step.decodes:
            self._since_decodes += 1
        if is_learned:
            self._learn(step, seconds)

    def forget_flights(self) -> None:
        """What is in flight never comes back."""
        self._in_flight.clear()
        self._last = None

    def _is_telling(self, step: _Launched) -> bool:
        """Whether the time since the last collect is the step's own.

        It is, where nothing else is in flight. Where steps overlap, a device that launches slowly, or that is done when
        a launch returns, spends it partly on a neighbour; no matter, if that is a step of the same kind.
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
    """How long a step of decodes alone takes, by its rows, in classes a fifth wide."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def note(self, rows: int, seconds: float, after_pause: bool = False) -> None:
        """Such a step took so long. After a pause what was seen before it counts for less."""
        seen = self._seconds.setdefault(_class_of(rows), deque(maxlen=WINDOW))
        for _ in range(-(-len(seen) // 2) if after_pause else 0):
            seen.popleft()
        seen.append(seconds)

    def of(self, rows: int) -> float | None:
        """What it would take now, or the next smaller one that was seen; None where none was."""
        if not self._seconds:
            return None
        own = _class_of(rows)
        nearest = max((known for known in self._seconds if known <= own), default=min(self._seconds))
        return statistics.median_low(self._seconds[nearest])


def _class_of(rows: int) -> int:
    return round(4 * math.log2(rows))


class PromptCosts:
    """What prompt tokens add to a step's time: a fixed part and a price per token, from steps weighted by age.

    Seconds per token are a straight line over 1 / tokens: its height is the price, its slope the fixed part. Taken that
    way a step of ten tokens says as much as one of a thousand, and a bend far away does not matter here.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._x = self._y = self._xx = self._xy = 0.0
        """Weighted means of 1 / tokens, seconds per token, and their products."""
        self._reach = 0.0
        """About the largest number of tokens that was measured lately."""

    def note(self, tokens: int, seconds: float) -> None:
        """So many tokens added so much to a step."""
        x, y = 1 / tokens, max(0.0, seconds) / tokens
        if self._steps > 2:
            price, fixed = self._line()
            y = min(y, OUTLIER * (price + fixed * x))
        self._steps += 1
        weight = max(MEMORY, 1 / self._steps)
        self._x += weight * (x - self._x)
        self._y += weight * (y - self._y)
        self._xx += weight * (x * x - self._xx)
        self._xy += weight * (x * y - self._xy)
        self._reach = max(tokens, self._reach * (1 - MEMORY / 4))

    def tokens_within(self, seconds: float) -> int:
        """How many tokens can be added in so much time; 0 where nobody knows."""
        price, fixed = self._line()
        most = GROWTH * self._reach
        return int(min(most, (seconds - fixed) / price)) if price > 0 else int(most)

    def _line(self) -> tuple[float, float]:
        """(price, fixed part). With steps of one size only, all of it is taken for price."""
        spread = self._xx - self._x**2
        fixed = max(0.0, self._xy - self._x * self._y) / (spread + 0.05 * self._x**2) if self._steps else 0.0
        return max(self._y - fixed * self._x, 0.2 * self._y), fixed
