"""Expert parallelism: which copy of an expert a token is sent to, and the exchange of tokens between ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.distributed.experts import Copy, ExpertRanks, copy_rows, exchange_counts, exchange_rows
from quire.layers.expert_placement import Placement, check_ranks, moves

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens, weights, slots) → the weighted sum of this rank's experts; slots outside its own add nothing."""


class ExpertDispatch:
    """Where a layer's experts are, in tables on the device, so that it can change under a captured step."""

    def __init__(self, ranks: ExpertRanks, num_experts: int, device: torch.device) -> None:
        check_ranks(num_experts, ranks.size, ranks.spare)
        self.ranks = ranks
        self.placement = Placement.even(num_experts, ranks.size, ranks.spare)
        self._copies = torch.ones(num_experts, dtype=torch.int64, device=device)
        self._rank_of = torch.zeros(num_experts, ranks.size, dtype=torch.int64, device=device)
        self._slot_of = torch.zeros(num_experts, ranks.size, dtype=torch.int32, device=device)
        self._fill()

    @property
    def held(self) -> tuple[int, ...]:
        """The experts on this rank, slot by slot."""
        return self.placement.slots[self.ranks.rank]

    def change(self, after: Placement, *stacks: torch.Tensor) -> None:
        """Hold other experts: their weights, rows of `stacks`, are copied from ranks that have them. Called on all."""
        copies = [Copy(move.source, move.target) for move in moves(self.placement, after)]
        for stack in stacks:
            copy_rows(stack, copies, self.ranks)
        self.placement = after
        self._fill()

    def _fill(self) -> None:
        homes, width = self.placement.homes, self.ranks.size
        padded = [[home[i % len(home)] for i in range(width)] for home in homes]
        self._copies.copy_(torch.tensor([len(home) for home in homes]))
        self._rank_of.copy_(torch.tensor([[rank for rank, _ in home] for home in padded]))
        self._slot_of.copy_(torch.tensor([[slot for _, slot in home] for home in padded]))

    def _assign(self, experts: torch.Tensor, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(ranks, slots there) of (token, expert) pairs: an expert's tokens go to its copies round-robin."""
        tokens = torch.arange(offset, offset + experts.shape[0], device=experts.device)
        experts = experts.long()
        copy = experts * self.ranks.size + tokens[:, None] % self._copies[experts]
        return self._rank_of.view(-1)[copy], self._slot_of.view(-1)[copy]

    def local_slots(self, experts: torch.Tensor) -> torch.Tensor:
        """Slots on this rank, if all ranks have the same tokens; -1 for pairs that another rank computes."""
        ranks, slots = self._assign(experts.clamp(min=0))
        return torch.where((ranks == self.ranks.rank) & (experts >= 0), slots, -1)

    def exchange(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, run: Run) -> torch.Tensor:
        """Send every token to the ranks of its experts, once to each; add up the sums they return.

        All ranks must call it, even without tokens. Bytes for each token and rank: hidden states there and back, and 8
        for each of its experts there.
        """
        size, top_k = self.ranks.size, experts.shape[1]
        ranks, slots = self._assign(experts, self.ranks.rank)
        reached = torch.zeros(len(x), size, dtype=torch.bool, device=x.device).scatter_(1, ranks, True)
        to, token = reached.t().nonzero(as_tuple=True)
        theirs = torch.where(ranks[token] == to[:, None], slots[token], -1)
        sent, received = exchange_counts(reached.sum(0))
        packed = exchange_rows(_pack(x[token], weights[token], theirs), sent, received)
        states, shares, wanted = _unpack(packed, x, top_k)
        sums = run(states, shares, wanted) if len(states) else states
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        back = exchange_rows(sums, received, sent)
        # Rank by rank, each of which has a token once: sums do not depend on which rank is faster.
        for index, part in zip(token.split(sent), back.split(sent), strict=True):
            out.index_add_(0, index, part.float())
        return out.to(x.dtype)


def _pack(x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """One row of bytes for each token: its state, weights and slots."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in (x, weights, slots)], dim=1)


def _unpack(packed: torch.Tensor, like: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    state = like.shape[1] * like.itemsize
    parts = packed.split([state, 4 * top_k, 4 * top_k], dim=1)
    states, weights, slots = (part.contiguous() for part in parts)
    return states.view(like.dtype), weights.view(torch.float32), slots.view(torch.int32)
