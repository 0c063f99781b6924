"""Simulated replicas: quire's own block tables and prefix cache, steps whose duration is computed by a formula."""

from __future__ import annotations

import heapq
import itertools
import statistics
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prefix_traces import BLOCK, Arrival

from quire.kvcache.block_tables import BlockTables

REPORT_STEPS = 16
"""Steps between progress reports of a row; a real front process sees every step."""
WINDOW_SECONDS = 10.0


@dataclass(frozen=True)
class Machine:
    """Capacity and speed of a replica."""

    blocks: int = 6144
    """KV blocks, of 16 tokens."""
    rows: int = 64
    budget: int = 2048
    """Prompt tokens a step may have."""
    step_seconds: float = 0.006
    row_seconds: float = 0.00003
    token_seconds: float = 1 / 16_000


@dataclass(eq=False)
class Visit:
    """A request at a replica."""

    arrival: Arrival
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    computed: int = 0
    cached: int = 0
    first_token: float = 0.0
    first_step: int = 0


class SimulatedReplica:
    """Admits in order of arrival, computes prompts in chunks beside decodes, and caches what it computed."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.tables = BlockTables(machine.blocks + 1, BLOCK)
        self.waiting: deque[Visit] = deque()
        self.prompts: list[Visit] = []
        self._ends: list[tuple[int, int, Visit]] = []
        """Decoding visits by the step they finish in."""
        self._order = itertools.count()
        self.steps = 0
        self.hit_tokens = 0
        self.work_tokens = 0
        self.work_by_window: Counter[int] = Counter()
        self.busy_seconds = 0.0
        self._chunks: list[tuple[Visit, int]] = []

    @property
    def open_requests(self) -> int:
        return len(self.waiting) + len(self.prompts) + len(self._ends)

    def begin_step(self, now: float) -> float:
        """Plan a step; returns the time at which it ends."""
        self._admit()
        machine, left = self.machine, self.machine.budget
        self._chunks = []
        for visit in self.prompts:
            chunk = min(left, visit.arrival.prompt_tokens - visit.computed)
            if chunk:
                self._chunks.append((visit, chunk))
                left -= chunk
        tokens = machine.budget - left
        seconds = machine.step_seconds + machine.row_seconds * len(self._ends) + machine.token_seconds * tokens
        work = tokens + len(self._ends)
        self.work_tokens += work
        self.work_by_window[int(now / WINDOW_SECONDS)] += work
        self.busy_seconds += seconds
        return now + seconds

    def end_step(self, now: float) -> tuple[list[Visit], list[Visit], list[Visit]]:
        """Visits with a first token, visits that progressed, visits that finished."""
        self.steps += 1
        for visit, chunk in self._chunks:
            visit.computed += chunk
            self.tables.publish(visit, visit.arrival.keys, visit.computed // BLOCK)
        started = [visit for visit, _ in self._chunks if visit.computed == visit.arrival.prompt_tokens]
        ended = []
        while self._ends and self._ends[0][0] <= self.steps:
            visit = heapq.heappop(self._ends)[2]
            self.tables.publish(visit, visit.arrival.keys, len(visit.arrival.keys))
            self.tables.release(visit)
            ended.append(visit)
        for visit in started:
            self.prompts.remove(visit)
            visit.first_token, visit.first_step = now, self.steps
            end = self.steps + max(1, visit.arrival.output_tokens - 1)
            heapq.heappush(self._ends, (end, next(self._order), visit))
        progressed = [visit for _, _, visit in self._ends] if self.steps % REPORT_STEPS == 0 else []
        return started, progressed, ended

    def _admit(self) -> None:
        tables = self.tables
        while self.waiting and len(self.prompts) + len(self._ends) < self.machine.rows:
            visit = self.waiting[0]
            arrival = visit.arrival
            found = tables.match(arrival.prompt_keys, arrival.prompt_tokens)
            length = arrival.prompt_tokens + arrival.output_tokens
            if tables.blocks_for(length) - len(found) + tables.cost_of_sharing(found) > tables.pool.free:
                return
            self.waiting.popleft()
            tables.adopt(visit, found)
            tables.grow(visit, length)
            visit.computed = visit.cached = len(found) * BLOCK
            self.hit_tokens += visit.cached
            self.prompts.append(visit)


class Dispatcher(Protocol):
    """Chooses a replica for each request. It gets the events that a front process sees."""

    @abstractmethod
    def send(self, arrival: Arrival, now: float) -> int:
        """The replica to send it to."""

    def started(self, arrival: Arrival, cached: int, now: float) -> None:
        """Its first token came."""

    def progressed(self, arrival: Arrival, generated: int, now: float) -> None:
        """More tokens came."""

    def ended(self, arrival: Arrival, now: float) -> None:
        """Its last token came."""


@dataclass(frozen=True)
class Outcome:
    """Results of a trace."""

    hit_tokens: int
    prompt_tokens: int
    work_balance: float
    """Max ÷ mean over replicas of tokens computed, of prompts and outputs."""
    window_balance: float
    """The same per window of ten seconds, averaged."""
    longest: float
    """Open requests at the replica with the most, averaged over arrivals."""
    ttft_p50: float
    ttft_p99: float
    busy_seconds: float
    """The busiest replica's."""


