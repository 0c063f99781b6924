"""Measures steps of a real engine, and fits a cost model to them.

Four kinds of steps are measured, in this order: decodes of many rows and contexts, together with the prompts before
them; prompts of many lengths beside decodes; decodes that share a prefix; copies between tiers, which an engine with
`swap_space` measures itself when it starts.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.energy.meters import MeterContext, MeterError
from quire.executor.base import Executor
from quire.executor.registry import executor_backend
from quire.messages.plan import StepMasks, StepPlan, StepResult
from quire.messages.sampling import SamplingParams
from quire.simulation.costs import CostModel, StepPadding, StepWork, fit
from quire.simulation.device import StepWorkTracker

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.layers.moe import ExpertSizes

DECODES = 12
"""Decode steps of each measured batch. Their median counts: other load on the machine disturbs some."""
CONTEXTS = (16, 256, 1024, 4096, 8192)
"""Prompt lengths of the batches."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CHUNKS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
"""Prompt lengths beside decodes. Small ones are close together: streams beside prompts leave room for no more on a CPU,
and kernels work in tiles of some rows…"""
LONG_CHUNK = 1024
"""…of which longer ones are measured without decodes only."""
BESIDE = (0, 1, 2, 3, 5, 8, 16, 32, 64, 128, 256)
"""Decodes beside prompts, unless captured steps have their own sizes…"""
BESIDE_CONTEXT = 128
"""…and how long their prompts were."""
REPEATS = 3
"""Of each prompt beside decodes…"""
WARM = 1
"""…and so many before these…"""
CAPTURE_WARM = 2
"""…or so many on a GPU, where a graph may be captured for the first."""
GROUP_DECODES = 24
"""Decode steps of each prefix group; of these the last half counts, because the first may run in a larger graph."""
GROUPS = ((8, 1024), (32, 1024), (32, 4096), (128, 1024), (128, 4096))
"""(rows, tokens that they share)."""
DEFAULT_SECONDS = 75.0
"""What the measurement takes, unless the user says otherwise…"""
SHARES = (0.55, 0.35, 0.1)
"""…and what part of it batches of decodes, prompts beside decodes, and prefix groups may take."""
DEFAULT_TOKENS = 1_000_000
"""Prompt tokens that are computed in all, unless the user says otherwise."""
FEW_STEPS = 12
"""Kinds of steps; with fewer, the user is told."""
CACHE_SHARE = 0.6
"""Of the KV cache that prompts may fill: where it is full, blocks are evicted, or saved in host memory, meanwhile."""


