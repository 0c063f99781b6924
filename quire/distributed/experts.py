"""The ranks that whole experts are spread over, and what travels between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.distributed import collectives
from quire.errors import RankLostError


@dataclass(frozen=True)
class ExpertRanks:
    """This process's place among those that share the experts."""

    rank: int = 0
    size: int = 1
    spare: int = 0
    """Slots there are, over all ranks, beyond one for each expert."""
    exchanges: bool = False
    """Each rank has tokens of its own and sends them where their experts are; if not, all have the same tokens."""
    first: int = 0
    """The first one's rank in the world."""


def exchange_counts(counts: torch.Tensor) -> list[list[int]]:
    """(rows this rank sends to each, rows it is sent by each). The device is waited for."""
    sent = counts.to(_carrier(counts.device))
    received = torch.empty_like(sent)
    _run(lambda: torch.distributed.all_to_all_single(received, sent))
    return torch.stack([sent, received]).tolist()


def exchange_rows(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """The rows that other ranks sent here, in the order of ranks; `rows` lie in that order too."""
    device, carrier = rows.device, _carrier(rows.device)
    out = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype, device=carrier)
    there = rows.contiguous().to(carrier)
    _run(lambda: torch.distributed.all_to_all_single(out, there, list(received), list(sent)))
    return out.to(device)


@dataclass(frozen=True)
class Copy:
    """A row of every rank's tensor that goes to another place: (rank, row) each."""

    source: tuple[int, int]
    target: tuple[int, int]


def copy_rows(stack: torch.Tensor, copies: Sequence[Copy], ranks: ExpertRanks) -> None:
    """Copy rows of `stack`, which every rank has one of, from rank to rank, all at once: what is read is what was
    there before. Every rank names the same copies."""
    carrier = _carrier(stack.device)
    ops, arrived, kept = [], [], []
    for copy in copies:
        (source, row), (target, slot) = copy.source, copy.target
        if source == target == ranks.rank:
            arrived.append((slot, stack[row].clone()))
        elif source == ranks.rank:
            kept.append(stack[row].to(carrier))
            ops.append(torch.distributed.P2POp(torch.distributed.isend, kept[-1], ranks.first + target))
        elif target == ranks.rank:
            buffer = torch.empty_like(stack[slot], device=carrier)
            arrived.append((slot, buffer))
            ops.append(torch.distributed.P2POp(torch.distributed.irecv, buffer, ranks.first + source))
    # Also where nothing comes or goes: ranks compare how many collectives they have begun.
    _run(lambda: [work.wait() for work in torch.distributed.batch_isend_irecv(ops)] if ops else None)
    for slot, weights in arrived:
        stack[slot].copy_(weights)


def _carrier(device: torch.device) -> torch.device:
    """Where a tensor must lie to be sent: gloo sends host memory alone."""
    return torch.device("cpu") if torch.distributed.get_backend() == "gloo" else device


def _run(collective: collectives.Collective) -> None:
    """Run it, and call it by its name if another rank is not there to take part."""
    collectives.count()
    try:
        collective()
    except RuntimeError as error:
        raise RankLostError(f"another rank is gone, or does not answer: {collectives.words_of(error)}") from error
