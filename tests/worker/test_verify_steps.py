"""Decodes that verify drafts as a GPU runs them: padded to a few shapes, verified and proposed inside the graph."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.kernels.triton_target import ON_GPU
from tests.models.harness import Target, loaded_model, random_reference
from tests.models.zoo import ZOO
from tests.worker.eager_graphs import run_graphs_eagerly
from tests.worker.test_verification import LONGEST, NOTHING, PARAMS, PROMPTS, ROWS, SIZE, Machine, _plain

from quire.kernels.triton.ops import TritonOps  # isort: skip
from quire.layers.attention.triton import TritonPagedAttention  # isort: skip
from quire.messages.plan import MAX_WIDTH, Drafts, NewRow, StepPlan  # isort: skip
from quire.messages.sampling import SamplingParams  # isort: skip
from quire.speculative.device import ProposalStep  # isort: skip
from quire.worker import cuda_graphs, mixed_steps  # isort: skip
from quire.worker.batch import DeviceBatch  # isort: skip
from quire.worker.cuda_batch import CudaBatch  # isort: skip
from quire.worker.geometry import plain_geometry  # isort: skip
from quire.worker.kv import KVCache  # isort: skip
from quire.worker.paths import EagerPath  # isort: skip
from quire.worker.runner import Runner  # isort: skip
from quire.worker.verify_steps import VerifyShape, pad_verifying, padded_drafts, smallest_above, verify_shape  # isort: skip

KERNELS = Target(ops=TritonOps, attention=TritonPagedAttention)


def decode_plan(counts: list[int], **more: Any) -> StepPlan:
    rows = np.arange(len(counts), dtype=np.int32)
    return StepPlan(
        step=0, rows=rows, counts=np.array(counts, np.int32), num_decodes=len(counts),
        num_drafts=sum(counts) - len(counts), tokens=NOTHING, samples=rows, sample_rows=rows, block_rows=NOTHING,
        block_indices=NOTHING, blocks=NOTHING, max_context=9, **more,
    )  # fmt: skip


def test_few_numbers_of_drafts() -> None:
    assert [padded_drafts(n) for n in range(1, 9)] == list(range(1, 9))
    assert len({padded_drafts(n) for n in range(1, 2000)}) < 45
    assert all(n <= padded_drafts(n) <= 1.25 * n for n in range(1, 2000))
    assert {padded_drafts(3 * rows) for rows in (16, 64, 256)} == {48, 192, 768}


@pytest.mark.parametrize("counts", [[4], [2, 1, 3], [8] * 3, [1, 8, 2, 8, 5], [3] * 7, [2] + [1] * 7])
def test_a_padded_plan_has_the_shape(counts: list[int]) -> None:
    plan, sizes = decode_plan(counts), cuda_graphs.next_sizes([1, 2, 4, 8])
    shape = verify_shape(plan, sizes, 8, 3)
    assert shape is not None and shape.width == (4 if max(counts) <= 4 else 8) and shape.proposals == 3
    padded = pad_verifying(plan, shape, 8)
    assert (len(padded.rows), padded.num_drafts, padded.num_tokens) == (shape.rows, shape.drafts, shape.tokens)
    assert padded.counts.sum() == shape.tokens and padded.counts.min() > 0
    real = len(counts)
    assert padded.counts[:real].tolist() == counts and (padded.rows[real:] == 8).all()
    places = plan.num_tokens
    assert padded.picks.tolist() == list(range(shape.tokens)) and (padded.place_rows[places:] == 8).all()
    assert padded.place_offsets[:places].tolist() == plan.place_offsets.tolist()


def test_steps_that_are_not_captured() -> None:
    sizes = cuda_graphs.next_sizes([1, 2, 4])
    assert verify_shape(decode_plan([1, 1]), sizes, 4, 0) is None
    assert verify_shape(decode_plan([2] * 5), sizes, 4, 0) is None
    plan = decode_plan([2, 1])
    plan.num_decodes = 1
    assert verify_shape(plan, sizes, 4, 0) is None


def test_a_rare_shape_runs_in_a_larger_one() -> None:
    """A graph is captured at once if no larger one is there, otherwise when the shape has come up often enough."""
    batch: Any = SimpleNamespace(max_rows=8, stop_ids=None, pad_row=8, adapters=None)
    path = cuda_graphs.CapturedVerifyPath(None, batch, None, True, [1, 2, 4, 8])  # type: ignore[arg-type]
    large, small = decode_plan([4] * 7 + [3]), decode_plan([2] * 4)
    whole = path.fit(large)
    own = verify_shape(small, cuda_graphs.next_sizes([1, 2, 4, 8]), 8, 0)
    assert whole is not None and own == VerifyShape(4, 4, 4, 0)
    assert path.fit(small) == own, "the larger one has more than twice its tokens"
    middle = decode_plan([4] * 5)
    assert [path.fit(middle) for _ in range(cuda_graphs.CAPTURE_AFTER)] == [whole] * cuda_graphs.CAPTURE_AFTER
    for shape in (whole, path.fit(middle)):
        assert shape is not None
        padded = pad_verifying(middle, shape, 8)
        assert (len(padded.rows), padded.num_tokens) == (shape.rows, shape.tokens)
        assert padded.counts[:5].tolist() == [4] * 5
    assert path.fit(middle) not in (whole, None)


def test_padding_drafts_need_a_padding_row() -> None:
    plan = decode_plan([3, 3])
    shape = VerifyShape(2, 4, 4, 0)
    full, wider, deeper, other = (
        VerifyShape(2, 6, 4, 0), VerifyShape(3, 5, 4, 0), VerifyShape(3, 4, 8, 0), VerifyShape(3, 4, 4, 1),
    )  # fmt: skip
    assert smallest_above(plan, shape, [full, other]) is None
    assert smallest_above(plan, shape, [full, wider, other]) == wider
    assert smallest_above(plan, shape, [wider, deeper]) == deeper
    assert smallest_above(plan, VerifyShape(2, 4, 8, 0), [wider, deeper]) == deeper


class Prophet:
    """Proposes what rows drew before, some of it wrong; notes what it was shown."""

    feature_layers = (0, 2)
    needs_hidden, needs_following = True, True
    caches: ClassVar[list[Any]] = []

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers = torch.zeros(ROWS + 1, LONGEST + MAX_WIDTH, dtype=torch.int32)
        for row, tokens in answers.items():
            self.answers[row, : len(tokens)] = torch.tensor(tokens)
        self.steps: list[ProposalStep] = []

    def propose(self, step: ProposalStep) -> None:
        batch, rows = step.batch, step.rows
        self.steps.append(step)
        positions = batch.num_tokens[rows, None] + torch.arange(MAX_WIDTH - 1)
        drafts = self.answers[rows[:, None], positions]
        batch.drafts[rows] = torch.where(positions % 9 == 0, drafts + 1, drafts)
        batch.num_drafts[rows] = step.count
        live = batch.active[rows]
        assert step.features is not None and step.hidden is not None
        assert len(step.features) == len(step.hidden) == len(step.tokens) == len(step.following)
        # The token at the end of each row is the one before its last, which follows it.
        assert torch.equal(step.positions[step.ends][live], batch.num_tokens[rows][live] - 2)
        assert torch.equal(step.following[step.ends][live], batch.last_token[rows][live])
        at, inputs = step.lay_out(-1)
        assert torch.equal(at[live], step.positions[step.ends][live])
        assert torch.equal(inputs[0].slots[live], step.attention[0].slots[step.ends][live])


class GpuMachine(Machine):
    """The same on the paths that would be captured."""

    proposer: Prophet | None = None

    def make(self, model: Any, with_tape: bool, blocks: int) -> tuple[DeviceBatch, Runner]:
        device = torch.device("cpu")
        geometry = plain_geometry(model.kv_shape, SIZE, model.build.kv_format)
        batch = CudaBatch(ROWS, LONGEST, 97, KVCache.of(geometry, blocks, device), device, 64)
        batch.speculates = True
        captured = cuda_graphs.captured_paths(model, batch, ROWS, True, False, self.proposer)
        paths = [*captured, EagerPath(model, batch, True, self.proposer)]
        return batch, Runner(model, batch, paths, proposer=self.proposer)


@pytest.fixture(scope="module")
def model() -> Any:
    return loaded_model(random_reference(ZOO["llama"]), target=KERNELS)


@pytest.fixture(scope="module", autouse=True)
def params() -> Iterator[None]:
    """Two rows that are sampled inside graphs, beside two that are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PARAMS, 0, SamplingParams(temperature=0))
        patch.setitem(PARAMS, 1, SamplingParams(temperature=1.0, seed=3))
        yield


