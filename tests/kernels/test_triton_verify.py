"""Drafts on the GPU against the batch in plain torch: the same runs are placed, the same draws count."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.kernels.test_triton_batch import DEVICE, LONGEST, TABLE, VOCAB, Twins, ints, new_row, plan_of

from quire.kernels.triton.sampling import DrawPlaces, draw_and_commit, workspace  # isort: skip
from quire.messages.plan import MAX_WIDTH, Drafts, StepPlan  # isort: skip
from quire.messages.sampling import SamplingParams  # isort: skip
from quire.worker.sampler import Sampler  # isort: skip

ROWS = 4


class Verifiers:
    """Rows with all their pages, in both batches; the host knows their tokens some steps late."""

    def __init__(self, seed: int) -> None:
        self.rng, self.twins, self.step = random.Random(seed), Twins(ROWS + 1, 64), 0
        for batch in self.twins.both:
            batch.speculates = True
        self.tokens: dict[int, list[int]] = {}
        self.accepted = 0

    def add(self, *rows: int) -> StepPlan:
        """Rows with prompts, which they compute whole."""
        prompts = {row: [self.rng.randrange(5) for _ in range(self.rng.randint(1, 6))] for row in rows}
        added = [
            new_row(
                row, self.rng, prompt_len=len(prompt), num_tokens=len(prompt), num_computed=0, limit=LONGEST - 8,
                stop_ids=[self.rng.randrange(40)],
            )
            for row, prompt in prompts.items()
        ]  # fmt: skip
        self.tokens |= prompts
        return plan_of(
            self.step, rows=ints(*rows), counts=ints(*map(len, prompts.values())), add=added,
            tokens=ints(*(token for prompt in prompts.values() for token in prompt)),
            samples=np.arange(len(rows), dtype=np.int32), sample_rows=ints(*rows),
            block_rows=np.repeat(ints(*rows), TABLE),
            block_indices=np.tile(np.arange(TABLE, dtype=np.int32), len(rows)),
            blocks=np.concatenate([1 + row * TABLE + np.arange(TABLE, dtype=np.int32) for row in rows]),
        )  # fmt: skip

    def decode(self, prompt: StepPlan | None = None) -> StepPlan:
        """Decodes of any width, some with a run from the host; then a prompt."""
        rows = [row for row in range(ROWS) if self.twins.torch.active[row] or self.rng.random() < 0.3]
        rows = [row for row in rows if row in self.tokens and (prompt is None or row not in prompt.rows)]
        counts = [self.rng.randint(1, MAX_WIDTH) for _ in rows]
        runs = [self._run(row) for row in rows if self.rng.random() < 0.7]
        plan = plan_of(
            self.step, rows=ints(*rows), counts=ints(*counts), num_decodes=len(rows),
            num_drafts=sum(counts) - len(rows), samples=np.arange(len(rows), dtype=np.int32),
            sample_rows=ints(*rows), drafts=runs,
        )  # fmt: skip
        if prompt is not None:
            for name in ("rows", "counts", "sample_rows"):
                setattr(plan, name, np.concatenate([getattr(plan, name), getattr(prompt, name)]))
            plan.samples = np.arange(len(plan.rows), dtype=np.int32)
            for name in ("tokens", "add", "block_rows", "block_indices", "blocks"):
                setattr(plan, name, getattr(prompt, name))
        return plan

    def _run(self, row: int) -> Drafts:
        """What may follow the tokens that the host knows, some of which are drawn already."""
        known = max(1, len(self.tokens[row]) - self.rng.choice([0, 0, 1, 3]))
        run = self.tokens[row][known:] + [self.rng.randrange(5) for _ in range(self.rng.randint(0, 9))]
        if len(run) > 1 and self.rng.random() < 0.2:
            run[0] += 1
        return Drafts(row, known, run or [3])

    def run(self, plan: StepPlan) -> None:
        self.step += 1
        self.twins.apply(plan)
        self._assert_same_drafts()
        self.twins.lay_out(plan)
        drawn = [token for row, width in zip(plan.sample_rows.tolist(), plan.widths.tolist(), strict=True)
                 for token in self._draw(row, width)]  # fmt: skip
        tokens = torch.tensor(drawn, device=DEVICE)
        invalid = torch.tensor([self.rng.random() < 0.02 for _ in drawn], device=DEVICE)
        self._finish(plan, tokens, invalid)

    def _draw(self, row: int, width: int) -> list[int]:
        """Mostly the row's drafts, then any token."""
        drafts = self.twins.torch.drafts[row].tolist()
        return [*(d if self.rng.random() < 0.8 else 7 for d in drafts[: width - 1]), self.rng.randrange(40)]

    def _finish(self, plan: StepPlan, tokens: torch.Tensor, invalid: torch.Tensor) -> None:
        found = []
        for batch in self.twins.both:
            if plan.num_drafts:
                half = len(tokens) // 2
                batch.place(tokens[:half], invalid[:half], 0)
                batch.place(tokens[half:], invalid[half:], half)
                assert torch.equal(batch.drawn(plan), tokens)
                counts = batch.verify(plan).tolist()
            else:
                batch.commit(tokens, invalid, batch.draw_rows(plan).long(), 0)
                counts = [1] * len(tokens)
            drawn = batch.result(len(plan.samples)).wait()
            assert drawn.counts is None or drawn.counts.tolist() == counts
            found.append([None if value is None else value.tolist() for value in drawn])
        assert found[0] == found[1]
        self.twins.assert_same_rows()
        self._assert_same_drafts()
        at = 0
        for row, width, count in zip(plan.sample_rows.tolist(), plan.widths.tolist(), counts, strict=True):
            self.tokens[row] += tokens[at : at + count].tolist()
            self.accepted += count - 1
            at += width

    def _assert_same_drafts(self) -> None:
        """Of rows that have not ended."""
        ours, theirs = self.twins.triton, self.twins.torch
        assert torch.equal(ours.num_drafts[theirs.active], theirs.num_drafts[theirs.active])
        for row in theirs.active.nonzero()[:, 0].tolist():
            count = int(theirs.num_drafts[row])
            assert torch.equal(ours.drafts[row, :count], theirs.drafts[row, :count])


