"""Token embedding and LM head: the vocabulary is split over the ranks, an equal number of rows each.

A vocabulary that does not divide is padded at its end; padding rows are never looked up and their logits are dropped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from quire.distributed.collectives import all_gather_last, all_reduce, is_shared
from quire.kernels.weights.base import Weight
from quire.layers.build_context import BuildContext
from quire.layers.matrices import MatrixPart, formats_of, make_matrix, matrix_targets
from quire.loading.weights import AnyTarget, Target
from quire.quantization.formats.base import Format


class VocabMatrix(nn.Module):
    """A matrix with a row for each token of the vocabulary; each rank holds the rows of some tokens."""

    weight: Weight

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__()
        self.ops = build.ops
        self.ranks = build.ranks
        self.kept = _kept_tokens(build)
        hidden = build.config.hidden_size
        rows = slice(self.kept.start, self.kept.stop)
        self.part = MatrixPart(name, (build.config.vocab_size, hidden), rows, slice(0, hidden))

    def make_weight(self, build: BuildContext, formats: list[Format | None]) -> None:
        """Make the matrix; rows past the end of the vocabulary are zeros."""
        self.formats = formats
        self.weight = make_matrix(build, [self.part], formats, _rows_per_rank(build))

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The rank's rows."""
        return matrix_targets(self.weight, [self.part], self.formats)


class VocabEmbedding(VocabMatrix):
    """A vector per token; each rank holds some tokens' vectors, and the ranks sum."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if not is_shared(self.ranks):
            return self.ops.embedding(tokens, self.weight)
        local = tokens - self.kept.start
        elsewhere = (local < 0) | (local >= len(self.kept))
        vectors = self.ops.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return all_reduce(vectors.masked_fill_(elsewhere.unsqueeze(-1), 0), self.ranks)

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Make the matrix."""
        self.make_weight(build, _embedding_formats(build, owner, self.part))


class LMHead(VocabMatrix):
    """A logit per token of the vocabulary, on every rank, in the activations' dtype."""

    def __init__(self, build: BuildContext, name: str, tied: VocabEmbedding | None = None) -> None:
        """`tied`: the embedding whose weight this head uses; it then has no checkpoint tensor of its own."""
        super().__init__(build, name)
        self._tied = (tied,)  # in a tuple: it is not a part of this module

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = all_gather_last(self.ops.linear(hidden, self.weight), self.ranks)
        return logits[:, : self.part.shape[0]]

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Make the matrix, or take the embedding's."""
        (tied,) = self._tied
        if tied is not None:
            self.weight = tied.weight
        elif build.config.tie_embeddings:  # the embedding is on another stage: this is a copy of it
            self.make_weight(build, _embedding_formats(build, owner, self.part))
        else:
            self.make_weight(build, formats_of(build, owner, [self.part]))

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The rank's rows of the head; none if it is tied."""
        return {} if self._tied[0] is not None else super().targets()


class PositionEmbedding(nn.Module):
    """A learned vector per position, whole on every rank."""

    def __init__(self, build: BuildContext, name: str, offset: int = 0) -> None:
        """`offset`: the table's row of position 0."""
        super().__init__()
        self.name = name
        self.offset = offset
        self.weight = build.parameter(build.config.max_position + offset, build.config.hidden_size)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions + self.offset if self.offset else positions, self.weight)

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The table, whole."""
        return {f"{self.name}.weight": [Target(self.weight, tuple(self.weight.shape))]}


def _embedding_formats(build: BuildContext, owner: str, part: MatrixPart) -> list[Format | None]:
    """Embeddings are in few bits only where a scheme says that it covers them."""
    return formats_of(build, owner, [part]) if getattr(build.scheme, "covers_embeddings", False) else [None]


def _rows_per_rank(build: BuildContext) -> int:
    return -(-build.config.vocab_size // build.ranks.tp_size)


def _kept_tokens(build: BuildContext) -> range:
    share, size = _rows_per_rank(build), build.config.vocab_size
    start = build.ranks.tp_rank * share
    return range(min(start, size), min(start + share, size))
