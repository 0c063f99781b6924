"""Metrics of a run: percentiles, throughput and goodput."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quire.cli.bench.common import percentile
from quire.cli.bench.load.client import RequestResult
from quire.cli.bench.load.drive import LoadRun
from quire.errors import ValidationError

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}

GOODPUT_VALUES: dict[str, Callable[[RequestResult], float]] = {
    "ttft": lambda result: result.ttft,
    "tpot": lambda result: result.tpot,
    "itl": lambda result: max(result.gaps, default=0.0),
    "e2el": lambda result: result.latency,
}
"""The value of a request that a limit of --goodput applies to; for itl the longest gap between tokens."""


@dataclass
class Distribution:
    """All values of one metric, in milliseconds, sorted."""

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
        """The percentile."""
        return percentile(self.values, percent)


class RunMeasurements:
    """The metrics of a run. Failed requests count only as failures."""

    def __init__(self, run: LoadRun, goals: dict[str, float]) -> None:
        self.run = run
        self.goals = goals
        self.done = [result for result in run.results if result.ok]
        self.failures = Counter(result.failure for result in run.results if result.failure is not None)
        self.input_tokens = sum(result.prompt_tokens for result in self.done)
        self.cached_tokens = sum(result.cached_tokens for result in self.done)
        self.output_tokens = sum(result.output_tokens for result in self.done)
        self.metered = [result.energy for result in self.done if result.energy is not None]
        """Energy of each request, of a server that meters it."""
        self.joules = sum(energy.joules for energy in self.metered)
        self.distributions = {
            "ttft": Distribution.of(result.ttft for result in self.done),
            "tpot": Distribution.of(result.tpot for result in self.done if result.output_tokens > 1),
            "itl": Distribution.of(gap for result in self.done for gap in result.gaps),
            "e2el": Distribution.of(result.latency for result in self.done),
        }
        self.good = sum(self._is_good(result) for result in self.done)

    def _is_good(self, result: RequestResult) -> bool:
        return all(1000 * GOODPUT_VALUES[name](result) <= limit for name, limit in self.goals.items())

    def per_second(self, count: float) -> float:
        """`count` of something, over the run's duration."""
        return count / self.run.duration if self.run.duration > 0 else 0.0

    @property
    def send_delays(self) -> Distribution:
        """Delays between planned and actual sending: large if the generator cannot keep up."""
        return Distribution.of(result.send_delay for result in self.run.results)

    @property
    def cpu_share(self) -> float:
        """CPU use of the load generator, as a share of one core."""
        return self.per_second(self.run.cpu)

    @property
    def is_counted_by_server(self) -> bool:
        """Whether every response had token counts."""
        return all(result.is_counted_by_server for result in self.done)

    def tokens_over_time(self, width: float = 1.0) -> list[float]:
        """Output tokens in each interval of `width` seconds."""
        return self._over_time(((at, weight) for result in self.done for at, weight in _tokens(result)), width)

    def failures_over_time(self, width: float = 1.0) -> list[float]:
        """Failed requests in each interval of `width` seconds."""
        return self._over_time(((result.last, 1.0) for result in self.run.results if not result.ok), width)

    def _over_time(self, moments: Iterable[tuple[float, float]], width: float) -> list[float]:
        bins = [0.0] * max(1, math.ceil(self.run.duration / width))
        for at, weight in moments:
            bins[min(len(bins) - 1, max(0, int((at - self.run.start) / width)))] += weight
        return bins

    def open_requests(self) -> list[tuple[float, int]]:
        """The number of open requests over time: (seconds after the start, open from then on)."""
        changes = [(result.sent, 1) for result in self.run.results]
        changes += [(result.last, -1) for result in self.run.results]
        steps, open_now = [], 0
        for at, change in sorted(changes):
            open_now += change
            steps.append((at - self.run.start, open_now))
        return steps

    @property
    def most_open(self) -> int:
        """The most requests open at once."""
        return max((count for _, count in self.open_requests()), default=0)


def _tokens(result: RequestResult) -> Iterable[tuple[float, float]]:
    """(time, tokens) of each event. The tokens are divided evenly over the events."""
    weight = result.output_tokens / (len(result.gaps) + 1)
    at = result.first
    yield at, weight
    for gap in result.gaps:
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
