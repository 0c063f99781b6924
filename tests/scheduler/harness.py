"""A simulated device: it applies plans as DESIGN.md says and checks every slot that a computed token would read.
Nothing here uses the scheduler's own bookkeeping: what a request must yield is a pure function of (request, sequence,
position), and what a slot must hold follows from the tokens up to its position."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.errors import StepError
from quire.kvcache.block_pool import NULL_BLOCK
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.block_store import BlockStore, StoreStats
from quire.kvcache.offload.costs import Costs
from quire.kvcache.offload.host_tier import HostTier
from quire.kvcache.offload.io_threads import IOTask, IOThreads
from quire.kvcache.offload.manager import OffloadManager
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.caches import FULL, CacheGroup
from quire.messages.outputs import Finished, Key, Started, StepOutputs
from quire.messages.plan import MAX_WIDTH, Moves, MovesDone, PrefixGroup, StepPlan, StepResult
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from quire.scheduler.drafting import Drafting
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.prefix_groups import PrefixGroups
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.swapping import Swapper
from quire.sessions.keeper import SessionKeeper
from quire.sessions.log import SessionStore
from quire.sessions.session_kv import SessionKV

EOS = 0
STOP = 1
"""The request's own stop token, in addition to EOS."""
VOCABULARY = 40
GARBAGE = -1
"""Content of a slot after an undefined write."""

_MASK = (1 << 61) - 1


