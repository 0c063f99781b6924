"""An engine that gets a request with the tokens it has draws the ones that an undisturbed engine would have drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.errors import SessionBusyError
from quire.messages.outputs import Finished, Key
from quire.messages.request import NewRequest
from quire.output.tracked import TrackedRequest

PROMPT = "the world one two three"
LENGTH = 24
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "filters": {"temperature": 0.9, "seed": 6, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"temperature": 1.0, "seed": 7, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    "repetition": {"temperature": 0, "repetition_penalty": 1.8},
    "min_tokens": {"temperature": 1.0, "seed": 8, "ignore_eos": False, "min_tokens": 20, "stop_token_ids": [40, 41, 9]},
    "bad words": {"temperature": 1.0, "seed": 9, "bad_words": ["the", "one two"]},
    "allowed tokens": {"temperature": 1.0, "seed": 10, "allowed_token_ids": list(range(20, 60))},
    "three": {"temperature": 1.0, "seed": 11, "n": 3},
}


def run(llm: LLM, request: NewRequest) -> tuple[dict[Key, list[int]], dict[Key, Finished]]:
    """New tokens, and how each sequence ended."""
    core = llm.llm_engine.core
    tokens: dict[Key, list[int]] = {}
    ends: dict[Key, Finished] = {}
    core.add(request)
    while core.has_work:
        outputs = core.step()
        at = 0
        for key, count in zip(outputs.keys, outputs.counts or [1] * len(outputs.keys), strict=True):
            tokens.setdefault(key, []).extend(outputs.tokens[at : at + count])
            at += count
        ends |= {end.key: end for end in outputs.finished}
    return tokens, ends


def make(llm: LLM, params: SamplingParams) -> NewRequest:
    return llm.llm_engine.inputs.make("a", PROMPT, params, 0.0)[0]


def whole(llm: LLM, params: SamplingParams) -> RequestOutput:
    return llm.generate(PROMPT, params, use_tqdm=False)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", [True, False])
def test_a_request_goes_on_from_any_token(llm: LLM, kind: str, cached: bool) -> None:
    params = SamplingParams(**{"ignore_eos": True, "max_tokens": LENGTH, **KINDS[kind]})
    expected = [list(one.token_ids) for one in whole(llm, params).outputs]
    for cut in (1, 2, 15, LENGTH - 1):  # with the prompt, 15 end within a block
        if not cached:
            llm.reset_prefix_cache()
        request = make(llm, params)
        request.drawn = [tokens[:cut] for tokens in expected]
        tokens, ends = run(llm, request)
        for index, right in enumerate(expected):
            assert right[:cut] + tokens.get(("a", index), []) == right
            assert ends["a", index].reason in ("length", "stop")


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_change_nothing(make_llm: Callable[..., LLM], llm: LLM, method: str) -> None:
    drafting = make_llm(speculative_config={"method": method, "num_speculative_tokens": 3, "tune": False})
    for kind in ("greedy", "penalties", "three"):
        params = SamplingParams(**{"ignore_eos": True, "max_tokens": LENGTH, **KINDS[kind]})
        expected = [list(one.token_ids) for one in whole(llm, params).outputs]
        for cut in (1, 15):
            request = make(drafting, params)
            request.drawn = [tokens[:cut] for tokens in expected]
            tokens, _ = run(drafting, request)
            assert [right[:cut] + tokens["a", i] for i, right in enumerate(expected)] == expected


def test_sequences_go_on_from_different_tokens_and_those_that_ended_do_not(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, n=4, ignore_eos=True, max_tokens=LENGTH)
    expected = [list(one.token_ids) for one in whole(llm, params).outputs]
    request = make(llm, params)
    request.drawn = [None, [], expected[2][:7], expected[3][:20]]
    tokens, ends = run(llm, request)
    assert tokens == {("a", 1): expected[1], ("a", 2): expected[2][7:], ("a", 3): expected[3][20:]}
    assert ends.keys() == tokens.keys()


def test_a_sequence_that_has_all_its_tokens_ends_at_once(llm: LLM) -> None:
    """The engine died before it reported the end: no further token is drawn."""
    params = SamplingParams(max_tokens=3, ignore_eos=True, stop_token_ids=[40], n=3)
    request = make(llm, params)
    request.drawn = [[7, 8, 9], [7, 40], [7, 8, 40]]
    tokens, ends = run(llm, request)
    assert not tokens
    assert [(ends["a", i].reason, ends["a", i].stop_reason) for i in range(3)] == [
        ("length", None), ("stop", 40), ("stop", 40),
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [0, 1, 6, 13])
def test_a_grammar_goes_on_within_its_text(llm: LLM, cut: int) -> None:
    form = StructuredOutputsParams(regex=r"\(\d{3}\) \d{3}-\d{4}")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, n=2, structured_outputs=form)
    expected = [list(one.token_ids) for one in whole(llm, params).outputs]
    request = make(llm, params)
    request.drawn = [tokens[:cut] for tokens in expected] if cut else []
    tokens, ends = run(llm, request)
    for index, right in enumerate(expected):
        assert right[:cut] + tokens[("a", index)] == right and ends["a", index].reason == "stop"


def test_prompt_logprobs_are_not_computed_again(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=2, logprobs=2)
    request = make(llm, params)
    tracked = TrackedRequest(request, PROMPT, None)
    assert tracked.continued() is request  # no token yet: the prompt's logprobs may be missing
    tracked.sequences[0].tokens += [7, 8]
    again = tracked.continued()
    assert again.drawn == [[7, 8]] and again.params.prompt_logprobs is None and again.reads_cache
    assert again.params.logprobs == 2 and request.params.prompt_logprobs == 2 and not request.reads_cache


class TestSessions:
    """A turn that goes on appends its whole output to the session, once."""

    @pytest.mark.parametrize("appended", [0, 9, LENGTH])
    def test_a_turn_goes_on(self, llm: LLM, appended: int) -> None:
        """`appended`: what the dead engine had written of the turn's output."""
        params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        expected = whole(llm, params)
        right = list(expected.outputs[0].token_ids)
        keeper = llm.llm_engine.sessions
        keeper.create("s", [*expected.prompt_token_ids, *right[:appended]])
        request = make(llm, params)
        request.session, request.drawn = "s", [right[:9]]
        tokens, _ = run(llm, request)
        assert tokens["a", 0] == right[9:]
        assert keeper.tokens("s") == [*expected.prompt_token_ids, *right]
        keeper.delete("s")

    def test_a_session_that_another_has_changed_is_refused(self, llm: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=LENGTH)
        request = make(llm, params)
        keeper = llm.llm_engine.sessions
        keeper.create("s", [*request.prompt, 50, 51, 52])
        request.session, request.drawn = "s", [[60, 61]]
        with pytest.raises(SessionBusyError):
            llm.llm_engine.core.add(request)
        assert keeper.tokens("s") == [*request.prompt, 50, 51, 52]
        keeper.delete("s")
