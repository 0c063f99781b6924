"""`LLM.beam_search`: what comes out, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import quire
from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import ValidationError
from tests.conftest import TINY_VOCAB, assert_idle

PROMPT = [5, 6, 7, 8, 9]


def test_the_best_sequences_of_each_prompt_in_order(llm: LLM) -> None:
    prompts: list[Any] = ["the world", PROMPT, {"prompt": "a word"}, {"prompt_token_ids": [9]}]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6))
    assert [output.prompt_token_ids for output in outputs[1::2]] == [PROMPT, [9]]
    tokenizer = llm.get_tokenizer()
    for output in outputs:
        assert type(output) is quire.BeamSearchOutput and output.finished and output.finish_reason == "stop"
        scores = [sequence.score for sequence in output.sequences]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True)
        for sequence in output.sequences:
            assert type(sequence) is quire.BeamSearchSequence
            assert sequence.tokens[: len(output.prompt_token_ids)] == output.prompt_token_ids
            assert sequence.text == tokenizer.decode(sequence.tokens)
            assert sequence.finish_reason in ("stop", "length")
        assert len({tuple(sequence.tokens) for sequence in output.sequences}) == 3
        assert output.metrics is not None and output.metrics.num_generation_tokens > 0


def test_the_end_token_is_shown_only_on_request(llm: LLM) -> None:
    (greedy,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    end = greedy.outputs[0].token_ids[2]
    for include in (False, True):
        params = BeamSearchParams(
            4, 8, ignore_eos=True, stop_token_ids=[end], include_stop_str_in_output=include, length_penalty=0.0
        )
        (output,) = llm.beam_search(PROMPT, params)
        ended = [sequence for sequence in output.sequences if sequence.finish_reason == "stop"]
        assert ended and all(sequence.stop_reason == end for sequence in ended)
        for sequence in ended:
            generated = sequence.tokens[len(PROMPT) :]
            assert (generated[-1:] == [end]) == include and end not in generated[:-1]
            assert [next(iter(entry)) for entry in sequence.logprobs] == generated


def test_one_beam_is_greedy(llm: LLM) -> None:
    (output,) = llm.beam_search(PROMPT, BeamSearchParams(1, 9, ignore_eos=True))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)
    (greedy,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert output.sequences[0].tokens[len(PROMPT) :] == greedy.outputs[0].token_ids
    assert output.sequences[0].cum_logprob == pytest.approx(greedy.outputs[0].cumulative_logprob, abs=1e-4)
    assert output.sequences[0].score == pytest.approx(output.sequences[0].cum_logprob / 9)


def test_the_concurrency_limit_does_not_change_results(llm: LLM) -> None:
    prompts, params = [[5 + i, 6, 7] for i in range(5)], BeamSearchParams(2, 5)
    together = llm.beam_search(prompts, params)
    most, step = 0, llm.llm_engine.step

    def watched() -> Any:
        nonlocal most
        most = max(most, llm.llm_engine.get_num_unfinished_requests())
        return step()

    llm.llm_engine.step = watched  # type: ignore[method-assign]
    try:
        apart = llm.beam_search(prompts, params, concurrency_limit=2, use_tqdm=True)
    finally:
        del llm.llm_engine.step
    assert most == 2
    assert [[s.tokens for s in output.sequences] for output in apart] == [
        [s.tokens for s in output.sequences] for output in together
    ]
    assert llm.beam_search([], params) == []


def test_a_prompt_that_is_cached_is_not_computed_again(llm: LLM) -> None:
    prompt = [5 + i % 60 for i in range(70)]
    first, again = (llm.beam_search(prompt, BeamSearchParams(3, 4))[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 64)
    assert [s.tokens for s in first.sequences] == [s.tokens for s in again.sequences]


def test_an_interrupted_search_leaves_nothing_behind(llm: LLM) -> None:
    step, steps = llm.llm_engine.step, 0

    def interrupted() -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return step()

    llm.llm_engine.step = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.beam_search([PROMPT, [9, 9]], BeamSearchParams(4, 30, ignore_eos=True))
    finally:
        del llm.llm_engine.step
    assert_idle(llm)


def test_logits_that_are_not_numbers_end_the_search_alone(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    worker = llm.llm_engine.core._executor._worker  # type: ignore[attr-defined]
    worker.model.model.embed_tokens.weight[3] = float("nan")
    bad, good = llm.beam_search([[5, 3], PROMPT], BeamSearchParams(3, 1))
    assert bad.finish_reason == "error" and bad.error is not None and "not numbers" in bad.error
    assert bad.sequences == []
    assert len(good.sequences) == 3 and good.error is None


@pytest.mark.parametrize(
    "given, names",
    [
        ({"beam_width": 0}, "beam_width must be an integer from 1 to 1024, got 0"),
        ({"beam_width": 2000}, "2000"),
        ({"beam_width": 2.5}, "2.5"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 0.7}, "temperature must be 0 in a beam search, got 0.7"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 1000.0}, "1000"),
        ({"early_stopping": "always"}, "always"),
        ({"early_stopping": None}, "None"),
        ({"stop_token_ids": [-1]}, "-1"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
    ],
)
def test_invalid_parameters(given: dict[str, Any], names: str) -> None:
    with pytest.raises(ValidationError, match=names):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | given))


def test_refusals_leave_nothing_behind(llm: LLM) -> None:
    params = BeamSearchParams(2, 4)
    with pytest.raises(ValidationError, match="empty"):
        llm.beam_search([PROMPT, []], params)
    with pytest.raises(ValidationError, match="must be BeamSearchParams, got SamplingParams"):
        llm.beam_search(PROMPT, SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="concurrency_limit.*got 0"):
        llm.beam_search(PROMPT, params, concurrency_limit=0)
    with pytest.raises(ValidationError, match=f"{TINY_VOCAB}, outside the vocabulary"):
        llm.beam_search(PROMPT, BeamSearchParams(2, 4, stop_token_ids=[TINY_VOCAB]))
    params.beam_width = 0
    with pytest.raises(ValidationError, match="beam_width"):
        llm.beam_search(PROMPT, params)


def test_more_beams_than_tokens_to_choose_from(llm: LLM) -> None:
    (output,) = llm.beam_search(PROMPT, BeamSearchParams(2 * TINY_VOCAB, 2, ignore_eos=True))
    assert len(output.sequences) == 2 * TINY_VOCAB
    (output,) = llm.beam_search(PROMPT, BeamSearchParams(2 * TINY_VOCAB, 1, ignore_eos=True))
    assert len(output.sequences) == TINY_VOCAB, "there are no more"
