"""Transfers between the cache and host memory: every byte arrives at its target, with its tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.kv import KVFormat
from quire.layers.attention.base import KVSpec
from quire.layers.caches import AttentionCache, LayerCache, StateCache, StatePart, StateView
from quire.messages.plan import Moves, StepPlan
from quire.worker.batch import DeviceBatch
from quire.worker.geometry import make_geometry
from quire.worker.kv import KVCache
from quire.worker.moves import HostMemory, Mover
from quire.worker.page_copies import page_copies
from quire.worker.runner import Runner

SPEC = KVSpec(2, 2, 8)
BLOCKS, SLOTS, SIZE = 12, 9, 4
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def mover(request: pytest.FixtureRequest) -> Mover:
    device = torch.device(request.param)
    kv = KVCache(SPEC, BLOCKS, SIZE, KVFormat(torch.float32), device)
    kv.data.copy_(torch.arange(kv.data.numel(), device=device).view(kv.data.shape))
    return Mover(kv, HostMemory(SLOTS, kv.geometry.page_bytes, pinned=device.type == "cuda"))


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_full", [True, False])
def test_pages_of_every_group_move_whole(device: str, has_full: bool) -> None:
    """A state's page, and a page of a model whose token ids are in the batch."""
    format, place = KVFormat(torch.bfloat16), torch.device(device)
    caches: list[LayerCache] = [
        AttentionCache(1, 8, format, None if has_full else 6),
        StateCache((StatePart(3, (5, 7), torch.float32),)),
    ]
    kv = KVCache.of(make_geometry(caches, SIZE), BLOCKS, place)
    tables = torch.tensor([range(1, 1 + kv.geometry.groups[1].pages)], device=place)
    state: StateView = kv.layers[1]
    values = torch.randn(1, 3, 5, 7, device=place)
    state.write(0, tables, values)
    kv.layers[0][5] = 3.0
    mover = Mover(kv, HostMemory(SLOTS, kv.geometry.page_bytes, pinned=device == "cuda"))
    pages = [*tables[0].tolist(), 5]
    mover.start(0, Moves(out=[(page, slot) for slot, page in enumerate(pages)]))
    assert finish(mover) == [0]
    kv.data.zero_()
    ids = np.arange(len(pages) * SIZE, dtype=np.int32)
    mover.start(1, Moves(back=[(slot, page + 3) for slot, page in enumerate(pages)], tokens=ids))
    assert finish(mover) == [1]
    assert torch.equal(state.read(0, tables + 3), values) and (kv.layers[0][8] == 3.0).all()
    assert not has_full or kv.tokens[8].tolist() == ids[-SIZE:].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_shared", [False, True], ids=["own slots", "a rank's part of slots"])
def test_encoded_pages_of_every_group_come_back_rounded(device: str, is_shared: bool) -> None:
    """A full group, and windows with fewer and larger heads, whose pages end in padding."""
    place, format = torch.device(device), KVFormat(torch.bfloat16)
    caches = [AttentionCache(2, 24, format), AttentionCache(1, 36, format, 6)]
    kv = KVCache.of(make_geometry(caches, SIZE), BLOCKS, place)
    copies = page_copies("int8_per_token_head", kv.geometry)
    assert kv.geometry.groups[1].kind == "window" and copies.slot_bytes < 0.6 * kv.geometry.page_bytes
    memory = HostMemory(
        SLOTS, copies.slot_bytes, device == "cuda",
        (lambda: torch.zeros(SLOTS, copies.slot_bytes + 64, dtype=torch.uint8)[:, 48:-16]) if is_shared else None,
    )  # fmt: skip
    mover = Mover(kv, memory, copies)
    for layer in kv.layers:
        layer.copy_(torch.randn(layer.shape))
    before = kv.data.clone()
    pages = [3, 4, 7, 1]
    mover.start(0, Moves(out=list(zip(pages, (2, 3, 8, 0), strict=True))))
    assert finish(mover) == [0]
    kv.data.zero_()
    ids = np.zeros(4 * SIZE, np.int32)
    mover.start(1, Moves(back=list(zip((2, 3, 8, 0), (9, 10, 2, 5), strict=True)), tokens=ids))
    assert finish(mover) == [1]
    back = kv.data.clone()
    kv.data.copy_(before)
    for layer in kv.layers:
        was = layer[pages].clone().double()
        kv.data.copy_(back)
        now = layer[[9, 10, 2, 5]].double()
        kv.data.copy_(before)
        assert not torch.equal(was, now)
        # Half a code of a largest value below 5, and bfloat16's rounding.
        assert (was - now).abs().max() < 5 / 254 + 0.01
    assert not back[[1, 3, 4, 6, 7, 8, 11]].any()


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
