"""/v1/responses: conversations in, items and events out, as the official client reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.responses import Response as TheirResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from quire.output.parsers.deltas import CallArguments, CallEnd, CallStart, Content, Delta, Reasoning
from quire.server.dialects.responses_chat import as_chat
from quire.server.dialects.responses_tools import OfferedTools
from quire.server.dialects.responses_writer import ResponseWriter, new_response
from quire.server.errors import ApiError
from quire.server.http import named_event
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import CompletionTokensDetails, PromptTokensDetails, Usage
from quire.server.protocol.conversation import NamedTool
from quire.server.protocol.fields import FieldReader
from quire.server.protocol.response_events import ResponseEvent
from quire.server.protocol.responses import ResponsesRequest
from tests.server.conftest import MODEL, Live

PATH = "/v1/responses"
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 20}
USAGE = Usage(10, 15, 5, PromptTokensDetails(4), CompletionTokensDetails(2))
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
ALL_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def request(**fields: Any) -> ResponsesRequest:
    return FieldReader().decode(json.dumps({"input": "hello", **fields}).encode(), ResponsesRequest)


def converted(given: ResponsesRequest, max_model_len: int = 1000, fields: FieldReader | None = None) -> ChatRequest:
    reader = fields or FieldReader()
    return as_chat(given, max_model_len, reader, OfferedTools(given.tools, reader))


def messages(**fields: Any) -> list[dict[str, Any]]:
    return [message.as_dict() for message in converted(request(**fields)).messages]


class TestInput:
    def test_text_is_a_user_message(self) -> None:
        assert messages() == [{"role": "user", "content": "hello"}]

    def test_instructions_and_developer_messages_become_the_system_message(self) -> None:
        items = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hello"}]
        assert messages(instructions="Be brief.", input=items) == [
            {"role": "system", "content": "Be brief.\n\nBe kind."},
            {"role": "user", "content": "hello"},
        ]

    def test_adjacent_reasoning_text_and_calls_are_one_message(self) -> None:
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "2+3?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": '{"a": 2}'},
            {"type": "function_call", "call_id": "call_2", "name": "add", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "call_1", "output": "5"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "0"}]},
            {"type": "message", "role": "assistant", "content": "Five."},
        ]  # fmt: skip
        assert messages(input=items) == [
            {"role": "user", "content": "2+3?"},
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning": "hm",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
                    {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "content": "5", "tool_call_id": "call_1"},
            {"role": "tool", "content": "0", "tool_call_id": "call_2"},
            {"role": "assistant", "content": "Five."},
        ]

    def test_output_items_can_be_sent_back_as_input(self) -> None:
        """Output items are valid input: that is how a conversation continues where nothing is stored."""
        writer = writing()
        writer.write([Reasoning("hm"), Content("well"), CallStart(0, "call_1", "add"), CallArguments(0, "{}")])
        writer.write([CallEnd(0, True)])
        writer.finish("tool_calls", USAGE)
        items = json.loads(named_event("x", writer.response).split(b"data: ")[1])["output"]
        (back,) = messages(input=items)
        assert (back["reasoning"], back["content"]) == ("hm", "well")
        assert back["tool_calls"][0]["id"] == "call_1"

    def test_options_are_passed_on(self) -> None:
        chat = converted(
            request(
                max_output_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=1, stop=["x"], parallel_tool_calls=False,
                tools=[TOOL], tool_choice={"type": "function", "name": "add"}, top_logprobs=2, truncation="auto",
                include=["message.output_text.logprobs"], reasoning={"effort": "low", "summary": "auto"},
                text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
            ),
            100,
        )  # fmt: skip
        assert (chat.max_completion_tokens, chat.temperature, chat.top_p, chat.top_k, chat.seed) == (7, 0.5, 0.9, 3, 1)
        assert (chat.stop, chat.parallel_tool_calls, chat.logprobs, chat.top_logprobs) == (["x"], False, True, 2)
        assert (chat.truncate_prompt_tokens, chat.reasoning_effort) == (93, "low")
        assert isinstance(chat.tool_choice, NamedTool) and chat.tool_choice.function.name == "add"
        assert chat.tools is not None and chat.tools[0].function.parameters == TOOL["parameters"]
        assert chat.response_format is not None and chat.response_format.json_schema is not None
        assert chat.response_format.json_schema.schema == {"type": "object"}

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"prompt": {"id": "p"}}, "prompt is not supported"),
            ({"tools": [{"type": "function"}]}, r"tools\[0\].*name is missing"),
            ({"tools": [{"type": 7}]}, r"tools\[0\].type must be text"),
            ({"tool_choice": {"type": "function"}}, "needs a name"),
            ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
            ({"tool_choice": "sometimes"}, "sometimes"),
            ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "needs a schema"),
            ({"text": {"format": {"type": "grammar"}}}, "grammar"),
            ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "cannot be combined"),
            ({"max_output_tokens": 0}, "at least 1"),
            ({"messages": [{}]}, "use input"),
            ({"max_tokens": 3}, "use max_output_tokens"),
            ({"input": []}, "input is empty"),
            ({"input": [{"role": "user"}]}, r"input\[0\].*content is missing"),
            ({"input": [{"role": "wizard", "content": "x"}]}, r"input\[0\].*wizard"),
            ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "refers to a stored item"),
            ({"input": [{"type": "computer_call"}]}, "computer_call"),
            ({"input": [{"type": 7}]}, "7"),
            ({"input": [{"role": "user", "content": [{"type": "input_audio", "data": "x"}]}]}, "text and images only"),
            ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "arguments is missing"),
        ],
    )  # fmt: skip
    def test_unsupported_fields_are_refused(self, fields: dict[str, Any], says: str) -> None:
        with pytest.raises(ApiError, match=says) as caught:
            converted(request(**fields))
        assert caught.value.status == 400


def writing(**fields: Any) -> ResponseWriter:
    given = request(**fields)
    return ResponseWriter(new_response(given, "resp_1", 1, "tiny"), OfferedTools(given.tools, FieldReader()))


def parsed(events: list[ResponseEvent]) -> list[Any]:
    """As the official client types them; unknown events raise."""
    lines = [named_event(event.kind, event).decode().split("\n") for event in events]
    seen = [ALL_EVENTS.validate_json(line[1].removeprefix("data: "), strict=False) for line in lines]
    assert [f"event: {event.type}" for event in seen] == [line[0] for line in lines]
    return seen


def some_deltas(rng: random.Random) -> list[Delta]:
    deltas: list[Delta] = [Reasoning(f"think{i} ") for i in range(rng.randrange(3))]
    calls = 0
    for _ in range(rng.randrange(4)):
        if rng.random() < 0.5:
            deltas += [Content(f"say{i} ") for i in range(rng.randrange(1, 3))]
        else:
            deltas += [
                CallStart(calls, f"call_{calls}", "add"),
                CallArguments(calls, '{"a":'),
                CallArguments(calls, "1}"),
            ]
            deltas.append(CallEnd(calls, True))
            calls += 1
    return deltas


class TestEvents:
    def test_events_add_up_to_the_response(self) -> None:
        """For any answer: events are numbered, items open and close in order, and add up to the whole."""
        rng = random.Random(2)
        for _ in range(100):
            deltas, reason = some_deltas(rng), rng.choice(["stop", "length", "tool_calls"])
            writer = writing()
            events = writer.start()
            while deltas:
                count = rng.randrange(1, 4)
                events += writer.write(deltas[:count])
                deltas = deltas[count:]
            events += writer.finish(reason, USAGE)
            seen = parsed(events)
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            assert [event.type for event in seen[:2]] == ["response.created", "response.in_progress"]
            assert seen[0].response.output == []
            final = seen[-1].response
            whole = TheirResponse.model_validate_json(named_event("", writer.response).split(b"data: ")[1])
            assert final == whole
            assert [event.item for event in seen if event.type == "response.output_item.done"] == whole.output
            added = [event for event in seen if event.type == "response.output_item.added"]
            assert [event.output_index for event in added] == list(range(len(whole.output)))
            assert [event.item.id for event in added] == [item.id for item in whole.output]
            streamed_text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
            assert streamed_text == whole.output_text
            for index, item in enumerate(whole.output):
                mine = [event for event in seen if getattr(event, "output_index", None) == index]
                pieces = "".join(event.delta for event in mine if event.type.endswith(".delta"))
                if item.type == "function_call":
                    assert pieces == item.arguments == '{"a":1}'
                elif item.type == "message":
                    assert pieces == item.content[0].text
                else:
                    assert pieces == item.content[0].text
            assert whole.status == ("incomplete" if reason == "length" else "completed")
            assert seen[-1].type == f"response.{whole.status}"

    def test_a_truncated_answer_is_incomplete(self) -> None:
        writer = writing()
        writer.write([CallStart(0, "call_0", "add"), CallArguments(0, '{"a"')])
        writer.finish("length", USAGE)
        response = writer.response
        assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"

    def test_an_empty_answer_is_an_empty_message(self) -> None:
        writer = writing()
        writer.finish("stop", USAGE)
        whole = TheirResponse.model_validate_json(named_event("", writer.response).split(b"data: ")[1])
        assert whole.output_text == "" and len(whole.output) == 1

    def test_a_failure_is_the_last_event(self) -> None:
        writer = writing()
        writer.start()
        (event,) = parsed(writer.fail(ApiError(500, "the engine broke")))
        assert event.type == "response.failed" and event.response.error.message == "the engine broke"

    def test_usage_has_the_field_names_of_the_responses_api(self) -> None:
        writer = writing()
        writer.finish("stop", USAGE)
        usage = writer.response.usage
        assert usage is not None
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (10, 5, 15)
        assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (4, 2)


class TestLive:
    @pytest.fixture
    def client(self, live: Live) -> openai.OpenAI:
        return live.openai(_strict_response_validation=True)

    def chat_text(self, live: Live, content: str = "hello", **fields: Any) -> str:
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 20, **fields}
        answer = live.post("/v1/chat/completions", body).json()
        text: str = answer["choices"][0]["message"]["content"]
        return text

    def test_the_text_matches_chat_completions(self, live: Live, client: openai.OpenAI) -> None:
        response = client.responses.create(model=MODEL, input="hello", metadata={"a": "b"}, **GREEDY)
        assert response.output_text == self.chat_text(live)
        assert response.id.startswith("resp_") and response.model == MODEL and response.metadata == {"a": "b"}
        assert response.usage is not None
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens

    def test_a_stream_adds_up_to_the_response(self, live: Live, client: openai.OpenAI) -> None:
        events = list(client.responses.create(model=MODEL, input="hello", stream=True, **GREEDY))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == self.chat_text(live)
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.output_text == text
        short: Any = {"extra_body": {"structured_outputs": {"regex": "yes!"}}}
        with client.responses.stream(model=MODEL, input="hello", **GREEDY, **short) as stream:
            assert stream.get_final_response().output_text == "yes!"

    def test_a_conversation_continues(self, live: Live, client: openai.OpenAI) -> None:
        items: list[Any] = [{"role": "user", "content": "hello"}]
        first = client.responses.create(model=MODEL, input=items, **GREEDY)
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"role": "user", "content": "go on"})
        second = client.responses.create(model=MODEL, input=items, **GREEDY)
        conversation = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "go on"},
        ]
        body = {"messages": conversation, "temperature": 0, "max_tokens": 20}
        assert second.output_text == live.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]

    def test_logprobs_match_the_text(self, client: openai.OpenAI) -> None:
        asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, **GREEDY}
        response = client.responses.create(model=MODEL, input="hello", **asked)
        (part,) = response.output[0].content  # type: ignore[union-attr]
        assert part.type == "output_text" and part.logprobs
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in part.logprobs)
        streamed: list[Any] = []
        for event in client.responses.create(model=MODEL, input="hello", stream=True, **asked):
            if event.type == "response.output_text.delta":
                streamed += event.logprobs
        assert [entry.token for entry in streamed] == [entry.token for entry in part.logprobs]

    def test_structured_output_matches_its_schema(self, client: openai.OpenAI) -> None:
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        form: Any = {
            "format": {"type": "json_schema", "name": "n", "schema": {**schema, "additionalProperties": False}}
        }
        response = client.responses.create(model=MODEL, input="hello", text=form, temperature=0, max_output_tokens=60)
        assert isinstance(json.loads(response.output_text)["ok"], bool)

    def test_a_required_tool_call_is_made(self, client: openai.OpenAI) -> None:
        parameters = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                      "additionalProperties": False}  # fmt: skip
        asked: Any = {
            "tools": [{"type": "function", "name": "press", "parameters": parameters, "strict": True}],
            "tool_choice": {"type": "function", "name": "press"},
            "temperature": 0,
            "max_output_tokens": 60,
        }
        response = client.responses.create(model=MODEL, input="hello", **asked)
        (call,) = response.output
        assert call.type == "function_call" and call.name == "press"
        assert isinstance(json.loads(call.arguments)["ok"], bool)
        events = list(client.responses.create(model=MODEL, input="hello", stream=True, **asked))
        pieces = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        assert pieces == call.arguments

    def test_errors_have_openais_shape(self, live: Live, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="resp_1"):
            client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="other", input="x")
        with pytest.raises(openai.BadRequestError, match="unknown role"):  # its template has no system role
            client.responses.create(model=MODEL, input="x", instructions="y")
        for body in (b"", b"{", b"[]", b'{"input": null}', b'{"input": 3}', b'{"input": [[]]}', b'{"input": [null]}'):
            answer = live.client.post(PATH, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400 and answer.json()["error"]["message"]

    def test_reasoning_is_a_separate_item(self, serving: Callable[..., Live]) -> None:
        live = serving(reasoning_parser="think")
        asked: Any = {**GREEDY, "extra_body": {"structured_outputs": {"regex": "<think>hm</think>yes"}}}
        client = live.openai(_strict_response_validation=True)
        response = client.responses.create(model=MODEL, input="hello", **{**asked, "max_output_tokens": 60})
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output[0].content[0].text == "hm"  # type: ignore[union-attr,index]
        assert response.output_text == "yes"
        assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens > 0
