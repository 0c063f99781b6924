"""Common clients and frameworks with the default model: sensible text, logprobs, tools, structured outputs."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
import torch
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from quire.loading.hub import DEFAULT_MODEL, resolve
from tests.engine.reference import transformers_model
from tests.server.clients import CHAT, RESPONSES, TEXT, AsyncClient, SyncClient, assembled, text_of
from tests.server.conftest import Live

pytestmark = pytest.mark.timeout(900)

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


class TestOfficialClient:
    def test_chat(self, real: Live) -> None:
        fields: dict[str, Any] = {"messages": FRANCE, "temperature": 0, "max_tokens": 16}
        answers = []
        for client in (SyncClient(real), AsyncClient(real)):
            (choice,) = client.call(CHAT, **fields).choices
            (streamed,) = assembled(client.stream(CHAT, **fields)).choices
            answers += [choice.message.content, streamed.message.content]
            assert choice.finish_reason == streamed.finish_reason == "stop"
        assert "Paris" in answers[0] and len(set(answers)) == 1

    def test_completions_and_responses(self, real: Live) -> None:
        client = SyncClient(real)
        prompt = "The capital of France is"
        whole = client.call(TEXT, prompt=prompt, temperature=0, max_tokens=4).choices[0].text
        assert "Paris" in whole
        assert text_of(client.stream(TEXT, prompt=prompt, temperature=0, max_tokens=4)) == whole
        fields: dict[str, Any] = {"input": FRANCE[0]["content"], "temperature": 0, "max_output_tokens": 16}
        answer = client.call(RESPONSES, **fields)
        assert "Paris" in answer.output_text
        assert client.stream(RESPONSES, **fields)[-1].response.output_text == answer.output_text

    def test_structured_output(self, real: Live) -> None:
        class City(BaseModel):
            name: Literal["Paris", "London", "Rome"]
            country: str = Field(max_length=12)

        answer = real.openai().chat.completions.parse(
            model=DEFAULT_MODEL, messages=FRANCE, response_format=City, temperature=0, max_tokens=48
        )
        city = answer.choices[0].message.parsed
        assert city is not None and city.country == "France"


def test_likelihoods_are_those_of_transformers(real: Live) -> None:
    """How eval harnesses rank answers: each is scored after the question, with echo and logprobs."""
    question, answers = "The capital of France is", [" Paris", " a small fish", " London", " very green"]
    encode = real.server.tokenizer.encode
    context = encode(question)
    wholes = [context + encode(answer) for answer in answers]
    choices = real.openai().completions.create(
        model=DEFAULT_MODEL, prompt=wholes, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    scored = [sum(choice.logprobs.token_logprobs[len(context) : -1]) for choice in choices.choices]  # type: ignore
    model = transformers_model(resolve(DEFAULT_MODEL, progress=False).path)
    for tokens, likelihood in zip(wholes, scored, strict=True):
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
        wanted = sum(float(rows[i - 1, tokens[i]]) for i in range(len(context), len(tokens)))
        assert likelihood == pytest.approx(wanted, abs=2e-2)
    assert scored.index(max(scored)) == 0


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}, with 21 degrees."


class TestLangChain:
    ASKED = HumanMessage("How is the weather in Paris today?")

    def model(self, real: Live, **settings: Any) -> ChatOpenAI:
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "max_retries": 0, **settings}
        return ChatOpenAI(model=DEFAULT_MODEL, base_url=f"{real.url}/v1", api_key="none", **fields)  # type: ignore[arg-type]

    def test_a_tool_call_round_trip(self, real: Live) -> None:
        for choice in ("required", "get_weather"):
            model_with_tools = self.model(real).bind_tools([get_weather], tool_choice=choice)
            called = model_with_tools.invoke([self.ASKED])
            assert isinstance(called, AIMessage)
            (call,) = called.tool_calls
            assert call["name"] == "get_weather" and set(call["args"]) == {"city"} and call["id"]
        result = get_weather.invoke(call)
        assert isinstance(result, ToolMessage) and result.tool_call_id == call["id"]
        final = self.model(real).bind_tools([get_weather], tool_choice="none").invoke([self.ASKED, called, result])
        assert final.text and not final.tool_calls  # type: ignore[attr-defined]
        assert "sun" in final.text.lower()
        assert final.usage_metadata["input_tokens"] > 0  # type: ignore[attr-defined, index]

    def test_a_streamed_call_is_the_same(self, real: Live) -> None:
        model_with_tools = self.model(real, stream_usage=True).bind_tools([get_weather], tool_choice="required")
        whole = model_with_tools.invoke([self.ASKED])

        async def streamed() -> AIMessageChunk:
            total: Any = None
            async for chunk in model_with_tools.astream([self.ASKED]):
                total = chunk if total is None else total + chunk
            return total  # type: ignore[no-any-return]

        pieces = asyncio.run(streamed())
        assert isinstance(whole, AIMessage)
        assert [(call["name"], call["args"]) for call in pieces.tool_calls] == [
            (call["name"], call["args"]) for call in whole.tool_calls
        ]
        assert pieces.usage_metadata is not None and pieces.usage_metadata["output_tokens"] > 0


class TestAnthropicShape:
    def test_a_tool_call_round_trip(self, real: Live) -> None:
        asked = {"role": "user", "content": "How is the weather in Paris today?"}
        base = {"model": DEFAULT_MODEL, "max_tokens": 40, "temperature": 0, "tools": [WEATHER]}
        headers = {"x-api-key": "none", "anthropic-version": "2023-06-01"}
        body = {**base, "messages": [asked], "tool_choice": {"type": "tool", "name": "get_weather"}}
        called = real.post("/v1/messages", body, headers=headers).json()
        assert (called["type"], called["role"], called["stop_reason"]) == ("message", "assistant", "tool_use")
        (use,) = called["content"]
        assert use["type"] == "tool_use" and set(use["input"]) == {"city"}
        assert self.streamed_input(real, body) == use["input"]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "It is sunny, with 21 degrees."}
        messages = [asked, {"role": "assistant", "content": called["content"]}, {"role": "user", "content": [result]}]
        final = real.post("/v1/messages", {**base, "messages": messages, "tool_choice": {"type": "none"}}).json()
        (text,) = final["content"]
        assert text["type"] == "text" and "sun" in text["text"].lower()
        assert final["usage"]["output_tokens"] > 0

    def streamed_input(self, real: Live, body: dict[str, Any]) -> Any:
        """The call's arguments, from a stream of events."""
        with real.client.stream("POST", "/v1/messages", json={**body, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        names = [line.removeprefix("event: ") for line in lines[::2]]
        events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
        assert names == [event["type"] for event in events]
        assert (names[0], names[-1]) == ("message_start", "message_stop")
        pieces = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
        return json.loads("".join(pieces))