@pytest.mark.parametrize("seed", range(3))
def test_rows_verify_their_drafts_as_in_torch(seed: int) -> None:
    steps = Verifiers(seed)
    steps.run(steps.add(0, 2))
    for number in range(14):
        ended = [row for row in range(ROWS) if not steps.twins.torch.active[row]]
        steps.run(steps.decode(steps.add(ended[0]) if ended and number % 3 == 0 else None))
    assert steps.accepted > 14


def test_drafts_are_reported() -> None:
    steps = Verifiers(9)
    steps.run(steps.add(0, 1, 3))
    batch = steps.twins.triton
    batch.verify_nothing()
    steps.twins.assert_same_rows()
    plan = steps.decode()
    batch.apply(plan)
    batch.inputs(plan)
    batch.place(torch.zeros(len(plan.place_rows), dtype=torch.int64, device=DEVICE), torch.zeros(1, device=DEVICE), 0)
    batch.verify(plan)
    batch.drafts.copy_(torch.arange(batch.drafts.numel(), device=DEVICE).view(batch.drafts.shape))
    batch.num_drafts.copy_(torch.arange(len(batch.num_drafts), device=DEVICE) + 1)
    drawn = batch.result(len(plan.samples), proposed=True).wait()
    assert drawn.drafts is not None and drawn.num_drafts is not None
    assert drawn.drafts.tolist() == batch.drafts[plan.sample_rows.tolist()].tolist()
    assert drawn.num_drafts.tolist() == (plan.sample_rows + 1).tolist()


def test_each_place_draws_with_the_random_number_of_its_position() -> None:
    """Filters, XTC's own numbers among them."""
    steps = Verifiers(4)
    batch, rng = steps.twins.triton, random.Random(0)
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, top_p=0.7, top_k=20),
        SamplingParams(temperature=1.2, xtc_probability=0.5, xtc_threshold=0.05),
    ]
    batch.apply(plan_of(0, add=[new_row(row, rng, params=params[row], num_computed=0) for row in range(ROWS)]))
    rows = np.repeat(np.arange(ROWS), 6)
    logits = torch.randn(len(rows), VOCAB, device=DEVICE) * 2
    offsets = torch.arange(6, dtype=torch.int32, device=DEVICE).repeat(ROWS)
    on_device = torch.from_numpy(rows).to(DEVICE)
    lengths = batch.num_tokens[on_device] + offsets
    wanted = Sampler(batch).draw(logits, on_device, lengths, rows).tokens
    before = batch.num_tokens.clone()
    nothing = torch.full((len(rows),), -1, dtype=torch.int32, device=DEVICE)
    places = DrawPlaces(nothing.clone(), nothing, offsets)
    room = workspace(len(rows), VOCAB, torch.device(DEVICE), group=16, tile=4)
    draw_and_commit(logits, on_device.int(), batch.columns, batch.results, batch.buffers.slot, True, room, places)
    assert places.tokens.tolist() == wanted.tolist() and not places.invalid.any()
    assert torch.equal(batch.num_tokens, before), "nothing is committed"


@pytest.mark.parametrize("distance", [1, 5])
def test_tokens_ahead(distance: int) -> None:
    steps = Verifiers(2)
    steps.run(steps.add(0, 1, 2, 3))
    for batch in steps.twins.both:
        batch.active[2] = False
        batch.limit[3] = batch.num_tokens[3] + 1
    rows = torch.tensor([1, 3, 0, 2], device=DEVICE)
    positions, (theirs, *_) = steps.twins.torch.ahead(rows, distance, LONGEST)
    found, (ours, *_) = steps.twins.triton.ahead(rows, distance, LONGEST)
    live = torch.tensor([True, distance < 2, True, False], device=DEVICE)
    assert torch.equal(found[live], positions[live]) and not found[~live].any()
    assert torch.equal(ours.slots[live], theirs.slots[live]) and (ours.slots[~live] < 4).all()
    assert torch.equal(ours.context_lens[live], theirs.context_lens[live]) and not ours.context_lens[~live].any()
