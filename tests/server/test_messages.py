"""/v1/messages: Anthropic's requests, responses, events and errors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from quire.output.parsers.deltas import CallArguments, CallEnd, CallStart, Content, Reasoning
from quire.server.dialects.messages_chat import as_chat
from quire.server.dialects.messages_writer import MessageWriter
from quire.server.errors import ApiError
from quire.server.http import named_event
from quire.server.protocol.common import PromptTokensDetails, Usage
from quire.server.protocol.conversation import NamedTool
from quire.server.protocol.fields import FieldReader
from quire.server.protocol.messages import AnthropicEvent, MessagesRequest
from tests.server.conftest import MODEL, Live
from tests.server.test_responses import some_deltas

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 20}
USAGE = Usage(10, 15, 5, PromptTokensDetails(4))
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
HIDDEN = {"type": "redacted_thinking", "data": "?"}


def request(**fields: Any) -> MessagesRequest:
    body = {"messages": HELLO, "max_tokens": 9, **fields}
    given = json.dumps({name: value for name, value in body.items() if value != ...})
    return FieldReader().decode(given.encode(), MessagesRequest)


def messages(given: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return [message.as_dict() for message in as_chat(request(messages=given, **fields), FieldReader()).messages]


class TestInput:
    def test_the_system_prompt_comes_first(self) -> None:
        expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
        assert messages(HELLO, system="Be brief.") == expected
        blocks = [
            {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "it"},
        ]
        assert messages(HELLO, system=blocks)[0] == {"role": "system", "content": "Be\n\nit"}

    def test_tool_calls_and_their_results(self) -> None:
        conversation = [
            {"role": "user", "content": [{"type": "text", "text": "2+3?"}, {"type": "text", "text": "Now."}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, HIDDEN,
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2}},
                {"type": "tool_use", "id": "toolu_2", "name": "add", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "5"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True,
                 "content": [{"type": "text", "text": "no"}]},
                {"type": "text", "text": "And?"}]},
        ]  # fmt: skip
        assert messages(conversation) == [
            {"role": "user", "content": "2+3?\nNow."},
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning": "hm",
                "tool_calls": [
                    {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}},
                    {"id": "toolu_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "content": "5", "tool_call_id": "toolu_1"},
            {"role": "tool", "content": "Error: no", "tool_call_id": "toolu_2"},
            {"role": "user", "content": "And?"},
        ]

    def test_a_prefilled_answer_is_continued(self) -> None:
        chat = as_chat(request(messages=[*HELLO, {"role": "assistant", "content": "And so"}]), FieldReader())
        assert chat.continue_final_message and chat.messages[-1].content == "And so"
        assert not as_chat(request(), FieldReader()).continue_final_message

    def test_options_are_passed_on(self) -> None:
        chat = as_chat(
            request(
                stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=3, stream=True, tools=[TOOL],
                tool_choice={"type": "any", "disable_parallel_tool_use": True}, metadata={"user_id": "u"},
                thinking={"type": "disabled"}, output_config={"effort": "low"},
            ),
            FieldReader(),
        )  # fmt: skip
        assert (chat.max_tokens, chat.stop, chat.temperature, chat.top_p, chat.top_k) == (9, ["x"], 0.5, 0.9, 3)
        assert (chat.stream, chat.tool_choice, chat.parallel_tool_calls) == (True, "required", False)
        assert (chat.chat_template_kwargs, chat.reasoning_effort) == ({"enable_thinking": False}, "low")
        assert chat.tools is not None and chat.tools[0].function.name == "add"
        chat.check_fields()

    @pytest.mark.parametrize(("given", "expected"), [("auto", "auto"), ("any", "required"), ("none", "none")])
    def test_tool_choices(self, given: str, expected: str) -> None:
        assert as_chat(request(tools=[TOOL], tool_choice={"type": given}), FieldReader()).tool_choice == expected
        named = as_chat(request(tools=[TOOL], tool_choice={"type": "tool", "name": "add"}), FieldReader()).tool_choice
        assert isinstance(named, NamedTool) and named.function.name == "add"

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"max_tokens": ...}, "max_tokens is missing"),
            ({"max_tokens": 0}, "at least 1"),
            ({"messages": []}, "messages is empty"),
            ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
            ({"messages": [{"role": "user", "content": []}]}, "is empty"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
            ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
            ({"messages": [{"role": "user", "content": [{}]}]}, "None"),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text is missing"),
            ({"messages": [{"role": "user", "content": [
                {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "only an assistant message"),
            ({"messages": [{"role": "assistant", "content": [
                {"type": "tool_result", "tool_use_id": "1"}]}]}, "only a user message"),
            ({"messages": [{"role": "assistant", "content": [
                {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "tool_result must follow"),
            ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [
                {"type": "image"}]}]}]}, "image"),
            ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "budget_tokens"),
            ({"tool_choice": {"type": "tool"}}, "needs a name"),
            ({"tools": [{"input_schema": {}}]}, r"tools\[0\].name is missing"),
            ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
            ({"n": 2}, "n is not supported"),
            ({"stop": ["x"]}, "use stop_sequences"),
        ],
    )  # fmt: skip
    def test_unsupported_fields_are_refused(self, fields: dict[str, Any], says: str) -> None:
        with pytest.raises(ApiError, match=says) as caught:
            as_chat(request(**fields), FieldReader())
        assert caught.value.status == 400


def decode_events(events: list[AnthropicEvent]) -> list[dict[str, Any]]:
    """Events as they are sent."""
    return read_events(b"".join(named_event(event.kind, event) for event in events).decode())


def read_events(text: str) -> list[dict[str, Any]]:
    """Every event; each event's name must be its type."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, by Anthropic's rules for assembling one."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    is_open = False
    for event in events[2:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            is_open, partial = True, ""
            message["content"].append(event["content_block"])
            continue
        assert is_open and event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if kind == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(partial or "{}")
            continue
        assert kind == "content_block_delta"
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            partial += delta["partial_json"]
        else:
            name = delta["type"].removesuffix("_delta")
            block[name] += delta[name]
    assert not is_open
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


class TestEvents:
    def test_events_add_up_to_the_message(self) -> None:
        rng = random.Random(3)
        for _ in range(100):
            deltas, reason = some_deltas(rng), rng.choice(["stop", "length", "tool_calls"])
            writer = MessageWriter("msg_1", "tiny")
            events = writer.start(USAGE)
            while deltas:
                count = rng.randrange(1, 4)
                events += writer.write(deltas[:count])
                deltas = deltas[count:]
            events += writer.finish(reason, None, USAGE)
            whole = json.loads(named_event("", writer.message).split(b"data: ")[1])
            assert assembled(decode_events(events)) == whole

    @pytest.mark.parametrize(
        ("reason", "stop", "expected", "sequence"),
        [
            ("stop", None, "end_turn", None),
            ("stop", 7, "end_turn", None),
            ("stop", "END", "stop_sequence", "END"),
            ("length", None, "max_tokens", None),
        ],
    )
    def test_stop_reasons(self, reason: str, stop: Any, expected: str, sequence: str | None) -> None:
        writer = MessageWriter("msg_1", "tiny")
        writer.write([Content("x")])
        writer.finish(reason, stop, USAGE)
        assert (writer.message.stop_reason, writer.message.stop_sequence) == (expected, sequence)

    def test_tool_calls_are_a_stop_reason(self) -> None:
        writer = MessageWriter("msg_1", "tiny")
        writer.write([Reasoning("hm"), CallStart(0, "call_ab", "add"), CallArguments(0, '{"a": 1}'), CallEnd(0, True)])
        writer.finish("tool_calls", None, USAGE)
        assert writer.message.stop_reason == "tool_use"
        content = json.loads(named_event("", writer.message).split(b"data: ")[1])["content"]
        assert content == [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "toolu_ab", "name": "add", "input": {"a": 1}},
        ]

    def test_a_truncated_call_is_not_returned_as_a_call(self) -> None:
        writer = MessageWriter("msg_1", "tiny")
        writer.write([Content("x"), CallStart(0, "call_1", "add"), CallArguments(0, '{"a": '), CallEnd(0, False)])
        writer.finish("length", None, USAGE)
        assert len(writer.message.content) == 1 and writer.message.stop_reason == "max_tokens"

    def test_cached_tokens_are_counted_separately(self) -> None:
        writer = MessageWriter("msg_1", "tiny")
        writer.finish("stop", None, USAGE)
        usage = writer.message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 4, 5)


