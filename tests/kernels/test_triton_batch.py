"""The batch's kernels against the batch in plain torch: the same plans leave the same columns and lay out equal steps.
Inactive rows differ by design: the kernels give them position 0, a slot in the null block and an empty context, so that
nothing is computed for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_target import DEVICE, IS_SANITIZED, ON_GPU

from quire.kernels.kv import KVFormat  # isort: skip
from quire.layers.attention.base import KVSpec  # isort: skip
from quire.messages.plan import Fork, NewRow, StepPlan  # isort: skip
from quire.messages.sampling import SamplingParams  # isort: skip
from quire.worker.batch import Drawn, DeviceBatch, StepInputs  # isort: skip
from quire.worker.cuda_batch import IN_FLIGHT, STOP_IDS, CudaBatch  # isort: skip
from quire.worker.kv import KVCache  # isort: skip

VOCAB = 97
BLOCK = 4
LONGEST = 40
ROWS = 7
STEP_TOKENS = 40
TABLE = -(-LONGEST // BLOCK) + 1
SEEDS = (0, 1, -1, -5, 2**31, 2**32 + 7, 2**63 - 1, -(2**63), 2**64 - 1, 0x9E3779B97F4A7C15)
STEPS = 200 if ON_GPU and not IS_SANITIZED else 40
GREEDY = SamplingParams(temperature=0)
COLUMNS = ("last_token", "num_tokens", "prompt_len", "limit", "active", "seed", "sequence", "scalars")


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def new_row(row: int, rng: random.Random, stops: int | None = None, **fields: Any) -> NewRow:
    """A row with parameters of every kind."""
    prompt = rng.randint(1, LONGEST // 2)
    tokens = prompt + rng.choice([0, 0, rng.randint(1, 6)])  # a preempted row comes back with its drawn tokens
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]), top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 0, 5, 500]),
        min_p=rng.choice([0.0, 0.05]), repetition_penalty=rng.choice([1.0, 1.2]),
        presence_penalty=rng.choice([0.0, -0.5]), frequency_penalty=rng.choice([0.0, 0.25]),
    )  # fmt: skip
    values: dict[str, Any] = {
        "row": row, "request": str(row), "prompt_len": prompt, "num_tokens": tokens,
        "num_computed": rng.randrange(tokens), "limit": rng.randint(tokens + 1, LONGEST), "seed": rng.choice(SEEDS),
        "sequence": rng.randrange(4), "params": params, "bad_words": [],
        "stop_ids": rng.sample(range(VOCAB), rng.randint(0, 3) if stops is None else stops),
    }  # fmt: skip
    return NewRow(**(values | fields))


def plan_of(step: int, **fields: Any) -> StepPlan:
    """A plan with only the named fields set."""
    none = ints()
    empty = {
        "rows": none, "counts": none, "num_decodes": 0, "tokens": none, "samples": none, "sample_rows": none,
        "block_rows": none, "block_indices": none, "blocks": none, "max_context": LONGEST,
    }  # fmt: skip
    return StepPlan(step=step, **(empty | fields))  # type: ignore[arg-type]


def _lists(drawn: Drawn) -> list[list[int] | None]:
    return [None if values is None else values.tolist() for values in drawn]


class Twins:
    """The two batches over caches of the same content."""

    def __init__(self, rows: int = ROWS, step_tokens: int = STEP_TOKENS) -> None:
        device = torch.device(DEVICE)
        caches = [KVCache(KVSpec(2, 1, 8), 1 + rows * TABLE, BLOCK, KVFormat(torch.float32), device) for _ in range(2)]
        for cache in caches:
            cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(1)))
            cache.tokens.fill_(-7)
        self.torch = DeviceBatch(rows, LONGEST, VOCAB, caches[0], device)
        self.triton = CudaBatch(rows, LONGEST, VOCAB, caches[1], device, step_tokens)
        self.added: set[int] = set()
        self.known_contexts = 0

    @property
    def both(self) -> tuple[DeviceBatch, CudaBatch]:
        return self.torch, self.triton

    def apply(self, plan: StepPlan, padded: int = 0) -> None:
        for batch in self.both:
            batch.apply(plan, padded)
        self.added |= {new.row for new in plan.add}
        self.assert_same_rows()

    def assert_same_rows(self) -> None:
        """Every column and every block, except the content of inactive rows."""
        for name in COLUMNS:
            ours, theirs = getattr(self.triton, name), getattr(self.torch, name)
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), name
        assert torch.equal(self.triton.block_table, self.torch.block_table)
        active = self.torch.active
        assert not active[-1], "the padding row is never active"
        assert torch.equal(self.triton.num_computed[active], self.torch.num_computed[active])
        for row in self.added:
            assert self._stops(self.triton, row) == self._stops(self.torch, row)
        assert (self.triton.kinds == self.torch.kinds).all()
        assert self.triton.extras.keys() == self.torch.extras.keys()
        assert torch.equal(self.triton.kv.data, self.torch.kv.data)
        assert torch.equal(self.triton.kv.tokens[1:], self.torch.kv.tokens[1:])

    @staticmethod
    def _stops(batch: DeviceBatch, row: int) -> set[int]:
        return set(batch.stop_ids[row].tolist()) - {-1}

    def lay_out(self, plan: StepPlan, padded: int = 0) -> None:
        """The step's inputs, from both."""
        theirs = self.torch.inputs(plan)
        idle, before = ~self.triton.active, self.triton.num_computed.clone()
        if padded:
            ours = self.triton.empty_inputs(padded, padded, padded, 1, 0)
            for tensor in (ours.tokens, ours.positions, ours.attention[0].slots, ours.attention[0].context_lens):
                tensor.fill_(-99)
            self.triton.expand(ours)
        else:
            ours = self.triton.inputs(plan)
            self._check_contexts(plan, ours.attention[0].contexts, theirs)
        self._assert_same_step(plan, ours, theirs, padded)
        assert torch.equal(self.triton.num_computed[idle], before[idle]), "nothing is computed for an inactive row"
        self.assert_same_rows()

    def _check_contexts(self, plan: StepPlan, contexts: Any, theirs: StepInputs) -> None:
        """Tokens that prompts had cached, if the host knows them, are those that the device counts."""
        if contexts is not None:
            before = theirs.attention[0].context_lens.tolist()[plan.num_decodes :]
            counts = plan.counts[plan.num_decodes :].tolist()
            assert list(contexts) == [total - count for total, count in zip(before, counts, strict=True)]
            self.known_contexts += len(contexts)

    def _assert_same_step(self, plan: StepPlan, ours: StepInputs, theirs: StepInputs, padded: int) -> None:
        rows, tokens = len(plan.rows), plan.num_tokens
        assert torch.equal(ours.tokens[:tokens], theirs.tokens)
        live = self.torch.active[torch.from_numpy(plan.rows).long().to(DEVICE)]
        owners = torch.repeat_interleave(live, torch.from_numpy(plan.counts).long().to(DEVICE))
        for mine, other, mask in (
            (ours.positions[:tokens], theirs.positions, owners),
            (ours.attention[0].slots[:tokens], theirs.attention[0].slots, owners),
            (ours.attention[0].context_lens[:rows], theirs.attention[0].context_lens, live),
        ):
            assert torch.equal(mine[mask], other[mask])
        assert not ours.positions[:tokens][~owners].any()
        assert (ours.attention[0].slots[:tokens][~owners] < BLOCK).all()
        assert not ours.attention[0].context_lens[:rows][~live].any()
        width = theirs.attention[0].block_tables.shape[1]
        assert torch.equal(ours.attention[0].own_tables(width)[:rows], theirs.attention[0].block_tables)
        if padded:
            assert (ours.attention[0].rows[rows:] == self.triton.pad_row).all()
            assert not ours.positions[rows:].any() and not ours.attention[0].context_lens[rows:].any()
            assert ((ours.attention[0].slots[rows:] >= 0) & (ours.attention[0].slots[rows:] < BLOCK)).all()
        else:
            assert torch.equal(ours.attention[0].query_starts, theirs.attention[0].query_starts)
        for name in ("picks", "draw_rows"):
            assert torch.equal(getattr(self.triton, name)(plan).long(), getattr(self.torch, name)(plan).long())

    def commit(self, plan: StepPlan, tokens: list[int], invalid: list[bool]) -> None:
        """Both write the same tokens back, and report the same to the host."""
        drawn = torch.tensor(tokens, dtype=torch.int64, device=DEVICE)
        bad = torch.tensor(invalid, dtype=torch.bool, device=DEVICE)
        results = []
        for batch in self.both:
            batch.commit(drawn, bad, batch.draw_rows(plan).long(), 0)
            results.append(batch.result(len(plan.samples)).wait())
        assert _lists(results[0]) == _lists(results[1])
        self.assert_same_rows()


