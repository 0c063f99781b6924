"""Sums and gathers over the tensor-parallel group; the identity when a rank is alone."""

from __future__ import annotations

import torch

from quire.distributed.groups import Ranks


def all_reduce(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Sum `x` over the tensor-parallel ranks, in place."""
    if ranks.tp_size > 1:
        torch.distributed.all_reduce(x)
    return x


def all_gather_last(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Join the ranks' slices of the last dimension."""
    if ranks.tp_size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(ranks.tp_size)]
    torch.distributed.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=-1)