def stream(live: Live, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = live.post(PATH, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return read_events(answer.text)


def text_of(message: dict[str, Any]) -> str:
    return "".join(block.get("text", "") for block in message["content"])


class TestLive:
    def test_the_text_matches_chat_completions(self, live: Live) -> None:
        answer = live.post(PATH, GREEDY).json()
        chat = live.post("/v1/chat/completions", {**GREEDY}).json()
        assert text_of(answer) == chat["choices"][0]["message"]["content"]
        assert answer["type"] == "message" and answer["role"] == "assistant" and answer["model"] == MODEL
        assert answer["id"].startswith("msg_")
        usage = answer["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
        assert usage["output_tokens"] == chat["usage"]["completion_tokens"]

    def test_a_stream_adds_up_to_the_message(self, live: Live) -> None:
        whole = live.post(PATH, GREEDY).json()
        streamed = assembled(stream(live, GREEDY))
        for name in ("content", "stop_reason", "stop_sequence", "role", "model", "type"):
            assert streamed[name] == whole[name]

    def test_blocks_of_text_have_no_null_fields(self, live: Live) -> None:
        """The AI SDK refuses `citations: null`."""
        (block,) = live.post(PATH, GREEDY).json()["content"]
        assert block.keys() == {"type", "text"}

    def test_a_prefilled_answer_is_continued(self, live: Live) -> None:
        begun = [*HELLO, {"role": "assistant", "content": "And so"}]
        answer = live.post(PATH, {**GREEDY, "messages": begun}).json()
        body = {**GREEDY, "messages": begun, "continue_final_message": True, "add_generation_prompt": False}
        assert text_of(answer) == live.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]

    def test_stop_sequences(self, live: Live) -> None:
        text = text_of(live.post(PATH, GREEDY).json())
        answer = live.post(PATH, {**GREEDY, "stop_sequences": [text[3:6]]}).json()
        assert answer["stop_reason"] == "stop_sequence" and answer["stop_sequence"] == text[3:6]
        assert text_of(answer) == text[: text.index(text[3:6])]

    def test_a_required_tool_call_is_made(self, live: Live) -> None:
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                  "additionalProperties": False}  # fmt: skip
        body = {
            **GREEDY,
            "max_tokens": 60,
            "tools": [{"name": "press", "input_schema": schema}],
            "tool_choice": {"type": "tool", "name": "press"},
        }
        answer = live.post(PATH, body).json()
        (call,) = answer["content"]
        assert (call["type"], call["name"], answer["stop_reason"]) == ("tool_use", "press", "tool_use")
        assert isinstance(call["input"]["ok"], bool) and call["id"].startswith("toolu_")
        (streamed,) = assembled(stream(live, body))["content"]
        assert streamed["input"] == call["input"]

    def test_tokens_are_counted(self, live: Live) -> None:
        body = {"model": MODEL, "messages": [*HELLO, {"role": "assistant", "content": "x"}, *HELLO]}
        count = live.post(f"{PATH}/count_tokens", body).json()
        tokens = live.post("/tokenize", {**body, "add_generation_prompt": True}).json()["count"]
        assert count == {"input_tokens": tokens}

    def test_errors_have_anthropics_shape(self, live: Live) -> None:
        def error(answer: httpx.Response, status: int, kind: str) -> str:
            assert answer.status_code == status, answer.text
            body = answer.json()
            assert body["type"] == "error" and body["error"]["type"] == kind
            message: str = body["error"]["message"]
            return message

        without = {name: value for name, value in GREEDY.items() if name != "max_tokens"}
        assert "max_tokens" in error(live.post(PATH, without), 400, "invalid_request_error")
        assert "other" in error(live.post(PATH, {**GREEDY, "model": "other"}), 404, "not_found_error")
        roles = error(live.post(PATH, {**GREEDY, "system": "x"}), 400, "invalid_request_error")
        assert "unknown role" in roles  # the tiny model's template has no system role
        error(live.post(PATH, {**GREEDY, "temperature": -1}), 400, "invalid_request_error")
        error(live.post(PATH, {**GREEDY, "max_tokens": 10**6}), 400, "invalid_request_error")
        error(live.post(f"{PATH}/count_tokens", {"messages": []}), 400, "invalid_request_error")
        error(live.client.get(PATH), 405, "invalid_request_error")
        for body in (b"", b"{", b"[]", b"\xff", b'{"messages": 3, "max_tokens": 1}'):
            answer = live.client.post(PATH, content=body, headers={"content-type": "application/json"})
            error(answer, 400, "invalid_request_error")

    def test_anthropics_key_header_is_accepted(self, serving: Callable[..., Live]) -> None:
        live = serving(api_key=("secret",))
        answer = live.post(PATH, GREEDY)
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        assert live.post(PATH, GREEDY, headers={"x-api-key": "wrong"}).json()["error"]["type"] == "authentication_error"
        assert live.post(PATH, GREEDY, headers={"x-api-key": "secret"}).status_code == 200
        assert live.post(PATH, GREEDY, headers={"authorization": "Bearer secret"}).status_code == 200
        assert live.post("/v1/responses", {"input": "x"}).json()["error"]["type"] == "AuthenticationError"

    def test_thinking_is_a_separate_block(self, serving: Callable[..., Live]) -> None:
        live = serving(reasoning_parser="think", default_chat_template_kwargs=None)
        form = {"type": "json_schema", "schema": {"const": "yes"}}
        body = {**GREEDY, "max_tokens": 60, "messages": [*HELLO, {"role": "assistant", "content": "<think>"}]}
        answer = live.post(PATH, {**body, "output_config": {"format": form}, "stop_sequences": ["</think>"]}).json()
        assert [block["type"] for block in answer["content"]] in (["thinking"], ["thinking", "text"])
