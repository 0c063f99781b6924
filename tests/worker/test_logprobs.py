"""Reported log-probabilities equal transformers', with any chunks, hits or preemptions."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, Logprob, SamplingParams
from quire.errors import ValidationError
from quire.messages.outputs import RequestOutput
from quire.models.llama import LlamaForCausalLM
from quire.worker import logprobs
from tests.conftest import TINY_VOCAB

PROMPT = [5 + (7 * i) % 100 for i in range(45)]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def scores(reference: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab]: row i is the distribution of token i + 1."""
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].double().log_softmax(-1)


def check(report: dict[int, Logprob], token: int, row: torch.Tensor, count: int, llm: LLM) -> None:
    """One position: the token first, then the best `count`, with their values, ranks and texts."""
    assert next(iter(report)) == token
    best = row.argsort(descending=True)[:count].tolist()
    assert set(report) == {token, *best}
    check_values(report, row, llm)


def check_values(report: dict[int, Logprob], row: torch.Tensor, llm: LLM) -> None:
    ranks = row.argsort(descending=True).tolist()
    for entry, logprob in report.items():
        assert math.isclose(logprob.logprob, float(row[entry]), abs_tol=2e-4)
        assert logprob.rank == ranks.index(entry) + 1
        assert logprob.decoded_token == llm.get_tokenizer().decode([entry])


def check_output(output: RequestOutput, reference: Any, count: int, llm: LLM) -> None:
    for sample in output.outputs:
        tokens = list(sample.token_ids)
        rows = scores(reference, output.prompt_token_ids + tokens)[len(output.prompt_token_ids) - 1 :]
        assert sample.logprobs is not None and len(sample.logprobs) == len(tokens)
        for report, token, row in zip(sample.logprobs, tokens, rows, strict=False):
            check(report, token, row, count, llm)
        total = sum(report[token].logprob for report, token in zip(sample.logprobs, tokens, strict=True))
        assert sample.cumulative_logprob == pytest.approx(total)


def check_prompt(output: RequestOutput, reference: Any, count: int, llm: LLM) -> None:
    tokens, reports = output.prompt_token_ids, output.prompt_logprobs
    assert reports is not None and len(reports) == len(tokens)
    assert reports[0] is None
    rows = scores(reference, tokens)
    for position in range(1, len(tokens)):
        report = reports[position]
        assert report is not None
        check(report, tokens[position], rows[position - 1], count, llm)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_of_drawn_tokens(llm: LLM, reference: Any, count: int, temperature: float) -> None:
    """Raw log-probabilities: without temperature, penalties and biases."""
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=12, ignore_eos=True, logprobs=count, presence_penalty=1.0,
        logit_bias={50: 3.0}, top_k=30,
    )  # fmt: skip
    for output in llm.generate([PROMPT, [9]], params, use_tqdm=False):
        check_output(output, reference, count, llm)


@pytest.mark.parametrize("spec", [None, {"method": "ngram", "num_speculative_tokens": 3}], ids=["plain", "drafts"])
def test_logprobs_of_requested_tokens(make_llm: Any, reference: Any, spec: dict[str, Any] | None) -> None:
    """Rows that ask for different ids, for the likeliest and for none share steps."""
    llm = make_llm(speculative_config=spec)
    lists = [[3, 90, 41], [7], None, [3, 90, 41], list(range(60))]
    asked = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=8, ignore_eos=True, logprob_token_ids=ids, top_k=30)
        for i, ids in enumerate(lists)
    ]
    asked.append(SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=4))
    outputs = llm.generate([PROMPT[i:20] for i in range(len(asked))], asked, use_tqdm=False)
    check_output(outputs.pop(), reference, 4, llm)
    for output, ids in zip(outputs, lists, strict=True):
        (sample,) = output.outputs
        if ids is None:
            assert sample.logprobs is None
            continue
        assert sample.logprobs is not None and len(sample.logprobs) == 8
        whole = output.prompt_token_ids + list(sample.token_ids)
        rows = scores(reference, whole)[len(output.prompt_token_ids) - 1 :]
        for report, token, row in zip(sample.logprobs, sample.token_ids, rows[:8], strict=True):
            assert list(report) == [token, *(other for other in ids if other != token)]
            check_values(report, row, llm)


def test_impossible_logprob_token_ids(llm: LLM) -> None:
    for ids, more in (([1, 1], {}), (list(range(129)), {}), ([-1], {}), ("12", {})):
        with pytest.raises(ValidationError, match="logprob"):
            SamplingParams(logprob_token_ids=ids, **more)
    with pytest.raises(ValidationError, match="outside the vocabulary"):
        llm.generate(["a"], SamplingParams(logprob_token_ids=[TINY_VOCAB]), use_tqdm=False)


def test_the_whole_vocabulary(make_llm: Any, reference: Any) -> None:
    llm = make_llm(max_logprobs=-1)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    (output,) = llm.generate([PROMPT[:5]], params, use_tqdm=False)
    assert all(len(report) == TINY_VOCAB for report in output.outputs[0].logprobs or [])
    check_output(output, reference, TINY_VOCAB, llm)
    check_prompt(output, reference, TINY_VOCAB, llm)


