"""Other clients than the official one of OpenAI, as their documentation shows them: chat, streams, tool loops with the
objects that they return, errors. A client that is not installed is skipped; the larger ones run with `slow`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import Live
from tests.server.scripted import ANSWER, Script, call

ASK = "How is the weather in Paris?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}


def weather(prompt: str) -> str:
    """A call first, then an answer."""
    return ANSWER if "[tool]" in prompt else call("weather", city="Paris")


class TestAnthropic:
    @pytest.fixture
    def client(self, scripted: Live) -> Any:
        anthropic = pytest.importorskip("anthropic")
        return anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)

    TOOLS = ({"name": "weather", "description": "The weather of a city.", "input_schema": PARAMETERS},)

    def test_a_tool_loop_with_the_returned_blocks(self, client: Any, script: Script) -> None:
        script.answer = weather
        messages: list[Any] = [{"role": "user", "content": ASK}]
        fields: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "tools": list(self.TOOLS)}
        made = client.messages.create(messages=messages, **fields)
        (use,) = made.content
        assert (made.stop_reason, use.name, use.input) == ("tool_use", "weather", {"city": "Paris"})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        messages += [{"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
        final = client.messages.create(messages=messages, **fields)
        assert (final.content[0].text, final.stop_reason) == (ANSWER, "end_turn")
        assert "sunny" in script.prompts[-1]

    def test_the_helper_for_streams(self, client: Any, script: Script) -> None:
        script.answer = weather
        fields: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": ASK}]}
        with client.messages.stream(tools=list(self.TOOLS), **fields) as stream:
            message = stream.get_final_message()
        assert message.content[0].input == {"city": "Paris"} and message.usage.output_tokens > 0
        script.answer = lambda prompt: ANSWER
        with client.messages.stream(**fields, thinking={"type": "enabled", "budget_tokens": 50}) as stream:
            assert "".join(stream.text_stream) == ANSWER

    def test_counting_and_errors(self, client: Any) -> None:
        import anthropic

        messages: list[Any] = [{"role": "user", "content": ASK}]
        assert client.messages.count_tokens(model="tiny", messages=messages).input_tokens > 10
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="other", max_tokens=9, messages=messages)
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(model="tiny", max_tokens=9, messages=messages, extra_body={"temperature": -1})

    def test_what_was_ignored_can_be_read(self, client: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": ASK}]
        raw = client.messages.with_raw_response.create(
            model="tiny", max_tokens=9, messages=messages, extra_body={"colour": "red"}
        )
        assert raw.headers["x-quire-ignored"] == "colour" and raw.parse().content[0].text == ANSWER


@pytest.mark.slow
class TestLiteLLM:
    @pytest.fixture
    def fields(self, scripted: Live) -> dict[str, Any]:
        pytest.importorskip("litellm")
        return {"model": "hosted_vllm/tiny", "api_base": f"{scripted.url}/v1", "api_key": "none"}

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    def test_three_turns_with_the_returned_messages(self, fields: Any, script: Script, provider: str) -> None:
        import litellm

        script.answer = weather
        fields = {**fields, "model": f"{provider}/tiny", "tools": [{"type": "function", "function": FUNCTION}]}
        messages: list[Any] = [{"role": "user", "content": ASK}]
        made = litellm.completion(messages=messages, **fields).choices[0].message
        (use,) = made.tool_calls
        assert json.loads(use.function.arguments) == {"city": "Paris"}
        messages += [made, {"role": "tool", "tool_call_id": use.id, "content": "sunny"}]
        answer = litellm.completion(messages=messages, **fields).choices[0].message
        assert answer.content == ANSWER
        messages += [answer.model_dump(), {"role": "user", "content": "Thanks."}]
        assert litellm.completion(messages=messages, **fields).choices[0].message.content == ANSWER

    def test_a_stream(self, fields: Any) -> None:
        import litellm

        chunks = list(litellm.completion(messages=[{"role": "user", "content": ASK}], stream=True, **fields))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER

    def test_cache_control_and_unknown_fields(self, fields: Any) -> None:
        import litellm

        part = {"type": "text", "text": ASK, "cache_control": {"type": "ephemeral"}}
        made = litellm.completion(messages=[{"role": "user", "content": [part]}], extra_body={"colour": 1}, **fields)
        assert made.choices[0].message.content == ANSWER
