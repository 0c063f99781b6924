"""The memory map: it adds up at every moment, with shared blocks, transfers and suspended sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine import memory_map
from quire.errors import ValidationError
from quire.kvcache.offload.costs import Costs
from quire.messages.memory_map import CACHED, EMPTY, HELD, MOVING, SHARED, MemoryMap
from quire.messages.plan import StepPlan

MakeLLM = Callable[..., LLM]
LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=60)
SHORT = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)


def check(llm: LLM) -> MemoryMap:
    """A map, checked against the pool's own counts."""
    found, pool = llm.memory_map(), llm.llm_engine.core.scheduler.tables.pool
    device = found.device
    assert (device.capacity, device.empty, device.cached, device.used) == (
        pool.capacity, pool.empty, pool.idle, pool.used,
    )  # fmt: skip
    assert device.empty + device.cached + device.held + device.shared + device.moving == device.capacity
    assert Counter(found.blocks) == Counter(
        {EMPTY: device.empty, CACHED: device.cached, HELD: device.held, SHARED: device.shared, MOVING: device.moving}
    )
    assert found.sharing.unaccounted == 0
    assert MemoryMap.from_json(found.to_json(), "it") == found
    return found


def test_sequences_of_one_prompt_share_its_full_blocks(make_llm: MakeLLM) -> None:
    llm = make_llm()
    before = check(llm)
    assert (before.device.used, before.owners.largest, before.sleeping, before.host) == (0, [], None, None)
    engine, prompt = llm.llm_engine, list(range(5, 5 + 40))
    engine.add_request("r", {"prompt_token_ids": prompt}, SamplingParams(n=4, max_tokens=60, ignore_eos=True, seed=1),
                       tenant="acme")  # fmt: skip
    assert check(llm).owners.waiting == 4
    for _ in range(4):
        engine.step()
    found = check(llm)
    full = len(prompt) // 16
    assert found.device.shared == found.sharing.by_more == full
    assert (found.sharing.by_two, found.sharing.most, found.sharing.saved) == (0, 4, 3 * full)
    assert sorted(owner.name for owner in found.owners.largest) == ["r/0", "r/1", "r/2", "r/3"]
    assert {(owner.kind, owner.tenant, owner.shared) for owner in found.owners.largest} == {("running", "acme", full)}
    assert found.device.held == sum(owner.blocks - owner.shared for owner in found.owners.largest)
    assert found.device.block_bytes * 129 == llm.llm_engine.info.kv_bytes
    engine.abort_request("r")
    llm.llm_engine.check_idle()
    after = check(llm)
    assert (after.device.used, after.device.cached) == (0, full)


