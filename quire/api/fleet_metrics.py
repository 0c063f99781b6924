"""Figures of several engines as those of one."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.stats import Metric

SHARES = frozenset(
    f"quire:{name}"
    for name in ("kv_cache_usage_perc", "kv_cache_waste", "expert_load_max_over_mean", "expert_rank_load_max_over_mean")
)
"""Figures whose mean says something, and whose sum does not."""
LEVELS = frozenset(f"quire:pressure_{tier}" for tier in ("device", "host", "disk"))
"""Figures of which the highest counts."""


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
    share = len(same) if first.name in SHARES else 1
    value = max(values) if first.name in LEVELS else sum(values) / share
    series: dict[tuple[str, ...], float] = {}
    for metric in same:
        for labels, part in metric.series:
            series[labels] = series.get(labels, 0.0) + part / share
    counts = tuple(sum(column) for column in zip(*(metric.counts for metric in same), strict=True))
    return Metric(first.name, first.kind, value, first.bounds, counts, tuple(series.items()))