@dataclass
class HostRow:
    """What the scheduler knows of a row."""

    num_tokens: int
    num_computed: int
    limit: int
    blocks: list[int]
    has_blocks: int = 0
    has_drawn: bool = False


class Planner:
    """Random plans as a scheduler might make them, which sees the end of a row one or more steps late."""

    def __init__(self, twins: Twins, seed: int) -> None:
        self.twins, self.rng = twins, random.Random(seed)
        self.rows: dict[int, HostRow] = {}
        self.step = 0
        self.was_inactive = self.was_added_again = self.was_padded = 0

    def run_step(self) -> None:
        rng, twins = self.rng, self.twins
        reset = rng.random() < 0.03
        if reset:
            self.rows.clear()
        drop = [] if reset else self._drop()
        add = [self._add(row) for row in range(ROWS) if row not in self.rows and rng.random() < 0.4]
        self.was_added_again += len({new.row for new in add} & set(drop))
        work = self._schedule()
        changes = [change for row, _ in work for change in self._grow(row)]
        decodes = [row for row, count in work if count == 0]
        plan = plan_of(
            self.step, rows=ints(*(row for row, _ in work)), counts=ints(*(count or 1 for _, count in work)),
            num_decodes=len(decodes), tokens=ints(*(rng.randrange(VOCAB) for _ in range(sum(c for _, c in work)))),
            reset=reset, drop=drop, add=add, copies=self._copies(),
            block_rows=ints(*(row for row, _, _ in changes)), block_indices=ints(*(i for _, i, _ in changes)),
            blocks=ints(*(block for _, _, block in changes)),
        )  # fmt: skip
        self._note_draws(plan, work)
        padded = rng.choice([0, len(work), ROWS]) if work and len(decodes) == len(work) else 0
        self.was_padded += padded > len(work)
        self.step += 1
        twins.apply(plan, padded)
        if work:
            self.was_inactive += int((~twins.torch.active[plan.rows.tolist()]).sum())
            twins.lay_out(plan, padded)
            draws = len(plan.samples)
            twins.commit(plan, [rng.randrange(VOCAB) for _ in range(draws)], [rng.random() < 0.1 for _ in range(draws)])

    def _drop(self) -> list[int]:
        active = self.twins.torch.active.tolist()
        gone = [
            row for row, state in self.rows.items()
            if state.num_tokens > state.limit or self.rng.random() < (0.05 if active[row] else 0.5)
        ]  # fmt: skip
        for row in gone:
            del self.rows[row]
        self.rng.shuffle(gone)
        return gone

    def _add(self, row: int) -> NewRow:
        new = new_row(row, self.rng, stops=STOP_IDS + 12 if self.rng.random() < 0.05 else None)
        blocks = list(range(1 + row * TABLE, 1 + (row + 1) * TABLE))
        self.rng.shuffle(blocks)
        self.rows[row] = HostRow(new.num_tokens, new.num_computed, new.limit, blocks)
        return new

    def _schedule(self) -> list[tuple[int, int]]:
        """(row, fresh tokens), decodes first; a decode has no fresh token."""
        chosen = [row for row in self.rows if self.rng.random() < 0.9]
        self.rng.shuffle(chosen)
        decodes = [(row, 0) for row in chosen if self.rows[row].has_drawn]
        if decodes and self.rng.random() < 0.4:
            return decodes
        budget, chunks = STEP_TOKENS - len(decodes), []
        for row in chosen:
            state = self.rows[row]
            left = min(budget, state.num_tokens - state.num_computed)
            if not state.has_drawn and left:
                chunks.append((row, self.rng.choice([left, self.rng.randint(1, left)])))
                budget -= chunks[-1][1]
        return decodes + chunks

    def _grow(self, row: int) -> list[tuple[int, int, int]]:
        state = self.rows[row]
        needed = -(-state.num_tokens // BLOCK)
        changes = [(row, i, state.blocks[i]) for i in range(state.has_blocks, needed)]
        state.has_blocks = max(needed, state.has_blocks)
        return changes

    def _note_draws(self, plan: StepPlan, work: list[tuple[int, int]]) -> None:
        samples = []
        for i, (row, count) in enumerate(work):
            state = self.rows[row]
            state.num_computed += count or 1
            if state.num_computed == state.num_tokens:
                samples.append(i)
                state.num_tokens += 1
                state.has_drawn = True
        plan.samples = ints(*samples)
        plan.sample_rows = plan.rows[plan.samples]
        plan.max_context = min(LONGEST + 2, max((self.rows[row].num_computed for row, _ in work), default=0))

    def _copies(self) -> list[tuple[int, int]]:
        if self.rng.random() < 0.7:
            return []
        return [tuple(self.rng.sample(range(1, 1 + ROWS * TABLE), 2))]  # type: ignore[list-item]


@pytest.mark.parametrize("seed", range(3))
def test_random_plans_leave_both_batches_alike(seed: int) -> None:
    planner = Planner(Twins(), seed)
    for _ in range(STEPS):
        planner.run_step()
    assert planner.was_inactive and planner.was_added_again and planner.was_padded
    assert planner.twins.known_contexts


def test_a_row_dropped_and_added_again_in_one_plan_is_the_new_one() -> None:
    twins, rng = Twins(), random.Random(5)
    twins.apply(plan_of(0, add=[new_row(2, rng, seed=-3), new_row(4, rng)]))
    again = new_row(2, rng, seed=2**64 - 2, num_tokens=9, num_computed=3)
    twins.apply(plan_of(1, drop=[4, 2], add=[again]))
    assert twins.triton.active.tolist() == [False, False, True] + [False] * (ROWS - 2)
    assert twins.triton.num_tokens[2] == 9
    assert twins.triton.seed[2] == -2


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_of_64_bits_arrives_whole(seed: int) -> None:
    twins = Twins()
    twins.apply(plan_of(0, add=[new_row(1, random.Random(0), seed=seed)]))
    assert int(twins.triton.seed[1]) & (2**64 - 1) == seed & (2**64 - 1)


@pytest.mark.parametrize("count", [1, STOP_IDS, STOP_IDS + 1, 70])
def test_a_long_list_of_stop_ids_widens_the_column_and_keeps_the_others(count: int) -> None:
    twins, rng = Twins(), random.Random(count)
    twins.apply(plan_of(0, add=[new_row(0, rng, stop_ids=[3, 4, 5]), new_row(5, rng, stop_ids=[])]))
    before = twins.triton.stop_ids
    twins.apply(plan_of(1, add=[new_row(1, rng, stop_ids=list(range(10, 10 + count)))]))
    assert (twins.triton.stop_ids is before) == (count <= STOP_IDS), "graphs watch for the column's moving"
    ids = twins.triton.stop_ids.tolist()
    assert set(ids[0]) == {3, 4, 5, -1} and set(ids[5]) == {-1}
    assert set(ids[1]) - {-1} == set(range(10, 10 + count))


def test_a_plan_larger_than_its_buffer_gets_a_larger_one() -> None:
    twins, rng = Twins(rows=30, step_tokens=32), random.Random(8)
    sizes = [len(buffer) for buffer in twins.triton._packed]
    rows = np.repeat(np.arange(30, dtype=np.int32), TABLE)
    plan = plan_of(
        0, add=[new_row(row, rng) for row in range(30)], block_rows=rows,
        block_indices=np.tile(np.arange(TABLE, dtype=np.int32), 30),
        blocks=np.random.default_rng(3).permutation(30 * TABLE).astype(np.int32) + 1,
    )  # fmt: skip
    twins.apply(plan)
    assert sum(len(buffer) for buffer in twins.triton._packed) > sum(sizes)
    for step in range(1, 2 * IN_FLIGHT):  # old and new buffers alternate
        twins.apply(plan_of(step, drop=[step], add=[new_row(step, rng)]))


def test_a_chunk_longer_than_one_stride_of_a_program() -> None:
    """`_expand` walks a long chunk in several strides."""
    device, length = torch.device(DEVICE), 1200
    batches = []
    for kind in (DeviceBatch, CudaBatch):
        kv = KVCache(KVSpec(1, 1, 8), 700, BLOCK, KVFormat(torch.float32), device)
        more = () if kind is DeviceBatch else (length + 2,)
        batches.append(kind(2, length + 8, VOCAB, kv, device, *more))
    rng, blocks = random.Random(2), -(-(length + 3) // BLOCK)
    new = new_row(1, rng, num_tokens=length + 3, num_computed=3, prompt_len=length + 3, limit=length + 8)
    plan = plan_of(
        0, add=[new], rows=ints(1), counts=ints(length), tokens=ints(*(rng.randrange(VOCAB) for _ in range(length))),
        samples=ints(0), sample_rows=ints(1), block_rows=ints(*[1] * blocks), block_indices=ints(*range(blocks)),
        blocks=np.random.default_rng(4).permutation(650)[:blocks].astype(np.int32) + 1, max_context=length + 3,
    )  # fmt: skip
    theirs, ours = (batch.apply(plan) or batch.inputs(plan) for batch in batches)
    assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.positions, theirs.positions)
    assert torch.equal(ours.attention[0].slots, theirs.attention[0].slots)
    assert torch.equal(batches[0].kv.tokens, batches[1].kv.tokens)


def test_forked_rows_are_copies_with_their_own_random_stream() -> None:
    twins, rng = Twins(), random.Random(6)
    source = new_row(3, rng, num_tokens=5, num_computed=0, prompt_len=5, limit=30)
    plan = plan_of(
        0, add=[source], rows=ints(3), counts=ints(5), tokens=ints(5, 6, 7, 8, 9), samples=ints(0, 0, 0),
        sample_rows=ints(3, 0, 6), block_rows=ints(3, 3), block_indices=ints(0, 1), blocks=ints(9, 4), max_context=5,
        forks=[Fork(3, 0, 1, "a"), Fork(3, 6, 2, "a")],
    )  # fmt: skip
    twins.apply(plan)
    twins.lay_out(plan)
    for batch in twins.both:
        batch.fork(plan.forks)
    twins.commit(plan, [11, 12, 13], [False] * 3)
    assert twins.triton.last_token.tolist()[:7] == [12, 0, 0, 11, 0, 0, 13]
    assert twins.triton.sequence.tolist()[6] == 2
    assert twins.triton.block_table[6, :2].tolist() == [9, 4]


@pytest.mark.parametrize("drawn_by_kernel", [False, True], ids=["committed", "drawn"])
def test_draws_in_slices(drawn_by_kernel: bool) -> None:
    """A step with more draws than logits may exist at once: each slice's results follow the last slice's."""
    twins, rng = Twins(), random.Random(9)
    for step in range(3):  # the ring of results wraps around
        add = [new_row(row, rng, num_tokens=4, num_computed=3, limit=9, params=GREEDY) for row in range(ROWS)]
        all_rows = ints(*range(ROWS))
        plan = plan_of(step, drop=list(range(ROWS)), add=add, rows=all_rows, counts=ints(*[1] * ROWS),
                       tokens=all_rows, samples=all_rows, sample_rows=all_rows)  # fmt: skip
        twins.apply(plan)
        logits = torch.randn(ROWS, VOCAB).to(DEVICE)
        tokens = logits.argmax(-1)
        for batch in twins.both:
            rows = batch.draw_rows(plan)
            for start, end in ((0, 3), (3, 5), (5, ROWS)):
                part = slice(start, end)
                if drawn_by_kernel and batch is twins.triton:
                    assert batch.draw(None, logits[part], rows[part], start, False)
                else:
                    invalid = torch.zeros(end - start, dtype=torch.bool, device=DEVICE)
                    batch.commit(tokens[part], invalid, rows[part].long(), start)
        ours, theirs = (batch.result(ROWS).wait() for batch in (twins.triton, twins.torch))
        assert _lists(ours) == _lists(theirs)
        twins.assert_same_rows()


def test_a_missing_plan_is_refused() -> None:
    twins = Twins()
    twins.apply(plan_of(0))
    with pytest.raises(RuntimeError, match="got plan 2, expected plan 1"):
        twins.triton.apply(plan_of(2))
    twins.triton.apply(plan_of(7, reset=True))


def test_positions_that_are_not_indices() -> None:
    """Three positions of prompts with images, and deltas after them; forks have those of their source."""
    twins, rng = Twins(), random.Random(0)
    for batch in twins.both:
        batch.use_deltas()
    common = {"num_computed": 0, "limit": LONGEST, "prompt_len": 9, "num_tokens": 9}
    added = [new_row(row, rng, position_delta=delta, **common) for row, delta in ((0, -6), (2, 0), (3, 5))]
    tables = {"block_rows": ints(*[0] * 5, *[2] * 5, *[3] * 5), "block_indices": ints(*[*range(5)] * 3)}
    prompts = {"rows": ints(0, 2, 3), "counts": ints(9, 9, 9), "tokens": np.arange(27, dtype=np.int32)}
    given = np.full((3, 27), -1, np.int32)
    given[:, :9], given[:, 18:] = rng.choices(range(LONGEST), k=9), np.arange(27).reshape(3, 9)
    draws = {"samples": ints(0, 1, 2), "sample_rows": ints(0, 2, 3)}
    first = plan_of(
        0, add=added, blocks=np.arange(1, 16, dtype=np.int32), positions=given.reshape(-1), **tables, **prompts,
        **draws,
    )  # fmt: skip
    twins.apply(first)
    expected = np.where(given >= 0, given, np.tile(np.arange(9), 3))
    for batch in twins.both:
        np.testing.assert_array_equal(batch.inputs(first).positions.cpu().numpy(), expected)
        batch.fork([Fork(3, 5, 1, "3")])
        batch.active[2] = False
    decodes = plan_of(1, rows=ints(0, 2, 3, 5), counts=ints(1, 1, 1, 1), num_decodes=4)
    for batch in twins.both:
        batch.apply(decodes)
        found = batch.inputs(decodes).positions.tolist()
        assert found[:1] + found[2:] == [9 - 6, 9 + 5, 9 + 5]
        assert min(found) >= 0
