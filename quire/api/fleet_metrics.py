"""Figures of several engines as those of one."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.stats import Metric
from quire.messages.metric_table import SPECS


def merged(engines: Sequence[Sequence[Metric]]) -> list[Metric]:
    """Each figure once: counted together, shares as their mean."""
    if len(engines) == 1:
        return list(engines[0])
    by_name: dict[str, list[Metric]] = {}
    for metrics in engines:
        for metric in metrics:
            by_name.setdefault(metric.name, []).append(metric)
    return [_merged(same) for same in by_name.values()]


def _merged(same: list[Metric]) -> Metric:
    first, values = same[0], [metric.value for metric in same]
    spec = SPECS.get(first.name.removeprefix("quire:"))
    merge = "sum" if spec is None else spec.merge
    share = len(same) if merge == "mean" else 1
    value = max(values) if merge == "max" else sum(values) / share
    series: dict[tuple[str, ...], float] = {}
    for metric in same:
        for labels, part in metric.series:
            series[labels] = series.get(labels, 0.0) + part / share
    counts = tuple(sum(column) for column in zip(*(metric.counts for metric in same), strict=True))
    return Metric(first.name, first.kind, value, first.bounds, counts, tuple(series.items()))
