"""The engine on a CUDA device: the tokens of transformers, with any batch, chunks or pipeline depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from tests.conftest import TINY_VOCAB
from tests.gpu.near_ties import NearTies, greedy
from tests.gpu.target import DEVICE, ON_A_GPU

pytestmark = ON_A_GPU

PROMPTS = [[(7 * i + 3 * j) % TINY_VOCAB for j in range(5 + 9 * i)] for i in range(8)]
LENGTH = 40
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[list[int]]:
    """Greedy continuations by transformers, one prompt at a time."""
    return greedy(reference, PROMPTS, LENGTH)


def sequences_of(output: RequestOutput) -> list[list[int]]:
    assert output.error is None
    return [list(sample.token_ids) for sample in output.outputs]


def preemptions(llm: LLM) -> int:
    return llm.llm_engine.core.scheduler.stats.preemptions


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 24, "max_num_seqs": 8}, {"num_gpu_blocks_override": 24, "block_size": 8}],
    ids=["plain", "tiny chunks", "preempted"],
)
def test_greedy_tokens_equal_transformers(
    engine: Callable[..., LLM], ties: NearTies, expected: list[list[int]], settings: dict, depth: int
) -> None:
    llm = engine(pipeline_depth=depth, **settings)
    for i, output in enumerate(llm.generate(PROMPTS, GREEDY, use_tqdm=False)):
        ties.compare(PROMPTS[i], output.outputs[0].token_ids, expected[i], f"prompt {i}")
    ties.report("greedy")
    assert (preemptions(llm) > 0) == ("num_gpu_blocks_override" in settings)


# Random streams


@pytest.mark.parametrize(
    "more",
    [{}, {"top_p": 0.95, "top_k": 50}, {"min_p": 0.05}, {"repetition_penalty": 1.3, "frequency_penalty": 0.2}],
    ids=["plain", "top-k and top-p", "min-p", "penalties"],
)
def test_a_seed_draws_the_same_text_on_both_devices(engine: Callable[..., LLM], more: dict[str, float]) -> None:
    params = SamplingParams(temperature=0.9, seed=-11, n=3, max_tokens=24, ignore_eos=True, **more)
    texts = []
    for device in (DEVICE, "cpu"):
        outputs = engine(device=device).generate(PROMPTS[:4], params, use_tqdm=False)
        texts.append([sequences_of(output) for output in outputs])
    assert texts[0] == texts[1]


def test_sequences_are_the_same_forked_queued_or_preempted(engine: Callable[..., LLM]) -> None:
    """A prompt that ends inside a block: each sequence's first own token copies that block."""
    params = SamplingParams(n=6, temperature=1.0, seed=2**64 - 3, max_tokens=24, ignore_eos=True)
    prompt = PROMPTS[2][:21]
    expected = sequences_of(engine().generate([prompt], params, use_tqdm=False)[0])
    assert len({tuple(tokens) for tokens in expected}) == 6
    few_rows, few_blocks = engine(max_num_seqs=2), engine(num_gpu_blocks_override=7)
    for llm in (few_rows, few_blocks):
        assert sequences_of(llm.generate([prompt], params, use_tqdm=False)[0]) == expected
    assert preemptions(few_blocks) > 0


# Shared blocks


def test_cached_prefixes_change_no_token(engine: Callable[..., LLM], ties: NearTies, expected: list[list[int]]) -> None:
    llm = engine(block_size=8)
    prompt, cut = PROMPTS[7], PROMPTS[7][:44]
    for asked, hit in ((prompt, 0), (prompt, len(prompt) // 8 * 8), (cut, 40), (prompt, len(prompt) // 8 * 8)):
        (output,) = llm.generate([asked], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == min(hit, (len(asked) - 1) // 8 * 8)
        if asked is prompt:
            ties.compare(prompt, output.outputs[0].token_ids, expected[7])
    twice = llm.generate([prompt, prompt, prompt], GREEDY, use_tqdm=False)  # in one step
    for output in twice:
        ties.compare(prompt, output.outputs[0].token_ids, expected[7])
    ties.report("cached prefixes")


def test_a_block_is_copied_whole(engine: Callable[..., LLM]) -> None:
    """The copy has all layers of K, V and token ids; the source is unchanged."""
    llm = engine(num_gpu_blocks_override=8)
    kv = llm.llm_engine.core._executor._worker._runner._batch.kv  # type: ignore[attr-defined]
    kv.data.normal_()
    kv.tokens.random_(0, 1000)
    before, tokens = kv.data.clone(), kv.tokens.clone()
    kv.copy([(3, 5), (1, 2)])
    assert kv.data[5].equal(before[3]) and kv.data[2].equal(before[1]) and kv.data[3].equal(before[3])
    assert kv.tokens[5].equal(tokens[3]) and kv.tokens[4].equal(tokens[4]) and kv.data[4].equal(before[4])


# The general sampler


@pytest.mark.parametrize("depth", [0, 1])
def test_penalties_lists_and_logprobs_run_on_the_device(engine: Callable[..., LLM], depth: int) -> None:
    params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=16, min_tokens=8, repetition_penalty=1.2, presence_penalty=0.5,
        logit_bias={5: 2.0}, allowed_token_ids=list(range(2, 90)), logprobs=3, prompt_logprobs=2,
    )  # fmt: skip
    llm = engine(dtype="bfloat16", max_num_batched_tokens=32, max_num_seqs=8, pipeline_depth=depth)
    (output,) = llm.generate([PROMPTS[5]], params, use_tqdm=False)
    assert len(output.prompt_logprobs or []) == len(PROMPTS[5])
    assert all(2 <= token < 90 for token in output.outputs[0].token_ids)
    assert len(output.outputs[0].logprobs or []) == len(output.outputs[0].token_ids) >= 8


def test_logprobs_equal_the_cpus(engine: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=4, prompt_logprobs=2)
    on_gpu, on_cpu = (
        engine(device=device, max_num_batched_tokens=32).generate(PROMPTS[:3], params, use_tqdm=False)
        for device in (DEVICE, "cpu")
    )
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        mine = [*(ours.prompt_logprobs or [])[1:], *(ours.outputs[0].logprobs or [])]
        others = [*(theirs.prompt_logprobs or [])[1:], *(theirs.outputs[0].logprobs or [])]
        for entry, other in zip(mine, others, strict=True):
            assert entry.keys() == other.keys()
            for token, report in entry.items():
                assert report.logprob == pytest.approx(other[token].logprob, abs=1e-3)
