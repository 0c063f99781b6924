"""Expert parallelism: the ranks that share whole experts, and the exchanges between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.distributed import collectives
from quire.errors import RankLostError


@dataclass(frozen=True)
class ExpertRanks:
    """This process among the ranks that share the experts."""

    rank: int = 0
    size: int = 1
    spare: int = 0
    """Slots over all ranks beyond one for each expert: they hold copies."""
    exchanges: bool = False
    """Each rank has its own tokens and sends them to their experts' ranks; otherwise all ranks have the same tokens."""
    first: int = 0
    """Global rank of the first of them."""


def exchange_counts(counts: torch.Tensor) -> list[list[int]]:
    """[rows this rank sends to each rank, rows it receives from each]. Synchronizes with the device."""
    sent = counts.to(_carrier(counts.device))
    received = torch.empty_like(sent)
    _run_collective(lambda: torch.distributed.all_to_all_single(received, sent))
    return torch.stack([sent, received]).tolist()


def exchange_rows(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """The rows received from all ranks, ordered by rank; `rows`, the ones to send, are ordered by rank too."""
    device, carrier = rows.device, _carrier(rows.device)
    out = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype, device=carrier)
    outgoing = rows.contiguous().to(carrier)
    _run_collective(lambda: torch.distributed.all_to_all_single(out, outgoing, list(received), list(sent)))
    return out.to(device)


@dataclass(frozen=True)
class Copy:
    """Copy one row of a per-rank tensor to another; both ends are (rank, row)."""

    source: tuple[int, int]
    target: tuple[int, int]


def copy_rows(stack: torch.Tensor, copies: Sequence[Copy], ranks: ExpertRanks) -> None:
    """Copy rows of the ranks' `stack` tensors between ranks, as if all reads came before all writes. Every rank passes
    the same copies."""
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
    # Also with nothing to send or receive: ranks compare how many collectives they have started.
    _run_collective(lambda: [work.wait() for work in torch.distributed.batch_isend_irecv(ops)] if ops else None)
    for slot, weights in arrived:
        stack[slot].copy_(weights)


def _carrier(device: torch.device) -> torch.device:
    """The device a tensor must be on to be sent: gloo sends host memory only."""
    return torch.device("cpu") if torch.distributed.get_backend() == "gloo" else device


def _run_collective(collective: collectives.Collective) -> None:
    """Run the collective; raises RankLostError if another rank does not take part."""
    collectives.count_collective()
    try:
        collective()
    except RuntimeError as error:
        raise RankLostError(
            f"another rank has exited or does not respond: {collectives.backend_message(error)}"
        ) from error
