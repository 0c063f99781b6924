"""The device batch of a model with several cache groups, in torch and in Triton, against plain Python: tables of each
group, slots, token ids kept by row, states of rows that have ended, forks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.test_triton_batch import new_row, plan_of
from tests.kernels.triton_target import DEVICE

from quire.kernels.kv import KVFormat  # isort: skip
from quire.layers.attention.base import AttentionInputs  # isort: skip
from quire.layers.caches import AttentionCache, LayerCache, StateCache, StatePart  # isort: skip
from quire.messages.plan import Fork, StepPlan  # isort: skip
from quire.worker.batch import DeviceBatch, StepInputs  # isort: skip
from quire.worker.cuda_batch import CudaBatch  # isort: skip
from quire.worker.geometry import make_geometry  # isort: skip
from quire.worker.kv import KVCache  # isort: skip

ROWS, LONGEST, BLOCK, VOCAB, PAGES = 4, 24, 4, 50, 60
F32 = KVFormat(torch.float32)
FULL, WINDOW = AttentionCache(1, 8, F32), AttentionCache(1, 8, F32, 6)
STATE = StateCache((StatePart(5, (8, 8), torch.float32),))
MODELS: dict[str, list[LayerCache]] = {
    "window": [WINDOW, WINDOW],
    "state": [STATE],
    "full, window": [WINDOW, FULL],
    "full, windows, state": [WINDOW, FULL, STATE, WINDOW, AttentionCache(1, 8, F32, 9)],
    "window, state": [STATE, WINDOW],
}


class Mirror:
    """What the batch holds, in Python."""

    def __init__(self, groups: int) -> None:
        self.tables = np.zeros((groups, ROWS + 1, 200), np.int32)
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.active: dict[int, bool] = {}

    def fork(self, source: int, row: int) -> None:
        self.tables[:, row] = self.tables[:, source]
        self.tokens[row] = list(self.tokens[source])
        self.computed[row], self.last[row] = self.computed[source], self.last[source]
        self.active[row] = self.active[source]


@pytest.mark.parametrize("name", MODELS)
def test_random_plans(name: str) -> None:
    geometry = make_geometry(MODELS[name], BLOCK)
    device = torch.device(DEVICE)
    make = [
        lambda kv: DeviceBatch(ROWS, LONGEST, VOCAB, kv, device),
        lambda kv: CudaBatch(ROWS, LONGEST, VOCAB, kv, device, 32),
    ]
    batches = [each(KVCache.of(geometry, PAGES, device)) for each in make]
    mirror = Mirror(len(geometry.groups))
    rng = random.Random(len(name))
    for step in range(12):
        plan = _plan(step, mirror, rng, geometry.groups)
        for batch in batches:
            batch.apply(plan)
            inputs = batch.inputs(plan)
            batch.fork(plan.forks)
            _check(batch, inputs, plan, mirror, geometry)
        _advance(plan, mirror, batches, rng)


def _plan(step: int, mirror: Mirror, rng: random.Random, groups: Any) -> StepPlan:
    """A step of every row: chunks of prompts, then decodes; rows are added, and one is forked now and then."""
    adds: list[Any] = []
    free = [row for row in range(ROWS) if row not in mirror.tokens]
    drop: list[int] = []
    if not free and rng.random() < 0.5:
        drop = [rng.choice(list(mirror.tokens))]
        for kept in (mirror.tokens, mirror.computed, mirror.last, mirror.active):
            kept.pop(drop[0])
    elif free:
        row = free[0]
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 12))]
        done = rng.choice([0, len(prompt) - 1])  # with a cached prefix, or without
        adds = [
            new_row(
                row, rng, prompt_len=len(prompt), num_tokens=len(prompt), num_computed=done, limit=LONGEST,
                stop_ids=[0], computed=np.array(prompt[:done], np.int32),
            )
        ]  # fmt: skip
        mirror.tokens[row], mirror.computed[row], mirror.active[row] = prompt, done, True
        mirror.last[row] = -1
    changes: list[tuple[int, int, int, int]] = []
    for new in adds:  # tables as long as they will get
        for number, group in enumerate(groups):
            pages = group.pages or LONGEST // BLOCK + 1
            changes += [(number, new.row, i, rng.randrange(1, PAGES)) for i in range(pages)]
    for number, row, index, page in changes:
        mirror.tables[number, row, index] = page
    decodes = [row for row in mirror.tokens if mirror.last[row] >= 0]
    chunks = {row: mirror.tokens[row][mirror.computed[row] :] for row in mirror.tokens if row not in decodes}
    chunks = {row: tokens[: rng.randint(1, len(tokens))] for row, tokens in chunks.items()}
    rows = decodes + list(chunks)
    counts = [1] * len(decodes) + [len(tokens) for tokens in chunks.values()]
    columns = np.array(changes, np.int32).reshape(-1, 4).T
    draws = [i for i, row in enumerate(rows) if _after(mirror, row, counts[i]) >= len(mirror.tokens[row])]
    forks = []
    free = [row for row in range(ROWS) if row not in mirror.tokens and row not in drop]
    if free and draws and rng.random() < 0.5:  # the new row draws from what its source computes
        forks = [Fork(rows[draws[-1]], free[-1], 1, "")]
        draws.append(draws[-1])
    drawing = [rows[i] for i in draws]
    drawing[len(drawing) - len(forks) :] = [fork.row for fork in forks]
    return plan_of(
        step, rows=np.array(rows, np.int32), counts=np.array(counts, np.int32), num_decodes=len(decodes),
        tokens=np.array([t for tokens in chunks.values() for t in tokens], np.int32),
        samples=np.array(draws, np.int32), sample_rows=np.array(drawing, np.int32),
        block_groups=columns[0] if len(groups) > 1 else np.empty(0, np.int32), block_rows=columns[1],
        block_indices=columns[2], blocks=columns[3], add=adds, drop=drop, forks=forks, max_context=LONGEST,
    )  # fmt: skip


def _after(mirror: Mirror, row: int, count: int) -> int:
    return mirror.computed[row] + count


def _check(batch: DeviceBatch, inputs: StepInputs, plan: StepPlan, mirror: Mirror, geometry: Any) -> None:
    on_gpu = isinstance(batch, CudaBatch)
    tokens = iter(plan.tokens.tolist())
    at = 0
    for i, (row, count) in enumerate(zip(plan.rows.tolist(), plan.counts.tolist(), strict=True)):
        for j in range(count):
            token = mirror.last[row] if i < plan.num_decodes else next(tokens)
            assert inputs.tokens[at] == token
            position = mirror.computed[row] + j
            if mirror.active[row]:
                assert inputs.positions[at] == position
            for number, (group, own) in enumerate(zip(geometry.groups, inputs.attention, strict=True)):
                if not mirror.active[row]:
                    assert own.slots[at] < BLOCK
                elif group.kind != "state":
                    page = mirror.tables[number, row, position // BLOCK]
                    assert own.slots[at] == page * BLOCK + position % BLOCK
                else:
                    assert own.slots[at] >= BLOCK
            at += 1
        end = mirror.computed[row] + count
        if mirror.active[row]:
            known = (
                (mirror.tokens[row] + [mirror.last[row]])[:end] if i < plan.num_decodes else mirror.tokens[row][:end]
            )
            found = batch.row_tokens(torch.tensor([row], device=DEVICE), end)[0].tolist()
            if not geometry.has_full_group:  # shared pages are random here: only kept-by-row ids are all known
                assert found == known
            assert found[mirror.computed[row] :] == known[mirror.computed[row] :]
            where = torch.tensor([row], device=DEVICE), torch.tensor([end - 1], device=DEVICE)
            assert batch.tokens_at(*where).item() == known[-1]
        for number, (group, own) in enumerate(zip(geometry.groups, inputs.attention, strict=True)):
            assert inputs.attention[0].of(number) is own or len(geometry.groups) == 1
            width = group.pages or 3
            table = _table(own, i)[:width].tolist()
            expected = mirror.tables[number, row, :width].tolist()
            if mirror.active[row]:
                assert table == expected and own.context_lens[i] == end
            elif group.kind == "state":
                assert not any(table), "a row that has ended must not change its state"
            elif on_gpu:
                assert own.context_lens[i] == 0
    if len(plan.samples):
        last = batch.last_tokens(plan, inputs)
        for number, group in enumerate(geometry.groups):
            own = last.inputs.of(number)
            for i, sample in enumerate(plan.samples.tolist()):
                row = int(plan.rows[sample])
                if mirror.active[row]:
                    width = group.pages or 3
                    assert _table(own, i)[:width].tolist() == mirror.tables[number, row, :width].tolist()
    for fork in plan.forks:
        assert torch.equal(batch.block_tables[:, fork.row], batch.block_tables[:, fork.source])
        assert torch.equal(batch.token_ids[fork.row], batch.token_ids[fork.source])


def _table(own: AttentionInputs, i: int) -> torch.Tensor:
    return own.block_tables[i if own.rows is None else int(own.rows[i])].cpu()


def _advance(plan: StepPlan, mirror: Mirror, batches: list[Any], rng: random.Random) -> None:
    """Draw: token 0 ends a row on the device."""
    for i, (row, count) in enumerate(zip(plan.rows.tolist(), plan.counts.tolist(), strict=True)):
        if mirror.active[row]:
            if i < plan.num_decodes:
                mirror.tokens[row].append(mirror.last[row])
            mirror.computed[row] += count
    for fork in plan.forks:
        mirror.fork(fork.source, fork.row)
    drawn = [0 if rng.random() < 0.15 else rng.randrange(1, VOCAB) for _ in plan.samples]
    for batch in batches:
        rows = batch.draw_rows(plan).long()
        tokens = torch.tensor(drawn, dtype=torch.int64, device=DEVICE)
        if drawn:
            batch.commit(tokens, torch.zeros(len(drawn), dtype=torch.bool, device=DEVICE), rows, 0)
    for row, token in zip(plan.sample_rows.tolist(), drawn, strict=True):
        mirror.last[row] = token
        mirror.active[row] &= token != 0 and mirror.computed[row] + 1 < LONGEST