@pytest.fixture(scope="module")
def expected(params: None) -> Machine:
    return _plain(loaded_model(random_reference(ZOO["llama"])), {})


@pytest.mark.skipif(ON_GPU, reason="on a GPU steps are really captured: tests/gpu runs them there")
def test_drafts_change_no_token(model: Any, expected: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    used = run_graphs_eagerly(monkeypatch, {"verify"})
    monkeypatch.setattr(GpuMachine, "proposer", None)
    random = np.random.default_rng(0)
    machine = GpuMachine(model, False, {})
    before = sum(map(len, machine.tokens.values()))
    steps = 0
    while len(machine.ended) < ROWS and steps < 4:
        widths = {row: int(random.integers(1, MAX_WIDTH + 1)) for row in range(ROWS)}
        if steps % 3 == 0:
            del widths[2], widths[3]
        drafts = []
        for row in widths:
            known = max(len(machine.tokens[row]) - int(random.integers(0, 3)), len(PROMPTS[row]))
            run = expected.tokens[row][known : known + 9]
            if random.random() < 0.4:
                run[int(random.integers(0, len(run)))] += 1
            drafts.append(Drafts(row, known, run))
        machine.decode(widths, drafts)
        steps += 1
    for row, tokens in machine.tokens.items():
        assert tokens == expected.tokens[row][: len(tokens)]
    assert sum(map(len, machine.tokens.values())) - before > 8 * steps
    assert {(True, "verify step"), (True, "verify forward")} <= used


@pytest.mark.skipif(ON_GPU, reason="on a GPU steps are really captured: tests/gpu runs them there")
def test_a_proposer_inside_the_graph(model: Any, expected: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decodes, decodes that verify, and steps with a prompt, each of which proposes."""
    monkeypatch.setattr(mixed_steps, "DECODES", (0, 1, 2))
    monkeypatch.setattr(mixed_steps, "PROMPTS", 1)
    monkeypatch.setattr(mixed_steps, "TOKENS", (8,))
    monkeypatch.setattr(cuda_graphs, "TOKENS", ())
    used = run_graphs_eagerly(monkeypatch, {"decode", "verify", "mixed"})
    prophet = Prophet(expected.tokens)
    monkeypatch.setattr(GpuMachine, "proposer", prophet)
    machine = GpuMachine(model, False, {})
    rows = [0, 1]
    result = machine.decode(dict.fromkeys(rows, 1), [], proposals=3)
    assert [len(drafts) for drafts in result.drafts] == [3, 3]
    assert {(True, "decode step")} <= used
    result = machine.decode(dict.fromkeys(rows, 4), [], proposals=5)
    assert result.counts[0] > 1 and {(True, "verify step")} <= used
    assert machine.tokens[0] == expected.tokens[0][: len(machine.tokens[0])]
    assert [len(drafts) for drafts in result.drafts] == [5, 5]
    # A prompt in two chunks beside a decode: the plan says what follows the first of them.
    new = NewRow(
        row=2, request="new", prompt_len=6, num_tokens=6, num_computed=0, limit=30, seed=0, sequence=0,
        params=SamplingParams(temperature=0), stop_ids=[], bad_words=[],
    )  # fmt: skip
    machine.run(
        rows=[0, 2], counts=[1, 4], num_decodes=1, tokens=[11, 12, 13, 14], add=[new], drop=[2], proposals=2,
        following=np.array([15], np.int32), drawing=[0],
    )  # fmt: skip
    step = prophet.steps[-1]
    assert {(True, "mixed step")} <= used and step.following[1:5].tolist() == [12, 13, 14, 15]
    result = machine.run(
        rows=[0, 2], counts=[1, 2], num_decodes=1, tokens=[15, 16], proposals=2, following=np.array([-1], np.int32),
    )  # fmt: skip
    step = prophet.steps[-1]
    assert step.following[0] == result.tokens[0] and step.following[1:3].tolist() == [16, result.tokens[1]]
    assert [len(drafts) for drafts in result.drafts] == [2, 2]
