"""Tiers below a CUDA device: swapped rows, restored prefixes and sessions, on separate streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.kv import KVFormat
from quire.layers.attention.base import KVSpec
from quire.messages.plan import Moves
from quire.worker.kv import KVCache
from quire.worker.moves import HostMemory, Mover
from quire.worker.page_copies import page_copies
from tests.conftest import TINY_VOCAB
from tests.gpu.near_ties import NearTies
from tests.gpu.storm import check, interrupted, make_requests, uninterrupted
from tests.gpu.target import ON_A_GPU
from tests.gpu.test_storm import CALM, TIGHT

pytestmark = ON_A_GPU

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


@pytest.fixture
def eager_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows are swapped, and copies are assumed cheap: a tiny model computes faster than any link."""
    monkeypatch.setattr("quire.scheduler.swapping.LEAST_SWAP", 1)
    monkeypatch.setattr("quire.kvcache.offload.costs.Costs.swapping_pays", lambda *_: True)
    monkeypatch.setattr("quire.kvcache.offload.costs.Costs.loading_pays", lambda *_: True)


@pytest.mark.usefixtures("small_groups", "eager_swaps")
@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_storm_over_tiers(engine: Callable[..., LLM], ties: NearTies, depth: int, disk: bool, tmp_path: Path) -> None:
    rng = random.Random(70 + depth)
    requests = make_requests(150, rng)
    expected = uninterrupted(engine(**CALM), requests)
    tiers: dict[str, Any] = {"swap_space": 0.0002, "kv_disk": str(tmp_path)} if disk else {"swap_space": 0.05}
    llm = engine(**TIGHT, **tiers, pipeline_depth=depth)
    ours = interrupted(llm, requests, rng, 0.03)
    llm.llm_engine.check_idle()
    check(requests, ours, expected, ties)
    scheduler = llm.llm_engine.core.scheduler
    assert scheduler.tiers is not None
    print(f"\n{scheduler.stats.swaps} swaps, {scheduler.tiers.saved} blocks out, {scheduler.tiers.loaded} back")
    ties.report("tiers", most=2)
    assert scheduler.stats.swaps and scheduler.tiers.loaded


@pytest.mark.usefixtures("eager_swaps")
@pytest.mark.parametrize("depth", [0, 1])
def test_sessions_yield_the_same_tokens_from_every_tier(
    engine: Callable[..., LLM], ties: NearTies, depth: int, tmp_path: Path
) -> None:
    rng = random.Random(depth)
    calm = engine(**CALM)
    llm = engine(pipeline_depth=depth, block_size=8, num_gpu_blocks_override=60, swap_space=0.01, kv_disk=str(tmp_path))
    truth: dict[str, list[int]] = {}
    for i in range(6):
        truth[f"s{i}"] = [rng.randrange(4, TINY_VOCAB) for _ in range(rng.randint(3, 60))]
        llm.sessions.create(f"s{i}", truth[f"s{i}"])
    for turn in range(30):
        name = rng.choice(list(truth))
        if len(truth[name]) > 180:
            continue
        session = llm.sessions.resume(name)
        more = [rng.randrange(4, TINY_VOCAB) for _ in range(rng.randint(0, 5))]
        session.append(more)
        ours = list(session.generate(GREEDY).outputs[0].token_ids)
        prompt = truth[name] + more
        theirs = list(calm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
        ties.compare(prompt, ours, theirs, name)
        truth[name] = prompt + ours
        assert session.tokens == truth[name]
        if rng.random() < 0.6:
            session.suspend()
            llm.reset_prefix_cache()
        if rng.random() < 0.2:
            session.fork(f"f{turn}")
            truth[f"f{turn}"] = list(truth[name])
    ties.report("sessions", most=2)


def test_pages_in_8_bits_are_those_of_a_cpu() -> None:
    """Encoded by the kernel on the way out, decoded on the way back, both over several rounds of staging memory."""
    encoded, back = {}, {}
    values = torch.randn(40, 3 * 2 * 2 * 16 * 64).bfloat16()
    for device in ("cpu", "cuda"):
        kv = KVCache(KVSpec(3, 2, 64), 40, 16, KVFormat(torch.bfloat16), torch.device(device))
        kv.data.copy_(values.view(kv.data.shape))
        copies = page_copies("int8_per_token_head", kv.geometry)
        memory = HostMemory(32, copies.slot_bytes, pinned=device == "cuda")
        mover = Mover(kv, memory, copies)
        copies._at_once = 5  # type: ignore[attr-defined]
        memory.data.zero_()
        out = [(39 - number, number) for number in range(12)] + [(number, number + 7) for number in range(5, 20)]
        mover.start(0, Moves(out=out))
        torch.cuda.synchronize()
        encoded[device] = memory.data.clone()
        kv.data.zero_()
        tokens = np.zeros(27 * 16, np.int32)
        mover.start(1, Moves(back=[(slot, 39 - page) for page, slot in out], tokens=tokens))
        torch.cuda.synchronize()
        back[device] = kv.data.cpu()
    assert torch.equal(encoded["cuda"], encoded["cpu"]) and torch.equal(back["cuda"], back["cpu"])
    assert encoded["cpu"][:27].any(1).all() and not encoded["cpu"][27:].any()
