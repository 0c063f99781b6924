"""Placement of experts over ranks, and how to change it to balance their load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.config import EngineConfig
from quire.layers.expert_placement import Placement, moves, place
from quire.messages.experts import Rebalanced

Counts = Mapping[int, Sequence[int]]
"""How often each expert was chosen, by layer."""

MIN_GAIN = 0.02
"""Weights are moved only if that lowers the fullest rank's load by this share."""


class ExpertBalance:
    """The placement of every layer's experts, and the counts at which it was made."""

    def __init__(self, ranks: int, spare: int, interval: int = 0) -> None:
        """`interval`: steps between automatic rebalances; 0: none."""
        self._ranks, self._spare = ranks, spare
        self._interval, self._steps = interval, 0
        self._placements: dict[int, Placement] = {}
        self._counts_at_move: Counts = {}
        self._own_counts_at_move: Counts = {}

    @classmethod
    def from_config(cls, config: EngineConfig) -> ExpertBalance:
        return cls(config.expert_ranks, config.num_redundant_experts, config.expert_rebalance_interval)

    def is_due(self) -> bool:
        """Call once per step: whether experts should be moved before it."""
        self._steps += 1
        return bool(self._interval) and self._steps % self._interval == 0

    def skews(self, counts: Counts) -> dict[int, float]:
        """Each layer's fullest rank's load ÷ the mean, from this engine's counts since experts last moved."""
        return {
            layer: self._placement(layer, len(chosen)).skew(_since(self._own_counts_at_move.get(layer), chosen))
            for layer, chosen in counts.items()
        }

    def plan(self, counts: Counts) -> tuple[dict[int, Placement], Rebalanced]:
        """(new placements of the layers whose experts should move, the outcome of that)."""
        placements: dict[int, Placement] = {}
        before = after = mean = 0.0
        moved = 0
        for layer, chosen in counts.items():
            current, load = self._placement(layer, len(chosen)), _since(self._counts_at_move.get(layer), chosen)
            better = place(load, current)
            if max(better.loads(load)) > (1 - MIN_GAIN) * max(current.loads(load)):
                better = current
            if better is not current:
                placements[layer] = better
                moved += len(moves(current, better))
            before += max(current.loads(load))
            after += max(better.loads(load))
            mean += sum(load) / self._ranks
        return placements, Rebalanced(before / mean if mean else 0.0, after / mean if mean else 0.0, moved)

    def commit(self, placements: Mapping[int, Placement], counts: Counts, own: Counts | None = None) -> None:
        """The experts have moved: loads count from `counts` on. `own`: this engine's part of counts summed over
        several."""
        self._placements.update(placements)
        self._counts_at_move, self._own_counts_at_move = counts, counts if own is None else own

    def _placement(self, layer: int, experts: int) -> Placement:
        if layer not in self._placements:
            self._placements[layer] = Placement.even(experts, self._ranks, self._spare)
        return self._placements[layer]


def _since(before: Sequence[int] | None, now: Sequence[int]) -> list[int]:
    """Counts minus those at an earlier time."""
    return list(now) if before is None else [new - old for new, old in zip(now, before, strict=True)]
