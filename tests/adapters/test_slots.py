"""Which adapter is in which slot: a random walk beside a plain model, and an engine with more adapters than slots."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire import LLM, RequestOutput
from quire.adapters.slots import PATIENCE_SECONDS, AdapterSlots
from quire.engine.stats import adapter_metrics
from quire.messages.adapter_use import AdapterUse
from quire.messages.plan import AdapterLoaded
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from tests.adapters.beside_peft import assert_as_peft, greedy
from tests.adapters.zoo import PROMPTS, Zoo
from tests.conftest import assert_idle


def _request(name: str, number: int, pinned: bool = False) -> NewRequest:
    use = AdapterUse(f"a{number}", f"/a{number}", number.to_bytes(32, "little"), pinned=pinned)
    return NewRequest(name, [1, 2, 3], SamplingParams(), 8, adapters=[use])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _load_all(slots: AdapterSlots) -> list[str]:
    slots.collect([AdapterLoaded(load.slot, load.key) for load in slots.take_loads()])
    return slots.take_ready()


def test_the_least_recently_used_is_evicted_and_pinned_ones_stay() -> None:
    slots = AdapterSlots(2)
    for number in (1, 2):
        assert not slots.hold(_request(f"r{number}", number, pinned=number == 1))
        assert _load_all(slots) == [f"r{number}"]
        slots.release(f"r{number}")
    assert not slots.hold(_request("r3", 3))  # 1 is older, and pinned
    _load_all(slots)
    slots.release("r3")
    assert slots.loaded() == [("a1",), ("a3",)]
    assert slots.hold(_request("r1", 1, pinned=True))
    assert not slots.hold(_request("r2", 2))  # 1 is held
    _load_all(slots)
    slots.release("r1")
    assert not slots.hold(_request("r3", 3))  # 2 is held: a pinned one makes room rather than let a request wait
    _load_all(slots)
    assert slots.loaded() == [("a3",), ("a2",)]
    slots.release("r2")
    slots.release("r3")
    slots.check_idle()


def test_vllms_gauge_names_adapters_that_requests_use_or_wait_for() -> None:
    slots = AdapterSlots(1)
    slots.hold(_request("r1", 1))
    _load_all(slots)
    slots.hold(_request("r2", 2))  # the slot is held
    (metric,) = adapter_metrics(slots)
    (((most, waiting, running), at),) = metric.series
    assert metric.name == "quire:lora_requests_info" and (most, waiting, running) == ("1", "a2", "a1")
    assert metric.under_vllms_name is not None and at == metric.value > 1.7e9
    slots.release("r1")
    assert adapter_metrics(slots)[0].series[0][0] == ("1", "a2", "")  # it is being loaded
    _load_all(slots)
    slots.release("r2")
    assert adapter_metrics(slots)[0].series[0][0] == ("1", "", "")


def test_a_failed_load_fails_those_that_wait_for_it_alone() -> None:
    slots = AdapterSlots(2)
    for name, number in (("x", 1), ("y", 1), ("z", 2)):
        assert not slots.hold(_request(name, number))
    bad, good = slots.take_loads()
    failed = slots.collect([AdapterLoaded(bad.slot, bad.key, "broken"), AdapterLoaded(good.slot, good.key)])
    assert failed == [("x", "broken"), ("y", "broken")]
    assert slots.take_ready() == ["z"]
    for name in "xyz":
        slots.release(name)
    slots.check_idle()


def test_loaded_adapters_pass_a_request_that_waits_for_a_slot_only_for_a_while() -> None:
    clock = Clock()
    slots = AdapterSlots(1, clock)
    assert not slots.hold(_request("first", 1))
    _load_all(slots)
    assert not slots.hold(_request("waits", 2))
    assert slots.hold(_request("passes", 1))
    clock.now += PATIENCE_SECONDS + 0.1
    assert not slots.hold(_request("late", 1))
    for name in ("first", "passes"):
        slots.release(name)
    assert _load_all(slots) == ["waits"]
    slots.release("waits")
    assert _load_all(slots) == ["late"]
    slots.release("late")
    slots.check_idle()


@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk(seed: int) -> None:
    """Every request is served once, with its own adapter in the slot it is given as long as it holds it."""
    rng, clock = random.Random(seed), Clock()
    slots = AdapterSlots(3, clock)
    content: dict[int, bytes] = {}
    running: dict[str, NewRequest] = {}
    waiting: dict[str, NewRequest] = {}
    loading: list[tuple[int, bytes]] = []
    served = 0
    for step in range(3000):
        clock.now += rng.random()
        if rng.random() < 0.4 and len(waiting) + len(running) < 12:
            request = _request(f"r{step}", rng.randrange(9))
            (running if slots.hold(request) else waiting)[request.id] = request
        for load in slots.take_loads():
            assert all(slots.slot_of(other) != load.slot for other in running.values())
            content.pop(load.slot, None)
            loading.append((load.slot, load.key))
        if loading and rng.random() < 0.5:
            slot, key = loading.pop(rng.randrange(len(loading)))
            is_bad = rng.random() < 0.1
            content[slot] = b"" if is_bad else key
            for failed, _ in slots.collect([AdapterLoaded(slot, key, "bad" if is_bad else "")]):
                del waiting[failed]
                slots.release(failed)
        if rng.random() < 0.02:
            slots.reset()
            loading = []
        for ready in slots.take_ready():
            running[ready] = waiting.pop(ready)
        for request in running.values():
            assert content[slots.slot_of(request)].startswith(request.adapters[0].digest)
        if running and rng.random() < 0.4:
            done = rng.choice(list(running))
            del running[done]
            slots.release(done)
            served += 1
        if waiting and rng.random() < 0.05:  # aborted
            gone = rng.choice(list(waiting))
            del waiting[gone]
            slots.release(gone)
    assert served > 300
    for request in (*running, *waiting):
        slots.release(request)
    slots.check_idle()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("slots"))


def _storm(zoo: Zoo, llm: LLM, requests: int, seed: int) -> list[tuple[str | None, RequestOutput]]:
    """Random adapters, lengths and aborts; returns the outputs, each with the name of its adapter."""
    base, rng, engine = zoo.base("llama"), random.Random(seed), llm.llm_engine
    names: list[str | None] = [None, "dora", "activated", "embeddings"]
    for number in range(6):
        name = f"storm{number}"
        if name not in base.loras:
            base.adapter(name, rank=1 + number, target_modules=["q_proj", "down_proj"] if number % 2 else ["v_proj"])
        names.append(name)
    chosen: dict[str, str | None] = {}
    outputs: list[tuple[str | None, RequestOutput]] = []
    pending = list(range(requests))
    while pending or engine.has_unfinished_requests():
        for _ in range(min(len(pending), rng.randrange(4))):
            request_id = f"{seed}-{pending.pop()}"
            name = chosen[request_id] = rng.choice(names)
            prompt = [rng.randrange(2, 97) for _ in range(rng.randrange(1, 14))]
            prompt = rng.choice([prompt, [*PROMPTS[0], *prompt], [*prompt, 9, 4, 3]])
            lora = None if name is None else base.loras[name]
            engine.add_request(request_id, prompt, greedy(rng.randrange(1, 9)), lora_request=lora)
        done = [output for output in engine.step() if output.finished and output.request_id in chosen]
        outputs += [(chosen.pop(output.request_id), output) for output in done]
        if chosen and rng.random() < 0.04:
            gone = rng.choice(list(chosen))
            del chosen[gone]
            engine.abort_request(gone)
    return outputs


@pytest.mark.parametrize("settings", [{}, {"swap_space": 0.01, "pipeline_depth": 1}], ids=["plain", "overlapped"])
def test_a_storm_over_few_slots_and_blocks(zoo: Zoo, settings: dict[str, object]) -> None:
    base = zoo.base("llama")
    with base.llm(max_loras=2, max_cpu_loras=3, num_gpu_blocks_override=24, max_num_seqs=5, **settings) as llm:
        outputs = _storm(zoo, llm, 60, 5)
        assert len(outputs) > 40
        for name, output in outputs:
            assert_as_peft(base, name, output)
        metrics = {metric.name: metric.value for metric in llm.llm_engine.core.metrics()}
        assert metrics["quire:adapter_evictions"] > 0 and metrics["quire:adapter_loads"] > 6
        assert_idle(llm)


def test_a_folder_that_is_gone_fails_its_request_alone(zoo: Zoo) -> None:
    base = zoo.base("llama")
    lora = base.adapter("gone", target_modules=["q_proj"])
    with base.llm() as llm:
        llm.add_lora(lora)
        for file in Path(lora.path).iterdir():
            file.unlink()
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        broken, fine = llm.generate(prompts, greedy(4), lora_request=[lora, base.loras["all"]])
        assert broken.outputs[0].finish_reason == "error" and "gone" in str(broken.error)
        assert_as_peft(base, "all", fine)
        assert_idle(llm)
