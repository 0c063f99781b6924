"""Prompts share steps with running requests, which they hardly slow down: on simulated devices with a clock and step
costs."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest

from quire.engine.core import EngineCore
from quire.executor.null import NullExecutor
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.plan import StepPlan, StepResult
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from quire.scheduler.pacing import LEAST_CHUNK, PRESSURE, STREAM_STRETCH, DecodeTimes, Pacer, PromptCosts
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.test_storm import EngineShape, Storm


@dataclass(frozen=True)
class Prices:
    """Cost of a step in milliseconds."""

    step: float
    row: float
    mixed: float
    """Per step with any prompt."""
    token: float
    attention: float
    """Per prompt token and thousand context tokens."""
    launch: float = 0.0
    """Of the host, per step with prompts; nothing else is launched meanwhile."""
    is_synchronous: bool = True
    """A step is done when `submit` returns."""
    budget: int = 512

    def of(self, decodes: int, tokens: int, read: int) -> float:
        """`read`: total context tokens read by all prompt tokens."""
        prompts = self.mixed + self.token * tokens + self.attention * read / 1000 if tokens else 0
        return self.step + self.row * decodes + prompts


CPU = Prices(step=17, row=1, mixed=3, token=1.1, attention=0.5)
SLOW = Prices(step=200, row=5, mixed=40, token=9, attention=4)
GPU = Prices(
    step=4, row=0.02, mixed=0.5, token=0.022, attention=0.0008, launch=5, is_synchronous=False, budget=8192
)  # fmt: skip
HUGE = replace(GPU, step=30, token=0.2, launch=12)
DEVICES = {"cpu": CPU, "slow": SLOW, "gpu": GPU, "huge": HUGE}


class TimedDevice(NullExecutor):
    """Computes nothing, and advances the clock by the step's cost."""

    def __init__(self, prices: Prices, noise: float = 0.0) -> None:
        super().__init__(max_rows=256)
        self.prices = prices
        self.now = 0.0
        """Milliseconds."""
        self.idle_at = 0.0
        self._noise = noise
        self._random = random.Random(0)
        self._computed = np.zeros(256, np.int64)

    def submit(self, plan: StepPlan) -> tuple[StepResult, float]:  # type: ignore[override]
        took = self._cost(plan) * self._random.lognormvariate(0, self._noise)
        if self._noise and self._random.random() < 0.005:
            took *= 10  # other load on the machine
        begin = max(self.now, self.idle_at)
        self.now += self.prices.launch if len(plan.tokens) else 0.2
        self.idle_at = max(self.now, begin + took)
        if self.prices.is_synchronous:
            self.now = self.idle_at
        return super().submit(plan), self.idle_at

    def _cost(self, plan: StepPlan) -> float:
        for new in plan.add:
            self._computed[new.row] = new.num_computed
        rows, counts = plan.rows[plan.num_decodes :], plan.counts[plan.num_decodes :]
        read = int((counts * (self._computed[rows] + counts / 2)).sum())
        self._computed[rows] += counts
        return self.prices.of(plan.num_decodes, len(plan.tokens), read)

    def collect(self, handle: tuple[StepResult, float]) -> StepResult:  # type: ignore[override]
        result, done = handle
        self.now = max(self.now, done)
        return result


