"""The executor `null`: computes nothing. The planning half alone, for benchmarks and stress tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from quire.executor.base import ExecutorSpec, StartedExecutor
from quire.messages.plan import AdapterLoaded, NewRow, StepMasks, StepPlan, StepResult, Vector

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.platforms.base import Platform

NUM_BLOCKS = 100_000
"""Blocks of an engine without a cache, unless `num_gpu_blocks_override` gives another number."""


class NullExecutor:
    """Returns a token for every sampled row at once: 7, or `token_of(request id, sequence, position)`."""

    balance = lockstep = None

    def __init__(self, max_rows: int, token_of: Callable[[str, int, int], int] | None = None) -> None:
        self._token_of = token_of
        self._rows: dict[int, NewRow] = {}
        self._positions = np.zeros(max_rows, np.int64)
        self._next_step = 0
        self._pooled: set[int] = set()

    def submit(self, plan: StepPlan) -> StepResult:
        if plan.step != self._next_step:
            raise RuntimeError(f"expected plan {self._next_step}, got plan {plan.step}")
        self._next_step += 1
        count = len(plan.sample_rows)
        stopped = np.zeros(count, np.bool_)
        if self._token_of is None:
            tokens = np.full(count, 7, np.int32)
        else:
            tokens = self._sample(plan, stopped)
        counts, invalid = np.ones(count, np.int32), np.zeros(count, np.bool_)
        return StepResult(
            plan.step,
            tokens,
            counts,
            stopped,
            invalid,
            vectors=self._pool(plan),
            adapters_done=[AdapterLoaded(load.slot, load.key) for load in plan.adapters],
        )

    def supply(self, handle: StepResult, masks: StepMasks) -> None:
        pass  # tokens are not sampled from logits

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def expert_counts(self) -> dict[int, list[int]]:
        return {}  # no model, no experts

    def memory_use(self) -> None:
        return None

    def rebalance_experts(self) -> None:
        return None

    def check(self) -> None:
        return None

    def give_up(self, message: str) -> None:
        pass  # `collect` never waits

    def shutdown(self) -> None:
        self._rows.clear()

    def _pool(self, plan: StepPlan) -> dict[int, Vector]:
        """A vector for every pooling row whose prompt is computed."""
        self._pooled = set() if plan.reset else self._pooled.difference(plan.drop)
        for new in plan.add:
            (self._pooled.discard if new.pooling is None else self._pooled.add)(new.row)
        if not self._pooled:
            return {}
        return {i: np.ones(4, np.float32) for i, row in enumerate(plan.sample_rows.tolist()) if row in self._pooled}

    def _sample(self, plan: StepPlan, stopped: np.ndarray) -> np.ndarray:
        for row in plan.add:
            self._rows[row.row] = row
            self._positions[row.row] = row.num_tokens
        for fork in plan.forks:
            source = self._rows[fork.source]
            self._rows[fork.row] = msgspec.structs.replace(source, row=fork.row, sequence=fork.sequence)
            self._positions[fork.row] = self._positions[fork.source]
        tokens = np.zeros(len(plan.sample_rows), np.int32)
        for i, row in enumerate(plan.sample_rows.tolist()):
            owner = self._rows[row]
            tokens[i] = self._token_of(owner.request, owner.sequence, int(self._positions[row]))  # type: ignore[misc]
            stopped[i] = int(tokens[i]) in owner.stop_ids
            self._positions[row] += 1
        return tokens


class NullBackend:
    """Starts an engine without a model: tokens are constant, and only the front and the planning half do work."""

    uses_local_devices = False

    def choose_platform(self, config: EngineConfig) -> Platform:
        from quire.platforms import choose

        return choose("cpu")

    def start(self, spec: ExecutorSpec) -> StartedExecutor:
        from quire.worker.memory import MemoryPlan

        memory = MemoryPlan(
            total=0, before=0, weights=0, loaded=0, activations=0, is_measured=False, step_tokens=spec.limits.tokens,
            reserve=0, cache=0, num_blocks=(spec.config.num_gpu_blocks_override or NUM_BLOCKS) + 1,
            block_size=spec.config.block_size, share=None,
        )  # fmt: skip
        return StartedExecutor(
            executor=NullExecutor(spec.limits.rows),
            memory=memory,
            device="null",
            dtype="none",
            weight_bytes=0,
            cache_bytes=0,
            reads_groups=False,
        )