class StepTimer:
    """An executor that times the steps of another. A step's time is that since the one before was collected, or since
    its own launch if nothing was in flight."""

    def __init__(self, executor: Executor, max_rows: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._executor = executor
        self._shapes = StepWorkTracker(max_rows)
        self._clock = clock
        self._collected = float("-inf")
        self._was_idle = True
        self._in_flight = 0
        self.steps: list[tuple[StepWork, float]] = []
        self.pauses: list[float] = []
        """Between steps while nothing was in flight: what the engine takes to end one and to plan the next."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> Any:
        shape, at = self._shapes.of(plan), self._clock()
        if not self._in_flight and not self._was_idle:
            self.pauses.append(at - self._collected)
        handle = self._executor.submit(plan)
        launched = at if self._was_idle or not self._in_flight else None
        self._was_idle = False
        self._in_flight += 1
        return handle, shape if plan.moves is None else None, launched

    def supply(self, handle: Any, masks: StepMasks) -> None:
        self._executor.supply(handle[0], masks)

    def collect(self, handle: Any) -> StepResult:
        inner, shape, launched = handle
        result = self._executor.collect(inner)
        now = self._clock()
        self._in_flight -= 1
        if shape is not None and shape.tokens:
            self.steps.append((shape, now - (self._collected if launched is None else launched)))
        self._collected = now
        return result

    def rest(self) -> None:
        """The engine is idle: the next step's time begins with its launch."""
        self._was_idle = True


class CalibrationRun:
    """Runs batches on an engine, and keeps what their steps took."""

    def __init__(
        self, llm: LLM, tokens: int, seconds: float, say: Callable[[str], Any], clock: Callable[[], float]
    ) -> None:
        self._llm = llm
        self._clock = clock
        self._engine = llm.llm_engine
        self._info = info = llm.llm_engine.info
        self._say = say
        self._left = min(tokens, int(CACHE_SHARE * info.cache_tokens))
        """Prompt tokens that may still be computed before the cache is emptied."""
        self._most_tokens = tokens
        self._seconds = seconds
        self._until = 0.0
        self._ids = itertools.count()
        self.padding = captured_sizes(llm)
        self.shapes: list[StepWork] = []
        self.seconds: list[float] = []
        timers: list[StepTimer] = []

        def wrap(executor: Executor) -> Executor:
            timers.append(StepTimer(executor, info.max_num_seqs, clock))
            return timers[0]

        self._engine.core.wrap_executor(wrap)
        self._timer = timers[0]

    def run(self) -> None:
        """Measure everything."""
        for measure, share in zip((self._decodes, self._mixed, self._groups), SHARES, strict=True):
            self._until = self._clock() + share * self._seconds
            self._llm.reset_prefix_cache()
            measure()

    @property
    def host_seconds(self) -> float:
        """What the engine takes between two steps, if the device waits for it."""
        is_alone = not self._engine.core.pipeline_depth
        return statistics.median(self._timer.pauses) if is_alone and self._timer.pauses else 0.0

    def _note(self, steps: Sequence[tuple[StepWork, float]]) -> None:
        for shape, took in _typical(steps):
            self.shapes.append(shape)
            self.seconds.append(took)

    def _prompt(self, name: int, length: int) -> list[int]:
        """`length` token ids; longer prompts of the same name begin with the shorter ones."""
        most = self._info.model.vocab_size - 2
        return [2 + (104_729 * name + i * (name % 1009 + 3)) % most for i in range(length)]

    def _add(self, prompt: list[int], output: int) -> str:
        name = f"calibration-{next(self._ids)}"
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _take(self) -> list[tuple[StepWork, float]]:
        steps = list(self._timer.steps)
        self._timer.steps.clear()
        return steps

    def _generate(self, prompts: Sequence[list[int]], output: int) -> list[tuple[StepWork, float]]:
        """The steps of these requests, from the first launch on."""
        self._take()
        self._timer.rest()
        for prompt in prompts:
            self._add(prompt, output)
        self._finish()
        return self._take()

    def _fits(self, rows: int, length: int) -> bool:
        info = self._info
        return (
            rows <= info.max_num_seqs
            and length + DECODES + 2 <= info.max_model_len
            and rows * (length + DECODES + 2) <= CACHE_SHARE * info.cache_tokens
        )

    # Decodes

    def _decodes(self) -> None:
        """Batches of every number of rows and every context, the smallest first. Prompts that an earlier batch had, or
        the beginning of which it had, are in the prefix cache."""
        counts = sorted({*(rows for rows in ROWS if rows < self._info.max_num_seqs), self._info.max_num_seqs})
        known = [0] * (counts[-1] + 1)
        """Tokens of each row's prompt that were computed."""
        rate = 0.0
        self._generate([self._prompt(0, 16)], DECODES)  # what is done once
        for rows, context in sorted(itertools.product(counts, CONTEXTS), key=lambda pair: pair[0] * pair[1]):
            new = sum(max(0, context - known[row]) for row in range(rows))
            begin = self._clock()
            late = begin + (new / rate if rate else 0.0) > self._until
            if not self._fits(rows, context) or new > self._left or late:
                continue
            self._left -= new
            steps = self._generate([self._prompt(row, context) for row in range(rows)], DECODES + 1)
            known[:rows] = (max(context, each) for each in known[:rows])
            if new > 256:
                rate = new / (self._clock() - begin)
            self._note(steps)
            decode = [took for shape, took in steps if shape.decodes == rows and not shape.prompt_tokens]
            if decode:
                self._say(
                    f"{rows:4} rows of {context:5} tokens: {1e3 * statistics.median(decode):8.3f} ms a decode step"
                )

    # Prompts beside decodes

    def _mixed(self) -> None:
        """Prompts of many lengths beside numbers of decodes, one at a time."""
        info = self._info
        self._left = min(self._most_tokens, int(CACHE_SHARE * info.cache_tokens))
        sizes = BESIDE if self.padding is None else self.padding.mixed_decodes
        smallest = 0 if self.padding is None else min(self.padding.mixed_tokens, default=0)
        lengths = spread([length for length in CHUNKS if length >= smallest and self._fits(1, length)])
        warm = WARM if self.padding is None else CAPTURE_WARM
        output = 3 * (warm + REPEATS) * len(lengths) + 4
        counts = [rows for rows in sizes if not rows or self._fits(rows + 1, BESIDE_CONTEXT + output)]
        begin, share = self._clock(), max(0.0, self._until - self._clock()) / max(1, len(counts))
        rate = 0.0
        """Seconds of a prompt token, at most."""
        for number, rows in enumerate(counts, 1):
            streams = [self._add(self._prompt(row, BESIDE_CONTEXT), output) for row in range(rows)]
            for _ in range(3 if rows else 0):
                self._engine.step()
            longest = min(info.max_num_batched_tokens - rows, LONG_CHUNK if rows else CHUNKS[-1])
            todo = [length for length in lengths if length <= longest]
            while (left := begin + number * share - self._clock()) > 0:
                most = min(self._left, left / rate if rate else math.inf) / (warm + REPEATS)
                if (length := next((length for length in todo if length <= most), None)) is None:
                    break
                todo.remove(length)
                self._left -= (warm + REPEATS) * length
                steps = self._beside(rows, length, warm)
                self._note(steps)
                took = [seconds for shape, seconds in steps if shape.prompt_tokens == length]
                if took:
                    rate = min(rate or math.inf, statistics.median(took) / length)
                    self._say(f"{rows:4} rows beside {length:5} tokens: {1e3 * statistics.median(took):8.3f} ms")
            self._engine.abort_request(streams)
            self._finish()

    def _beside(self, rows: int, length: int, warm: int) -> list[tuple[StepWork, float]]:
        """The steps of running decodes while prompts come, without the first `warm` of these."""
        for number in range(warm + REPEATS):
            if number == warm:
                self._take()
            if not rows:
                self._timer.rest()
            self._add(self._prompt(10_000 + next(self._ids), length), 1)
            for _ in range(3):
                if self._engine.has_unfinished_requests():
                    self._engine.step()
        return self._take()

    # Prefix groups

    def _groups(self) -> None:
        """Decodes whose prompts begin with the same tokens. Without prefix groups on this device these tell nothing."""
        for number, (rows, length) in enumerate(GROUPS):
            if not self._fits(rows, length + 64) or self._clock() > self._until:
                continue
            shared = self._prompt(5_000 + number, length)
            self._generate([shared], 1)
            steps = self._generate([[*shared, *self._prompt(row, 24)] for row in range(rows)], GROUP_DECODES + 1)
            steps = [step for step in steps if step[0].shared and step[0].decodes == rows][GROUP_DECODES // 2 :]
            if not steps:
                return
            self._note(steps)
            median = 1e3 * statistics.median(took for _, took in steps)
            self._say(f"{rows:4} rows that share {length:5} tokens: {median:8.3f} ms a decode step")


def calibrate(
    llm: LLM,
    name: str,
    source: str,
    tokens: int = DEFAULT_TOKENS,
    seconds: float = DEFAULT_SECONDS,
    say: Callable[[str], Any] = print,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Run batches of many shapes on this engine, and fit a cost model to their steps. `tokens`, `seconds`: most prompt
    tokens of a part of it, and about how long it takes. `clock`: what times steps."""
    info, core = llm.llm_engine.info, llm.llm_engine.core
    experts = model_experts(llm)
    measured = CalibrationRun(llm, tokens, seconds, say, clock)
    with _PowerMeter(llm) as meter:
        measured.run()
    decodes = sum(not shape.prompt_tokens for shape in measured.shapes)
    say(f"{decodes} kinds of decode steps and {len(measured.shapes) - decodes} of steps with prompts were measured")
    if min(decodes, len(measured.shapes) - decodes) < FEW_STEPS:
        say("that is few: the cost model guesses what is between them; give it more --seconds, or a quieter machine")
    tiers = core.scheduler.tiers
    speeds = () if tiers is None else (tiers.costs.out, tiers.costs.back, tiers.costs.disk)
    out, back, disk = (speed.value if speed.is_known else None for speed in speeds) if speeds else (None, None, None)
    for kind, rate in (("to host memory", out), ("from host memory", back), ("from disk", disk)):
        if rate is not None:
            say(f"{kind}: {rate / 1e9:.1f} GB/s")
    blank = CostModel(
        name, source, [(1, 0.0)], 0.0, 0.0, prompt_tokens=[(1, 0.0)],
        captured_tokens=None if measured.padding is None else [(1, 0.0)], padding=measured.padding,
        num_blocks=info.num_blocks, block_size=info.block_size, max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens, pipeline_depth=core.pipeline_depth, watts=meter.watts,
        layers=info.model.num_layers, hidden_size=info.model.hidden_size, weight_bytes=info.weight_bytes,
        kv_bytes_per_token=info.block_bytes // info.block_size,
        host_out_rate=out, host_back_rate=back, disk_rate=disk, host_seconds=measured.host_seconds,
        expert_bytes=experts and experts.num_bytes, moe_layers=experts and experts.layers,
        experts_per_token=experts and experts.per_token,
    )  # fmt: skip
    return fit(blank, measured.shapes, measured.seconds)


def model_experts(llm: LLM) -> ExpertSizes | None:
    """What the routed experts of the whole model take; None: it has none."""
    import torch

    from quire.distributed.groups import Ranks
    from quire.layers.moe import expert_sizes
    from quire.worker.building import build_model

    config, info = llm.llm_engine.config, llm.llm_engine.info
    platform = executor_backend(config).choose_platform(config)
    shapes = build_model(
        config, info.files, info.model, platform, info.max_model_len, Ranks(), torch.device("meta")
    )  # fmt: skip
    return expert_sizes(shapes)  # type: ignore[arg-type]


def captured_sizes(llm: LLM) -> StepPadding | None:
    """What steps of this engine are padded to; None: it does not capture any."""
    config, info = llm.llm_engine.config, llm.llm_engine.info
    is_cuda = executor_backend(config).choose_platform(config).device.type == "cuda"
    return (
        step_padding(info.max_num_seqs, info.max_num_batched_tokens) if is_cuda and not config.enforce_eager else None
    )


def step_padding(rows: int, tokens: int) -> StepPadding:
    """What captured steps are padded to on an engine of so many rows, and tokens in a step."""
    from quire.worker import mixed_steps
    from quire.worker.cuda_graphs import capture_sizes

    most = mixed_steps.PROMPTS
    return StepPadding(
        decodes=capture_sizes(min(rows, 1024)),
        mixed_decodes=[size for size in mixed_steps.DECODES if size + most <= rows],
        mixed_tokens=[size for size in mixed_steps.TOKENS if size <= tokens],
        prompts=most,
    )


def spread(values: Sequence[int]) -> list[int]:
    """The same values: first the ends, then what halves each gap, so that those before any cut are spread out."""
    gaps, order = deque([(0, len(values) - 1)]), [*values[:1], *values[1:][-1:]]
    while gaps:
        low, high = gaps.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            order.append(values[middle])
            gaps += [(low, middle), (middle, high)]
    return order


class _PowerMeter:
    """Measures the mean power of the device, if it has a meter: an estimate would tell nothing new."""

    def __init__(self, llm: LLM) -> None:
        self.watts: float | None = None
        self._meter = None
        config = llm.llm_engine.config
        if executor_backend(config).choose_platform(config).device.type != "cuda":
            return
        from quire.energy.nvml import NvmlMeter
        from quire.engine.energy import engine_cards

        try:
            self._meter = NvmlMeter(MeterContext(is_gpu=True, cards=engine_cards(config.num_ranks)))
        except MeterError:
            return

    def __enter__(self) -> _PowerMeter:
        if self._meter is not None:
            self._joules, self._begin = self._meter.read(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._meter is not None:
            self.watts = (self._meter.read() - self._joules) / (time.perf_counter() - self._begin)
            self._meter.close()


def _typical(steps: Sequence[tuple[StepWork, float]]) -> Iterator[tuple[StepWork, float]]:
    """Steps of the same rows and tokens as one, of the median time."""
    groups: dict[tuple[int, int], list[tuple[StepWork, float]]] = defaultdict(list)
    for shape, took in steps:
        groups[shape.decodes, shape.prompt_tokens].append((shape, took))
    for group in groups.values():
        ordered = sorted(group, key=lambda step: step[1])
        yield ordered[len(ordered) // 2]