class Run:
    """An engine on such a device, and when each token came."""

    def __init__(
        self, prices: Prices, depth: int = 0, stretch: float | None = STREAM_STRETCH, noise: float = 0.0
    ) -> None:
        self.device = TimedDevice(prices, noise)
        self.keys = ContentKeys(16, b"model")
        self.scheduler = Scheduler(
            BlockTables(40_000, 16), make_policy("fcfs"), self.keys, 256, prices.budget,
            clock=lambda: self.device.now / 1000, pacer=None if stretch is None else Pacer(stretch),
        )  # fmt: skip
        self.core = EngineCore(self.scheduler, self.device, depth, log_stats=False)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.finished: dict[str, float] = {}
        self._ids = itertools.count()

    def add(self, prompt: int, output: int, name: str = "") -> str:
        name = name or f"r{next(self._ids)}"
        draw = random.Random(name)
        tokens = [draw.randrange(1000) for _ in range(prompt)]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        self.core.add(NewRequest(name, tokens, params, limit=prompt + output, keys=self.keys.of(tokens)))
        return name

    def streams(self, count: int) -> list[str]:
        """Requests that do not end during the test, all decoding."""
        names = [self.add(32, 100_000, f"stream{i}") for i in range(count)]
        while not all(len(self.times[name]) > 8 for name in names):
            self.step()
        return names

    def step(self) -> None:
        outputs = self.core.step()
        for name, _ in outputs.keys:
            self.times[name].append(self.device.now)
        for end in outputs.finished:
            self.finished[end.key[0]] = self.device.now

    def until(self, time: float, every: float = 0.0, prompt: int = 0) -> None:
        """Run until then; with `every`, a prompt arrives every `every` milliseconds."""
        due = self.device.now + every
        while self.device.now < time:
            if every and self.device.now >= due:
                self.add(prompt, 1)
                due += every
            self.step()

    def gaps(self, names: list[str], since: float) -> np.ndarray:
        kept = [[time for time in self.times[name] if time >= since] for name in names]
        return np.concatenate([np.diff(times) for times in kept])


