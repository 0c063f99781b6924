"""Adapters that PEFT has written, computed by an engine: the tokens and logprobs of PEFT on transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM
from quire.errors import QuireError
from quire.messages.lora import LoRARequest
from tests.adapters.beside_peft import Base, assert_as_peft, check, greedy
from tests.adapters.zoo import BASES, INVOCATION, PROMPTS, Zoo, kinds_of
from tests.conftest import assert_idle


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def llama(zoo: Zoo) -> Iterator[LLM]:
    with zoo.base("llama").llm() as llm:
        yield llm


@pytest.mark.parametrize("name", sorted(BASES))
def test_every_kind_alone_and_mixed_with_others_and_with_none(zoo: Zoo, name: str) -> None:
    base = zoo.base(name)
    with base.llm(max_loras=3) as llm:  # fewer slots than adapters: some wait for one, some are evicted
        for kind in kinds_of(name)[:2]:
            check(base, llm, [kind], PROMPTS[:1], 4)
        check(base, llm, [*kinds_of(name), None], [*PROMPTS, [7, *INVOCATION, 5, 6]], 5)
        check(base, llm, [None], PROMPTS, 4)
        assert_idle(llm)


def test_the_adapters_change_what_is_generated(zoo: Zoo) -> None:
    """Otherwise the comparisons prove nothing."""
    base = zoo.base("llama")
    for kind in kinds_of("llama"):
        prompt = [*PROMPTS[0], *INVOCATION]
        difference = (base.logprobs(kind, prompt)[-1] - base.logprobs(None, prompt)[-1]).abs().max()
        assert difference > 0.05, kind


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 5, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 14, "max_num_seqs": 3},
        {"num_gpu_blocks_override": 14, "max_num_seqs": 3, "swap_space": 0.01},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        {"pipeline_depth": 1},
        {"enforce_eager": True, "enable_prefix_caching": False},
    ],
    ids=["chunks", "preemption", "swap", "drafts", "overlapped", "eager"],
)
def test_beside_other_features(zoo: Zoo, settings: dict[str, Any]) -> None:
    base = zoo.base("llama")
    with base.llm(max_loras=2, **settings) as llm:
        repeated = [4, 11, 7, 4, 11, 7, 4, 11, 7, 9, 4, 11]
        check(base, llm, ["all", "activated", None, "embeddings", "dora"], [*PROMPTS, repeated], 12)
        assert_idle(llm)


class TestKeys:
    LONG = (*range(20, 36), *range(40, 45))

    def _cached(self, base: Base, llm: LLM, name: str | None, prompt: list[int]) -> int:
        lora = None if name is None else base.loras[name]
        (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy(4), lora_request=lora)
        assert_as_peft(base, name, output)
        return output.num_cached_tokens

    def test_blocks_are_shared_within_an_adapter_and_with_nothing_else(self, zoo: Zoo, llama: LLM) -> None:
        base = zoo.base("llama")
        llama.reset_prefix_cache()
        for name in ("all", None, "wide"):
            assert self._cached(base, llama, name, [*self.LONG]) == 0
        for name in ("all", None, "wide"):
            assert self._cached(base, llama, name, [*self.LONG]) == 20

    def test_blocks_before_an_invocation_are_the_bases(self, zoo: Zoo, llama: LLM) -> None:
        base = zoo.base("llama")
        llama.reset_prefix_cache()
        prompt = [*self.LONG, *INVOCATION, 7, 8, 9]  # the invocation is at 21: five blocks are wholly before it
        assert self._cached(base, llama, None, prompt) == 0
        assert self._cached(base, llama, "activated", prompt) == 20
        assert self._cached(base, llama, "activated", prompt) == 24
        assert self._cached(base, llama, None, prompt) == 24

    def test_an_adapter_that_is_never_invoked_is_the_base(self, zoo: Zoo, llama: LLM) -> None:
        base = zoo.base("llama")
        llama.reset_prefix_cache()
        assert self._cached(base, llama, None, [*self.LONG]) == 0
        assert self._cached(base, llama, "activated", [*self.LONG]) == 20


def test_several_sequences(zoo: Zoo, llama: LLM) -> None:
    base = zoo.base("llama")
    prompts = [{"prompt_token_ids": prompt} for prompt in (PROMPTS[0], PROMPTS[0], PROMPTS[1])]
    names = ["all", None, "dora"]
    loras = [None if name is None else base.loras[name] for name in names]
    sampled = greedy(6, n=3, temperature=0.8, seed=3)
    together = llama.generate(prompts, sampled, lora_request=loras)
    apart = [llama.generate([p], sampled, lora_request=lora)[0] for p, lora in zip(prompts, loras, strict=True)]
    for one, other in zip(together, apart, strict=True):
        assert [s.token_ids for s in one.outputs] == [s.token_ids for s in other.outputs]
    for name, output in zip(names, together, strict=True):
        for sample in output.outputs:
            tokens = [*output.prompt_token_ids, *sample.token_ids]
            expected = base.logprobs(name, tokens)[len(output.prompt_token_ids) - 1 : -1]
            for place, (token, found) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
                assert abs(found[token].logprob - float(expected[place, token])) < 2e-3
    assert_idle(llama)


def test_prompt_logprobs(zoo: Zoo, llama: LLM) -> None:
    base = zoo.base("llama")
    for name in ("saved", "wide"):
        (output,) = llama.generate(
            [{"prompt_token_ids": PROMPTS[1]}], greedy(2, prompt_logprobs=1), lora_request=base.loras[name]
        )
        expected = base.logprobs(name, PROMPTS[1])
        for place, (token, found) in enumerate(zip(PROMPTS[1], output.prompt_logprobs, strict=True)):
            if place:
                assert abs(found[token].logprob - float(expected[place - 1, token])) < 2e-3


class TestRefusals:
    def _error(self, llm: LLM, lora: LoRARequest) -> str:
        try:
            (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], greedy(2), lora_request=lora)
        except QuireError as error:
            return str(error)
        finally:
            assert_idle(llm)
        assert output.outputs[0].finish_reason == "error"
        return str(output.error)

    def test_an_adapter_for_another_model_fails_alone(self, zoo: Zoo, llama: LLM) -> None:
        base, other = zoo.base("llama"), zoo.base("gpt2")
        error = self._error(llama, other.loras["conv1d"])
        assert "conv1d" in error and "c_attn" in error
        check(base, llama, ["all", None], PROMPTS[:1], 3)

    def test_a_norm_that_was_trained_whole(self, zoo: Zoo, llama: LLM) -> None:
        base = zoo.base("llama")
        lora = base.adapter("norm", target_modules=["q_proj"], modules_to_save=["norm"])
        assert "norm.weight (modules_to_save)" in self._error(llama, lora)

    def test_a_rank_above_the_limit(self, zoo: Zoo, llama: LLM) -> None:
        lora = zoo.base("llama").adapter("huge", rank=9, target_modules=["q_proj"])
        assert "max_lora_rank" in self._error(llama, lora)

    def test_files_that_change_after_they_were_registered(self, zoo: Zoo) -> None:
        base = zoo.base("llama")
        with base.llm(max_loras=1, max_cpu_loras=1) as llm:
            lora = base.adapter("changing", target_modules=["q_proj"])
            check(base, llm, ["changing"], PROMPTS[:1], 2)
            base.adapter("changing", target_modules=["k_proj"])
            check(base, llm, ["all"], PROMPTS[:1], 2)  # evicts it from the slot and from host memory
            assert "have changed since" in self._error(llm, lora)


def test_decodes_with_adapters_are_recorded_and_replayed(zoo: Zoo) -> None:
    base = zoo.base("llama")
    with base.llm() as llm:
        path = llm.llm_engine.core._executor._worker._runner.paths[0]
        check(base, llm, ["all", "wide", None], PROMPTS[:1], 6)
        recorded = [shape for shape in path._passes if shape.adapters >= 0]
        if not recorded:
            pytest.skip("no compiler")
        check(base, llm, ["narrow", None, "patterns"], PROMPTS[1:], 6)
        for names in (["all", "wide", None], ["narrow", None, "patterns"], [None, "all", "narrow"]):
            check(base, llm, names, PROMPTS[:1], 6)
        assert any(shape.rows == 3 and shape.adapters == 0 for shape in path._passes)
        check(base, llm, ["dora", "all", None], PROMPTS[1:], 6)
        check(base, llm, [None, None, None], PROMPTS[1:], 6)
        check(base, llm, ["all", None, "embeddings"], PROMPTS[1:], 6)
        assert_idle(llm)
