"""Sums and gathers over the tensor-parallel group; the identity when a rank is alone.

A sum has the same bits on every rank: gloo and NCCL both reduce in one place and distribute the result. Every rank
gathers the full logits and therefore samples the same tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from quire.distributed.groups import Ranks

Collective = Callable[[], object]
_started = 0
_group: torch.distributed.ProcessGroup | None = None


def use_group(group: torch.distributed.ProcessGroup | None) -> None:
    """Use this group for tensor-parallel collectives instead of the default group of all ranks."""
    global _group
    _group = group


def is_shared(ranks: Ranks) -> bool:
    """Whether there is a group to reduce over. A group of a single rank runs the same collectives as a larger one."""
    return ranks.tp_size > 1 or _group is not None


def all_reduce(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Sum `x` over the tensor-parallel ranks, in place."""
    if is_shared(ranks):
        count_collective()
        torch.distributed.all_reduce(x, group=_group)
    return x


def all_gather_last(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Join the ranks' slices of the last dimension."""
    if not is_shared(ranks):
        return x
    count_collective()
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks.tp_size)]
    torch.distributed.all_gather(parts, x.contiguous(), group=_group)
    return torch.cat(parts, dim=-1)


def backend_message(error: Exception) -> str:
    """The first sentence of a failed collective's error, without source locations and hints."""
    line = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0]


def collectives_started() -> int:
    """Number of collectives this process has started. Ranks whose numbers differ would deadlock."""
    return _started


def count_collective() -> None:
    """Count one more."""
    global _started
    _started += 1
