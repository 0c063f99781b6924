"""Vectors of a step's rows, computed together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire import SamplingParams
from quire.messages.plan import StepPlan
from quire.worker.extras import RowKind
from quire.worker.pooling import pool
from tests.worker.device import Device, Operations


def step_of(kinds: list[RowKind]) -> tuple[Device, StepPlan, torch.Tensor]:
    """A step of prompts of 1, 2, 3 … tokens; it ends all but the first."""
    device = Device(9, max_rows=len(kinds))
    for row, kind in enumerate(kinds):
        device.add(row, SamplingParams(), prompt=[1] * (row + 1))
        device.batch.kinds[row] = kind
    rows = np.arange(len(kinds), dtype=np.int32)
    none = np.empty(0, np.int32)
    plan = StepPlan(
        step=0, rows=rows, counts=rows + 1, num_decodes=0, tokens=none, samples=rows[1:], sample_rows=rows[1:],
        block_rows=none, block_indices=none, blocks=none, max_context=len(kinds),
    )  # fmt: skip
    return device, plan, torch.randn(int(plan.counts.sum()), 4)


@pytest.mark.parametrize("last_only", [False, True])
def test_last_token_vectors_take_as_many_operations_for_many_rows_as_for_two(last_only: bool) -> None:
    counts = []
    for size in (3, 8):
        device, plan, hidden = step_of([RowKind.LAST] * size)
        lines = torch.from_numpy(np.cumsum(plan.counts)[1:] - 1)
        with Operations() as seen:
            vectors = pool(plan, device.batch, hidden[lines] if last_only else hidden, last_only)
        counts.append(seen.count)
        assert {draw: vector.tolist() for draw, vector in vectors.take().items()} == {
            draw: hidden[line].tolist() for draw, line in enumerate(lines.tolist())
        }
    assert counts[0] == counts[1]


def test_rows_of_all_kinds_share_a_step() -> None:
    kinds = [RowKind.MEAN, RowKind.LAST, RowKind.GREEDY, RowKind.MEAN, RowKind.LAST]
    device, plan, hidden = step_of(kinds)
    found = pool(plan, device.batch, hidden, False).take()
    prompts = hidden.split(plan.counts.tolist())
    wanted = {0: prompts[1][-1], 2: prompts[3].mean(0), 3: prompts[4][-1]}
    assert found.keys() == wanted.keys()
    for draw, vector in wanted.items():
        torch.testing.assert_close(torch.from_numpy(found[draw]), vector)
