"""Transfers between the cache and host memory: every byte arrives at its target, with its tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.kv import KVFormat
from quire.layers.attention.base import KVSpec
from quire.messages.plan import Moves, StepPlan
from quire.worker.batch import DeviceBatch
from quire.worker.kv import KVCache, stored_bytes
from quire.worker.moves import HostMemory, Mover
from quire.worker.runner import Runner

SPEC = KVSpec(2, 2, 8)
BLOCKS, SLOTS, SIZE = 12, 9, 4
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def mover(request: pytest.FixtureRequest) -> Mover:
    device = torch.device(request.param)
    kv = KVCache(SPEC, BLOCKS, SIZE, KVFormat(torch.float32), device)
    kv.data.copy_(torch.arange(kv.data.numel(), device=device).view(kv.data.shape))
    return Mover(kv, HostMemory(SLOTS, stored_bytes(SPEC, SIZE, KVFormat(torch.float32)), pinned=device.type == "cuda"))


def finish(mover: Mover) -> list[int]:
    done = []
    while not mover.can_report:
        pass
    done += [each.step for each in mover.take_done()]
    return done


def test_blocks_are_copied_out_and_back_to_other_places(mover: Mover) -> None:
    kv, rng = mover._kv, random.Random(3)
    before = kv.data.clone()
    out = list(zip(rng.sample(range(1, BLOCKS), SLOTS), rng.sample(range(SLOTS), SLOTS), strict=True))
    mover.start(0, Moves(out=out))
    assert finish(mover) == [0]
    kv.data.zero_()
    targets = rng.sample(range(1, BLOCKS), SLOTS)
    tokens = np.arange(SLOTS * SIZE, dtype=np.int32)
    mover.start(1, Moves(back=[(slot, target) for (_, slot), target in zip(out, targets, strict=True)], tokens=tokens))
    assert finish(mover) == [1]
    for (block, _), target, ids in zip(out, targets, tokens.reshape(SLOTS, SIZE), strict=True):
        assert torch.equal(kv.data[target], before[block])
        assert kv.tokens[target].tolist() == ids.tolist()


def test_adjacent_blocks_are_copied_together(mover: Mover) -> None:
    before = mover._kv.data.clone()
    mover.start(7, Moves(out=[(3, 0), (4, 1), (5, 2), (9, 3), (8, 4)]))
    assert finish(mover) == [7]
    host = mover.memory.data.view(torch.float32).view(SLOTS, *before.shape[1:])
    for block, slot in ((3, 0), (4, 1), (5, 2), (9, 3), (8, 4)):
        assert torch.equal(host[slot], before[block].cpu())


def test_a_refused_plan_copies_nothing(mover: Mover) -> None:
    """The previous step failed: its slots may have been reassigned."""
    batch = DeviceBatch(2, 16, 10, mover._kv, mover._kv.data.device)
    runner = Runner(None, batch, None)  # type: ignore[arg-type]
    runner.mover = mover
    batch.is_broken = True
    mover.memory.data.zero_()
    none = np.empty(0, np.int32)
    plan = StepPlan(0, none, none, 0, none, none, none, none, none, none, 0, moves=Moves(out=[(3, 0)]))
    with pytest.raises(RuntimeError, match="only a reset can follow"):
        runner.launch(plan)
    assert finish(mover) == [] and not mover.memory.data.any()


def test_both_directions_are_measured(mover: Mover) -> None:
    assert all(speed > 0 for speed in mover.measure())


def test_memory_that_cannot_be_allocated_is_an_error() -> None:
    memory = HostMemory(1 << 40, 1 << 20, pinned=False)
    with pytest.raises(ConfigError, match="GiB of host memory .* Lower swap_space"):
        _ = memory.data