def mixed(*values: int | str) -> int:
    """A well-mixed number from small ones, the same in every process."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        for part in value.encode() if isinstance(value, str) else (value & _MASK,):
            state = ((state ^ part) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
            state ^= state >> 29
    return state


def draw(request: str, sequence: int, position: int) -> int:
    """The token at `position`: never EOS or STOP, unless `ending` says otherwise."""
    return 2 + mixed(request, sequence, position) % (VOCABULARY - 2)


def ending(request: str, sequence: int, position: int) -> int:
    """As `draw`, but about one in thirty is EOS or STOP."""
    fate = mixed("fate", request, sequence, position) % 60
    return fate if fate in (EOS, STOP) else draw(request, sequence, position)


Draws = Callable[[str, int, int], int]
Guess = Callable[[Key, list[int], int, int], list[int]]
"""Drafts for a sequence: (its key, all tokens it will have, a position, how many) -> tokens from that position on."""


class Truth:
    """What each sequence must yield, and what its slots must hold."""

    def __init__(self, source: NewRequest, index: int, draws: Draws) -> None:
        self.source = source
        tokens = list(source.prompt)
        while True:
            token = draws(source.id, index, len(tokens))
            tokens.append(token)
            if token in source.stop_ids or len(tokens) >= source.limit:
                break
        self.tokens = tokens
        self.output = tokens[len(source.prompt) :]
        self.reason = "stop" if tokens[-1] in source.stop_ids else "length"
        self.stop_reason = STOP if self.reason == "stop" and tokens[-1] == STOP else None
        content, chain = [], mixed("salt", source.salt)
        for position, token in enumerate(tokens):
            chain = mixed(chain, token, position) & _MASK
            content.append(chain)
        self.content = np.array(content, np.int64)


class MemoryStore(BlockStore):
    """A block store that is a dictionary."""

    def __init__(self, capacity: int = 10_000) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.capacity = capacity
        """In blocks."""

    @classmethod
    def open(cls, folder: Path, fingerprint: bytes, block_bytes: int, capacity: int) -> MemoryStore:
        return cls(capacity // block_bytes)

    def has(self, key: bytes) -> bool:
        return key in self.blocks

    def read(self, key: bytes, into: memoryview) -> bool:
        if (block := self.blocks.get(key)) is None:
            return False
        into[:] = block
        return True

    def write(self, key: bytes, payload: memoryview) -> bool:
        if len(self.blocks) >= self.capacity:
            self.blocks.pop(next(iter(self.blocks)))
        self.blocks[key] = bytes(payload)
        return True

    def discard(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def stats(self) -> StoreStats:
        return StoreStats(blocks=len(self.blocks), block_bytes=1, used_bytes=len(self.blocks), capacity=self.capacity)


class MemoryDisk(IOThreads):
    """I/O on a store in memory, without threads: tasks take several polls, and some fail."""

    def __init__(self, capacity: int = 10_000, seed: int = 0, failing: float = 0.1) -> None:
        self.store = MemoryStore(capacity)
        self.num_threads = 1
        self._rng = rng_of("disk", seed)
        self._failing = failing
        self._queue: list[IOTask] = []

    def submit_read(self, key: bytes, into: memoryview) -> IOTask:
        return self._enqueue(IOTask("read", key, into))

    def submit_write(self, key: bytes, payload: memoryview) -> IOTask:
        return self._enqueue(IOTask("write", key, payload))

    def submit_call(self, call: Callable[[], object]) -> IOTask:
        return self._enqueue(IOTask("call", call=call))

    def _enqueue(self, task: IOTask) -> IOTask:
        self._queue.append(task)
        return task

    def poll(self) -> list[IOTask]:
        done = [task for task in self._queue if self._rng.random() < 0.4]
        self._queue = [task for task in self._queue if task not in done]
        for task in done:
            task.ok = self._rng.random() >= self._failing or task.kind == "call"
            if task.call is not None:
                task.call()
                continue
            assert task.buffer is not None
            if task.kind == "write":
                task.ok = task.ok and self.store.write(task.key, task.buffer)
            elif not (task.ok and self.store.read(task.key, task.buffer)):
                task.ok = False
                task.buffer[:] = bytes(len(task.buffer))
                self.store.discard([task.key])
        return done

    def sleep(self, seconds: float, wakes: Sequence[int] = ()) -> None:
        """Returns at once: the next poll may have finished something."""

    def close(self) -> None: ...


@dataclass
class DeviceRow:
    """One row of the device batch."""

    request: str
    sequence: int
    num_tokens: int
    num_computed: int
    tables: list[np.ndarray]
    """By cache group."""
    active: bool = True
    drafts: list[int] = field(default_factory=list)
    """Tokens it may draw next, to be verified."""
    accepted: int = 1
    """Tokens that its last computation yields."""
    is_wide: bool = False
    """Its last decode verified drafts."""
    is_spoiled: bool = False
    """Its recurrent state is a token ahead of what it is to compute next: what it yields must not be used."""


@dataclass
class Launched:
    """A step the device was given; its result is collected later."""

    result: StepResult
    requests: set[str]
    failed: bool
    draws: set[Key] = field(default_factory=set)


class CheckingExecutor:
    """Applies plans to a model of rows, tables and slot contents, and raises AssertionError at the first wrong slot."""

    lockstep = balance = None

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        token_budget: int,
        draws: Draws = draw,
        fails: Callable[[StepPlan, set[str]], str] = lambda plan, requests: "",
        yields_nothing: Callable[[Key, int], bool] = lambda key, position: False,
        is_invalid: Callable[[Key, int], bool] = lambda key, position: False,
        host_slots: int = 0,
        draws_elsewhere: bool = False,
        groups: Sequence[CacheGroup] = (FULL,),
        guess: Guess = lambda key, truth, position, count: [],
        verifies_with_prompts: bool = True,
    ) -> None:
        """`draws_elsewhere`: this is a pipeline stage that learns drawn tokens only from plans. `guess`: the device's
        proposer."""
        self.guess = guess
        self.verifies_with_prompts = verifies_with_prompts
        self.verified = self.accepted = 0
        """Drafts in all steps."""
        self.cache_groups = groups
        self.state_groups = [number for number, group in enumerate(groups) if group.kind == "state"]
        self.snapshots = 0
        """Pages copied at the end of steps."""
        self.draws_elsewhere = draws_elsewhere
        self.block_size = block_size
        self.max_rows = max_rows
        self.token_budget = token_budget
        self.draws = draws
        self.fails = fails
        """"submit" or "collect" to fail there, "" not to; called with the plan and the requests in it."""
        self.yields_nothing = yields_nothing
        self.is_invalid = is_invalid
        self.sources: dict[str, NewRequest] = {}
        self.truths: dict[Key, Truth] = {}
        self.rows: dict[int, DeviceRow] = {}
        self.content = np.full(num_blocks * block_size, GARBAGE, np.int64)
        self.host = np.full((host_slots, block_size), GARBAGE, np.int64)
        self.moving: list[tuple[int, int, Moves]] = []
        """Transfers in flight: the step at whose collection they are done, the step they came with, and what they
        copy."""
        self.table_width = num_blocks if groups[0].kind == "full" else 1000
        self.groups: list[PrefixGroup] = []
        self.grouped_rows = 0
        """Rows that computed as members of a group, summed over steps."""
        self.next_step = 0
        self.is_broken = False
        self.plans: list[StepPlan] = []
        self.keep_plans = False
        self.pending: list[Launched] = []
        self.failures: Counter[str] = Counter()
        """How many failed steps each request was part of."""
        self.computed_tokens = 0
        self.stale_draws = 0
        self.copied = 0
        self.awaited = 0
        """Plans whose rows read blocks that the same plan loads."""

    def expect(self, source: NewRequest) -> None:
        """Register a request with the checker."""
        self.sources[source.id] = source

    def truth(self, request: str, index: int) -> Truth:
        key = (request, index)
        if key not in self.truths:
            self.truths[key] = Truth(self.sources[request], index, self.draws)
        return self.truths[key]

    # The executor's protocol

    def submit(self, plan: StepPlan) -> Launched:
        assert plan.step == self.next_step, f"plan {plan.step} came where {self.next_step} was due"
        self.next_step += 1
        if self.keep_plans:
            self.plans.append(plan)
        if plan.reset:
            self.rows.clear()
            self.pending.clear()
            self.moving.clear()
            self.is_broken = False
        self._check_budgets(plan)
        is_early = plan.moves is not None and plan.moves.awaited and not plan.reset
        if is_early:
            self._start_moves(plan)
        self._apply_differences(plan)
        if not is_early:
            self._start_moves(plan)
        requests = {self.rows[row].request for row in plan.rows.tolist()}
        failure = self.fails(plan, requests)
        if failure or self.is_broken:
            self.is_broken = True
            self._spoil(plan)
            self.failures.update(requests)
            if failure == "submit":
                # As far as the engine can know, any request in flight may be the cause.
                self.failures.update({id for launched in self.pending for id in launched.requests} - requests)
                raise StepError(f"step {plan.step} cannot be launched")
            return self._launched(_empty_result(plan), requests, failed=True)
        self._bring_awaited(plan)
        self._write(plan)
        self._verify_reads(plan)
        self._verify_groups(plan)
        self._fork(plan)
        self._snapshot(plan)
        launched = self._launched(self._draw(plan), requests, failed=False)
        launched.draws = {(self.rows[row].request, self.rows[row].sequence) for row in plan.sample_rows.tolist()}
        return launched

    def _launched(self, result: StepResult, requests: set[str], failed: bool) -> Launched:
        self.pending.append(Launched(result, requests, failed))
        return self.pending[-1]

    def check(self) -> None: ...

    def collect(self, handle: Launched) -> StepResult:
        assert self.pending.pop(0) is handle, "results are read in order"
        if handle.failed:
            raise StepError(f"step {handle.result.step} failed on the device")
        handle.result.moves_done = self._end_moves(handle.result.step, wait=not handle.requests)
        return handle.result

    def shutdown(self) -> None:
        self.rows.clear()

    # Transfers

    def _start_moves(self, plan: StepPlan) -> None:
        """Copies read at the latest possible moment; until then their targets are undefined."""
        if plan.moves is None:
            return
        blocks = self.content.reshape(-1, self.block_size)
        assert len(plan.moves.tokens) == len(plan.moves.back) * self.block_size
        for _, block in plan.moves.back:
            assert block != NULL_BLOCK
            blocks[block] = GARBAGE
        for block, slot in plan.moves.out:
            assert all(block != own for _, own in plan.copies), "a block leaves before it has arrived"
            self.host[slot] = GARBAGE
        moves = Moves(out=plan.moves.out) if plan.moves.awaited else plan.moves
        self.moving.append((plan.step + mixed("moves", plan.step) % 4, plan.step, moves))

    def _bring_awaited(self, plan: StepPlan) -> None:
        """Complete the transfers that this step reads from, if it computes."""
        if plan.moves is not None and plan.moves.awaited:
            assert len(plan.rows), "rows wait for them"
            self.awaited += 1
            for slot, block in plan.moves.back:
                self.content.reshape(-1, self.block_size)[block] = self.host[slot]

    def _end_moves(self, step: int, wait: bool) -> list[MovesDone]:
        """End transfers that are done by now; `wait`: wait for at least one."""
        blocks = self.content.reshape(-1, self.block_size)
        due = [entry for entry in self.moving if entry[0] <= step] or (self.moving[:1] if wait else [])
        for _, _, moves in due:
            for block, slot in moves.out:
                self.host[slot] = blocks[block]
            for slot, block in moves.back:
                blocks[block] = self.host[slot]
        self.moving = [entry for entry in self.moving if entry not in due]
        return [MovesDone(came, 1.0, 1.0) for _, came, _ in due]

    # One step

    def _check_budgets(self, plan: StepPlan) -> None:
        rows = plan.rows.tolist()
        assert rows or plan.moves or self.moving, "a plan without work"
        assert plan.num_tokens == int(plan.counts.sum()) <= self.token_budget, (plan.num_tokens, self.token_budget)
        assert len(set(rows)) == len(rows) == len(plan.counts), "a row is scheduled twice"
        assert all(0 <= row < self.max_rows for row in rows)
        widths = plan.counts[: plan.num_decodes]
        assert (plan.counts > 0).all() and (widths <= MAX_WIDTH).all()
        assert plan.num_drafts == int(widths.sum()) - plan.num_decodes
        assert self.verifies_with_prompts or not plan.num_drafts or len(rows) == plan.num_decodes
        assert len(set(plan.sample_rows.tolist())) == len(plan.sample_rows), "a row draws twice"
        if self.draws_elsewhere and not plan.reset:
            computing = {(self.rows[row].request, self.rows[row].sequence) for row in rows if row in self.rows}
            drawing = {key for launched in self.pending for key in launched.draws}
            gone = {(self.rows[row].request, self.rows[row].sequence) for row in plan.drop}
            assert not (computing - gone) & drawing, "a row computes again before its draw is known"

    def _apply_differences(self, plan: StepPlan) -> None:
        for row in plan.drop:
            assert self.rows.pop(row, None) is not None, f"row {row} is dropped but not there"
        for new in plan.add:
            assert new.row not in self.rows, f"row {new.row} is added but taken"
            source = self.sources[new.request]
            assert new.prompt_len == len(source.prompt) and new.limit == source.limit
            assert new.stop_ids == source.stop_ids
            assert new.num_computed < new.num_tokens, "a hit leaves at least the last token"
            tables = [np.full(self.table_width, NULL_BLOCK, np.int64) for _ in self.cache_groups]
            self.rows[new.row] = DeviceRow(new.request, new.sequence, new.num_tokens, new.num_computed, tables)
        assert len(self.rows) <= self.max_rows
        rewound = dict(plan.rewound)
        assert self.draws_elsewhere or not rewound
        if self.draws_elsewhere:
            for row in plan.rows[: plan.num_decodes].tolist():
                state = self.rows[row]
                expected = state.num_computed if state.is_wide else None
                assert rewound.pop(row, None) == expected or not state.active, f"row {row} is not rewound"
            assert not rewound
        for run in plan.drafts:
            state = self.rows[run.row]
            drawn = state.num_tokens - run.start
            assert drawn >= 0 and run.start >= len(self.sources[state.request].prompt)
            is_right = (
                self.truth(state.request, state.sequence).tokens[run.start : state.num_tokens] == run.tokens[:drawn]
            )
            state.drafts = run.tokens[drawn:][: MAX_WIDTH - 1] if is_right else []
        groups = plan.block_groups if len(plan.block_groups) else np.zeros(len(plan.blocks), np.int32)
        for row, index, block, group in zip(
            plan.block_rows.tolist(), plan.block_indices.tolist(), plan.blocks.tolist(), groups.tolist(), strict=True
        ):
            assert block != NULL_BLOCK
            assert row in self.rows, f"row {row} is given block {block} but is not there"
            self.rows[row].tables[group][index] = block
        sources, targets = [a for a, _ in plan.copies], [b for _, b in plan.copies]
        assert len(set(targets)) == len(targets) and NULL_BLOCK not in targets
        assert not set(sources) & set(targets), f"copies {plan.copies} depend on their order"
        blocks = self.content.reshape(-1, self.block_size)
        blocks[targets] = blocks[sources]
        self.copied += len(plan.copies)
        if plan.reset:
            assert plan.groups is not None, "groups of unknown rows"
        if plan.groups is not None:
            self.groups = plan.groups

    def _write(self, plan: StepPlan) -> None:
        """Every scheduled row writes the KV of its tokens through its table."""
        given = plan.tokens.tolist()
        added, forced = {new.row for new in plan.add}, dict(plan.forced)
        at = 0
        for i, (row, count) in enumerate(zip(plan.rows.tolist(), plan.counts.tolist(), strict=True)):
            state = self.rows[row]
            truth = self.truth(state.request, state.sequence)
            start = state.num_computed
            if i < plan.num_decodes:
                if not state.active:
                    continue  # to block 0, which is never read
                assert start == state.num_tokens - 1, f"{state} decodes, but {start} tokens are computed"
                if row in added or self.draws_elsewhere:
                    assert forced[row] == truth.tokens[start], f"{state} joins with another token than its last"
                assert state.num_tokens + count <= truth.source.limit, f"{state} verifies beyond its end"
                state.accepted = self._verify(state, truth, count)
                state.is_wide = count > 1
            else:
                state.accepted = 1

                assert given[at : at + count] == truth.tokens[start : start + count], f"wrong tokens for {state}"
                assert start + count <= state.num_tokens
                at += count
            positions = np.arange(start, start + count)
            for group in self._token_groups:
                slots = self._slots(state, positions, group)
                assert (slots >= self.block_size).all(), f"{state} has no block for positions {positions}"
                self.content[slots] = GARBAGE  # of drafts that are rejected
                right = positions[: state.accepted] if i < plan.num_decodes else positions
                self.content[slots[: len(right)]] = truth.content[right] ^ _stamp(group)
            assert start + count <= plan.max_context
            if i < plan.num_decodes:
                self._advance_state(state, truth, start, start + state.accepted)
                state.num_computed = start + state.accepted
            else:
                self._advance_state(state, truth, start, start + count)
                state.num_computed = start + count
            self.computed_tokens += count
        assert at == len(given)

    def _verify(self, state: DeviceRow, truth: Truth, width: int) -> int:
        """How many tokens a decode of `width` yields: one, and one more for each draft that was right."""
        drafts = [*state.drafts, *[VOCABULARY + 5] * width][: width - 1]
        right = truth.tokens[state.num_tokens :]
        accepted = 0
        while accepted < len(drafts) and accepted + 1 < len(right) and drafts[accepted] == right[accepted]:
            accepted += 1
        self.verified += len(drafts)
        self.accepted += accepted
        return 1 + accepted

    def _propose(self, plan: StepPlan, idle: set[int]) -> list[list[int]]:
        """The device's proposer: drafts for each row that draws, and what its own layers leave in the slots of tokens
        that are not computed yet. `idle`: rows whose draw has yielded nothing."""
        made = []
        for row in plan.sample_rows.tolist():
            state = self.rows[row]
            state.drafts = []
            if plan.proposals and state.active and not state.is_spoiled and row not in idle:
                truth = self.truth(state.request, state.sequence)
                key, at = (state.request, state.sequence), state.num_tokens
                state.drafts = self.guess(key, truth.tokens, at, plan.proposals)[: plan.proposals]
                last = min(at - 1 + plan.proposals, truth.source.limit)
                positions = np.arange(at - 1, last)
                for group in self._token_groups:
                    slots = self._slots(state, positions, group)
                    assert (slots >= self.block_size).all(), f"{state} has no block for drafts at {positions}"
                    self.content[slots] = GARBAGE
            made.append(list(state.drafts))
        return made if plan.proposals else []

    def _verify_reads(self, plan: StepPlan) -> None:
        """All of a row's positions hold exactly its own sequence: attention reads them all."""
        decoding = set(plan.rows[: plan.num_decodes].tolist())
        for row, count in zip(plan.rows.tolist(), plan.counts.tolist(), strict=True):
            state = self.rows[row]
            if not state.active:
                continue
            truth = self.truth(state.request, state.sequence)
            for group in self._token_groups:
                window = self.cache_groups[group].window or state.num_computed + 1
                written = min(count, state.accepted) if row in decoding else count
                first = max(0, state.num_computed - written - window + 1)
                positions = np.arange(first, state.num_computed)
                held = self.content[self._slots(state, positions, group)]
                right = truth.content[first : state.num_computed] ^ _stamp(group)
                if not np.array_equal(held, right):
                    wrong = np.flatnonzero(held != right) + first
                    raise AssertionError(
                        f"step {plan.step}: row {row} {state} reads wrong KV of group {group} at positions "
                        f"{wrong.tolist()}"
                    )
            if not state.is_spoiled:
                self._verify_state(state, truth, state.num_computed)

    # Recurrent states: the first slot of each page has the hash of all tokens that were consumed

    @property
    def _token_groups(self) -> list[int]:
        return [number for number, group in enumerate(self.cache_groups) if group.kind != "state"]

    def _state_pages(self, state: DeviceRow, group: int) -> np.ndarray:
        pages = state.tables[group][: self.cache_groups[group].pages]
        assert (pages != NULL_BLOCK).all() and len(set(pages.tolist())) == len(pages), f"{state} has no state"
        return pages

    def _advance_state(self, state: DeviceRow, truth: Truth, start: int, end: int) -> None:
        """The row's live state consumes its tokens from `start` up to `end`; at position 0 it starts from zeros."""
        if start and not state.is_spoiled:
            self._verify_state(state, truth, start)
        blocks = self.content.reshape(-1, self.block_size)
        for group in self.state_groups:
            pages = self._state_pages(state, group)
            blocks[pages] = GARBAGE
            if not state.is_spoiled:
                blocks[pages, 0] = _state_content(truth, end, group, len(pages))

    def _verify_state(self, state: DeviceRow, truth: Truth, tokens: int) -> None:
        for group in self.state_groups:
            pages = self._state_pages(state, group)
            held = self.content.reshape(-1, self.block_size)[pages, 0]
            right = _state_content(truth, tokens, group, len(pages))
            assert np.array_equal(held, right), f"{state}: the state of group {group} is not that of {tokens} tokens"

    def _snapshot(self, plan: StepPlan) -> None:
        """Page copies at the end of a step."""
        sources, targets = [a for a, _ in plan.snapshots], [b for _, b in plan.snapshots]
        assert len(set(targets)) == len(targets) and NULL_BLOCK not in targets
        assert not set(sources) & set(targets), f"snapshots {plan.snapshots} depend on their order"
        blocks = self.content.reshape(-1, self.block_size)
        blocks[targets] = blocks[sources]
        self.snapshots += len(targets)

    def _verify_groups(self, plan: StepPlan) -> None:
        """All rows of a group have the same shared blocks, and this step writes no token to them."""
        forked = {fork.row: fork.source for fork in plan.forks}
        members = [row for group in self.groups for row in group.rows]
        assert len(set(members)) == len(members), f"a row is in two groups: {self.groups}"
        self.grouped_rows += len(set(members) & set(plan.rows[: plan.num_decodes].tolist()))
        before = dict(zip(plan.rows.tolist(), plan.counts.tolist(), strict=True))
        for group in self.groups:
            blocks, rest = divmod(group.shared_tokens, self.block_size)
            assert len(group.rows) > 1 and blocks > 0 and rest == 0, group
            states = [self.rows[forked.get(row, row)] for row in group.rows]
            assert len({tuple(state.tables[0][:blocks]) for state in states}) == 1, f"{group} does not share its blocks"
            for row, state in zip(group.rows, states, strict=True):
                is_decode = row in plan.rows[: plan.num_decodes]
                written = state.accepted if is_decode and row in before and state.active else 0
                assert state.num_computed - written >= group.shared_tokens, f"{state} writes what {group} shares"

    def _fork(self, plan: StepPlan) -> None:
        for fork in plan.forks:
            parent = self.rows[fork.source]
            assert fork.row not in self.rows, f"row {fork.row} is forked into but taken"
            assert fork.request == parent.request
            self.rows[fork.row] = DeviceRow(
                parent.request,
                fork.sequence,
                parent.num_tokens,
                parent.num_computed,
                [table.copy() for table in parent.tables],
                is_spoiled=parent.is_spoiled,
            )
        assert len(self.rows) <= self.max_rows

    def _draw(self, plan: StepPlan) -> StepResult:
        computing = plan.rows.tolist()
        drawing = [computing[i] for i in plan.samples.tolist()]
        for row in computing:
            state = self.rows[row]
            if state.active:
                is_done = state.num_computed == state.num_tokens - 1 + state.accepted
                assert is_done == (row in drawing), f"row {row} {state}: draws wrongly"
        tokens, counts, stopped, invalid = [], [], [], []
        for source, row in zip(drawing, plan.sample_rows.tolist(), strict=True):
            state = self.rows[row]
            assert self.rows[source].request == state.request
            assert not state.active or state.num_computed == state.num_tokens - 1 + state.accepted
            key, position = (state.request, state.sequence), state.num_tokens
            drawn: list[int] = []
            is_bad = False
            if not state.active:
                self.stale_draws += 1
                if mixed("stale", *key, position) % 2:  # a device may yield an invalid token for such a row, or none
                    drawn = [VOCABULARY + 1]
            elif state.is_spoiled:
                drawn, state.num_computed = [VOCABULARY + 1], state.num_tokens - 1
            elif self.yields_nothing(key, position):
                state.num_computed = state.num_tokens - 1
                state.is_spoiled = bool(self.state_groups)
            else:
                drawn = self.truth(*key).tokens[position : position + state.accepted]
                assert len(drawn) == state.accepted
                wrong = next((i for i in range(len(drawn)) if self.is_invalid(key, position + i)), None)
                if wrong is not None:  # nothing is drawn behind it, and its own token is meaningless
                    drawn = [*drawn[:wrong], VOCABULARY + 1]
                    is_bad = True
                state.num_tokens += len(drawn)
            is_stop = state.active and bool(drawn) and drawn[-1] in self.sources[state.request].stop_ids
            if state.active and (is_bad or is_stop or state.num_tokens >= self.sources[state.request].limit):
                state.active = False
            tokens += drawn
            counts.append(len(drawn))
            stopped.append(is_stop)
            invalid.append(is_bad)
        return StepResult(
            plan.step,
            np.array(tokens, np.int32),
            np.array(counts, np.int32),
            np.array(stopped, np.bool_),
            np.array(invalid, np.bool_),
            drafts=self._propose(plan, set(plan.sample_rows[np.array(counts, np.int32) == 0].tolist())),
        )

    def _spoil(self, plan: StepPlan) -> None:
        """A failed step leaves arbitrary content in the slots it was to write."""
        for row, count in zip(plan.rows.tolist(), plan.counts.tolist(), strict=True):
            if row in self.rows:
                state = self.rows[row]
                positions = np.arange(state.num_computed, state.num_computed + count)
                truth = self.truth(state.request, state.sequence).content
                for group in self._token_groups:
                    slots = self._slots(state, positions, group)
                    # After a draw that yielded nothing the last token is computed again: the same bytes, whatever
                    # fails.
                    is_there = [
                        p < len(truth) and self.content[s] == truth[p] ^ _stamp(group)
                        for s, p in zip(slots, positions, strict=True)
                    ]
                    self.content[slots[~np.array(is_there)]] = GARBAGE
                for group in self.state_groups:
                    self.content.reshape(-1, self.block_size)[self._state_pages(state, group)] = GARBAGE
        self.content.reshape(-1, self.block_size)[[target for _, target in plan.snapshots]] = GARBAGE
        for fork in plan.forks:
            if fork.source in self.rows and fork.row not in self.rows:
                parent = self.rows[fork.source]
                self.rows[fork.row] = DeviceRow(
                    parent.request,
                    fork.sequence,
                    parent.num_tokens,
                    parent.num_computed,
                    [table.copy() for table in parent.tables],
                    is_spoiled=parent.is_spoiled,
                )

    def _slots(self, state: DeviceRow, positions: np.ndarray, group: int = 0) -> np.ndarray:
        return state.tables[group][positions // self.block_size] * self.block_size + positions % self.block_size


def _stamp(group: int) -> int:
    """Distinguishes the same token's content in different groups."""
    return 0 if not group else mixed("group", group) & _MASK


def _state_content(truth: Truth, tokens: int, group: int, pages: int) -> np.ndarray:
    """What the pages of a state hold that has consumed so many tokens."""
    return np.array([int(truth.content[tokens - 1]) ^ mixed("state", group, i) & _MASK for i in range(pages)], np.int64)


def _empty_result(plan: StepPlan) -> StepResult:
    draws = len(plan.sample_rows)
    return StepResult(
        plan.step, np.zeros(0, np.int32), np.zeros(draws, np.int32), np.zeros(draws, bool), np.zeros(draws, bool)
    )


@dataclass
class Received:
    """What the caller received of one sequence."""

    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def reason(self) -> str | None:
        return self.finished.reason if self.finished else None


class Bench:
    """A scheduler, the loop and the checking device, with a clock that only tests advance."""

    def __init__(
        self,
        blocks: int = 64,
        block_size: int = 4,
        max_rows: int = 8,
        budget: int = 64,
        policy: str = "fcfs",
        depth: int = 0,
        prefix_caching: bool = True,
        chunked: bool = True,
        draws: Draws = draw,
        fails: Callable[[StepPlan, set[str]], str] = lambda plan, requests: "",
        yields_nothing: Callable[[Key, int], bool] = lambda key, position: False,
        is_invalid: Callable[[Key, int], bool] = lambda key, position: False,
        least_shared: int = 1,
        config: EngineConfig | None = None,
        host_slots: int = 0,
        disk: MemoryDisk | None = None,
        sessions: Path | None = None,
        microbatches: int | None = None,
        groups: Sequence[CacheGroup] = (FULL,),
        drafting: Drafting | None = None,
        guess: Guess = lambda key, truth, position, count: [],
        verifies_with_prompts: bool = True,
    ) -> None:
        """`least_shared`: minimum of tokens that rows must share, and save together, to be a group. `host_slots`,
        `disk`: tiers below the device. `sessions`: their folder."""
        self.now = 0.0
        self.keys = ContentKeys(block_size, b"model")
        self.tables = BlockTables(blocks + 1, block_size, prefix_caching, groups)
        self.device = CheckingExecutor(
            blocks + 1, block_size, max_rows, budget, draws, fails, yields_nothing, is_invalid, host_slots,
            microbatches is not None, groups, guess, verifies_with_prompts,
        )  # fmt: skip
        self.tiers = self._make_tiers(host_slots, disk) if host_slots else None
        self.scheduler = Scheduler(
            self.tables, make_policy(policy, config), self.keys, max_rows, budget, chunked, clock=lambda: self.now,
            groups=PrefixGroups(block_size, least_shared, least_shared), tiers=self.tiers, microbatches=microbatches,
            drafting=drafting,
        )  # fmt: skip
        if isinstance(swapper := self.scheduler.requests.swapper, Swapper):
            swapper.least_swap = 1
        if sessions is not None:
            store = SessionStore.open(sessions, clock=lambda: self.now)
            kv = SessionKV(self.tables, self.keys, store, b"model", self.tiers, clock=lambda: self.now)
            self.scheduler.attach(SessionKeeper(store, kv, self.tiers, clock=lambda: self.now))
        self.device.keep_plans = True
        self.core = EngineCore(self.scheduler, self.device, depth)
        self.sequences: dict[Key, Received] = {}
        self.started: list[Started] = []

    def _make_tiers(self, slots: int, disk: MemoryDisk | None) -> OffloadManager:
        costs = Costs(1, out=1e9, back=1e9)
        costs.prefill.value = 1.0
        backed = (lambda key: False) if disk is None else disk.store.has
        slot_bytes = lambda slot: memoryview(self.device.host[slot]).cast("B")  # noqa: E731
        return OffloadManager(self.tables, HostTier(slots, backed), costs, disk, slot_bytes)

    @property
    def plans(self) -> list[StepPlan]:
        return self.device.plans

    def request(
        self,
        id: str,
        prompt: int | list[int] = 6,
        output: int = 4,
        n: int = 1,
        priority: int = 0,
        salt: str = "",
        reads_cache: bool = True,
        tenant: str = "",
        session: str = "",
    ) -> NewRequest:
        """A request for `output` tokens; an integer prompt stands for that many unique tokens."""
        tokens = prompt if isinstance(prompt, list) else [2 + mixed("prompt", id, i) % 30 for i in range(prompt)]
        params = SamplingParams(n=n, max_tokens=output, stop_token_ids=[STOP])
        return NewRequest(
            id=id,
            prompt=tokens,
            params=params,
            limit=len(tokens) + output,
            eos_ids=[EOS],
            keys=self.keys.of(tokens, salt),
            salt=salt,
            reads_cache=reads_cache,
            priority=priority,
            tenant=tenant,
            session=session,
            arrival=self.now,
        )

    def add(self, id: str, prompt: int | list[int] = 6, output: int = 4, **more: object) -> NewRequest:
        """Make a request and add it to the core."""
        return self.put(self.request(id, prompt, output, **more))  # type: ignore[arg-type]

    def put(self, source: NewRequest) -> NewRequest:
        self.core.add(source)
        self.device.expect(source)
        for index in range(source.params.n):
            self.sequences[(source.id, index)] = Received()
        return source

    def step(self) -> StepOutputs:
        """One step; its outputs are checked for order and kept."""
        outputs = self.core.step()
        self.note(outputs)
        self.audit()
        return outputs

    def note(self, outputs: StepOutputs) -> None:
        counts = outputs.counts if outputs.counts is not None else [1] * len(outputs.keys)
        assert len(counts) == len(outputs.keys) and sum(counts) == len(outputs.tokens)
        at = 0
        for key, count in zip(outputs.keys, counts, strict=True):
            assert self.sequences[key].finished is None, f"{key} yields tokens after its end"
            self.sequences[key].tokens += outputs.tokens[at : at + count]
            at += count
        for end in outputs.finished:
            assert self.sequences[end.key].finished is None, f"{end.key} ends twice"
            self.sequences[end.key].finished = end
        self.started += outputs.started

    def run(self, steps: int = 2000) -> None:
        """Run until no request is left; all blocks and rows must be free then."""
        for _ in range(steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"not done after {steps} steps"
        self.scheduler.check_idle()

    def audit(self) -> None:
        """Reference counts match the requests' tables."""
        running = self.scheduler.rows.running()
        every_page = self.tables.every_page
        owners = Counter(block for request in running for block in every_page(request))
        owners += Counter(
            block for request in self.scheduler.requests.swapper.requests for block in every_page(request)
        )
        owners += Counter(self.scheduler.requests.states.page_refs())
        owners += self.scheduler.sessions.kv.block_refs()
        if self.tiers is not None:
            owners += self.tiers.block_refs()
        refs = {block: count for block, count in enumerate(self.tables.pool.refs) if count}
        assert refs == dict(owners)
        assert NULL_BLOCK not in owners
        assert self.tables.pool.free + self.tables.pool.used == self.tables.pool.capacity
        for request in running:
            own = every_page(request)
            assert len(set(own)) == len(own)

    def assert_right(self, *ids: str, but: tuple[str, ...] = ()) -> None:
        """These requests (default: all) ended by themselves, every sequence with the expected tokens."""
        for id in ids or [source for source in self.device.sources if source not in but]:
            for index in range(self.device.sources[id].params.n):
                received, truth = self.sequences[(id, index)], self.device.truth(id, index)
                assert received.tokens == truth.output, (id, index)
                assert received.finished is not None, (id, index)
                assert (received.finished.reason, received.finished.stop_reason) == (truth.reason, truth.stop_reason)

    def running(self) -> set[Key]:
        return {request.key for request in self.scheduler.rows.running()}


def ids(keys: Iterable[Key]) -> set[str]:
    """The request ids of these sequences."""
    return {id for id, _ in keys}


def rng_of(*seed: int | str) -> random.Random:
    """A separate random stream for each seed, the same in every process."""
    return random.Random(mixed(*seed))