def replay(arrivals: Sequence[Arrival], make: Callable[[], Dispatcher], count: int, machine: Machine) -> Outcome:
    """Run a trace through `count` replicas until every request has finished."""
    dispatcher = make()
    replicas = [SimulatedReplica(machine) for _ in range(count)]
    visits = [Visit(arrival) for arrival in arrivals]
    coming = 0
    steps: list[tuple[float, int]] = []
    longest: list[int] = []
    while coming < len(visits) or steps:
        if not steps or (coming < len(visits) and visits[coming].arrival.at <= steps[0][0]):
            visit = visits[coming]
            coming += 1
            longest.append(max(replica.open_requests for replica in replicas))
            now = visit.arrival.at
            chosen = dispatcher.send(visit.arrival, now)
            is_idle = replicas[chosen].open_requests == 0
            replicas[chosen].waiting.append(visit)
            if is_idle:
                heapq.heappush(steps, (replicas[chosen].begin_step(now), chosen))
            continue
        now, number = heapq.heappop(steps)
        replica = replicas[number]
        started, progressed, ended = replica.end_step(now)
        for visit in started:
            dispatcher.started(visit.arrival, visit.cached, now)
        for visit in progressed:
            dispatcher.progressed(visit.arrival, 1 + replica.steps - visit.first_step, now)
        for visit in ended:
            dispatcher.ended(visit.arrival, now)
        if replica.open_requests:
            heapq.heappush(steps, (replica.begin_step(now), number))
    waits = sorted(visit.first_token - visit.arrival.at for visit in visits)
    return Outcome(
        hit_tokens=sum(replica.hit_tokens for replica in replicas),
        prompt_tokens=sum(arrival.prompt_tokens for arrival in arrivals),
        work_balance=_balance([replica.work_tokens for replica in replicas]),
        window_balance=statistics.fmean(_balance(window) for window in _windows(replicas, arrivals[-1].at)),
        longest=statistics.fmean(longest),
        ttft_p50=waits[len(waits) // 2],
        ttft_p99=waits[int(0.99 * len(waits))],
        busy_seconds=max(replica.busy_seconds for replica in replicas),
    )


def _balance(loads: Sequence[int]) -> float:
    return max(loads) / statistics.fmean(loads) if sum(loads) else 1.0


def _windows(replicas: Sequence[SimulatedReplica], end: float) -> list[list[int]]:
    """Tokens computed by each replica in each window, while requests arrived."""
    windows = range(max(1, int(end / WINDOW_SECONDS)))
    return [[replica.work_by_window[window] for replica in replicas] for window in windows]
