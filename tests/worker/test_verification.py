"""Drafts are verified exactly: rows that get drafts, right and wrong ones, draw the tokens they draw without any.

Plans are made by hand, so that every kind of draft meets every kind of row: full and partial runs, runs that the row
has passed or left, rows that end inside a draft, sampled rows with penalties.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.cpu.build import library
from quire.kernels.cpu.ops import CpuOps
from quire.layers.attention.cpu import CpuPagedAttention
from quire.messages.plan import MAX_WIDTH, Drafts, NewRow, StepPlan, StepResult
from quire.messages.sampling import SamplingParams
from quire.worker.batch import DeviceBatch
from quire.worker.geometry import plain_geometry
from quire.worker.kv import KVCache
from quire.worker.paths import EagerPath, StepPath, TapeDecodePath
from quire.worker.runner import Runner
from tests.models.harness import PLAIN, Target, loaded_model, random_reference
from tests.models.zoo import ZOO

SIZE = 4
LONGEST = 64
ROWS = 4
NATIVE = Target(ops=CpuOps, attention=CpuPagedAttention)
PROMPTS = {0: [1, 2, 3, 4, 5], 1: [5, 3, 9, 60, 2, 8, 1], 2: [44], 3: [7, 7, 7]}
PARAMS = {
    0: SamplingParams(temperature=0, logprobs=2),
    1: SamplingParams(temperature=1.0, seed=3, top_p=0.9),
    2: SamplingParams(temperature=0.7, seed=4, repetition_penalty=1.3, frequency_penalty=0.4),
    3: SamplingParams(temperature=0, min_tokens=6, presence_penalty=1.0),
}
NOTHING = np.empty(0, np.int32)


class Machine:
    """A model with its batch, and rows with all the pages they can need."""

    def __init__(self, model: Any, with_tape: bool, stop_ids: dict[int, list[int]], limit: int = LONGEST - 9) -> None:
        pages = LONGEST // SIZE
        self.batch, self.runner = self.make(model, with_tape, 1 + ROWS * pages)
        self.step = 0
        self.tokens = {row: list(tokens) for row, tokens in PROMPTS.items()}
        self.ended: set[int] = set()
        self.logprobs: dict[int, list[Any]] = {row: [] for row in PROMPTS}
        rows = list(PROMPTS)
        added = [
            NewRow(
                row=row,
                request=str(row),
                prompt_len=len(tokens),
                num_tokens=len(tokens),
                num_computed=0,
                limit=limit,
                seed=PARAMS[row].seed or 0,
                sequence=0,
                params=PARAMS[row],
                stop_ids=stop_ids.get(row, []),
                bad_words=[],
            )
            for row, tokens in PROMPTS.items()
        ]
        self.run(
            rows=rows, counts=[len(tokens) for tokens in PROMPTS.values()], num_decodes=0,
            tokens=[token for tokens in PROMPTS.values() for token in tokens], add=added,
            block_rows=np.repeat(np.arange(ROWS), pages), block_indices=np.tile(np.arange(pages), ROWS),
            blocks=1 + np.arange(ROWS * pages),
        )  # fmt: skip

    def make(self, model: Any, with_tape: bool, blocks: int) -> tuple[DeviceBatch, Runner]:
        geometry = plain_geometry(model.kv_shape, SIZE, model.build.kv_format)
        device = torch.device("cpu")
        batch = DeviceBatch(ROWS, LONGEST, 97, KVCache.of(geometry, blocks, device), device)
        batch.speculates = True
        paths: list[StepPath] = [EagerPath(model, batch, True)]
        if with_tape:
            paths.insert(0, TapeDecodePath(model, batch, model.build.ops))
        return batch, Runner(model, batch, paths)

    def decode(self, widths: dict[int, int], drafts: list[Drafts], **more: Any) -> StepResult:
        rows = [row for row in widths if row not in self.ended]
        drafts = [run for run in drafts if run.row in rows]
        counts = [widths[row] for row in rows]
        return self.run(
            rows=rows, counts=counts, num_decodes=len(rows), tokens=[], num_drafts=sum(counts) - len(rows),
            drafts=drafts, **more,
        )  # fmt: skip

    def run(self, rows: list[int], counts: list[int], tokens: list[int], **changes: Any) -> StepResult:
        arrays = {"block_rows": NOTHING, "block_indices": NOTHING, "blocks": NOTHING}
        arrays = {name: np.asarray(changes.pop(name, value), np.int32) for name, value in arrays.items()}
        drawing = changes.pop("drawing", rows)
        plan = StepPlan(
            step=self.step, rows=np.array(rows, np.int32), counts=np.array(counts, np.int32),
            tokens=np.array(tokens, np.int32), samples=np.array([rows.index(row) for row in drawing], np.int32),
            sample_rows=np.array(drawing, np.int32), max_context=LONGEST - 1, **arrays, **changes,
        )  # fmt: skip
        self.step += 1
        result = self.runner.launch(plan).result()
        at = 0
        for i, row in enumerate(drawing):
            count = int(result.counts[i])
            self.tokens[row] += result.tokens[at : at + count].tolist()
            self.logprobs[row] += [result.logprobs[j] for j in range(at, at + count) if j in result.logprobs]
            at += count
            if result.stopped[i] or not self.batch.active[row]:
                self.ended.add(row)
        return result


@pytest.fixture(params=["torch", "native"], scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    if request.param == "native" and library() is None:
        pytest.skip("no compiler")
    return loaded_model(random_reference(ZOO["llama"]), target=NATIVE if request.param == "native" else PLAIN)


def _plain(model: Any, stop_ids: dict[int, list[int]]) -> Machine:
    machine = Machine(model, with_tape=False, stop_ids=stop_ids)
    while len(machine.ended) < ROWS:
        machine.decode(dict.fromkeys(range(ROWS), 1), [])
    return machine


def _stops(model: Any) -> dict[int, list[int]]:
    """A stop id for two rows: a token that they draw after some others."""
    free = _plain(model, {})
    return {row: [free.tokens[row][len(PROMPTS[row]) + 11]] for row in (0, 2)}


def test_drafts_change_no_token(model: Any) -> None:
    stop_ids = _stops(model)
    expected = _plain(model, stop_ids)
    assert any(len(expected.tokens[row]) < LONGEST - 9 for row in range(ROWS))
    random = np.random.default_rng(0)
    native = type(model.build.ops) is CpuOps
    for trial in range(6):
        machine = Machine(model, with_tape=native, stop_ids=stop_ids)
        accepted = verified = 0
        while len(machine.ended) < ROWS:
            widths = {row: int(random.integers(1, MAX_WIDTH + 1)) for row in range(ROWS)}
            drafts = []
            for row in range(ROWS):
                known = len(machine.tokens[row]) - int(random.integers(0, 4)) * (trial % 2)  # the host may be behind
                known = max(known, len(PROMPTS[row]))
                run = expected.tokens[row][known : known + int(random.integers(0, 12))]
                if len(run) > 2 and random.random() < 0.5:
                    run = [*run]
                    run[int(random.integers(0, len(run)))] = int(random.integers(0, 97))
                if run:
                    drafts.append(Drafts(row, known, run))
            before = sum(map(len, machine.tokens.values()))
            result = machine.decode(widths, drafts)
            accepted += sum(map(len, machine.tokens.values())) - before - len(result.counts)
            verified += 1
        assert machine.tokens == expected.tokens
        assert accepted > 2 * verified  # drafts were accepted, not just ignored
        for ours, plain in zip(machine.logprobs[0], expected.logprobs[0], strict=True):
            assert ours.ids == plain.ids and ours.rank == plain.rank
            assert np.allclose(ours.values, plain.values, atol=1e-4)


def test_a_draft_is_not_accepted_twice(model: Any) -> None:
    """Drafts belong to one step: a decode without a width forgets them."""
    expected = _plain(model, {})
    machine = Machine(model, with_tape=False, stop_ids={})
    known = len(machine.tokens[0])
    run = expected.tokens[0][known : known + 3]
    machine.decode({0: 1}, [Drafts(0, known, run)])
    result = machine.decode({0: 4}, [])
    assert result.counts.tolist() == [1] or run[1:] == expected.tokens[0][known + 1 : known + 3]
    assert int(machine.batch.num_drafts[0]) == 0
    assert machine.tokens[0] == expected.tokens[0][: len(machine.tokens[0])]


def test_a_run_that_a_row_has_left_is_dropped(model: Any) -> None:
    expected = _plain(model, {})
    machine = Machine(model, with_tape=False, stop_ids={})
    start = len(PROMPTS[0])
    right = expected.tokens[0][start : start + 6]
    wrong = [(right[0] + 1) % 97, *right[1:]]
    machine.batch._place_drafts([Drafts(0, start, wrong)])
    assert int(machine.batch.num_drafts[0]) == 0
    machine.batch._place_drafts([Drafts(0, start, right)])
    assert machine.batch.drafts[0, :5].tolist() == right[1:] and int(machine.batch.num_drafts[0]) == 5
    machine.batch._place_drafts([Drafts(0, start, right[:1])])
    assert int(machine.batch.num_drafts[0]) == 0


def test_places_of_a_plan() -> None:
    plan = StepPlan(
        step=0, rows=np.array([4, 2, 1]), counts=np.array([3, 1, 5]), num_decodes=2, tokens=np.arange(5), num_drafts=2,
        samples=np.array([0, 1, 2, 2]), sample_rows=np.array([4, 2, 1, 0]), block_rows=NOTHING, block_indices=NOTHING,
        blocks=NOTHING, max_context=9,
    )  # fmt: skip
    assert plan.num_tokens == 9
    assert plan.widths.tolist() == [3, 1, 1, 1]
    assert plan.place_rows.tolist() == [4, 4, 4, 2, 1, 0]
    assert plan.place_offsets.tolist() == [0, 1, 2, 0, 0, 0]
    assert plan.picks.tolist() == [0, 1, 2, 3, 8, 8]
