"""A simulation as a plot: what `quire bench serve --plot` draws of a real run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from quire.cli.bench.load.measure import Distribution
from quire.cli.bench.load.plot import plot
from quire.simulation.measurements import METRICS, SimulationResult


@dataclass(frozen=True)
class _Duration:
    duration: float


class PlottedSimulation:
    """The figures of a simulation in the form that `plot` reads (`PlottedRun`). A request's tokens are taken to be
    spread evenly between its first and its last."""

    def __init__(self, result: SimulationResult) -> None:
        self._result = result
        self.run = _Duration(result.duration)
        self.goals: dict[str, float] = {}
        self.distributions = {name: Distribution.of(result.values(name)) for name in METRICS}

    def _requests(self) -> Iterator[tuple[float, ...]]:
        spans = iter(self._result.spans)
        return zip(spans, spans, spans, spans, strict=True)

    def tokens_over_time(self, width: float = 1.0) -> list[float]:
        """Output tokens in each interval of `width` seconds."""
        count = max(1, math.ceil(self.run.duration / width))
        rises = [0.0] * (count + 1)
        for _, first, last, tokens in self._requests():
            begin, end = min(count - 1, int(first / width)), min(count - 1, int(last / width))
            share = tokens / (end - begin + 1)
            rises[begin] += share
            rises[end + 1] -= share
        return list(accumulate(rises[:count]))

    def failures_over_time(self, width: float = 1.0) -> list[float]:
        """Simulated requests that fail have no time: none are drawn."""
        return []

    def open_requests(self) -> list[tuple[float, int]]:
        """The number of open requests over time: (seconds, open from then on)."""
        changes = sorted(change for arrival, _, last, _ in self._requests() for change in ((arrival, 1), (last, -1)))
        totals = accumulate(change for _, change in changes)
        return [(at, total) for (at, _), total in zip(changes, totals, strict=True)]

    @property
    def most_open(self) -> int:
        """The most requests open at once."""
        return max((count for _, count in self.open_requests()), default=0)


def write_plot(path: str, result: SimulationResult) -> None:
    """Write the run as an SVG."""
    figures = f"{result.per_second(result.output_tokens):,.0f} output tokens/s, {result.completed} requests"
    title = f"quire simulate: {result.replicas} × {result.costs.name}"
    with open(path, "w", encoding="utf-8") as file:
        file.write(plot(PlottedSimulation(result), title, f"{figures}; simulated, {result.costs.source}"))
