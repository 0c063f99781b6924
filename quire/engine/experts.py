"""How evenly a mixture's router deals tokens to experts, as figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.engine.stats import Metric


def expert_figures(counts: Mapping[int, Sequence[int]]) -> list[Metric]:
    """Figures from how often each expert of each layer was chosen; none where the model has no experts.

    `quire:expert_tokens` has a value for each (layer, expert), and their sum; `quire:expert_load_max_over_mean` one
    for each layer, and the largest: 1 is perfectly even, the number of experts is everything to one.
    """
    if not counts:
        return []
    tokens = tuple(
        ((str(layer), str(expert)), float(count))
        for layer, chosen in counts.items()
        for expert, count in enumerate(chosen)
    )
    loads = tuple(((str(layer),), _max_over_mean(chosen)) for layer, chosen in counts.items())
    return [
        Metric("quire:expert_tokens", "counter", sum(count for _, count in tokens), series=tokens),
        Metric("quire:expert_load_max_over_mean", "gauge", max(load for _, load in loads), series=loads),
    ]


def _max_over_mean(chosen: Sequence[int]) -> float:
    return max(chosen) * len(chosen) / total if (total := sum(chosen)) else 0.0
