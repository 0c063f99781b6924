"""Storms: thousands of concurrent requests of every kind, on every engine shape, against the checking device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from quire.config import EngineConfig
from quire.errors import CacheTooSmallError, ValidationError
from quire.messages.caches import FULL, CacheGroup
from quire.messages.outputs import Key
from quire.messages.plan import MAX_WIDTH, StepPlan
from tests.scheduler.harness import Bench, MemoryDisk, ending, mixed, rng_of
from tests.scheduler.proposals import Proposals


@dataclass(frozen=True)
class EngineShape:
    """One configuration of the engine, and its load."""

    block_size: int = 4
    blocks: int = 40
    rows: int = 8
    budget: int = 32
    depth: int = 0
    policy: str = "fcfs"
    prefix_caching: bool = True
    chunked: bool = True
    failure_rate: float = 0.0
    empty_rate: float = 0.0
    """Draws that yield no token."""
    invalid_rate: float = 0.0
    """Draws that are not possible: they end the request."""
    abort_rate: float = 0.05
    longest: int = 40
    tenants: tuple[str, ...] = ("",)
    host: int = 0
    """Slots of host memory."""
    disk: int = 0
    """Blocks on disk."""
    config: EngineConfig | None = None
    groups: tuple[CacheGroup, ...] = (FULL,)
    """What the model's layers keep."""
    microbatches: bool = False
    """The device is a pipeline of as many stages as plans are in flight."""
    drafts: str = ""
    """Where drafts come from: the device, the host, or both."""
    most_drafts: int = MAX_WIDTH - 1
    skill: float = 0.7
    """The share of drafts that are right."""
    verifies_with_prompts: bool = True
    tunes: bool = False


