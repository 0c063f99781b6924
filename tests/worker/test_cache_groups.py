"""A model whose layers with windows form cache groups of their own computes the bits of the same model in one group,
through hand-made plans: prompts in chunks, decodes, forks, copies and snapshots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.cpu.build import library
from quire.kernels.cpu.ops import CpuOps
from quire.kernels.kv import KVFormat
from quire.layers.attention.cpu import CpuPagedAttention
from quire.layers.caches import AttentionCache, LayerCache
from quire.messages.plan import Fork, NewRow, StepPlan
from quire.messages.sampling import SamplingParams
from quire.worker.batch import DeviceBatch
from quire.worker.geometry import CacheGeometry, assign_groups, make_geometry
from quire.worker.kv import KVCache
from quire.worker.paths import EagerPath, StepPath, TapeDecodePath
from quire.worker.runner import Runner
from tests.models.harness import PLAIN, Target, loaded_model, random_reference
from tests.models.zoo import ZOO

SIZE = 4
PAGES = 80
LONGEST = 40
WINDOW = 6
NATIVE = Target(ops=CpuOps, attention=CpuPagedAttention)


class Machine:
    """A model with its batch. Tables are filled with pages in an order of its own."""

    def __init__(self, model: Any, geometry: CacheGeometry, stride: int, with_tape: bool) -> None:
        self.model, self.geometry = model, geometry
        assign_groups(model, geometry)
        self.groups = [module.group for module in model.modules() if hasattr(module, "group")]
        device = torch.device("cpu")
        self.kv = KVCache.of(geometry, PAGES, device)
        self.batch = DeviceBatch(4, LONGEST, 97, self.kv, device)
        paths: list[StepPath] = [EagerPath(model, self.batch, True)]
        if with_tape:
            paths.insert(0, TapeDecodePath(model, self.batch, model.build.ops))
        self.runner = Runner(model, self.batch, paths)
        self.free = [1 + i * stride % (PAGES - 1) for i in range(PAGES - 1)]
        self.tables: dict[tuple[int, int], list[int]] = {}

    def blocks(self, row: int, done: int, tokens: int) -> list[tuple[int, int, int, int]]:
        """(group, row, index, page) of the pages the row lacks; those behind a window go to others."""
        changes = []
        for number, group in enumerate(self.geometry.groups):
            table = self.tables.setdefault((number, row), [])
            while len(table) * SIZE < tokens:
                changes.append((number, row, len(table), self.free[0]))
                table.append(self.free.pop(0))
            if group.kind == "window":
                for index in range(max(0, done - group.window + 1) // SIZE):
                    if table[index]:
                        self.free.append(table[index])
                        self.kv.data[table[index]].view(torch.uint8).fill_(0xFF)
                        table[index] = 0
        return changes

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> tuple[list[int], torch.Tensor]:
        """The drawn tokens, and the logits they were drawn from."""
        seen: list[torch.Tensor] = []
        logits, self.model.logits = self.model.logits, lambda hidden: _keep(seen, logits(hidden))
        try:
            tokens = self.runner.launch(plan).result().tokens.tolist()
        finally:
            del self.model.logits
        return tokens, torch.cat(seen) if seen else torch.empty(0)


def _keep(seen: list[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    seen.append(logits.clone())
    return logits


def _new(row: int, tokens: int) -> NewRow:
    return NewRow(
        row=row, request=str(row), prompt_len=tokens, num_tokens=tokens, num_computed=0, limit=LONGEST, seed=row,
        sequence=0, params=SamplingParams(temperature=0), stop_ids=[], bad_words=[],
    )  # fmt: skip


@pytest.mark.parametrize("native", [False, True])
def test_groups_compute_the_bits_of_one_group(native: bool) -> None:
    if native and library() is None:
        pytest.skip("no compiler")
    reference = random_reference(ZOO["qwen2-upper-windows"])
    machines: list[Machine] = []
    for in_groups in (False, True):
        model = loaded_model(reference, target=NATIVE if native else PLAIN)
        windows = model.build.config.windows
        assert set(windows) == {None, WINDOW}
        heads, dim = model.kv_shape.num_kv_heads, model.kv_shape.head_dim
        caches: list[LayerCache] = [
            AttentionCache(heads, dim, KVFormat(torch.float32), window if in_groups else None) for window in windows
        ]
        machines.append(Machine(model, make_geometry(caches, SIZE), 7 if in_groups else 1, with_tape=native))
    plain, grouped = machines
    assert [group.kind for group in plain.geometry.groups] == ["full"] and set(plain.groups) == {0}
    assert [group.kind for group in grouped.geometry.groups] == ["full", "window", "window"]
    assert list(windows) == [None, WINDOW, WINDOW] and grouped.groups == [0, 1, 2]
    prompts = {0: list(range(1, 20)), 1: [5, 3, 9, 60, 2, 8, 1], 2: [44]}
    computed = dict.fromkeys(prompts, 0)
    lengths = {row: len(tokens) for row, tokens in prompts.items()}
    for step in range(14):
        decodes = [row for row in computed if computed[row] == lengths[row] - 1 and lengths[row] > len(prompts[row])]
        chunks = {row: prompts[row][computed[row] : computed[row] + 8] for row in prompts if row not in decodes}
        rows = [*decodes, *chunks]
        counts = [1] * len(decodes) + [len(chunk) for chunk in chunks.values()]
        forks = [Fork(1, 3, 1, "1")] if step == 3 else []  # between decodes: as a beam would, but with a draw
        ends = [computed[row] + count for row, count in zip(rows, counts, strict=True)]
        draws = [i for i, row in enumerate(rows) if ends[i] == lengths[row]]
        sample_rows = [rows[i] for i in draws] + [fork.row for fork in forks]
        samples = draws + [rows.index(fork.source) for fork in forks]
        results = []
        for machine in machines:
            copies = _own_pages(machine, 3) if step == 4 else []  # the forked row writes to others from now on
            changes = [_place(machine, 3, page) for _, page in copies]
            for row, end in zip(rows, ends, strict=True):
                changes += machine.blocks(row, computed[row], end)
            columns = np.array(changes, np.int32).reshape(-1, 4).T
            plan = StepPlan(
                step=step, rows=np.array(rows, np.int32), counts=np.array(counts, np.int32), num_decodes=len(decodes),
                tokens=np.array([t for chunk in chunks.values() for t in chunk], np.int32),
                samples=np.array(samples, np.int32), sample_rows=np.array(sample_rows, np.int32),
                block_groups=columns[0], block_rows=columns[1],
                block_indices=columns[2], blocks=columns[3],
                max_context=max(ends), add=[_new(row, len(prompts[row])) for row in prompts] if step == 0 else [],
                forks=forks, copies=copies,
            )  # fmt: skip
            results.append(machine.run(plan))
            for fork in forks:
                for number in range(len(machine.geometry.groups)):
                    machine.tables[number, fork.row] = list(machine.tables[number, fork.source])
        (tokens, logits), (same, ours) = results
        assert tokens == same
        assert torch.equal(logits, ours) and not ours.isnan().any()
        for row, end in zip(rows, ends, strict=True):
            computed[row] = end
        for fork in forks:
            computed[fork.row], lengths[fork.row], prompts[fork.row] = computed[1], lengths[1], prompts[1]
        for row in sample_rows:
            lengths[row] += 1
    assert min(computed.values()) > 2 * WINDOW, "pages behind the window were given back"
    assert 0 in grouped.tables[1, 0] and 0 not in grouped.tables[0, 0]
    grouped.kv.copy([(3, 70), (5, 71)])
    assert torch.equal(grouped.kv.data[[70, 71]], grouped.kv.data[[3, 5]])


def _own_pages(machine: Machine, row: int) -> list[tuple[int, int]]:
    """Copies of the pages in use, one group's after another's, so that two rows do not write to the same."""
    copies = []
    for number in range(len(machine.geometry.groups)):
        table = machine.tables[number, row]
        for index, page in enumerate(table):
            if page:
                copies.append((page, machine.free[0]))
                table[index] = machine.free.pop(0)
    return copies


def _place(machine: Machine, row: int, page: int) -> tuple[int, int, int, int]:
    for number in range(len(machine.geometry.groups)):
        table = machine.tables[number, row]
        if page in table:
            return number, row, table.index(page), page
    raise AssertionError(page)


def test_snapshots_are_copied_after_the_step() -> None:
    """A snapshot holds what the step has written; a copy what was there before it."""
    model = loaded_model(random_reference(ZOO["llama"]))
    geometry = make_geometry([AttentionCache(model.kv_shape.num_kv_heads, 8, KVFormat(torch.float32))] * 2, SIZE)
    machine = Machine(model, geometry, 1, with_tape=False)
    before = machine.kv.data[1].clone()
    ints = np.array
    plan = StepPlan(
        step=0, rows=ints([0], np.int32), counts=ints([3], np.int32), num_decodes=0, tokens=ints([1, 2, 3], np.int32),
        samples=ints([0], np.int32), sample_rows=ints([0], np.int32), block_rows=ints([0], np.int32),
        block_indices=ints([0], np.int32), blocks=ints([1], np.int32), max_context=3, add=[_new(0, 3)],
        copies=[(1, 5)], snapshots=[(1, 6)],
    )  # fmt: skip
    machine.run(plan)
    assert torch.equal(machine.kv.data[5], before) and not torch.equal(machine.kv.data[1], before)
    assert torch.equal(machine.kv.data[6], machine.kv.data[1])
