"""The worker in this process, in step with those of other engines, which hold the experts it does not."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from quire.distributed.collectives import calls
from quire.distributed.lockstep import LockstepAgreement
from quire.errors import RankLostError, StepError
from quire.executor.expert_balance import ExpertBalance
from quire.executor.local import LocalExecutor
from quire.messages.experts import Rebalanced
from quire.messages.plan import StepMasks, StepPlan, StepResult
from quire.worker.runner import PendingStep
from quire.worker.worker import Worker


class LockstepExecutor:
    """Runs plans when it is everyone's turn. One engine lost is all lost: they wait for each other in every layer."""

    def __init__(self, local: LocalExecutor, worker: Worker, world: LockstepAgreement, balance: ExpertBalance) -> None:
        self._local, self._worker, self._world = local, worker, world
        self.balance = balance
        self.lockstep = self
        self._rebalanced: list[Rebalanced] = []
        begin = calls()
        self._worker.serve_others()
        self._collectives = calls() - begin
        """In every pass, whoever has tokens."""

    # Turns

    @property
    def is_on(self) -> bool:
        """Whether the engines take turns: then there is a step to make, with or without a plan."""
        return self._world.is_on

    def rouse(self, number: int) -> None:
        """A request, the `number`-th of all, has come to one of the engines."""
        self._world.rouse(number)

    def accompany(self, has_work: bool) -> bool:
        """There is no plan here: take a turn with the others. Whether a pass was made."""
        return self._take_turn(has_plan=False, has_work=has_work)

    def _take_turn(self, has_plan: bool, has_work: bool) -> bool:
        turn = self._world.agree(has_plan, has_work)
        # All make the same passes: experts are due everywhere at once.
        if turn.rebalances or (turn.runs and self.balance.is_due()):
            self._rebalance(is_asked=turn.rebalances)
        if turn.runs and not has_plan:
            self._worker.serve_others()
        return turn.runs

    # Steps

    def submit(self, plan: StepPlan) -> PendingStep | StepError:
        if not len(plan.rows):  # moves between tiers are nobody else's business
            return self._local.submit(plan)
        self._take_turn(has_plan=True, has_work=True)
        begin = calls()
        handle = self._local.submit(plan)
        if isinstance(handle, StepError):
            self._catch_up(handle, calls() - begin)
        return handle

    def _catch_up(self, error: StepError, made: int) -> None:
        """A step failed here. The others are in it too: one that ended before or after all exchanges can be made good,
        in the midst of them nobody knows who waits for what."""
        if isinstance(error.__cause__, RankLostError):
            raise error.__cause__
        if not made:
            self._worker.serve_others()
        elif made != self._collectives:
            raise RankLostError(f"a step failed while other engines took part in it: {error}") from error

    def supply(self, handle: Any, masks: StepMasks) -> None:
        self._local.supply(handle, masks)

    def collect(self, handle: Any) -> StepResult:
        return self._local.collect(handle)

    # Experts

    def expert_counts(self) -> Mapping[int, Sequence[int]]:
        return self._local.expert_counts()

    def rebalance_experts(self) -> None:
        return None  # not alone

    def ask_to_rebalance(self, number: int) -> None:
        """Move experts when all engines have been asked; `take_rebalanced` tells."""
        self._world.ask(number)

    def take_rebalanced(self) -> list[Rebalanced]:
        """What came of it, of each time since this was asked last."""
        taken, self._rebalanced = self._rebalanced, []
        return taken

    def _rebalance(self, is_asked: bool) -> None:
        """All engines compute the same placement from the same counts, and move the experts."""
        counts = self._world.sum(own := self._local.expert_counts())
        placements, outcome = self.balance.plan(counts)
        self._worker.place_experts(placements)
        self.balance.commit(placements, counts, own)
        if is_asked:
            self._rebalanced.append(outcome)

    def check(self) -> None:
        return None  # the front looks after all engines

    def give_up(self, message: str) -> None:
        self._local.give_up(message)

    def shutdown(self) -> None:
        self._local.shutdown()
        with contextlib.suppress(RuntimeError):
            self._world.leave()
