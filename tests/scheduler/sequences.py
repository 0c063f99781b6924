"""A device whose model is a hash: what follows a row's tokens depends on everything it reads through its table, and on
nothing else. So one wrong slot anywhere gives other tokens, and a beam search over plain lists gives the expected
ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.errors import StepError
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.beams import BeamSearchParams, Hypothesis
from quire.messages.caches import FULL, CacheGroup
from quire.messages.outputs import Finished
from quire.messages.plan import StepPlan, StepResult, TokenLogprobs
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from quire.scheduler.beam_search import num_candidates
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.prefix_groups import PrefixGroups
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.harness import mixed

EOS = 0
VOCABULARY = 12
GARBAGE = -1


def slot_content(token: int, position: int) -> int:
    return token * 100_000 + position


def logprobs_after(contents: list[int]) -> list[float]:
    """The log-probability of each token after a sequence."""
    seed = mixed(*contents)
    return [-0.01 - (mixed(seed, token) % 1_000_003) / 300_000 for token in range(VOCABULARY)]


def logprobs_of(tokens: list[int]) -> list[float]:
    return logprobs_after([slot_content(token, position) for position, token in enumerate(tokens)])


@dataclass
class HashRow:
    """One row of the device."""

    limit: int
    stop_ids: list[int]
    reports: int | None
    num_tokens: int
    num_computed: int
    tables: list[np.ndarray]
    """By cache group."""
    last: int = GARBAGE
    active: bool = True


class HashDevice:
    """An executor."""

    lockstep = balance = None

    def __init__(
        self,
        blocks: int,
        block_size: int,
        fails: Callable[[StepPlan], str] = lambda plan: "",
        groups: Sequence[CacheGroup] = (FULL,),
    ) -> None:
        self.groups = groups
        self.size = block_size
        self.content = np.full(blocks * block_size, GARBAGE, np.int64)
        self.fails = fails
        self.rows: dict[int, HashRow] = {}
        self.plans: list[StepPlan] = []
        self.computed = 0
        self.next_step = 0
        self.in_flight: list[list[HashRow]] = []
        self.is_broken = False

    def submit(self, plan: StepPlan) -> tuple[StepResult, bool]:
        assert plan.step == self.next_step
        self.next_step += 1
        self.plans.append(plan)
        if plan.reset:
            self.rows.clear()
            self.is_broken = False
            self.in_flight.clear()
            assert not plan.branches
        self._apply(plan)
        busy = {id(line) for lines in self.in_flight for line in lines}
        assert not busy & {id(self.rows[row]) for row, _ in plan.forced}, "a beam is in two steps in flight"
        failure = self.fails(plan)
        if failure or self.is_broken:
            self.is_broken = True
            for row, count in zip(plan.rows.tolist(), plan.counts.tolist(), strict=True):
                line = self.rows[row]
                for group in self._token_groups:
                    self.content[self._slots(line, line.num_computed, line.num_computed + count, group)] = GARBAGE
                for _, pages in self._states(line):
                    self.content.reshape(-1, self.size)[pages] = GARBAGE
            self.content.reshape(-1, self.size)[[target for _, target in plan.snapshots]] = GARBAGE
            if failure == "submit":
                raise StepError("cannot be launched")
            self.in_flight.append([])
            return StepResult(plan.step, *(np.zeros(0, np.int32) for _ in range(4))), True
        self._write(plan)
        self._check_groups(plan)
        pages = self.content.reshape(-1, self.size)
        pages[[target for _, target in plan.snapshots]] = pages[[source for source, _ in plan.snapshots]]
        self.in_flight.append([self.rows[row] for row in plan.rows.tolist()])
        return self._draw(plan), False

    def collect(self, handle: tuple[StepResult, bool]) -> StepResult:
        self.in_flight.pop(0)
        if handle[1]:
            raise StepError("failed on the device")
        return handle[0]

    def check(self) -> None: ...

    def give_up(self, message: str) -> None: ...

    def shutdown(self) -> None:
        self.rows.clear()

    def _apply(self, plan: StepPlan) -> None:
        targets = [fork.row for fork in plan.branches]
        assert len(set(targets)) == len(targets)
        copies = {
            fork.row: replace(line := self.rows[fork.source], tables=[table.copy() for table in line.tables])
            for fork in plan.branches
        }
        self.rows.update(copies)
        added = {new.row for new in plan.add}
        for row, token in plan.forced:
            if row not in added:
                self.rows[row].last = token
        for row in plan.drop:
            assert self.rows.pop(row, None) is not None, f"row {row} is dropped but not there"
        for new in plan.add:
            assert new.row not in self.rows, f"row {new.row} is taken"
            tables = [np.zeros(len(self.content), np.int64) for _ in self.groups]
            self.rows[new.row] = HashRow(
                new.limit, new.stop_ids, new.params.logprobs, new.num_tokens, new.num_computed, tables
            )
        for row, token in plan.forced:
            if row in added:
                self.rows[row].last = token
        groups = plan.block_groups if len(plan.block_groups) else np.zeros(len(plan.blocks), np.int32)
        for row, index, block, group in zip(plan.block_rows, plan.block_indices, plan.blocks, groups, strict=True):
            self.rows[int(row)].tables[group][index] = block
        blocks = self.content.reshape(-1, self.size)
        sources, copied = [a for a, _ in plan.copies], [b for _, b in plan.copies]
        assert not set(sources) & set(copied)
        blocks[copied] = blocks[sources]

    def _slots(self, line: HashRow, start: int, stop: int, group: int = 0) -> np.ndarray:
        positions = np.arange(start, stop)
        return line.tables[group][positions // self.size] * self.size + positions % self.size

    @property
    def _token_groups(self) -> list[int]:
        return [number for number, group in enumerate(self.groups) if group.kind != "state"]

    def _states(self, line: HashRow) -> list[tuple[int, np.ndarray]]:
        """State groups, and the row's pages in each."""
        kinds = enumerate(self.groups)
        return [(number, line.tables[number][: group.pages]) for number, group in kinds if group.kind == "state"]

    def _check_groups(self, plan: StepPlan) -> None:
        """Every group has what group 0 says was computed: within its window, or as a hash over all tokens."""
        for row, count in zip(plan.rows.tolist(), plan.counts.tolist(), strict=True):
            line = self.rows[row]
            if not line.active:
                continue
            own = self.content[self._slots(line, 0, line.num_computed)].tolist()
            for group in self._token_groups:
                window = self.groups[group].window or line.num_computed
                first = max(0, line.num_computed - count - window + 1)
                held = self.content[self._slots(line, first, line.num_computed, group)].tolist()
                assert held == own[first:], f"row {row}: wrong content in group {group}"
            for group, pages in self._states(line):
                assert pages.all() and (self.content.reshape(-1, self.size)[pages, 0] == _consumed(own, group)).all()

    def _write(self, plan: StepPlan) -> None:
        given = plan.tokens.tolist()
        for i, (row, count) in enumerate(zip(plan.rows.tolist(), plan.counts.tolist(), strict=True)):
            line = self.rows[row]
            tokens = [line.last]
            if i >= plan.num_decodes:
                tokens, given = given[:count], given[count:]
            if not line.active:
                continue
            start = line.num_computed
            fresh = [slot_content(token, start + j) for j, token in enumerate(tokens)]
            before = self.content[self._slots(line, 0, start)].tolist()
            for group in self._token_groups:
                slots = self._slots(line, start, start + count, group)
                assert (slots >= self.size).all(), f"row {row} has no block for its tokens"
                self.content[slots] = fresh
            for group, pages in self._states(line):
                states = self.content.reshape(-1, self.size)
                assert pages.all() and (not start or (states[pages, 0] == _consumed(before, group)).all())
                states[pages, 0] = _consumed(before + fresh, group)
            line.num_computed = start + count
            self.computed += count
        assert not given

    def _draw(self, plan: StepPlan) -> StepResult:
        tokens, stopped, reports = [], [], {}
        for i, (sample, row) in enumerate(zip(plan.samples.tolist(), plan.sample_rows.tolist(), strict=True)):
            assert int(plan.rows[sample]) == row, "no row forks while it draws here"
            line = self.rows[row]
            assert not line.active or line.num_computed == line.num_tokens
            values = logprobs_after(self.content[self._slots(line, 0, line.num_tokens)].tolist())
            ranked = sorted(range(VOCABULARY), key=lambda token: -values[token])
            if line.reports is not None:
                top = ranked[: line.reports]
                reports[i] = TokenLogprobs([ranked[0], *top], [values[token] for token in (ranked[0], *top)], 1)
            line.last = ranked[0]
            line.num_tokens += 1
            tokens.append(line.last)
            stopped.append(line.last in line.stop_ids)
            line.active = line.active and not stopped[-1] and line.num_tokens < line.limit
        counts, invalid = np.ones(len(tokens), np.int32), np.zeros(len(tokens), bool)
        return StepResult(
            plan.step, np.array(tokens, np.int32), counts, np.array(stopped, bool), invalid, logprobs=reports
        )