def compare(run: Run, names: list[str], every: float, prompt: int, prompts: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Gaps of the streams without prompts for a while, then with `prompts` of them."""
    begin = run.device.now
    run.until(begin + every)
    quiet, middle = run.gaps(names, begin), run.device.now
    run.until(middle + (prompts + 1) * every, every, prompt)
    return quiet, run.gaps(names, middle)


def p99(gaps: np.ndarray) -> float:
    return float(np.percentile(gaps, 99))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("streams", [1, 12])
@pytest.mark.parametrize("device", DEVICES)
def test_occasional_prompts_hardly_slow_running_streams(device: str, streams: int, depth: int) -> None:
    every, prompt = {"cpu": (10_000, 1000), "slow": (100_000, 1000), "gpu": (1000, 4000), "huge": (10_000, 4000)}[
        device
    ]
    run = Run(DEVICES[device], depth)
    quiet, busy = compare(run, run.streams(streams), every, prompt)
    assert p99(busy) <= 2 * p99(quiet)
    assert busy.max() <= 2.6 * quiet.max()
    assert len(run.finished) == 3, "prompts make progress"


def test_without_pacing_the_gaps_are_long() -> None:
    """Without pacing a chunk is as large as the step's budget, and every stream waits for it."""
    run = Run(CPU, stretch=None)
    quiet, busy = compare(run, run.streams(6), 10_000, 1000)
    assert busy.max() > 20 * p99(quiet)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("depth", [0, 1])
def test_noise_changes_little(device: str, depth: int) -> None:
    """Every step varies by some percent, and one in two hundred takes ten times as long."""
    run = Run(DEVICES[device], depth, noise=0.1)
    every, prompt = {"cpu": (5000, 1000), "gpu": (1000, 4000)}[device]
    quiet, busy = compare(run, run.streams(6), every, prompt, prompts=8)
    for share in (50, 90, 99):
        assert np.percentile(busy, share) <= 2 * np.percentile(quiet, max(share, 90))


@pytest.mark.parametrize("change", [4.0, 0.25], ids=["slower", "faster"])
@pytest.mark.parametrize("depth", [0, 1])
def test_it_adapts_to_a_device_that_changes_speed(change: float, depth: int) -> None:
    """Old measurements are soon forgotten, also while prompts arrive without a pause."""
    run = Run(CPU, depth)
    names = run.streams(6)
    run.until(10_000, every=4000, prompt=1000)
    prices = CPU
    run.device.prices = replace(
        prices, **{name: change * getattr(prices, name) for name in ("step", "row", "mixed", "token", "attention")}
    )
    quiet, busy = compare(run, names, 5000 * change, 1000)
    assert p99(busy) <= 2 * p99(quiet)
    begin = run.device.now
    for _ in range(4):  # now while prompts are computed
        run.add(4000, 1)
    run.until(begin + 500 * change)
    run.device.prices = prices
    run.until(begin + 10_000 * change)
    late = run.gaps(names, begin + 3000 * change)
    alone = prices.step + 7 * prices.row
    assert np.median(late) <= max(STREAM_STRETCH, 1 + PRESSURE * 3 / 6) * alone * 1.15


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_cold_start_is_paced_too(device: str, depth: int) -> None:
    """The second request ever is a long prompt, while the first has barely begun to stream."""
    run = Run(DEVICES[device], depth)
    first = run.add(20, 100_000)
    while len(run.times[first]) < 2:
        run.step()
    long = run.add(2000, 1)
    while long not in run.finished:
        run.step()
    gaps = run.gaps([first], 0)
    alone = run.device.prices.step + run.device.prices.row
    assert gaps.max() <= 3 * max(alone, run.device.prices.launch)
    assert np.median(gaps) <= 2 * max(alone, run.device.prices.launch)


class TestManyPrompts:
    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_burst_of_long_prompts_is_spread(self, device: str, depth: int) -> None:
        """Each waiting prompt adds its weight; no gap is longer than the weight of all waiting prompts allows."""
        run = Run(DEVICES[device], depth)
        names = run.streams(20)
        begin = run.device.now
        prompts = [run.add(2000, 1) for _ in range(10)]
        while not all(name in run.finished for name in prompts):
            run.step()
        alone = run.device.prices.step + 20 * run.device.prices.row
        gaps = run.gaps(names, begin)
        assert np.percentile(gaps, 99) <= 1.3 * (1 + PRESSURE * 9 / 20) * alone + run.device.prices.launch
        last = run.gaps(names, run.finished[prompts[-2]])  # one remains
        assert np.median(last) <= 2 * max(alone, run.device.prices.launch)

    @pytest.mark.parametrize(("device", "depth"), [("cpu", 0), ("gpu", 1)])
    def test_a_server_with_a_constant_queue_loses_little(self, device: str, depth: int) -> None:
        """Sixteen clients that send the next request when one is answered: the total time, and the longest gaps."""

        def ask_all(stretch: float | None) -> tuple[float, float]:
            run, draw = Run(DEVICES[device], depth, stretch), random.Random(1)
            prompts = [(draw.randint(16, 512), draw.randint(16, 128)) for _ in range(64)]
            names = [run.add(*prompts.pop()) for _ in range(16)]
            while run.core.has_work:
                answered = len(run.finished)
                run.step()
                names += [run.add(*prompts.pop()) for _ in range(min(len(prompts), len(run.finished) - answered))]
            return run.device.now, p99(run.gaps(names, since=max(run.times[name][0] for name in names[:16])))

        paced, unpaced = ask_all(STREAM_STRETCH), ask_all(None)
        assert paced[0] <= 1.12 * unpaced[0]
        assert paced[1] <= 0.75 * unpaced[1]

    def test_no_prompt_starves(self) -> None:
        """With hundreds of streams and more prompts than there is time for, every prompt finishes, in order."""
        run = Run(CPU)
        run.streams(200)
        prompts = [run.add(600, 1) for _ in range(30)]
        run.until(run.device.now + 240_000)
        ends = [run.finished[name] for name in prompts]
        assert ends == sorted(ends)


class TestArrivalOrder:
    """A stream is protected from prompts that arrive after it began, not from those that were already waiting."""

    def test_requests_that_arrive_together_do_not_slow_each_other(self) -> None:
        run = Run(CPU)
        for _ in range(16):
            run.add(200, 50)
        steps = 0
        while run.scheduler.waiting or run.scheduler.requests.prefilling:
            run.step()
            steps += 1
        assert steps == -(-16 * 200 // (CPU.budget - 16))

    def test_a_later_prompt_is_paced(self) -> None:
        run = Run(CPU)
        run.streams(4)
        run.step()
        before = run.scheduler.stats.prompt_tokens
        run.add(200, 50)
        run.step()
        assert 0 < run.scheduler.stats.prompt_tokens - before < 20

    def test_fewer_earlier_streams_are_protected_less(self) -> None:
        pacer = Pacer(1.5)
        clock = itertools.count(0, 0.010)
        for tokens in (0, 0, 0, 100, 100, 100):
            pacer.launched(8, tokens, now := next(clock))
            pacer.collected(now + 0.004 + 0.00005 * tokens)
        assert [pacer.allowance(8, elder, 1) for elder in (8, 4, 2)] == pytest.approx([40, 80, 160], rel=0.05)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_storm_passes_with_pacing(policy: str, depth: int) -> None:
    """Preemption, failures, forks, aborts: every request still gets its tokens, and each block is freed."""
    storm = Storm(EngineShape(depth=depth, policy=policy, failure_rate=0.02), requests=150, seed=depth)
    storm.bench.scheduler._pacer = Pacer(1.1)
    storm.run()


def test_without_running_requests_prompts_use_the_whole_step() -> None:
    run = Run(CPU)
    run.add(2000, 1)
    run.step()
    assert run.scheduler.stats.prompt_tokens == CPU.budget


def test_a_failed_step_leaves_no_measurement() -> None:
    pacer = Pacer(1.7)
    pacer.launched(4, 0, 0.0)
    pacer.launched(4, 0, 0.1)
    pacer.forget_in_flight()
    pacer.launched(4, 0, 1.0)
    pacer.collected(1.02)
    pacer.launched(4, 8, 1.02)
    pacer.collected(1.03)
    assert LEAST_CHUNK <= pacer.allowance(4, 4, 1) <= 16


class TestMeasurements:
    def test_decode_times_are_medians_by_rows(self) -> None:
        times = DecodeTimes()
        assert times.of(3) is None
        for seconds in (0.02, 0.5, 0.021, 0.02):
            times.note(4, seconds)
        times.note(64, 0.06)
        assert times.of(4) == times.of(1) == times.of(30) == 0.02
        assert times.of(64) == times.of(200) == 0.06

    @pytest.mark.parametrize(("fixed", "price"), [(0.0, 0.001), (0.004, 0.001), (0.002, 0.00002)])
    def test_costs_have_a_fixed_part_and_a_price_per_token(self, fixed: float, price: float) -> None:
        costs = PromptCosts()
        assert costs.tokens_within(1.0) == 0
        draw = random.Random(0)
        for _ in range(60):
            tokens = draw.randint(5, 200)
            costs.note(tokens, fixed + price * tokens)
        for tokens in (20, 100, 180):
            assert costs.tokens_within(fixed + price * tokens) == pytest.approx(tokens, rel=0.15)

    def test_a_chunk_grows_by_doubling_at_most(self) -> None:
        costs = PromptCosts()
        costs.note(8, 0.0)
        assert costs.tokens_within(1.0) == 16

    def test_one_outlier_is_forgotten(self) -> None:
        costs = PromptCosts()
        for _ in range(20):
            costs.note(10, 0.014)
        costs.note(10, 5.0)
        assert costs.tokens_within(0.014) >= 6
        for _ in range(10):
            costs.note(10, 0.014)
        assert costs.tokens_within(0.014) in (9, 10)

    def test_steps_that_others_disturb_do_not_make_chunks_smaller(self) -> None:
        """One step in five is up to three times as long; the others tell what tokens cost."""
        costs, draw = PromptCosts(), random.Random(0)
        within = []
        for number in range(400):
            tokens = draw.randint(8, 16)
            disturbed = 1 + 2 * draw.random() if draw.random() < 0.2 else 1.0
            costs.note(tokens, (0.003 + 0.0005 * tokens) * disturbed)
            within += [costs.tokens_within(0.009)] * (number > 50)
        assert 10 <= np.median(within) <= 13, "12 fit"

    @pytest.mark.parametrize("change", [0.2, 5.0])
    def test_a_change_is_learned_within_a_few_steps(self, change: float) -> None:
        costs = PromptCosts()
        for tokens in (8, 16) * 20:
            costs.note(tokens, 0.001 * tokens)
        for tokens in (8, 16) * 10:
            costs.note(tokens, change * 0.001 * tokens)
        assert costs.tokens_within(change * 0.012) == pytest.approx(12, abs=3)

    def test_prompts_that_first_cost_nothing_may_cost_something_later(self) -> None:
        costs = PromptCosts()
        for _ in range(8):
            costs.note(8, 0.0)
        for _ in range(16):
            costs.note(8, 0.008)
        assert costs.tokens_within(0.008) <= 12
