"""Where the experts are, and where the load says they had better be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.config import EngineConfig
from quire.layers.expert_placement import Placement, moves, place
from quire.messages.experts import Rebalanced

Counts = Mapping[int, Sequence[int]]
"""How often each expert was chosen, by layer."""

WORTH = 0.02
"""Weights are not moved for less of the fullest rank's load than this."""


class ExpertBalance:
    """Remembers the placement of every layer's experts, and the counts at which it was made."""

    def __init__(self, ranks: int, spare: int, interval: int = 0) -> None:
        """`interval`: steps after which experts should be moved; 0: never by itself."""
        self._ranks, self._spare = ranks, spare
        self._interval, self._steps = interval, 0
        self._placements: dict[int, Placement] = {}
        self._since: Counts = {}
        self._seen: Counts = {}

    @classmethod
    def of(cls, config: EngineConfig) -> ExpertBalance:
        """As the settings say."""
        return cls(config.expert_ranks, config.num_redundant_experts, config.expert_rebalance_interval)

    def is_due(self) -> bool:
        """To be asked once a step: whether experts should be moved before it."""
        self._steps += 1
        return bool(self._interval) and self._steps % self._interval == 0

    def skews(self, counts: Counts) -> dict[int, float]:
        """For each layer the fullest rank's load ÷ the mean, by what this engine counted since experts last moved."""
        return {
            layer: self._of(layer, chosen).skew(_since(self._seen.get(layer), chosen))
            for layer, chosen in counts.items()
        }

    def plan(self, counts: Counts) -> tuple[dict[int, Placement], Rebalanced]:
        """(placements of the layers in which experts should move, what comes of that)."""
        found: dict[int, Placement] = {}
        before = after = mean = 0.0
        moved = 0
        for layer, chosen in counts.items():
            now, fresh = self._of(layer, chosen), _since(self._since.get(layer), chosen)
            better = place(fresh, now)
            if max(better.loads(fresh)) > (1 - WORTH) * max(now.loads(fresh)):
                better = now
            if better is not now:
                found[layer] = better
                moved += len(moves(now, better))
            before += max(now.loads(fresh))
            after += max(better.loads(fresh))
            mean += sum(fresh) / self._ranks
        return found, Rebalanced(before / mean if mean else 0.0, after / mean if mean else 0.0, moved)

    def commit(self, placements: Mapping[int, Placement], counts: Counts, seen: Counts | None = None) -> None:
        """The experts are there now; what was counted before counts no more. `seen`: what this engine counted, where
        `counts` are of several."""
        self._placements.update(placements)
        self._since, self._seen = counts, counts if seen is None else seen

    def _of(self, layer: int, chosen: Sequence[int]) -> Placement:
        if layer not in self._placements:
            self._placements[layer] = Placement.even(len(chosen), self._ranks, self._spare)
        return self._placements[layer]


def _since(before: Sequence[int] | None, now: Sequence[int]) -> list[int]:
    return list(now) if before is None else [new - old for new, old in zip(now, before, strict=True)]