def _consumed(contents: list[int], group: int) -> int:
    """The state after these tokens."""
    return mixed(group, *contents) >> 2


class Sequences:
    """A scheduler and its loop over a `HashDevice`; results of requests are compared with plain lists."""

    def __init__(
        self,
        blocks: int = 64,
        block_size: int = 4,
        rows: int = 8,
        budget: int = 64,
        depth: int = 0,
        policy: str = "fcfs",
        prefix_caching: bool = True,
        fails: Callable[[StepPlan], str] = lambda plan: "",
        config: EngineConfig | None = None,
        groups: Sequence[CacheGroup] = (FULL,),
    ) -> None:
        self.keys = ContentKeys(block_size, b"model")
        self.tables = BlockTables(blocks + 1, block_size, prefix_caching, groups)
        shared = PrefixGroups(block_size, 1, 1)
        self.scheduler = Scheduler(self.tables, make_policy(policy, config), self.keys, rows, budget, groups=shared)
        self.device = HashDevice(blocks + 1, block_size, fails, groups)
        self.core = EngineCore(self.scheduler, self.device, depth)  # type: ignore[arg-type]
        self.sources: dict[str, NewRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.found: dict[str, list[Hypothesis]] = {}
        self.ended: dict[str, Finished] = {}
        self.most_used = 0

    def add(self, id: str, prompt: list[int], output: int, beams: BeamSearchParams | None = None) -> None:
        """A greedy request, or a beam search."""
        params = SamplingParams(temperature=0, max_tokens=output)
        source = NewRequest(id, prompt, params, len(prompt) + output, [EOS], keys=self.keys.of(prompt, ""))
        if beams is not None:
            source.beams = beams
            params.ignore_eos, params.logprobs = True, num_candidates(beams, 1 + len(beams.stop_token_ids or ()))
        self.core.add(source)
        self.sources[id], self.outputs[id] = source, []

    def search(self, id: str, prompt: list[int], width: int, output: int, **params: object) -> None:
        self.add(id, prompt, output, BeamSearchParams(width, output, **params))  # type: ignore[arg-type]

    def step(self) -> None:
        outputs = self.core.step()
        counts = outputs.counts if outputs.counts is not None else [1] * len(outputs.keys)
        at = 0
        for (id, _), count in zip(outputs.keys, counts, strict=True):
            self.outputs[id] += outputs.tokens[at : at + count]
            at += count
        self.found.update(outputs.beams)
        for end in outputs.finished:
            assert end.key[0] not in self.ended, f"{end.key} ends twice"
            self.ended[end.key[0]] = end
        self.most_used = max(self.most_used, self.tables.pool.used)

    def run(self, steps: int = 5000) -> None:
        for _ in range(steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"not done after {steps} steps"
        self.scheduler.check_idle()

    def assert_right(self, but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Every request ended as expected, except these."""
        for id, source in self.sources.items():
            if id in but:
                continue
            assert self.ended[id].reason != "error", self.ended[id]
            if source.beams is None:
                assert self.outputs[id] == greedy(source), id
            else:
                self._assert_search(id, source)

    def _assert_search(self, id: str, source: NewRequest) -> None:
        assert not self.outputs[id], "beams report no tokens"
        found = [(one.tokens, one.reason) for one in self.found[id]]
        right = beam_search(source)
        assert found == [(tokens, reason) for tokens, reason, _, _ in right], id
        for one, (_, _, total, score) in zip(self.found[id], right, strict=True):
            assert abs(one.total - total) < 1e-9 and abs(one.score - score) < 1e-9
            assert abs(sum(one.logprobs) - total) < 1e-9 and len(one.logprobs) == len(one.ranks) == len(one.tokens)


def greedy(source: NewRequest) -> list[int]:
    tokens = list(source.prompt)
    while len(tokens) < source.limit and (len(tokens) == len(source.prompt) or tokens[-1] != EOS):
        values = logprobs_of(tokens)
        tokens.append(max(range(VOCABULARY), key=lambda token: values[token]))
    return tokens[len(source.prompt) :]


def beam_search(source: NewRequest) -> list[tuple[list[int], str, float, float]]:
    """Over whole lists, every token of every beam: (tokens, reason, log-probability, score), best first."""
    assert source.beams is not None
    params, start = source.beams, len(source.prompt)
    ends = {*(() if params.ignore_eos else (EOS,)), *(params.stop_token_ids or ())}
    width, keep = params.beam_width, max(2, 1 + len(ends)) * params.beam_width
    running: list[tuple[float, list[int]]] = [(0.0, list(source.prompt))]
    finished: list[tuple[list[int], str, float, float]] = []
    while True:
        every = [
            (total + value, [*tokens, token])
            for total, tokens in running
            for token, value in enumerate(logprobs_of(tokens))
        ]
        every.sort(key=lambda one: -one[0])
        length = len(running[0][1]) + 1 - start
        is_last = start + length == source.limit
        for total, tokens in every[:width]:
            if is_last or tokens[-1] in ends:
                reason = "stop" if tokens[-1] in ends else "length"
                finished.append((tokens[start:], reason, total, total / length**params.length_penalty))
        finished = sorted(finished, key=lambda one: -one[3])[:width]
        running = [one for one in every[:keep] if one[1][-1] not in ends][:width]
        if is_last or (len(finished) == width and params.early_stopping is True):
            return finished
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = source.limit - start
        if len(finished) == width and running[0][0] / length**params.length_penalty <= finished[-1][3]:
            return finished
