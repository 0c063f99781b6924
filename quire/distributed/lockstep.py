"""Engines that share experts run in lockstep: before every pass they agree on whether there is one.

Each engine has its own requests. While one engine has something to compute, all make a pass; an engine without tokens
makes an empty one, in which its experts serve the others. When no engine has work left all of them sleep, at no cost,
until they are woken. Wake-ups are numbered, and sent after the request has reached its engine. Rounds end only when all
engines have seen the same number, so no engine starts a round that the sleeping others would not join.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d

from quire.distributed.collectives import backend_message
from quire.distributed.process_group import loopback_environment
from quire.errors import RankLostError


@dataclass(frozen=True)
class LockstepAddress:
    """An engine's rank among those in lockstep, and where they rendezvous."""

    rank: int
    size: int
    rendezvous: str
    """Path of the file through which they find each other."""


@dataclass(frozen=True)
class LockstepRound:
    """What all engines have agreed on."""

    runs: bool
    """A pass is made."""
    rebalances: bool
    """Experts are moved, before the pass."""


class LockstepAgreement:
    """This engine's side of the agreement. Every call of `agree` waits for one of every other engine."""

    def __init__(self, address: LockstepAddress, backend: str, seconds: float) -> None:
        """Joins the other engines. `seconds`: the timeout, now and in every exchange, until `set_timeout`."""
        self.address = address
        self.is_active = False
        """Whether rounds are being made; if not, all engines sleep."""
        self._last_wake = 0
        self._requested = self._rebalanced = 0
        os.environ.update(loopback_environment(dict(os.environ)))
        store = torch.distributed.FileStore(address.rendezvous, address.size)
        timeout = timedelta(seconds=seconds)
        torch.distributed.init_process_group(
            backend, store=store, rank=address.rank, world_size=address.size, timeout=timeout
        )
        self._group = None if backend == "gloo" else torch.distributed.new_group(backend="gloo", timeout=timeout)

    def set_timeout(self, seconds: float) -> None:
        """How long to wait for the other engines from now on."""
        for group in {None, self._group}:
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def wake(self, number: int) -> None:
        """One of the engines has received a request."""
        self._last_wake = max(self._last_wake, number)
        self.is_active = True

    def request_rebalance(self, number: int) -> None:
        """Move experts once all engines have received this request."""
        self._requested = max(self._requested, number)
        self.is_active = True

    def agree(self, has_plan: bool, has_work: bool) -> LockstepRound:
        """Make a round. `has_plan`: this engine has something to compute now; `has_work`: now or soon."""
        wake, requested = self._last_wake, self._requested
        ours = [has_plan, has_work or has_plan, wake, -wake, requested, -requested]
        any_plan, any_work, *extremes = self._reduce(ours, torch.distributed.ReduceOp.MAX)
        max_wake, negative_min_wake, max_requested, negative_min_requested = extremes
        same_wake, same_requested = max_wake == -negative_min_wake, max_requested == -negative_min_requested
        rebalances = same_requested and requested > self._rebalanced
        if rebalances:
            self._rebalanced = requested
        self.is_active = bool(any_work) or not (same_wake and same_requested)
        return LockstepRound(bool(any_plan), rebalances)

    def sum(self, counts: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """Expert counts summed over all engines."""
        flat = [count for chosen in counts.values() for count in chosen]
        total = iter(self._reduce(flat, torch.distributed.ReduceOp.SUM))
        return {layer: [next(total) for _ in chosen] for layer, chosen in counts.items()}

    def _reduce(self, numbers: Sequence[int], how: torch.distributed.ReduceOp.RedOpType) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        try:
            torch.distributed.all_reduce(tensor, how, group=self._group)
        except RuntimeError as error:
            raise RankLostError(
                f"another engine of the {self.address.size} that share the experts has exited or does not respond: "
                f"{backend_message(error)}"
            ) from error
        return tensor.tolist()

    def leave(self) -> None:
        """Leave the process group."""
        torch.distributed.destroy_process_group()
