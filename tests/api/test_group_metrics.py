"""Metrics of several engines as those of one."""

from __future__ import annotations

from quire.api.engine_group import merged_metrics
from quire.engine.stats import Metric


def test_counts_are_summed_shares_averaged_and_pressure_is_the_highest() -> None:
    def engine(scale: int) -> list[Metric]:
        return [
            Metric("quire:steps", "counter", 10.0 * scale),
            Metric("quire:kv_cache_usage_perc", "gauge", 0.2 * scale),
            Metric("quire:pressure_host", "gauge", float(scale)),
            Metric("quire:times", "histogram", 5.0, (1.0, 2.0), (scale, 0, 1)),
            Metric("quire:by_label", "gauge", 3.0, series=((("a",), 1.0 * scale), (("b",), 2.0))),
        ]

    assert merged_metrics([engine(1)]) == engine(1)
    steps, usage, pressure, times, labelled = merged_metrics([engine(1), engine(3)])
    assert (steps.value, usage.value, pressure.value) == (40.0, 0.4, 3.0)
    assert (times.value, times.bounds, times.counts) == (10.0, (1.0, 2.0), (4, 0, 2))
    assert dict(labelled.series) == {("a",): 4.0, ("b",): 4.0} and labelled.value == 6.0
