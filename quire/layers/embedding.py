"""Token embedding and LM head: the vocabulary is split over the ranks, an equal number of rows each.

A vocabulary that does not divide is padded at its end; padding rows are never looked up and their logits are dropped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from quire.distributed.collectives import all_gather_last, all_reduce, is_shared
from quire.layers.build_context import BuildContext
from quire.loading.weights import Target


class VocabEmbedding(nn.Module):
    """A vector per token; each rank holds some tokens' vectors, and the ranks sum."""

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__()
        self.ops = build.ops
        self.ranks = build.ranks
        self.name = name
        self.weight = _vocab_weight(build)
        self.kept = _kept_tokens(build)
        self.whole = (build.config.vocab_size, build.config.hidden_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if not is_shared(self.ranks):
            return self.ops.embedding(tokens, self.weight)
        local = tokens - self.kept.start
        elsewhere = (local < 0) | (local >= len(self.kept))
        vectors = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return all_reduce(vectors.masked_fill_(elsewhere.unsqueeze(-1), 0), self.ranks)

    def targets(self) -> dict[str, list[Target]]:
        """The rank's rows of the embedding."""
        return {f"{self.name}.weight": [_vocab_target(self.weight, self.kept, self.whole)]}


class LMHead(nn.Module):
    """A logit per token of the vocabulary, on every rank, in the weights' dtype."""

    def __init__(self, build: BuildContext, name: str, tied: VocabEmbedding | None = None) -> None:
        """`tied`: the embedding whose weight this head uses; it then has no checkpoint tensor of its own."""
        super().__init__()
        self.ops = build.ops
        self.ranks = build.ranks
        self.name = name
        self.owns_weight = tied is None
        self.weight = _vocab_weight(build) if tied is None else tied.weight
        self.kept = _kept_tokens(build)
        self.whole = (build.config.vocab_size, build.config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = all_gather_last(self.ops.linear(hidden, self.weight), self.ranks)
        return logits[:, : self.whole[0]]

    def targets(self) -> dict[str, list[Target]]:
        """The rank's rows of the head; none if it is tied."""
        if not self.owns_weight:
            return {}
        return {f"{self.name}.weight": [_vocab_target(self.weight, self.kept, self.whole)]}


class PositionEmbedding(nn.Module):
    """A learned vector per position, whole on every rank."""

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = build.parameter(build.config.max_position, build.config.hidden_size)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions, self.weight)

    def targets(self) -> dict[str, list[Target]]:
        """The table, whole."""
        return {f"{self.name}.weight": [Target(self.weight, tuple(self.weight.shape))]}


def _rows_per_rank(build: BuildContext) -> int:
    return -(-build.config.vocab_size // build.ranks.tp_size)


def _kept_tokens(build: BuildContext) -> range:
    share, size = _rows_per_rank(build), build.config.vocab_size
    start = build.ranks.tp_rank * share
    return range(min(start, size), min(start + share, size))


def _vocab_weight(build: BuildContext) -> nn.Parameter:
    weight = build.parameter(_rows_per_rank(build), build.config.hidden_size)
    weight[len(_kept_tokens(build)) :].zero_()
    return weight


def _vocab_target(weight: nn.Parameter, kept: range, whole: tuple[int, int]) -> Target:
    return Target(weight[: len(kept)], whole, (slice(kept.start, kept.stop),))
