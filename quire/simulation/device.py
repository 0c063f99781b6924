"""A device that only takes time: an executor over a virtual clock, and the shapes of the steps it is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.executor.null import NullExecutor
from quire.messages.plan import StepPlan, StepResult
from quire.simulation.costs import CostModel, StepWork

TOKEN = 7
"""Every token that the device draws."""


@dataclass
class VirtualClock:
    """A clock that is set instead of read from the machine; called like `time.monotonic`."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class StepWorkTracker:
    """The shape of each plan. Follows how many tokens of every row are computed."""

    def __init__(self, max_rows: int) -> None:
        self._computed = np.zeros(max_rows, np.int64)

    def of(self, plan: StepPlan) -> StepWork:
        """The shape of the next plan."""
        computed = self._computed
        for fork in plan.branches:
            computed[fork.row] = computed[fork.source]
        for row in plan.add:
            computed[row.row] = row.num_computed
        for place, count in plan.rewound:
            computed[place] = count
        split = plan.num_decodes
        before, counts = computed[plan.rows], plan.counts.astype(np.int64)
        starts, chunks = before[split:], counts[split:]
        shape = StepWork(
            decodes=split + plan.num_drafts,
            prompt_tokens=len(plan.tokens),
            context=int((before[:split] + counts[:split]).sum()),
            pairs=int((chunks * starts + chunks * (chunks + 1) // 2).sum()),
        )
        computed[plan.rows] = before + counts
        for fork in plan.forks:
            computed[fork.row] = computed[fork.source]
        return shape


@dataclass(frozen=True)
class SimulatedStep:
    """A step on the device: its result, and when it is done."""

    result: StepResult
    shape: StepWork
    start: float
    end: float


class SimulatedDevice(NullExecutor):
    """Computes nothing; steps run one after the other and take the time that the cost model says. Waiting for a result
    sets the clock to the end of its step."""

    def __init__(
        self,
        costs: CostModel,
        max_rows: int,
        clock: VirtualClock,
        on_step: Callable[[SimulatedStep], object] = lambda step: None,
    ) -> None:
        super().__init__(max_rows)
        self._costs = costs
        self._clock = clock
        self._shapes = StepWorkTracker(max_rows)
        self._on_step = on_step
        self._free_at = -math.inf
        """When the last step submitted is done."""
        self.busy = 0.0
        """Seconds of all steps."""

    def submit(self, plan: StepPlan) -> SimulatedStep:  # type: ignore[override]
        result = super().submit(plan)
        shape = self._shapes.of(plan)
        start = max(self._clock.now, self._free_at)
        seconds = self._costs.seconds(shape)
        self._free_at = start + seconds
        self.busy += seconds
        step = SimulatedStep(result, shape, start, self._free_at)
        self._on_step(step)
        return step

    def collect(self, handle: SimulatedStep) -> StepResult:  # type: ignore[override]
        self._clock.now = max(self._clock.now, handle.end)
        return handle.result
