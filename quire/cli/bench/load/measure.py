"""What the times of a run say: percentiles, throughput, and how many requests were good enough."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quire.cli.bench.load.client import RequestTiming
from quire.cli.bench.load.drive import LoadRun
from quire.errors import ValidationError

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}

GOODPUT_VALUES: dict[str, Callable[[RequestTiming], float]] = {
    "ttft": lambda outcome: outcome.ttft,
    "tpot": lambda outcome: outcome.tpot,
    "itl": lambda outcome: max(outcome.gaps, default=0.0),
    "e2el": lambda outcome: outcome.latency,
}
"""What a limit of --goodput is compared with; of the gaps between tokens it is the longest."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in order, between the two nearest where it falls between them."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass
class Distribution:
    """Many times of one kind, in milliseconds and in order."""

    values: list[float]

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Distribution:
        return cls(sorted(1000 * each for each in seconds))

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else 0.0

    @property
    def median(self) -> float:
        return percentile(self.values, 50)

    @property
    def std(self) -> float:
        return statistics.pstdev(self.values) if self.values else 0.0

    def at(self, percent: float) -> float:
        """The value that `percent` of them do not exceed."""
        return percentile(self.values, percent)


class RunMeasurements:
    """The figures of a run. Failed requests count as failed and nowhere else."""

    def __init__(self, run: LoadRun, goals: dict[str, float]) -> None:
        self.run = run
        self.goals = goals
        self.done = [outcome for outcome in run.outcomes if outcome.ok]
        self.failures = Counter(outcome.failure for outcome in run.outcomes if outcome.failure is not None)
        self.input_tokens = sum(outcome.prompt_tokens for outcome in self.done)
        self.cached_tokens = sum(outcome.cached_tokens for outcome in self.done)
        self.output_tokens = sum(outcome.output_tokens for outcome in self.done)
        self.spreads = {
            "ttft": Distribution.of(outcome.ttft for outcome in self.done),
            "tpot": Distribution.of(outcome.tpot for outcome in self.done if outcome.output_tokens > 1),
            "itl": Distribution.of(gap for outcome in self.done for gap in outcome.gaps),
            "e2el": Distribution.of(outcome.latency for outcome in self.done),
        }
        self.good = sum(self._is_good(outcome) for outcome in self.done)

    def _is_good(self, outcome: RequestTiming) -> bool:
        return all(1000 * GOODPUT_VALUES[name](outcome) <= limit for name, limit in self.goals.items())

    def per_second(self, count: float) -> float:
        """`count` of something, over the run's duration."""
        return count / self.run.duration if self.run.duration > 0 else 0.0

    @property
    def lateness(self) -> Distribution:
        """How long after their times requests left: a generator that cannot keep up shows here."""
        return Distribution.of(outcome.late for outcome in self.run.outcomes)

    @property
    def cpu_share(self) -> float:
        """Of one core, what generating the load took."""
        return self.per_second(self.run.cpu)

    @property
    def is_counted_by_server(self) -> bool:
        """Whether every answer told its tokens."""
        return all(outcome.is_counted_by_server for outcome in self.done)

    def tokens_over_time(self, width: float = 1.0) -> list[float]:
        """Output tokens in each piece of the run that is `width` seconds long."""
        return self._over_time(((at, weight) for outcome in self.done for at, weight in _tokens(outcome)), width)

    def failures_over_time(self, width: float = 1.0) -> list[float]:
        """Requests that failed in each such piece."""
        return self._over_time(((outcome.last, 1.0) for outcome in self.run.outcomes if not outcome.ok), width)

    def _over_time(self, moments: Iterable[tuple[float, float]], width: float) -> list[float]:
        pieces = [0.0] * max(1, math.ceil(self.run.duration / width))
        for at, weight in moments:
            pieces[min(len(pieces) - 1, max(0, int((at - self.run.start) / width)))] += weight
        return pieces

    def open_requests(self) -> list[tuple[float, int]]:
        """Seconds after the start, and how many requests were on their way from then on."""
        changes = [(outcome.sent, 1) for outcome in self.run.outcomes]
        changes += [(outcome.last, -1) for outcome in self.run.outcomes]
        steps, open_now = [], 0
        for at, change in sorted(changes):
            open_now += change
            steps.append((at - self.run.start, open_now))
        return steps

    @property
    def most_open(self) -> int:
        """The most requests that were on their way at once."""
        return max((count for _, count in self.open_requests()), default=0)


def _tokens(outcome: RequestTiming) -> Iterable[tuple[float, float]]:
    """When its tokens came. An event may bring several: each counts for its share of them."""
    weight = outcome.output_tokens / (len(outcome.gaps) + 1)
    at = outcome.first
    yield at, weight
    for gap in outcome.gaps:
        at += gap
        yield at, weight


def read_goals(words: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` as milliseconds by name."""
    goals = {}
    for word in words:
        name, colon, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if not colon or name not in METRICS or not limit > 0:
            names = ", ".join(METRICS)
            raise ValidationError(f"--goodput takes milliseconds such as ttft:200, for {names}; got {word!r}")
        goals[name] = limit
    return goals
