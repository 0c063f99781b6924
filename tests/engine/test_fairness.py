"""Tenants in the whole engine, with a tiny model. Latencies are counted in steps: the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import ValidationError
from quire.messages.beams import BeamSearchParams
from tests.scheduler.harness import rng_of

MakeLLM = Callable[..., LLM]


def steps_of_light(llm: LLM, greedy: int, light: int = 4) -> list[int]:
    """Steps that each request of a light tenant takes, one after the other, while another tenant has very many at
    once."""
    engine = llm.llm_engine
    for i in range(greedy):
        engine.add_request(f"greedy{i}", [5 + i % 90] * 24, SamplingParams(max_tokens=24, ignore_eos=True), tenant="g")
    for _ in range(10 if greedy else 0):
        engine.step()
    steps = []
    for i in range(light):
        engine.add_request(f"light{i}", [7 + i] * 12, SamplingParams(max_tokens=6, ignore_eos=True), tenant="light")
        steps.append(1)
        while not any(output.request_id == f"light{i}" and output.finished for output in engine.step()):
            steps[-1] += 1
    engine.abort_request([f"greedy{i}" for i in range(greedy)])
    while engine.has_unfinished_requests():
        engine.step()
    return steps


def test_a_greedy_tenant_slows_a_light_one_by_no_more_than_its_share(make_llm: MakeLLM) -> None:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    alone = max(steps_of_light(make_llm(scheduling_policy="fair", **settings), 0))
    fair = steps_of_light(make_llm(scheduling_policy="fair", **settings), 200)
    assert max(fair) <= 2 * alone + 1, (alone, fair)
    first_come = steps_of_light(make_llm(scheduling_policy="fcfs", **settings), 60, light=1)
    assert first_come[0] > 20 * alone, first_come


def test_the_policy_changes_no_token_and_load_leaves_nothing_behind(make_llm: MakeLLM) -> None:
    rng = rng_of("fairness")
    prompts = [[rng.randint(4, 110) for _ in range(rng.randint(1, 40))] for _ in range(40)]
    params = [
        SamplingParams(seed=i, max_tokens=rng.randint(1, 30), ignore_eos=True, n=rng.choice([1, 1, 1, 3]))
        for i in range(len(prompts))
    ]
    tenants = [rng.choice("abc") for _ in prompts]
    plain = make_llm(num_gpu_blocks_override=24).generate(prompts, params, use_tqdm=False)
    shares = {"tenant_weights": {"a": 3}, "tenant_max_rows": {"b": 2}, "tenant_max_blocks": {"c": 0.5}}
    llm = make_llm(num_gpu_blocks_override=24, scheduling_policy="fair", max_num_seqs=6, **shares)
    shared = llm.generate(prompts, params, use_tqdm=False, tenant=tenants, priority=[i % 3 for i in range(40)])
    for one, other in zip(plain, shared, strict=True):
        assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in other.outputs]
    (beams,) = llm.beam_search(prompts[0], BeamSearchParams(beam_width=4, max_tokens=4), tenant="b")
    assert len(beams.sequences) == 4


def test_a_request_above_its_tenant_s_cap_is_refused_alone(make_llm: MakeLLM) -> None:
    llm = make_llm(scheduling_policy="fair", tenant_max_blocks={"a": 2})
    with pytest.raises(ValidationError, match="tenant 'a' may hold 2 blocks of 16, enough for 33"):
        llm.generate([[5] * 20], SamplingParams(max_tokens=20), use_tqdm=False, tenant="a")
    (output,) = llm.generate([[5] * 20], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False, tenant="a")
    assert len(output.outputs[0].token_ids) == 13 and output.outputs[0].finish_reason == "length"


class TestPrefixes:
    """The time to first token reveals whether a prompt was cached: only its own tenant may learn it."""

    def cached(self, llm: LLM, tenant: str, salt: str = "") -> int:
        prompt = {"prompt_token_ids": list(range(10, 60)), "cache_salt": salt}
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False, tenant=tenant)  # type: ignore[list-item]
        assert output.num_cached_tokens is not None
        return output.num_cached_tokens

    def test_prefixes_are_private_to_a_tenant(self, llm: LLM) -> None:
        assert [self.cached(llm, "a"), self.cached(llm, "a"), self.cached(llm, "b"), self.cached(llm, "")] == [
            0,
            48,
            0,
            0,
        ]

    def test_a_salt_cannot_reach_another_tenants_prefixes(self, llm: LLM) -> None:
        assert self.cached(llm, "ab", "c") == 0
        for tenant, salt in [("a", "bc"), ("abc", ""), ("", "abc"), ("", "2:abc"), ("", "ab\0c"), ("ab", "")]:
            assert self.cached(llm, tenant, salt) == 0, (tenant, salt)
        assert self.cached(llm, "ab", "c") == 48

    def test_prefixes_are_shared_if_configured(self, make_llm: MakeLLM) -> None:
        llm = make_llm(isolate_tenants=False)
        assert [self.cached(llm, "a"), self.cached(llm, "b"), self.cached(llm, "b", "salt")] == [0, 48, 0]


def test_tenants_need_one_value_for_all_or_one_for_each_prompt(llm: LLM, tiny_model: Path) -> None:
    with pytest.raises(ValidationError, match="2 prompts, but 1 tenants"):
        llm.generate(["a", "b"], tenant=["x"], use_tqdm=False)
    with pytest.raises(ValidationError, match="a tenant is a string, got 3"):
        llm.generate(["a"], tenant=[3], use_tqdm=False)  # type: ignore[list-item]
