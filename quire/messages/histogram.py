"""A histogram that is cheap to fill."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

COMPILE_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
"""Seconds to compile a grammar."""


class Histogram:
    """Counts of values by bucket, and their sum, as in a Prometheus histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        """Ascending; a value belongs to the first bound that is not below it."""
        self.counts = [0] * (len(self.bounds) + 1)
        """Not cumulative; the last bucket is for values above every bound."""
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of values counted."""
        return sum(self.counts)
