"""What attention is told about a step, and what a backend must do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class KVSpec:
    """The cache a model needs on this rank and stage."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class GroupInputs:
    """Rows that begin with the same blocks, by their lines in the block tables; int32, on the device.

    Group i's members are members[starts[i]] to members[starts[i + 1]], its blocks those of the first of them. Not all
    of them need be in the step.
    """

    shared: torch.Tensor
    """[lines]: tokens of the full blocks a row shares with its group; 0: it is in none. Fewer than it has."""
    members: torch.Tensor
    starts: torch.Tensor


@dataclass
class AttentionInputs:
    """One step as attention sees it: S rows, T query tokens, packed row after row.

    The first `num_decodes` rows have exactly one query token each. The integer bounds are known on the host, so that
    no backend has to ask the device for them.
    """

    slots: torch.Tensor
    """[T] int64: block * block_size + offset, where each token's K and V are written."""
    query_starts: torch.Tensor
    """[S + 1] int32: row i's queries are tokens query_starts[i] to query_starts[i + 1]."""
    context_lens: torch.Tensor
    """[S] int32: tokens of the row that are in the cache once this step's are written."""
    block_tables: torch.Tensor
    """[S, max_blocks] int32; or those of the whole batch, if `rows` says whose is whose."""
    num_rows: int
    num_tokens: int
    num_decodes: int
    max_query_len: int
    max_context_len: int
    rows: torch.Tensor | None = None
    """[S]: row i's table is block_tables[rows[i]]. None: block_tables[i]."""
    groups: GroupInputs | None = None
    """Where `rows` is given: what rows share, for a backend that can read it once for all. It need not."""
    last: LastTokens | None = None
    """Where not all hidden states are wanted: a model that can (`narrows`) computes the others no further than the
    keys and values of its last layer."""
    plans: dict[Any, Any] = field(default_factory=dict)
    """What a backend worked out for this step and will need again in the next layer."""

    def own_tables(self, width: int) -> torch.Tensor:
        """[S, width]: the rows' tables, gathered if need be."""
        if self.rows is None:
            return self.block_tables[:, :width]
        if ("tables", width) not in self.plans:
            self.plans["tables", width] = self.block_tables[:, :width][self.rows.long()]
        return self.plans["tables", width]


@dataclass
class LastTokens:
    """The tokens of a step whose hidden states are wanted, each the last of its row."""

    tokens: torch.Tensor
    """[P]: their places among the step's tokens."""
    inputs: AttentionInputs
    """The step as if it had no others."""


class AttentionBackend(Protocol):
    """Attention over the paged cache."""

    graph_safe: bool
    """Whether its kernels can be captured once and replayed for rows of other lengths."""

    def prepare(self, heads: int, kv: torch.Tensor, inputs: AttentionInputs, window: int | None) -> None:
        """Called in each layer before its keys are written: what a step needs worked out once is worked out here."""
        ...

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, inputs: AttentionInputs, scale: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention of q [T, heads, head_dim] over the rows' cached tokens; returns [T, heads * head_dim].

        kv is one layer's cache [blocks, 2, kv_heads, block_size, head_dim] and already holds this step's tokens.
        Query j of a row (counted from its last) sits at position context_len - query_len + j. With a window, a query
        sees itself and the window - 1 tokens before it.
        """
        ...
