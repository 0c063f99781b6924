"""What one front has counted, as plain data, so that the hub can show the sum of all fronts."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.messages.histogram import Histogram

Labels = tuple[str, ...]


class HistogramCounts(msgspec.Struct):
    """The values of a histogram."""

    counts: list[int]
    total: float


class MetricsSnapshot(msgspec.Struct):
    """Counters and histograms by name, each by its label values."""

    counts: dict[str, list[tuple[Labels, float]]] = {}
    histograms: dict[str, list[tuple[Labels, HistogramCounts]]] = {}


def merged_snapshots(parts: Iterable[MetricsSnapshot]) -> MetricsSnapshot:
    """The sum of snapshots."""
    counts: dict[str, dict[Labels, float]] = {}
    histograms: dict[str, dict[Labels, HistogramCounts]] = {}
    for part in parts:
        for name, values in part.counts.items():
            mine = counts.setdefault(name, {})
            for labels, value in values:
                mine[labels] = mine.get(labels, 0.0) + value
        for name, series in part.histograms.items():
            merged = histograms.setdefault(name, {})
            for labels, one in series:
                before = merged.get(labels)
                if before is not None:
                    columns = zip(before.counts, one.counts, strict=True)
                    one = HistogramCounts([a + b for a, b in columns], before.total + one.total)
                merged[labels] = one
    return MetricsSnapshot(
        {name: list(values.items()) for name, values in counts.items()},
        {name: list(series.items()) for name, series in histograms.items()},
    )


def with_counts(values: dict[Labels, float], others: Iterable[tuple[Labels, float]]) -> dict[Labels, float]:
    """A counter's values with those of other fronts added."""
    summed = dict(values)
    for labels, value in others:
        summed[labels] = summed.get(labels, 0.0) + value
    return summed


def with_histograms(
    values: dict[Labels, Histogram], others: Iterable[tuple[Labels, HistogramCounts]], bounds: Iterable[float]
) -> dict[Labels, Histogram]:
    """A histogram's values with those of other fronts added."""
    summed = {}
    for labels, histogram in values.items():
        summed[labels] = copy = Histogram(histogram.bounds)
        copy.counts, copy.total = list(histogram.counts), histogram.total
    for labels, other in others:
        mine = summed.get(labels)
        if mine is None:
            mine = summed[labels] = Histogram(tuple(bounds))
        mine.counts = [a + b for a, b in zip(mine.counts, other.counts, strict=True)]
        mine.total += other.total
    return summed
