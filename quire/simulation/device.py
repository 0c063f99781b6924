"""A device that only takes time: an executor over a virtual clock, and the shapes of the steps it is given.

It computes nothing, but it yields what a device would: one token a draw, or more where drafts are accepted at given
rates, and reports of copies between its memory and the host's, and of loads of adapters, once these have had the time
they take.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.executor.null import NullExecutor
from quire.messages.plan import AdapterLoaded, Ints, MovesDone, PrefixGroup, StepPlan, StepResult
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
    """The shape of each plan. Follows how many tokens of every row are computed, and the prefix groups."""

    def __init__(self, max_rows: int) -> None:
        self._computed = np.zeros(max_rows, np.int64)
        self._group_of = np.zeros(max_rows, np.int64)
        """By row: the number of its prefix group; 0: none."""
        self._shared = np.zeros(1, np.int64)
        """By group: tokens that its rows share."""

    def of(self, plan: StepPlan, yielded: Ints | None = None) -> StepWork:
        """The shape of the next plan. `yielded`: tokens of each of its draws, where drafts are verified."""
        computed = self._computed
        for fork in plan.branches:
            computed[fork.row] = computed[fork.source]
        for row in plan.add:
            computed[row.row] = row.num_computed
        for place, count in plan.rewound:
            computed[place] = count
        if plan.groups is not None:
            self._set_groups(plan.groups)
        split = plan.num_decodes
        before, counts = computed[plan.rows], plan.counts.astype(np.int64)
        starts, chunks = before[split:], counts[split:]
        shape = StepWork(
            decodes=split + plan.num_drafts,
            prompt_tokens=len(plan.tokens),
            context=int((before[:split] + counts[:split]).sum()),
            pairs=int((chunks * starts + chunks * (chunks + 1) // 2).sum()),
            prompts=len(chunks),
            shared=self._saved(plan.rows[:split]) if len(self._shared) > 1 else 0,
            has_images=bool(plan.splices),
        )
        computed[plan.rows] = before + counts
        if plan.num_drafts and yielded is not None:  # what was computed for rejected drafts is computed again
            is_decode = plan.samples < split
            rows = plan.sample_rows[is_decode]
            computed[rows] = before[plan.samples[is_decode]] + yielded[is_decode]
        for fork in plan.forks:
            computed[fork.row] = computed[fork.source]
        return shape

    def _set_groups(self, groups: Sequence[PrefixGroup]) -> None:
        self._group_of[:] = 0
        for number, group in enumerate(groups, 1):
            self._group_of[group.rows] = number
        self._shared = np.array([0, *(group.shared_tokens for group in groups)], np.int64)

    def _saved(self, rows: Ints) -> int:
        """Tokens of context that groups save these decodes from reading."""
        counts = np.bincount(self._group_of[rows], minlength=len(self._shared))
        return int((np.maximum(counts - 1, 0) * self._shared).sum())


@dataclass(frozen=True)
class DraftModel:
    """Drafts that a proposer on the device makes, and how often they are right."""

    rates: tuple[float, ...]
    """For each draft of a decode the probability that it is accepted if all before it are."""
    seconds: float = 0.0
    """That the proposer takes for one more draft of every row of a step."""
    seed: int = 0


@dataclass(frozen=True)
class HostLink:
    """Copies of blocks between the device and host memory, in both directions at the same time."""

    block_bytes: int
    out_rate: float
    """Bytes a second from the device…"""
    back_rate: float
    """…and to it."""


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
        drafts: DraftModel | None = None,
        link: HostLink | None = None,
        adapter_seconds: float = 0.0,
        image_seconds: float = 0.0,
    ) -> None:
        """`drafts`: for plans that verify some. `link`: for plans that move blocks. `adapter_seconds`: to load an
        adapter. `image_seconds`: to encode an image, in the step that reads it first."""
        super().__init__(max_rows)
        self._costs = costs
        self._clock = clock
        self._shapes = StepWorkTracker(max_rows)
        self._on_step = on_step
        self._drafts = drafts
        self._chance = np.random.default_rng(0 if drafts is None else drafts.seed)
        self._link = link
        self.free_at = -math.inf
        """When the last step submitted has left the first pipeline stage."""
        self._link_free_at = -math.inf
        self._moving: deque[tuple[float, MovesDone]] = deque()
        """Copies under way, and when each is done."""
        self._adapter_seconds = adapter_seconds
        self._image_seconds = image_seconds
        self._loading: deque[tuple[float, AdapterLoaded]] = deque()
        """Adapters that are loaded, one after the other, and when each is done."""
        self.busy = 0.0
        """Seconds of all steps."""

    def submit(self, plan: StepPlan) -> SimulatedStep:  # type: ignore[override]
        result = super().submit(plan)
        if self._drafts is not None:
            self._verify(plan, result, self._drafts)
        shape = self._shapes.of(plan, result.counts)
        start = max(self._clock.now, self.free_at)
        copied = self._start_copies(plan, start)
        if plan.adapters:
            self._start_loads(result)
        if plan.moves is not None and plan.moves.awaited:
            start = max(start, copied)
        seconds = self._costs.seconds(shape)
        if self._drafts is not None:
            seconds += plan.proposals * self._drafts.seconds
        seconds += len(plan.encode) * self._image_seconds
        stages = self._costs.stages
        self.free_at, end = start + seconds / stages, start + seconds
        if seconds:
            end += (stages - 1) * self._costs.hop_seconds
        elif not len(plan.rows) and (waits := [queue[0][0] for queue in (self._moving, self._loading) if queue]):
            end = max(start, min(waits))  # it only waits for copies and loads
        self.busy += seconds / stages
        step = SimulatedStep(result, shape, start, end)
        self._on_step(step)
        return step

    def collect(self, handle: SimulatedStep) -> StepResult:  # type: ignore[override]
        now = self._clock.now = max(self._clock.now, handle.end)
        while self._moving and self._moving[0][0] <= now:
            handle.result.moves_done.append(self._moving.popleft()[1])
        while self._loading and self._loading[0][0] <= now:
            handle.result.adapters_done.append(self._loading.popleft()[1])
        return handle.result

    def _verify(self, plan: StepPlan, result: StepResult, drafts: DraftModel) -> None:
        """Accept drafts at random, and propose some."""
        if plan.num_drafts:
            rates = np.zeros(int(plan.widths.max()))
            rates[: len(drafts.rates)] = drafts.rates[: len(rates)]
            is_right = self._chance.random((len(plan.samples), len(rates))) < rates
            is_right &= np.arange(len(rates)) < (plan.widths - 1)[:, None]
            result.counts = (1 + np.cumprod(is_right, axis=1).sum(1)).astype(np.int32)
            result.tokens = np.full(int(result.counts.sum()), TOKEN, np.int32)
        if plan.proposals:
            result.drafts = [[TOKEN] * plan.proposals] * len(plan.sample_rows)

    def _start_loads(self, result: StepResult) -> None:
        """Load the plan's adapters behind those that are being loaded: a device has one thread for it."""
        done = max(self._clock.now, self._loading[-1][0] if self._loading else -math.inf)
        for load in result.adapters_done:
            done += self._adapter_seconds
            self._loading.append((done, load))
        result.adapters_done = []

    def _start_copies(self, plan: StepPlan, start: float) -> float:
        """Start the plan's copies once it has; returns when they are done."""
        if plan.moves is None or self._link is None:
            return start
        size, begin = self._link.block_bytes, max(start, self._link_free_at)
        out, back = len(plan.moves.out) * size / self._link.out_rate, len(plan.moves.back) * size / self._link.back_rate
        self._link_free_at = begin + max(out, back)
        self._moving.append((self._link_free_at, MovesDone(plan.step, out, back)))
        return self._link_free_at
