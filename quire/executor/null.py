"""An executor that computes nothing: the planning half alone, for benchmarks and storms."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from quire.messages.plan import NewRow, StepMasks, StepPlan, StepResult, Vector


class NullExecutor:
    """Yields a token for every draw at once. `token_of(request id, sample, position)` says which."""

    balance = lockstep = None

    def __init__(self, max_rows: int, token_of: Callable[[str, int, int], int] | None = None) -> None:
        self._token_of = token_of
        self._rows: dict[int, NewRow] = {}
        self._drawn = np.zeros(max_rows, np.int64)
        self._next_step = 0
        self._pooled: set[int] = set()

    def submit(self, plan: StepPlan) -> StepResult:
        if plan.step != self._next_step:
            raise RuntimeError(f"plan {plan.step} came where {self._next_step} was due")
        self._next_step += 1
        draws = len(plan.sample_rows)
        stopped = np.zeros(draws, np.bool_)
        if self._token_of is None:
            tokens = np.full(draws, 7, np.int32)
        else:
            tokens = self._draw(plan, stopped)
        counts, invalid = np.ones(draws, np.int32), np.zeros(draws, np.bool_)
        return StepResult(plan.step, tokens, counts, stopped, invalid, vectors=self._pool(plan))

    def supply(self, handle: StepResult, masks: StepMasks) -> None:
        pass  # tokens are not drawn from anything

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def expert_counts(self) -> dict[int, list[int]]:
        return {}  # no model, no experts

    def rebalance_experts(self) -> None:
        return None

    def check(self) -> None:
        return None

    def give_up(self, message: str) -> None:
        pass  # nobody ever waits here

    def shutdown(self) -> None:
        self._rows.clear()

    def _pool(self, plan: StepPlan) -> dict[int, Vector]:
        """A vector for every pooled row whose prompt is done."""
        self._pooled = set() if plan.reset else self._pooled.difference(plan.drop)
        for new in plan.add:
            (self._pooled.discard if new.pooling is None else self._pooled.add)(new.row)
        if not self._pooled:
            return {}
        return {i: np.ones(4, np.float32) for i, row in enumerate(plan.sample_rows.tolist()) if row in self._pooled}

    def _draw(self, plan: StepPlan, stopped: np.ndarray) -> np.ndarray:
        for row in plan.add:
            self._rows[row.row] = row
            self._drawn[row.row] = row.num_tokens
        for fork in plan.forks:
            source = self._rows[fork.source]
            self._rows[fork.row] = msgspec.structs.replace(source, row=fork.row, sample=fork.sample)
            self._drawn[fork.row] = self._drawn[fork.source]
        tokens = np.zeros(len(plan.sample_rows), np.int32)
        for i, row in enumerate(plan.sample_rows.tolist()):
            owner = self._rows[row]
            tokens[i] = self._token_of(owner.request, owner.sample, int(self._drawn[row]))  # type: ignore[misc]
            stopped[i] = int(tokens[i]) in owner.stop_ids
            self._drawn[row] += 1
        return tokens
