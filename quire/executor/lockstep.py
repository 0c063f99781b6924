"""The worker in this process, in lockstep with those of other engines, which hold the other experts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.distributed.collectives import collectives_started
from quire.distributed.lockstep import LockstepAgreement
from quire.errors import RankLostError, StepError
from quire.executor.expert_balance import ExpertBalance
from quire.messages.experts import Rebalanced
from quire.messages.memory_use import MemoryUse
from quire.messages.plan import StepMasks, StepPlan, StepResult
from quire.worker.runner import PendingStep
from quire.worker.worker import Worker

if TYPE_CHECKING:
    from quire.executor.local import LocalExecutor


class LockstepExecutor:
    """Runs plans in lockstep rounds. When one engine is lost all are: every layer exchanges tokens with all of them."""

    def __init__(
        self, local: LocalExecutor, worker: Worker, agreement: LockstepAgreement, balance: ExpertBalance
    ) -> None:
        self._local, self._worker, self._agreement = local, worker, agreement
        self.balance = balance
        self.lockstep = self
        self._rebalanced: list[Rebalanced] = []
        before = collectives_started()
        self._worker.serve_others()
        self._collectives = collectives_started() - before
        """Of every pass, with or without tokens of this engine."""

    # Rounds

    @property
    def is_active(self) -> bool:
        return self._agreement.is_active

    def wake(self, number: int) -> None:
        self._agreement.wake(number)

    def join_round(self, has_work: bool) -> bool:
        return self._make_round(has_plan=False, has_work=has_work)

    def _make_round(self, has_plan: bool, has_work: bool) -> bool:
        agreed = self._agreement.agree(has_plan, has_work)
        # All engines make the same passes, so a rebalance is due in all of them at once.
        if agreed.rebalances or (agreed.runs and self.balance.is_due()):
            self._rebalance(is_requested=agreed.rebalances)
        if agreed.runs and not has_plan:
            self._worker.serve_others()
        return agreed.runs

    # Steps

    def submit(self, plan: StepPlan) -> PendingStep | StepError:
        if not len(plan.rows):  # only transfers between tiers: no pass
            return self._local.submit(plan)
        self._make_round(has_plan=True, has_work=True)
        before = collectives_started()
        handle = self._local.submit(plan)
        if isinstance(handle, StepError):
            self._catch_up(handle, collectives_started() - before)
        return handle

    def _catch_up(self, error: StepError, started: int) -> None:
        """A step failed here after `started` collectives; the other engines are in it too. Before the first or after
        the last one this engine can stay in lockstep; in between, the engines are out of sync for good."""
        if isinstance(error.__cause__, RankLostError):
            raise error.__cause__
        if not started:
            self._worker.serve_others()
        elif started != self._collectives:
            raise RankLostError(f"a step failed while other engines took part in it: {error}") from error

    def supply(self, handle: Any, masks: StepMasks) -> None:
        self._local.supply(handle, masks)

    def collect(self, handle: Any) -> StepResult:
        return self._local.collect(handle)

    # Experts

    def expert_counts(self) -> Mapping[int, Sequence[int]]:
        return self._local.expert_counts()

    def memory_use(self) -> MemoryUse | None:
        return self._local.memory_use()

    def rebalance_experts(self) -> None:
        return None  # only together with the other engines: `request_rebalance`

    def request_rebalance(self, number: int) -> None:
        self._agreement.request_rebalance(number)

    def take_rebalanced(self) -> list[Rebalanced]:
        taken, self._rebalanced = self._rebalanced, []
        return taken

    def _rebalance(self, is_requested: bool) -> None:
        """All engines compute the same placement from the same counts, and move the experts."""
        counts = self._agreement.sum(own := self._local.expert_counts())
        placements, outcome = self.balance.plan(counts)
        self._worker.place_experts(placements)
        self.balance.commit(placements, counts, own)
        if is_requested:
            self._rebalanced.append(outcome)

    def check(self) -> None:
        return None  # the front watches all engines

    def give_up(self, message: str) -> None:
        self._local.give_up(message)

    def shutdown(self) -> None:
        self._local.shutdown()
        with contextlib.suppress(RuntimeError):
            self._agreement.leave()