def test_the_map_adds_up_at_every_step_under_overload(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for choice in ("swapping_pays", "loading_pays"):
        monkeypatch.setattr(Costs, choice, lambda *_: True)
    llm = make_llm(num_gpu_blocks_override=24, swap_space=0.01, max_num_seqs=6)
    for i in range(10):
        prompt = [5 + (i // 2 * 7 + j) % 90 for j in range(30 + 9 * i)]
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, LONG)
    submit, seen = llm.llm_engine.core._executor.submit, []

    def submit_and_look(plan: StepPlan) -> Any:
        seen.append(check(llm))  # a step and its copies are in flight
        return submit(plan)

    monkeypatch.setattr(llm.llm_engine.core._executor, "submit", submit_and_look)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        seen.append(check(llm))
    assert {"running", "loading", "swapped"} <= {owner.kind for found in seen for owner in found.owners.largest}
    assert max(found.transfers.out for found in seen) > 0
    assert max(found.transfers.back for found in seen) > 0
    assert {found.pressure.device for found in seen} == {0, 1, 2}


@pytest.mark.parametrize("tier", ["none", "host", "disk"])
def test_idle_and_suspended_sessions(make_llm: MakeLLM, tmp_path: Path, tier: str) -> None:
    tiers: dict[str, Any] = {
        "none": {}, "host": {"swap_space": 0.02}, "disk": {"swap_space": 0.02, "kv_disk": str(tmp_path)},
    }[tier]  # fmt: skip
    llm = make_llm(**tiers)
    for name in ("idle", "asleep"):
        session = llm.sessions.create(name)
        session.append("hello the world one two three four five six")
        session.generate(SHORT)
    llm.sessions.get("idle").fork("twin")
    llm.sessions.create("new").append("never run")
    assert check(llm).sleeping is not None
    llm.sessions.get("asleep").suspend()
    found = check(llm)
    by_name = {owner.name: owner for owner in found.owners.largest}
    assert set(by_name) == {"idle", "twin"}
    idle = by_name["idle"]
    info = llm.sessions.get("idle").info
    assert (idle.kind, idle.tokens, idle.blocks) == ("session", info.device_tokens, -(-info.device_tokens // 16))
    assert idle.shared == idle.blocks == found.sharing.by_two == found.sharing.saved
    suspended = found.sleeping
    assert suspended is not None
    is_saved = int(tier != "none")
    assert (suspended.count, suspended.in_host, suspended.on_disk, suspended.nowhere, suspended.unknown) == (
        2, is_saved, 0, 2 - is_saved, 0,
    )  # fmt: skip
    assert [(one.name, one.place) for one in suspended.latest] == [("asleep", "host")][:is_saved]
    if found.host is not None:
        assert found.host.used >= -(-suspended.latest[0].kv_tokens // 16)
        assert found.host.owned == (found.host.used if tier == "host" else 0)
    assert (found.disk is not None) == (tier == "disk")
    if tier == "disk":
        assert found.disk is not None
        assert found.disk.owned == found.disk.blocks == -(-suspended.latest[0].kv_tokens // 16)
        tiers_below = llm.llm_engine.core.scheduler.tiers
        assert tiers_below is not None
        tiers_below.host.discard(list(tiers_below.host.oldest()))
        lower = check(llm).sleeping
        assert lower is not None
        assert (lower.in_host, lower.on_disk) == (0, 1)
    for name in ("idle", "twin"):
        llm.sessions.get(name).suspend()


def test_evicted_blocks_are_in_transfer_until_they_arrive(make_llm: MakeLLM) -> None:
    llm = make_llm(swap_space=0.02)
    llm.sessions.create("s").append("hello the world one two three four five six")
    llm.sessions.get("s").generate(SHORT)
    blocks = check(llm).device.used
    llm.llm_engine.core.sessions.suspend("s")
    found = check(llm)
    assert (found.device.moving, found.device.held, found.transfers.out, found.transfers.back) == (blocks, 0, blocks, 0)
    assert found.owners.largest == []
    while llm.llm_engine.core.has_work:
        llm.llm_engine.step()
    found = check(llm)
    assert (found.device.moving, found.transfers.out) == (0, 0)


def test_a_large_cache_is_sampled(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    llm.generate({"prompt_token_ids": list(range(5, 5 + 70))}, SHORT, use_tqdm=False)
    whole = llm.memory_map()
    monkeypatch.setattr(memory_map, "MOST_CELLS", 50)
    found = llm.memory_map()
    assert (found.stride, found.blocks) == (3, whole.blocks[::3])
    assert found.device == whole.device


def test_owners_and_suspended_sessions_beyond_the_listed_ones_are_counted(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_map, "MOST_NAMED", 2)
    monkeypatch.setattr(memory_map, "MOST_LOOKED_UP", 3)
    llm = make_llm(swap_space=0.02)
    for i in range(5):
        session = llm.sessions.create(f"s{i}")
        session.append("x" * 20 * (i + 1))
        session.generate(SHORT)
    found = check(llm)
    assert (found.owners.sessions, [owner.name for owner in found.owners.largest]) == (5, ["s4", "s3"])
    for i in range(5):
        llm.sessions.get(f"s{i}").suspend()
    suspended = check(llm).sleeping
    assert suspended is not None
    assert (suspended.count, suspended.in_host, suspended.unknown, suspended.nowhere) == (5, 3, 2, 0)
    assert [one.name for one in suspended.latest] == ["s4", "s3"]


def test_a_block_without_an_owner_is_reported(make_llm: MakeLLM) -> None:
    llm = make_llm()
    pool = llm.llm_engine.core.scheduler.tables.pool
    lost = pool.allocate(1)
    assert llm.memory_map().sharing.unaccounted == 1
    pool.release(lost)
    check(llm)


def test_expert_load(make_llm: MakeLLM, tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    from tests.models.zoo import _mixture

    config = _mixture(Qwen3MoeConfig, head_dim=8)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    llm = make_llm(tmp_path, load_format="dummy", skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
    llm.generate({"prompt_token_ids": list(range(2, 22))}, params, use_tqdm=False)
    experts = llm.memory_map().experts
    assert [load.layer for load in experts] == [0, 1]
    for load in experts:
        assert len(load.chosen) == config.num_experts
        tokens = 20 + 4 if load.layer == 0 else 1 + 4  # of a prompt, the last layer computes only the last token
        assert sum(load.chosen) == tokens * config.num_experts_per_tok
        (expert, share), *_ = load.hottest(3)
        assert load.chosen[expert] == max(load.chosen)
        assert share == max(load.chosen) / sum(load.chosen)
        assert load.max_over_mean == pytest.approx(share * config.num_experts)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"object": "list"}', b"not json"])
def test_an_invalid_map_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(ValidationError, match="map.json is no memory map") as refusal:
        MemoryMap.from_json(data, "map.json")
    assert "\n" not in str(refusal.value)
