"""What a proposer on the device implements: it runs after each step's draws, in the same captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quire.layers.attention.base import AttentionInputs
from quire.layers.caches import LayerCache


@dataclass
class ProposalStep:
    """A step that has drawn, and whose rows have the tokens they yielded. T tokens, R rows that draw.

    Rows that ended keep their numbers: `batch.active` is off for them, and what is proposed for them is never read.
    """

    tokens: torch.Tensor
    """[T] int64: what the target computed, drafts included."""
    positions: torch.Tensor
    """[T] int64"""
    following: torch.Tensor
    """[T] int64: the token after each of them: the next of its chunk, or the one that was drawn there. Behind a draft
    that was not accepted it is meaningless."""
    attention: tuple[AttentionInputs, ...]
    """The step as each cache group sees it; slots are those that the target wrote to."""
    hidden: torch.Tensor | None
    """[T, hidden size]: the target's hidden states after its final norm, if the proposer's `needs_hidden` is set."""
    features: torch.Tensor | None
    """[T, layers * hidden size]: the residual streams that entered the layers in the proposer's `feature_layers`,
    joined (`FeatureRequest.joined`); None if it has none."""
    rows: torch.Tensor
    """[R] int64: the rows that draw."""
    ends: torch.Tensor
    """[R] int64: the last of the T tokens of each row that counts: the one its last token was drawn at."""
    count: int
    """Drafts to make for each row."""
    batch: Any
    """The device batch: columns by row (`last_token`, `num_tokens`, `drafts`, `num_drafts`, ...)."""
    kv: Sequence[Any]
    """The caches of the proposer's own layers, in the order of its `caches`."""
    lay_out: Callable[[int], tuple[torch.Tensor, tuple[AttentionInputs, ...]]]
    """`lay_out(i)`: positions [R] and attention inputs of one token for each row, i tokens after its last one; -1: the
    token that `ends` names."""


class DeviceProposer(Protocol):
    """Writes drafts to `batch.drafts` and their number to `batch.num_drafts`, for the rows that draw.

    Must not wait for the device, nor read from it: its launches are captured.
    """

    feature_layers: tuple[int, ...]
    """Layers of the target whose input is read."""
    needs_hidden: bool
    needs_following: bool
    """Whether it reads `following` of prompts, so that plans have it."""
    caches: list[LayerCache]
    """What its own layers keep: part of the target's groups that keep every token."""

    def propose(self, step: ProposalStep) -> None:
        """Make `step.count` drafts for each row that draws; with a count of 0 only compute what later steps need."""
        ...
