"""Prometheus' text format, parsed by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Key = tuple[str, frozenset[tuple[str, str]]]


class Scrape:
    """One page of metrics."""

    def __init__(self, page: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(page)}
        samples = [sample for family in self.families.values() for sample in family.samples]
        self.values: dict[Key, float] = {
            (sample.name, frozenset(sample.labels.items())): sample.value for sample in samples
        }
        assert len(self.values) == len(samples), "a series is shown twice"
        self.names = {sample.name for sample in samples}

    def sum(self, name: str, **labels: str) -> float:
        """The sum of all series of a name that have these labels."""
        found = [value for (each, has), value in self.values.items() if each == name and has >= set(labels.items())]
        assert found, f"no {name} with {labels}"
        return sum(found)

    def buckets(self, name: str) -> dict[str, float]:
        """Bound → count, of the only histogram of that name."""
        bounds = [(dict(has)["le"], value) for (each, has), value in self.values.items() if each == f"{name}_bucket"]
        return dict(sorted(bounds, key=lambda pair: float(pair[0])))
