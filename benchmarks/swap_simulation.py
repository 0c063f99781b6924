"""Gain of swapping, simulated with the scheduler and a cost model: `benchmarks/swap.py` without a device.

python benchmarks/swap_simulation.py            # Llama-3.1-8B on an H200, 128 long prompts over a cache for 85 of them

The scheduler, its tables and tiers are quire's own; steps and copies take the time that a `Card` computes, on a
simulated clock. On the card itself the first of these loads reached 3,596 tokens a second without swapping.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from dataclasses import dataclass

import numpy as np

from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.costs import Costs
from quire.kvcache.offload.host_tier import HostTier
from quire.kvcache.offload.manager import OffloadManager
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.plan import MovesDone, StepPlan, StepResult
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.scheduler import Scheduler

BLOCK = 16


@dataclass(frozen=True)
class Card:
    """Llama-3.1-8B on an H200, as measured."""

    weights: float = 0.0043
    """Seconds to read them."""
    row: float = 0.00001
    prefill: float = 43_000
    """Prompt tokens a second."""
    kv_token: int = 131_072
    """Bytes."""
    memory: float = 3.9e12
    link: float = 50e9
    """Bytes a second each way."""

    def step(self, decodes: int, prompt_tokens: int, context: int) -> float:
        """Seconds: the larger of reading weights and multiplying by them, and reading the KV cache."""
        products = max(self.weights + self.row * decodes, prompt_tokens / self.prefill)
        return products + context * self.kv_token / self.memory


@dataclass(frozen=True)
class Load:
    """Prompts of half to all of `prompt` tokens, all there from the beginning."""

    requests: int = 128
    prompt: int = 4000
    output: int = 1000
    rows: int = 128
    cache_tokens: int = 300_000
    budget: int = 8192


@dataclass(frozen=True)
class Outcome:
    """What came of a load."""

    seconds: float
    rate: float
    """Output tokens a second."""
    preempted: int
    swapped: int
    prompt_tokens: int
    """Computed, those that were computed again too."""

    def __str__(self) -> str:
        return (
            f"{self.rate:8.0f} tok/s   {self.preempted} preempted, {self.swapped} of them swapped, "
            f"{self.prompt_tokens} prompt tokens computed"
        )


class Device:
    """Runs plans by the clock: steps one after the other, copies beside them, one after the other each way."""

    def __init__(self, card: Card, scheduler: Scheduler) -> None:
        self.now = 0.0
        self._card, self._scheduler = card, scheduler
        self._free = {"steps": 0.0, "out": 0.0, "back": 0.0}
        self._steps: deque[tuple[StepPlan, float]] = deque()
        self._moves: deque[tuple[float, MovesDone]] = deque()

    def submit(self, plan: StepPlan) -> None:
        card, computed = self._card, self._scheduler.rows.computed
        begin = max(self._free["steps"], self.now)
        if plan.moves is not None:
            seconds = {
                way: len(getattr(plan.moves, way)) * BLOCK * card.kv_token / card.link for way in ("out", "back")
            }
            for way in seconds:
                self._free[way] = max(self._free[way], begin) + seconds[way]
            done = max(self._free[way] for way in seconds if seconds[way])
            self._moves.append((done, MovesDone(plan.step, seconds["out"], seconds["back"])))
            if plan.moves.awaited:
                begin = self._free["back"]
        cost = card.step(plan.num_decodes, len(plan.tokens), int(computed[plan.rows].sum())) if len(plan.rows) else 0.0
        self._free["steps"] = begin + cost
        self._steps.append((plan, begin + cost))

    @property
    def in_flight(self) -> int:
        return len(self._steps)

    def collect(self) -> StepResult:
        plan, end = self._steps.popleft()
        if not len(plan.rows) and self._moves:  # it waits for moves alone
            end = max(end, self._moves[0][0])
        self.now = max(self.now, end)
        moved = []
        while self._moves and self._moves[0][0] <= self.now:
            moved.append(self._moves.popleft()[1])
        draws = len(plan.samples)
        nothing = np.zeros(draws, np.bool_)
        tokens, counts = np.full(draws, 7, np.int32), np.ones(draws, np.int32)
        return StepResult(plan.step, tokens, counts, nothing, nothing, moves_done=moved)


def simulate(load: Load, host_tokens: int = 0, card: Card = Card(), depth: int = 1) -> Outcome:
    """The load with a host tier of so many tokens; 0: none, rows are computed again."""
    keys = ContentKeys(BLOCK, b"simulation")
    tables = BlockTables(load.cache_tokens // BLOCK + 1, BLOCK)
    tiers = None
    if host_tokens:
        costs = Costs(BLOCK * card.kv_token, out=card.link, back=card.link)
        tiers = OffloadManager(tables, HostTier(host_tokens // BLOCK, lambda key: False), costs)
    device: Device | None = None
    scheduler = Scheduler(
        tables, make_policy("fcfs"), keys, load.rows, load.budget, clock=lambda: device.now if device else 0.0,
        tiers=tiers,
    )  # fmt: skip
    device = Device(card, scheduler)
    rng = random.Random(1)
    params = SamplingParams(max_tokens=load.output, ignore_eos=True)
    for i in range(load.requests):
        tokens = [rng.randint(0, 9999) for _ in range(rng.randint(load.prompt // 2, load.prompt))]
        scheduler.add(NewRequest(str(i), tokens, params, limit=len(tokens) + load.output, keys=keys.of(tokens)))
    while scheduler.unfinished or device.in_flight:
        plan = scheduler.schedule()
        if plan is not None:
            device.submit(plan)
        if plan is None or device.in_flight > depth:
            scheduler.update(device.collect())
            scheduler.take_outputs()
    stats = scheduler.stats
    rate = load.requests * load.output / device.now
    return Outcome(device.now, rate, stats.preemptions, stats.swaps, stats.prompt_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("requests", "prompt", "output", "rows", "cache_tokens", "budget"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Load, name))
    load = Load(**vars(parser.parse_args()))
    without, with_swap = simulate(load), simulate(load, host_tokens=load.cache_tokens)
    print(f"recompute {without}\nswap      {with_swap}\nswap / recompute: {with_swap.rate / without.rate:.3f}")


if __name__ == "__main__":
    main()
