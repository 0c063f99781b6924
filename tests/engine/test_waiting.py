"""Why requests wait, as the memory map says: each reason while it holds, with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import StepError
from quire.messages.memory_map import WaitingRequest

MakeLLM = Callable[..., LLM]
LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=100)


def add(llm: LLM, name: str, tokens: int = 20, tenant: str = "", params: SamplingParams = LONG) -> None:
    llm.llm_engine.add_request(name, {"prompt_token_ids": [5 + ord(name[0]) % 50] * tokens}, params, tenant=tenant)


def waiting(llm: LLM, steps: int = 1) -> dict[str, WaitingRequest]:
    for _ in range(steps):
        llm.llm_engine.step()
    found = llm.memory_map().owners
    assert found.waiting == len(found.queue)
    return {one.name: one for one in found.queue}


def end(llm: LLM, *names: str) -> None:
    llm.llm_engine.abort_request(list(names))


def test_rows_are_in_use_and_others_wait_behind(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=2)
    for name in "abcd":
        add(llm, name)
    found = waiting(llm)
    assert list(found) == ["c", "d"]
    assert (found["c"].reason, found["c"].detail) == ("rows", "all 2 rows are in use")
    assert (found["d"].reason, found["d"].detail) == ("order", "1 request is before it")
    assert found["c"].tokens == 20 and 0 < found["c"].seconds < 3600
    end(llm, *"abcd")
    assert not waiting(llm, steps=0)


def test_blocks_are_in_use(make_llm: MakeLLM) -> None:
    llm = make_llm(num_gpu_blocks_override=10)
    add(llm, "a", 100)
    add(llm, "b", 80)
    found = waiting(llm, steps=3)
    assert found["b"].reason == "blocks"
    free = llm.llm_engine.core.scheduler.tables.pool.free
    assert found["b"].detail == f"it needs up to 5 blocks, and {free} of 10 are free"
    end(llm, *"ab")


def test_a_tenant_has_its_share(make_llm: MakeLLM) -> None:
    llm = make_llm(scheduling_policy="fair", tenant_max_rows={"a": 1})
    add(llm, "a1", tenant="a")
    add(llm, "a2", tenant="a")
    found = waiting(llm)
    assert (found["a2"].reason, found["a2"].tenant) == ("share", "a")
    end(llm, "a1", "a2")


def test_the_tokens_of_a_step_go_to_others(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_batched_tokens=32)
    add(llm, "a", 100)
    add(llm, "b", 20)
    found = waiting(llm)
    assert (found["b"].reason, found["b"].detail) == ("budget", "the 32 tokens of a step go to requests before it")
    end(llm, *"ab")


def test_sequences_that_fork_do_not_wait_themselves(make_llm: MakeLLM) -> None:
    llm = make_llm()
    add(llm, "a", params=SamplingParams(n=3, max_tokens=50, ignore_eos=True))
    owners = llm.memory_map().owners
    assert ([one.name for one in owners.queue], owners.waiting) == (["a/0"], 3)
    end(llm, "a")


def test_after_a_failed_step_requests_run_one_at_a_time(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    add(llm, "a")
    add(llm, "b")
    core = llm.llm_engine.core

    def fail(handle: Any) -> Any:
        raise StepError("made up")

    with monkeypatch.context() as patched:
        patched.setattr(core._executor, "collect", fail)
        llm.llm_engine.step()
    found = waiting(llm, steps=0)
    assert found["b"].reason == "quarantine" and "now a" in found["b"].detail
    end(llm, *"ab")


def test_preempted_requests_say_how_often(make_llm: MakeLLM) -> None:
    llm = make_llm(num_gpu_blocks_override=10)
    for name in "abc":
        add(llm, name, 40)
    seen: list[WaitingRequest] = []
    for _ in range(80):
        seen += [one for one in waiting(llm).values() if one.preemptions]
    assert seen and all(one.reason in ("blocks", "order", "draws", "memory", "budget") for one in seen)
    end(llm, *"abc")
