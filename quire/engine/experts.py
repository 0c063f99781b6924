"""How evenly a mixture's router deals tokens to experts, as figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.engine.stats import Metric
from quire.executor.expert_balance import ExpertBalance


def expert_figures(counts: Mapping[int, Sequence[int]], balance: ExpertBalance | None = None) -> list[Metric]:
    """Figures from how often each expert of each layer was chosen; none where the model has no experts.

    `quire:expert_tokens` has a value for each (layer, expert), and their sum; `quire:expert_load_max_over_mean` one
    for each layer, and the largest: 1 is perfectly even, the number of experts is everything to one. Where whole
    experts are spread over ranks, `quire:expert_rank_load_max_over_mean` is that of ranks, since experts last moved.
    """
    if not counts:
        return []
    tokens = tuple(
        ((str(layer), str(expert)), float(count))
        for layer, chosen in counts.items()
        for expert, count in enumerate(chosen)
    )
    loads = tuple(((str(layer),), _max_over_mean(chosen)) for layer, chosen in counts.items())
    figures = [
        Metric("quire:expert_tokens", "counter", sum(count for _, count in tokens), series=tokens),
        Metric("quire:expert_load_max_over_mean", "gauge", max(load for _, load in loads), series=loads),
    ]
    if balance is not None:
        skews = tuple(((str(layer),), skew) for layer, skew in balance.skews(counts).items())
        worst = max(skew for _, skew in skews)
        figures.append(Metric("quire:expert_rank_load_max_over_mean", "gauge", worst, series=skews))
    return figures


def _max_over_mean(chosen: Sequence[int]) -> float:
    return max(chosen) * len(chosen) / total if (total := sum(chosen)) else 0.0
