"""Low-rank products of adapters: which slot each token of a pass is computed with, and what a product means."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

NO_SLOT = -1
"""The slot of a token without an adapter."""


class SlotTokens:
    """The adapter slot of each token of a pass. The host knows which slots occur, the device which token has which."""

    def __init__(self, slots: torch.Tensor, present: Collection[int]) -> None:
        """`slots`: [tokens] int32, `NO_SLOT`: none. `present`: every slot that occurs among them, perhaps more."""
        self.slots = slots
        self.present = tuple(sorted(present))
        self.made: dict[Any, Any] = {}
        """What kernels have made of the slots, once for all layers of a pass."""

    @cached_property
    def index(self) -> torch.Tensor:
        """The slots as an index: `NO_SLOT` finds the last row of a table."""
        return self.slots.long()

    @cached_property
    def groups(self) -> Sequence[tuple[int, torch.Tensor]]:
        """For each slot the tokens that have it. Waits for the device."""
        found = [(slot, (self.slots == slot).nonzero().flatten()) for slot in self.present]
        return [(slot, tokens) for slot, tokens in found if len(tokens)]

    def at(self, tokens: torch.Tensor | slice) -> SlotTokens:
        """The same for some of the tokens."""
        return SlotTokens(self.slots[tokens], self.present)


class SlotLowRank(NamedTuple):
    """What adapters change in the products with a matrix."""

    a: torch.Tensor
    """[slots, parts * rank, in], in the adapters' dtype."""
    b: torch.Tensor
    """[slots, rank, outputs]."""
    tokens: SlotTokens
    bounds: tuple[int, ...]
    """parts + 1 numbers: to outputs bounds[p] to bounds[p + 1] of a token in slot s
    (a[s, p * rank : (p + 1) * rank] @ x) @ b[s] is added."""


def add_low_rank(out: torch.Tensor, x: torch.Tensor, low: SlotLowRank) -> None:
    """`Ops.add_low_rank` in plain torch, slot by slot.

    Operations: 2 * tokens * rank * (parts * in + outputs). Bytes: a and b of every slot that occurs, once.
    """
    a, b, tokens, bounds = low
    rank = b.shape[1]
    for slot, index in tokens.groups:
        inner = x[index].to(a.dtype) @ a[slot].t()
        for part, (first, last) in enumerate(itertools.pairwise(bounds)):
            grown = inner[:, part * rank : (part + 1) * rank] @ b[slot, :, first:last]
            out[index, first:last] += grown.to(out.dtype)