class Storm:
    """Random callers around a bench. Each request's outcome is decided when it is made; the engine must deliver it."""

    def __init__(self, shape: EngineShape, requests: int, seed: int) -> None:
        self.shape, self.left = shape, requests
        self.rng = rng_of("storm", seed)
        self.seed = seed
        proposals = Proposals(shape, seed)
        self.bench = Bench(
            shape.blocks, shape.block_size, shape.rows, shape.budget, shape.policy, shape.depth,
            shape.prefix_caching, shape.chunked, ending, self._fails, self._yields_nothing, self._is_invalid,
            config=shape.config, host_slots=shape.host,
            disk=MemoryDisk(shape.disk, seed) if shape.disk else None,
            microbatches=shape.depth + 1 if shape.microbatches else None, groups=shape.groups,
            drafting=proposals.drafting(), guess=proposals.guess, verifies_with_prompts=shape.verifies_with_prompts,
        )  # fmt: skip
        proposals.bench = self.bench
        self.bench.device.keep_plans = False
        self.cuts: dict[tuple[str, int], int] = {}
        """Sequences whose caller finds a stop string, and after how many tokens."""
        self.cut: set[tuple[str, int]] = set()
        self.aborted: set[str] = set()
        self.open: list[str] = []
        self.sequences: list[list[int]] = [[2 + mixed("stem", i) % 9 for i in range(200)]]
        self.refused = 0
        self.invalid = 0
        """Sequences that ended because of an invalid draw."""
        self.made = 0

    def _is_invalid(self, key: Key, position: int) -> bool:
        """Whether no token can be drawn there: the same whenever it is asked."""
        return mixed("invalid", self.seed, *key, position) % 1000 < 1000 * self.shape.invalid_rate

    def run(self) -> None:
        while self.left:
            self._arrivals()
            self._callers()
            self.bench.now += self.rng.random()
            self._step()
        most = 50 + 6 * (1 + self.shape.depth) * sum(self._work(id) for id in self.open)
        for _ in range(most):
            if not self.bench.core.has_work:
                break
            self._callers()
            self._step()
        assert not self.bench.core.has_work, f"{len(self.open)} requests starve after {most} steps"
        self.bench.scheduler.check_idle()
        self._check_ends()

    def _step(self) -> None:
        self.bench.note(self.bench.core.step())
        if self.rng.random() < 0.2:
            self.bench.audit()

    def _work(self, id: str) -> int:
        source = self.bench.device.sources[id]
        return source.params.n * source.limit

    def _fails(self, plan: StepPlan, requests: set[str]) -> str:
        if self.rng.random() < self.shape.failure_rate:
            return self.rng.choice(["submit", "collect"])
        return ""

    def _yields_nothing(self, key: tuple[str, int], position: int) -> bool:
        return self.rng.random() < self.shape.empty_rate

    # Callers

    def _arrivals(self) -> None:
        rng = self.rng
        burst = rng.choice([0, 0, 0, 1, 1, 2, 5]) if rng.random() < 0.9 else 12
        for _ in range(min(burst, self.left)):
            self.left -= 1
            self.made += 1
            id = f"r{self.made}"
            source = self.bench.request(
                id,
                self._prompt(),
                rng.randint(1, rng.choice([1, 8, self.shape.longest, self.shape.longest])),
                n=rng.choice([1, 1, 1, 1, 2, 3, self.shape.rows + 2]),
                priority=rng.choice([0, 0, 1, 5, -3]),
                salt=rng.choice(["", "", "", "tenant"]),
                reads_cache=rng.random() < 0.9,
                tenant=self.shape.tenants[mixed("tenant", id) % len(self.shape.tenants)],
            )
            try:
                self.bench.put(source)
            except (CacheTooSmallError, ValidationError):
                self.refused += 1
                continue
            self.open.append(id)
            for index in range(source.params.n):
                if rng.random() < 0.1:
                    self.cuts[(id, index)] = rng.randint(0, 6)
            if rng.random() < 0.3:
                self.sequences.append(self.bench.device.truth(id, 0).tokens)
                del self.sequences[1:-20]

    def _prompt(self) -> list[int]:
        """Often a prefix of something the engine has seen, sometimes followed by new tokens."""
        rng, longest = self.rng, self.shape.longest
        tokens: list[int] = []
        if rng.random() < 0.7:
            tokens = list(rng.choice(self.sequences)[: rng.randint(1, longest)])
        if not tokens or rng.random() < 0.6:
            tokens += [rng.randint(2, 9) for _ in range(rng.randint(1, 1 + longest // 2))]
        return tokens

    def _callers(self) -> None:
        rng, bench = self.rng, self.bench
        self.open = [
            id for id in self.open if any(bench.sequences[(id, i)].finished is None for i in range(self._n(id)))
        ]
        if self.open and rng.random() < self.shape.abort_rate:
            id = rng.choice(self.open)
            self.aborted.add(id)
            bench.core.abort(id)
        for key, at in list(self.cuts.items()):
            received = bench.sequences[key]
            if received.finished is not None:
                del self.cuts[key]
            elif len(received.tokens) >= at and rng.random() < 0.5:
                bench.core.finish(key, at, "stop string")
                self.cut.add(key)
                del received.tokens[at:]
                del self.cuts[key]

    def _n(self, id: str) -> int:
        return self.bench.device.sources[id].params.n

    # The end

    def _check_ends(self) -> None:
        bench, errors = self.bench, 0
        for key, received in bench.sequences.items():
            truth = bench.device.truth(*key)
            assert received.finished is not None, f"{key} never ended"
            reason, stop_reason = received.finished.reason, received.finished.stop_reason
            assert received.tokens == truth.output[: len(received.tokens)], f"{key} has wrong tokens"
            if reason == "abort":
                assert key[0] in self.aborted
            elif reason == "error" and "NaN" in str(received.finished.message):
                at = next(i for i in range(len(truth.source.prompt), len(truth.tokens)) if self._is_invalid(key, i))
                assert received.tokens == truth.tokens[len(truth.source.prompt) : at], f"{key} lost tokens"
                self.invalid += 1
            elif reason == "error":
                errors += 1
                assert bench.device.failures[key[0]] >= 2, f"{key} ended with an error it had no part in"
            elif key in self.cut:
                assert (reason, stop_reason) == ("stop", "stop string")
            else:
                assert (reason, stop_reason) == (truth.reason, truth.stop_reason), key
                assert received.tokens == truth.output, f"{key} ended early"
        if not self.shape.failure_rate:
            assert not errors
        stats = bench.scheduler.stats
        assert 0.0 <= stats.waste < 1.0
        assert 0.0 <= stats.hit_rate <= 1.0
        if not self.shape.prefix_caching and not self.shape.host:  # swapped blocks are found again
            assert stats.cached_tokens == 0
        assert stats.finished == len(bench.sequences)


MIXED = [
    EngineShape(),
    EngineShape(depth=1),
    EngineShape(depth=2),
    EngineShape(policy="priority"),
    EngineShape(policy="priority", depth=1),
    EngineShape(prefix_caching=False),
    EngineShape(prefix_caching=False, depth=1),
    EngineShape(chunked=False),
    EngineShape(chunked=False, depth=1, budget=9),
    EngineShape(block_size=1, blocks=90),
    EngineShape(block_size=1, blocks=90, depth=1),
    EngineShape(block_size=16, blocks=12, depth=1),
    EngineShape(block_size=16, blocks=400, rows=24, budget=512),
    EngineShape(block_size=16, blocks=400, rows=24, budget=512, depth=1),
    EngineShape(budget=1),
    EngineShape(budget=3, depth=1, rows=6),
    EngineShape(rows=1, depth=1),
    EngineShape(rows=2, depth=2, blocks=22),
    EngineShape(empty_rate=0.1),
    EngineShape(empty_rate=0.1, depth=1),
    EngineShape(abort_rate=0.6, depth=1),
]
TIGHT = [
    EngineShape(block_size=size, blocks=-(-room // size), depth=depth, policy=policy, rows=rows)
    for size, room, depth, policy, rows in itertools.product(
        [1, 4, 16], [70, 120], [0, 1], ["fcfs", "priority"], [3, 16]
    )
]
FAILING = [
    EngineShape(failure_rate=rate, depth=depth, blocks=blocks, prefix_caching=caching, policy=policy, budget=budget)
    for (rate, depth, blocks), (caching, policy, budget) in zip(
        [(0.01, 0, 40), (0.01, 1, 40), (0.03, 1, 25), (0.03, 2, 25), (0.01, 0, 200), (0.02, 1, 200)],
        itertools.cycle([(True, "fcfs", 32), (True, "priority", 9), (False, "fcfs", 32)]),
    )
]


TIERED = [
    EngineShape(
        host=host, disk=disk, depth=depth, blocks=blocks, policy=policy, failure_rate=rate, prefix_caching=caching
    )
    for (host, disk), (depth, blocks), (policy, rate, caching) in zip(
        itertools.cycle([(400, 0), (30, 0), (8, 500), (100, 200), (3, 60)]),
        itertools.product([0, 1, 2], [22, 30, 60]),
        itertools.cycle([("fcfs", 0.0, True), ("priority", 0.0, True), ("fcfs", 0.02, True), ("fcfs", 0.0, False)]),
        strict=False,
    )
]


PIPELINED = [
    EngineShape(microbatches=True, depth=1),
    EngineShape(microbatches=True, depth=3, rows=9, policy="priority"),
    EngineShape(microbatches=True, depth=2, blocks=22, budget=9, chunked=False),
    EngineShape(microbatches=True, depth=1, blocks=25, failure_rate=0.02, empty_rate=0.1),
    EngineShape(microbatches=True, depth=2, blocks=30, host=30, failure_rate=0.01),
    EngineShape(microbatches=True, depth=1, rows=1, block_size=1, blocks=90),
]


def describe(shape: EngineShape) -> str:
    shown = {name: value for name, value in vars(shape).items() if name not in ("config", "groups")}
    unusual = {name: value for name, value in shown.items() if value != getattr(EngineShape, name)}
    return "-".join(f"{name}={value}" for name, value in unusual.items()) or "plain"


def random_shape(seed: int, tiered: bool = False) -> EngineShape:
    """Any engine that can hold its longest request."""
    rng = rng_of("weather", seed)
    size, longest = rng.choice([1, 2, 3, 4, 7, 16]), rng.choice([5, 20, 60])
    least = -(-3 * longest // size)
    host = rng.choice([1, 10, 100, 1000])
    return EngineShape(
        block_size=size,
        blocks=max(2, int(least * rng.choice([0.5, 1, 1, 1.3, 3]))),
        rows=rng.choice([1, 2, 4, 9, 30]),
        budget=rng.choice([1, 4, 16, 100]),
        depth=rng.choice([0, 1, 1, 2, 3]),
        policy=rng.choice(["fcfs", "priority"]),
        prefix_caching=rng.random() < 0.8,
        chunked=rng.random() < 0.8,
        failure_rate=rng.choice([0.0, 0.0, 0.005, 0.05]),
        empty_rate=rng.choice([0.0, 0.0, 0.05]),
        abort_rate=rng.choice([0.0, 0.05, 0.3]),
        longest=longest,
        host=host if tiered else 0,
        disk=rng.choice([0, 40, 1000]) if tiered and host else 0,
    )


@pytest.mark.parametrize("shape", MIXED, ids=describe)
def test_mixed_load(shape: EngineShape) -> None:
    Storm(shape, requests=120, seed=1).run()


@pytest.mark.parametrize("shape", TIGHT, ids=describe)
def test_cache_barely_larger_than_one_request(shape: EngineShape) -> None:
    Storm(shape, requests=60, seed=2).run()


@pytest.mark.parametrize("shape", FAILING, ids=describe)
def test_failing_steps(shape: EngineShape) -> None:
    Storm(shape, requests=80, seed=3).run()


@pytest.mark.parametrize("shape", TIERED, ids=describe)
def test_tiers_below(shape: EngineShape) -> None:
    storm = Storm(shape, requests=80, seed=4)
    storm.run()
    assert storm.bench.tiers is not None and storm.bench.tiers.saved


@pytest.mark.parametrize("shape", PIPELINED, ids=describe)
def test_plans_through_a_pipeline(shape: EngineShape) -> None:
    Storm(shape, requests=60, seed=5).run()


@pytest.mark.parametrize("seed", range(10))
def test_any_engine_shape_with_tiers(seed: int) -> None:
    Storm(random_shape(seed, tiered=True), requests=60, seed=seed).run()


@pytest.mark.parametrize("seed", range(20))
def test_any_engine_shape(seed: int) -> None:
    Storm(random_shape(seed), requests=60, seed=seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [100])
@pytest.mark.parametrize("shape", MIXED + TIGHT + FAILING + TIERED + PIPELINED, ids=describe)
def test_long_storm(shape: EngineShape, seed: int) -> None:
    Storm(shape, requests=3000, seed=seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("tiered", [False, True], ids=["one tier", "tiers"])
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_long_storms_of_any_engine_shape(seed: int, tiered: bool) -> None:
    Storm(random_shape(seed, tiered), requests=300, seed=seed).run()
