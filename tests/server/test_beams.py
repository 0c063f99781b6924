"""Beam searches over HTTP and from `AsyncLLM`: the sequences that `LLM.beam_search` finds, as choices, best first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams
from quire.errors import ValidationError
from quire.messages.outputs import BeamSearchOutput
from tests.conftest import tiny_tokenizer
from tests.server.conftest import Live

PROMPT = "the world in a word"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def offline(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), dtype="float32", num_gpu_blocks_override=64, device="cpu") as llm:
        yield llm


def generated(output: BeamSearchOutput) -> list[list[int]]:
    return [found.tokens[len(output.prompt_token_ids) :] for found in output.sequences]


@pytest.mark.parametrize("penalty", [None, -1.0, 2.0])
def test_completions(live: Live, offline: LLM, penalty: float | None) -> None:
    fields: dict[str, Any] = {"n": 4, "max_tokens": 9, "use_beam_search": True, "return_token_ids": True, "logprobs": 0}
    if penalty is not None:
        fields["length_penalty"] = penalty
    answer = live.post(TEXT, {"prompt": PROMPT, "temperature": 0, **fields}).json()
    params = BeamSearchParams(beam_width=4, max_tokens=9, length_penalty=1.0 if penalty is None else penalty)
    (expected,) = offline.beam_search(PROMPT, params)
    assert [choice["token_ids"] for choice in answer["choices"]] == generated(expected)
    for choice, found in zip(answer["choices"], expected.sequences, strict=True):
        assert choice["text"] == tiny_tokenizer().decode(choice["token_ids"], skip_special_tokens=True)
        assert choice["finish_reason"] == found.finish_reason
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(
            sum(next(iter(entry.values())).logprob for entry in found.logprobs), abs=1e-4
        )
    assert answer["usage"]["completion_tokens"] == sum(map(len, generated(expected)))


def test_several_prompts_with_echo(live: Live, offline: LLM) -> None:
    prompts = [PROMPT, "a x"]
    answer = live.openai().completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=5, echo=True, extra_body={"use_beam_search": True}
    )
    found = offline.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=5))
    decode = tiny_tokenizer().decode
    texts = [prompt + decode(tokens, skip_special_tokens=True) for prompt, each in zip(prompts, found, strict=True)
             for tokens in generated(each)]  # fmt: skip
    assert [choice.text for choice in answer.choices] == texts


def test_chat(live: Live, offline: LLM) -> None:
    messages = [{"role": "user", "content": "the world"}]
    fields = {"messages": messages, "n": 3, "max_tokens": 6, "use_beam_search": True, "return_token_ids": True}
    answer = live.post(CHAT, fields).json()
    (expected,) = offline.beam_search(
        {"prompt_token_ids": answer["prompt_token_ids"]}, BeamSearchParams(beam_width=3, max_tokens=6)
    )
    assert [choice["token_ids"] for choice in answer["choices"]] == generated(expected)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"stop": ["x"]}, "stop"),
        ({"stream": True}, "stream"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": 0, "echo": True}, "echo"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"n": 0}, None),
        ({"n": 129}, "n"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(live: Live, fields: dict[str, Any], param: str | None) -> None:
    answer = live.post(TEXT, {"prompt": PROMPT, "use_beam_search": True, "max_tokens": 4, **fields})
    assert answer.status_code == 400, answer.text
    assert param is None or answer.json()["error"]["param"] == param


def test_parameters_with_their_default_value_are_accepted(live: Live) -> None:
    neutral = {"top_p": 1, "presence_penalty": 0, "top_k": -1, "stop": [], "temperature": 0.0, "seed": 5}
    assert live.post(TEXT, {"prompt": PROMPT, "use_beam_search": True, **neutral}).status_code == 200


class TestAsyncLLM:
    def test_finds_the_same_sequences_as_the_offline_api(self, live: Live, offline: LLM) -> None:
        params = BeamSearchParams(beam_width=3, max_tokens=7, length_penalty=0.5)
        (expected,) = offline.beam_search(PROMPT, params)
        found = live.run(live.server.llm.beam_search(PROMPT, params))
        assert generated(found) == generated(expected)
        assert found.finished and found.prompt_token_ids == expected.prompt_token_ids

    def test_a_cancelled_search_leaves_nothing_behind(self, live: Live) -> None:
        """The `live` fixture checks that all blocks are freed."""

        async def leave_early() -> None:
            with pytest.raises(asyncio.TimeoutError):
                params = BeamSearchParams(beam_width=8, max_tokens=200, ignore_eos=True)
                await asyncio.wait_for(live.server.llm.beam_search(PROMPT, params), 0.05)

        live.run(leave_early())
        assert live.server.llm.num_open_requests == 0

    def test_other_parameters_are_refused(self, live: Live) -> None:
        with pytest.raises(ValidationError, match="BeamSearchParams"):
            live.run(live.server.llm.beam_search(PROMPT, None))  # type: ignore[arg-type]
