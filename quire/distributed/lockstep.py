"""Engines that share experts step together: before every pass they agree on whether there is one.

Each of them has requests of its own. While one has something to compute all make a pass, those that have nothing an
empty one, in which their experts serve the others. When nobody has work left all go to sleep, and cost nothing, until
they are roused. Whoever rouses them numbers that, after the work is where it belongs, and a wave ends only when all
have heard the same number: so nobody begins a turn that the others, asleep, would not join.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d

from quire.distributed.collectives import words_of
from quire.distributed.world import one_machine
from quire.errors import RankLostError


@dataclass(frozen=True)
class LockstepAddress:
    """An engine's place among those that step together."""

    rank: int
    size: int
    meeting: str
    """The file in which they find each other."""


@dataclass(frozen=True)
class LockstepRound:
    """What all have agreed on."""

    runs: bool
    """A pass is made."""
    rebalances: bool
    """Experts are moved, before the pass."""


class LockstepAgreement:
    """This engine among the others. Every call of `agree` meets one of each of them."""

    def __init__(self, place: LockstepAddress, backend: str, seconds: float) -> None:
        """Meets the others. `seconds`: so long one waits for them, now and in every exchange before `limit`."""
        self.place = place
        self.is_on = False
        """Whether turns are being taken; if not, everyone sleeps."""
        self._heard = 0
        self._asked = self._rebalanced = 0
        os.environ.update(one_machine(dict(os.environ)))
        store = torch.distributed.FileStore(place.meeting, place.size)
        limit = timedelta(seconds=seconds)
        torch.distributed.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=limit
        )
        self._group = None if backend == "gloo" else torch.distributed.new_group(backend="gloo", timeout=limit)

    def limit(self, seconds: float) -> None:
        """All are there: from now on nobody is waited for longer than this."""
        for group in {None, self._group}:
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def rouse(self, number: int) -> None:
        """There is work somewhere."""
        self._heard = max(self._heard, number)
        self.is_on = True

    def ask(self, number: int) -> None:
        """Experts are to be moved, once all have been asked."""
        self._asked = max(self._asked, number)
        self.is_on = True

    def agree(self, has_plan: bool, has_work: bool) -> LockstepRound:
        """Take a turn. `has_plan`: there is something to compute now; `has_work`: or soon."""
        heard, asked = self._heard, self._asked
        ours = [has_plan, has_work or has_plan, heard, -heard, asked, -asked]
        plan, work, last, first, last_asked, first_asked = self._reduce(ours, torch.distributed.ReduceOp.MAX)
        all_heard, all_asked = last == -first, last_asked == -first_asked
        rebalances = all_asked and asked > self._rebalanced
        if rebalances:
            self._rebalanced = asked
        self.is_on = bool(work) or not (all_heard and all_asked)
        return LockstepRound(bool(plan), rebalances)

    def sum(self, counts: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """Counts of all engines."""
        flat = [count for chosen in counts.values() for count in chosen]
        total = iter(self._reduce(flat, torch.distributed.ReduceOp.SUM))
        return {layer: [next(total) for _ in chosen] for layer, chosen in counts.items()}

    def _reduce(self, numbers: Sequence[int], how: torch.distributed.ReduceOp.RedOpType) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        try:
            torch.distributed.all_reduce(tensor, how, group=self._group)
        except RuntimeError as error:
            raise RankLostError(
                f"another engine of the {self.place.size} that share the experts is gone, or does not answer: "
                f"{words_of(error)}"
            ) from error
        return tensor.tolist()

    def leave(self) -> None:
        """The others are on their own."""
        torch.distributed.destroy_process_group()