@pytest.mark.parametrize("budget", [7, 16, 2048])
@pytest.mark.parametrize("depth", [0, 1])
def test_prompt_logprobs_in_chunks(make_llm: Any, reference: Any, budget: int, depth: int) -> None:
    llm = make_llm(max_num_batched_tokens=budget, pipeline_depth=depth)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=3, logprobs=2)
    prompts = [PROMPT, [9], PROMPT[:17], PROMPT[10:40]]
    for output in llm.generate(prompts, params, use_tqdm=False):
        check_prompt(output, reference, 3, llm)
        check_output(output, reference, 2, llm)


def test_prompt_logprobs_do_not_read_the_prefix_cache_but_fill_it(llm: LLM, reference: Any) -> None:
    plain = SamplingParams(temperature=0, max_tokens=2)
    llm.generate([PROMPT], plain, use_tqdm=False)
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2), use_tqdm=False)
    assert output.num_cached_tokens == 0
    check_prompt(output, reference, 2, llm)
    llm.reset_prefix_cache()
    llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2), use_tqdm=False)
    assert llm.generate([PROMPT], plain, use_tqdm=False)[0].num_cached_tokens == 32


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_preempted_requests_report_every_token_once(
    make_llm: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, depth: int, caching: bool
) -> None:
    rows: list[int] = []
    head = LlamaForCausalLM.logits
    monkeypatch.setattr(LlamaForCausalLM, "logits", lambda model, x: rows.append(len(x)) or head(model, x))
    llm = make_llm(
        num_gpu_blocks_override=9, block_size=8, pipeline_depth=depth, enable_prefix_caching=caching,
        max_num_batched_tokens=16,
    )  # fmt: skip
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    outputs = llm.generate([PROMPT[i : i + 12] for i in range(6)], params, use_tqdm=False)
    assert llm.llm_engine.core.scheduler.stats.preemptions > 0
    assert any(output.metrics.preemptions for output in outputs)
    assert min(rows) > 0, "output that is computed again is not reported again"
    for output in outputs:
        check_output(output, reference, 2, llm)
        check_prompt(output, reference, 2, llm)


def test_every_sequence_of_a_prompt_has_its_own_logprobs(llm: LLM, reference: Any) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=8, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    check_output(output, reference, 3, llm)
    check_prompt(output, reference, 1, llm)


def test_requests_without_logprobs_report_none(llm: LLM) -> None:
    asks, does_not = SamplingParams(max_tokens=3, logprobs=0), SamplingParams(max_tokens=3)
    first, second = llm.generate(["abc", "abc"], [asks, does_not], use_tqdm=False)
    assert first.outputs[0].logprobs and first.prompt_logprobs is None
    assert second.outputs[0].logprobs is None and second.outputs[0].cumulative_logprob is None


def test_penalties_in_the_engine_equal_a_loop(llm: LLM, reference: Any) -> None:
    """Greedy with all three penalties, the reference chosen token by token."""
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=1.4, presence_penalty=0.9,
        frequency_penalty=0.6,
    )  # fmt: skip
    for prompt in (PROMPT[:20], [9, 9, 9, 10]):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        drawn: list[int] = []
        for token in output.outputs[0].token_ids:
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + drawn])).logits[0, -1].double().clone()
            for seen in set(prompt + drawn):
                logits[seen] = logits[seen] / 1.4 if logits[seen] > 0 else logits[seen] * 1.4
            for seen in set(drawn):
                logits[seen] -= 0.9 + 0.6 * drawn.count(seen)
            assert token == int(logits.argmax())
            drawn.append(token)


@pytest.mark.parametrize("rows, narrow", [(1, 1024), (1, 1), (128, 1024)])
def test_requests_with_different_logprob_counts_share_a_step(
    llm: LLM, reference: Any, monkeypatch: pytest.MonkeyPatch, rows: int, narrow: int
) -> None:
    monkeypatch.setattr(logprobs, "LOGPROB_ROWS", rows)
    monkeypatch.setattr(logprobs, "COPIED_AT_ONCE", narrow)
    counts = [0, 5, None, 2, 5, None, 0, 1]
    asked = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=6, ignore_eos=True, logprobs=c) for i, c in enumerate(counts)
    ]
    outputs = llm.generate([PROMPT[i:20] for i in range(len(counts))], asked, use_tqdm=False)
    for output, count in zip(outputs, counts, strict=True):
        if count is None:
            assert output.outputs[0].logprobs is None
        else:
            check_output(output, reference, count, llm)


def test_an_output_consists_of_dataclasses(llm: LLM) -> None:
    (output,) = llm.generate([[9]], SamplingParams(max_tokens=2, logprobs=1, temperature=0), use_tqdm=False)
    (sample,) = dataclasses.asdict(output)["outputs"]
    token, report = next(iter((output.outputs[0].logprobs or [])[0].items()))
    said = {"logprob": report.logprob, "rank": 1, "decoded_token": report.decoded_token}
    assert sample["logprobs"][0][token] == said
    assert dataclasses.replace(report, rank=7) == Logprob(report.logprob, 7, report.decoded_token)
