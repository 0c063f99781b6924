"""Sums and gathers over the tensor-parallel group; the identity when a rank is alone.

A sum has the same bits on every rank: it is added up in one place and passed on, by gloo and by NCCL. Logits are
gathered whole, so every rank draws the same tokens by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from quire.distributed.groups import Ranks

Collective = Callable[[], object]
_calls = 0
_group: torch.distributed.ProcessGroup | None = None


def use_group(group: torch.distributed.ProcessGroup | None) -> None:
    """The tensor-parallel ranks are these, and not all there are."""
    global _group
    _group = group


def is_shared(ranks: Ranks) -> bool:
    """Whether there is a group to sum over. One of a single rank does all that a larger one does."""
    return ranks.tp_size > 1 or _group is not None


def all_reduce(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Sum `x` over the tensor-parallel ranks, in place."""
    if is_shared(ranks):
        count()
        torch.distributed.all_reduce(x, group=_group)
    return x


def all_gather_last(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Join the ranks' slices of the last dimension."""
    if not is_shared(ranks):
        return x
    count()
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks.tp_size)]
    torch.distributed.all_gather(parts, x.contiguous(), group=_group)
    return torch.cat(parts, dim=-1)


def words_of(error: Exception) -> str:
    """What a backend says of a collective that failed, without its own lines of code and good advice."""
    line = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0]


def calls() -> int:
    """Collectives this process has begun. Ranks that differ here wait for each other for ever."""
    return _calls


def count() -> None:
    """One more is begun."""
    global _calls
    _calls += 1
