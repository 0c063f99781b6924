"""Measures steps of a real engine, and fits a cost model to them."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from quire.executor.base import Executor
from quire.messages.plan import StepMasks, StepPlan, StepResult
from quire.simulation.costs import CostModel, StepWork, fit
from quire.simulation.device import StepWorkTracker

if TYPE_CHECKING:
    from quire.api.llm import LLM

DECODES = 12
"""Decode steps of each measured batch. Their median counts: other load on the machine disturbs some."""
CONTEXTS = (16, 256, 1024, 4096)
"""Prompt lengths of the batches."""
DEFAULT_TOKENS = 60_000
"""Prompt tokens that are computed in all, unless the user says otherwise."""


class StepTimer:
    """An executor that times the steps of another. A step's time is that since the one before was collected, or since
    its own launch if nothing was in flight: what a stream would wait."""

    def __init__(self, executor: Executor, max_rows: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._executor = executor
        self._shapes = StepWorkTracker(max_rows)
        self._clock = clock
        self._collected = float("-inf")
        self._in_flight = 0
        self._was_idle = True
        self.steps: list[tuple[StepWork, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> Any:
        shape, at = self._shapes.of(plan), self._clock()
        handle = self._executor.submit(plan)
        was_idle, self._was_idle = self._was_idle, False
        return handle, shape, at if was_idle else None

    def supply(self, handle: Any, masks: StepMasks) -> None:
        self._executor.supply(handle[0], masks)

    def collect(self, handle: Any) -> StepResult:
        inner, shape, launched = handle
        result = self._executor.collect(inner)
        now = self._clock()
        if shape.tokens:
            self.steps.append((shape, now - (self._collected if launched is None else launched)))
        self._collected = now
        return result

    def rest(self) -> None:
        """The engine is idle: the next step's time begins with its launch."""
        self._was_idle = True


def calibrate(
    llm: LLM, name: str, source: str, tokens: int = DEFAULT_TOKENS, say: Callable[[str], Any] = print
) -> CostModel:
    """Run batches of many shapes on this engine, and fit a cost model to their steps."""
    from quire.messages.sampling import SamplingParams

    info = llm.llm_engine.info
    timers: list[StepTimer] = []

    def wrap(executor: Executor) -> Executor:
        timers.append(StepTimer(executor, info.max_num_seqs))
        return timers[0]

    llm.llm_engine.core.wrap_executor(wrap)
    timer = timers[0]
    shapes: list[StepWork] = []
    seconds: list[float] = []
    vocabulary = info.model.vocab_size
    for number, (rows, context) in enumerate(
        _batches(info.max_num_seqs, info.max_model_len, info.cache_tokens, tokens)
    ):
        prompts = [
            {
                "prompt_token_ids": [
                    2 + (7919 * number + 104_729 * row + i * (row + 3)) % (vocabulary - 2) for i in range(context)
                ]
            }
            for row in range(rows)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=DECODES + 1, ignore_eos=True)
        for is_measured in (False, True) if number == 0 else (True,):
            llm.reset_prefix_cache()
            timer.steps.clear()
            timer.rest()
            llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
            if is_measured:
                found = list(_typical(timer.steps))
                shapes += [shape for shape, _ in found]
                seconds += [took for _, took in found]
        decode = [took for shape, took in timer.steps if shape.decodes == rows and not shape.prompt_tokens]
        if decode:
            say(f"{rows:4} rows of {context:5} tokens: {1e3 * statistics.median(decode):8.3f} ms a decode step")
    blank = CostModel(
        name, source, [(1, 0.0)], 0.0, 0.0, num_blocks=info.num_blocks, block_size=info.block_size,
        max_num_seqs=info.max_num_seqs, max_num_batched_tokens=info.max_num_batched_tokens,
        pipeline_depth=llm.llm_engine.core.pipeline_depth,
    )  # fmt: skip
    return fit(blank, shapes, seconds)


def _batches(max_rows: int, max_len: int, cache_tokens: int, tokens: int) -> Iterator[tuple[int, int]]:
    """(rows, prompt length) of the batches, smallest first, with at most `tokens` prompt tokens in all."""
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if count < max_rows] + [max_rows]
    pairs = sorted(((rows, context) for rows in counts for context in CONTEXTS), key=lambda pair: pair[0] * pair[1])
    for rows, context in pairs:
        total = rows * context
        if context + DECODES + 2 > max_len or rows * (context + DECODES + 2) > cache_tokens or total > tokens:
            continue
        tokens -= total
        yield rows, context


def _typical(steps: list[tuple[StepWork, float]]) -> Iterator[tuple[StepWork, float]]:
    """Decode steps of the same rows as one, of the median time; steps with prompts as they are. The first step of a
    batch may include what is done once, and is left out if others tell as much."""
    groups: dict[tuple[int, int], list[tuple[StepWork, float]]] = defaultdict(list)
    for shape, took in steps:
        groups[shape.decodes, shape.prompt_tokens].append((shape, took))
    for group in groups.values():
        ordered = sorted(group, key=lambda step: step[1])
        yield ordered[len(ordered) // 2]
