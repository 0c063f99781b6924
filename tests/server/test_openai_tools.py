"""Tools and structured outputs through the official client, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.server.clients import CHAT, USER, AsyncClient, Client, SyncClient, assembled
from tests.server.conftest import MODEL, Live

KINDS = {"sync": SyncClient, "async": AsyncClient}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}


def tool(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object", "properties": {"n": NUMBER}, "required": ["n"], "additionalProperties": False
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "description": f"{name} n", "parameters": parameters}}


TOOLS = [tool("add"), tool("take")]
ONE_CALL = {
    # Notation: a regular expression that makes the model write one call after the other.
    "hermes": r'<tool_call>\n\{"name": "%s", "arguments": \{"n": [0-9]\}\}\n</tool_call>',
    "mistral": r'\[TOOL_CALLS\]\[\{"name": "%s", "arguments": \{"n": [0-9]\}\}\]',
    "llama3_json": r'\{"name": "%s", "parameters": \{"n": [0-9]\}\}',
    "pythonic": r"\[%s\(n=[0-9]\)\]",
    "json": r'\{"name": "%s", "arguments": \{"n": [0-9]\}\}',
}
TWO_CALLS = {
    "hermes": ONE_CALL["hermes"] % "add" + r"\n" + ONE_CALL["hermes"] % "take",
    "mistral": r'\[TOOL_CALLS\]\[\{"name": "add", "arguments": \{"n": [0-9]\}\}, '
    r'\{"name": "take", "arguments": \{"n": [0-9]\}\}\]',
    "llama3_json": ONE_CALL["llama3_json"] % "add" + "; " + ONE_CALL["llama3_json"] % "take",
    "pythonic": r"\[add\(n=[0-9]\), take\(n=[0-9]\)\]",
    "json": r"\[" + ONE_CALL["json"] % "add" + ", " + ONE_CALL["json"] % "take" + r"\]",
}


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """Names and arguments; ids must be present and distinct."""
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls) and all(call.id and call.type == "function" for call in calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, live: Live) -> Client:
    """Each test runs with both clients."""
    made: Client = KINDS[request.param](live)
    return made


def ask(client: Client, **fields: Any) -> Any:
    """The choice of a non-streamed response; the streamed one must add up to it."""
    fields = {"messages": USER, "tools": TOOLS, "seed": 5, "max_tokens": 150, **fields}
    (whole,) = client.call(CHAT, **fields).choices
    (streamed,) = assembled(client.stream(CHAT, **fields)).choices
    assert calls_of(streamed.message) == calls_of(whole.message)
    assert (streamed.message.content or None) == (whole.message.content or None)
    assert streamed.finish_reason == whole.finish_reason
    return whole


@pytest.mark.parametrize("parser", ONE_CALL)
class TestAuto:
    """The model calls by itself: a regex constraint makes it write exactly that."""

    def test_one_call(self, serving: Callable[..., Live], parser: str) -> None:
        live = serving(tool_call_parser=parser)
        for kind in KINDS.values():
            choice = ask(kind(live), extra_body={"structured_outputs": {"regex": ONE_CALL[parser] % "add"}})
            ((name, arguments),) = calls_of(choice.message)
            assert name == "add" and arguments["n"] in range(10)
            assert choice.finish_reason == "tool_calls" and choice.message.content is None

    def test_two_calls_and_parallel_tool_calls_off(self, serving: Callable[..., Live], parser: str) -> None:
        client = SyncClient(serving(tool_call_parser=parser))
        constraint = {"structured_outputs": {"regex": TWO_CALLS[parser]}}
        both = calls_of(ask(client, extra_body=constraint).message)
        assert [name for name, _ in both] == ["add", "take"]
        assert calls_of(ask(client, extra_body=constraint, parallel_tool_calls=False).message) == both[:1]

    def test_with_tool_choice_none_a_call_is_text(self, serving: Callable[..., Live], parser: str) -> None:
        client = SyncClient(serving(tool_call_parser=parser))
        constraint = {"structured_outputs": {"regex": ONE_CALL[parser] % "add"}}
        choice = ask(client, extra_body=constraint, tool_choice="none")
        assert choice.message.tool_calls is None and "add" in choice.message.content
        assert choice.finish_reason == "stop"


class TestThinking:
    """A form does not suppress thinking: it applies after it, or at once if the answer begins with none."""

    @pytest.mark.parametrize("demand", [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "take"}}},
    ])  # fmt: skip
    def test_the_model_may_think_first(self, serving: Callable[..., Live], demand: dict[str, Any]) -> None:
        live = serving(reasoning_parser="qwen3")
        less = live.server.tokenizer.convert_tokens_to_ids("<")
        client = live.openai()
        fields: Any = {"model": MODEL, "messages": USER, "seed": 5, "max_tokens": 60, **demand}
        thinking = client.chat.completions.create(**fields, logit_bias={str(less): 30}).choices[0]
        assert len(thinking.message.reasoning) > 10 and thinking.finish_reason == "length"  # type: ignore[attr-defined]
        assert not thinking.message.content and thinking.message.tool_calls is None
        for switch in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
            bias = {} if switch else {"logit_bias": {str(less): -100}}
            (at_once,) = client.chat.completions.create(**fields, **bias, extra_body=switch).choices
            calls = at_once.message.tool_calls
            assert (calls is not None) == ("tools" in demand) and at_once.finish_reason != "length"
            written = calls[0].function.arguments if calls else at_once.message.content
            assert json.loads(written) in (range(10) if calls is None else [{"n": n} for n in range(10)])


class TestDemanded:
    def test_required(self, client: Client) -> None:
        choice = ask(client, tool_choice="required", parallel_tool_calls=False)
        ((name, arguments),) = calls_of(choice.message)
        assert name in ("add", "take") and arguments["n"] in range(10)
        assert choice.finish_reason == "tool_calls"

    def test_named(self, client: Client) -> None:
        choice = ask(client, tool_choice={"type": "function", "function": {"name": "take"}})
        ((name, arguments),) = calls_of(choice.message)
        assert name == "take" and arguments["n"] in range(10)

    def test_each_sequence_calls_for_itself(self, client: Client) -> None:
        fields: dict[str, Any] = {"messages": USER, "tools": TOOLS, "seed": 5, "max_tokens": 150, "n": 3}
        fields |= {"temperature": 1.0, "tool_choice": "required", "parallel_tool_calls": False}
        whole = [calls_of(choice.message) for choice in client.call(CHAT, **fields).choices]
        streamed = [calls_of(choice.message) for choice in assembled(client.stream(CHAT, **fields)).choices]
        assert whole == streamed and all(len(calls) == 1 for calls in whole)

    def test_deltas_have_the_name_once_and_arguments_in_pieces(self, client: Client) -> None:
        fields: dict[str, Any] = {"messages": USER, "tools": TOOLS, "max_tokens": 150, "tool_choice": "required"}
        chunks = client.stream(CHAT, parallel_tool_calls=False, seed=5, **fields)
        deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert deltas[0].id and deltas[0].function.name and deltas[0].function.arguments == ""
        assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
        assert {delta.index for delta in deltas} == {0}

    def test_the_client_validates_arguments_with_a_pydantic_model(self, live: Live) -> None:
        class Take(BaseModel):
            n: int = Field(ge=0, le=9)

        answer = live.openai().chat.completions.parse(
            model=MODEL, messages=USER, tools=[openai.pydantic_function_tool(Take)],
            tool_choice={"type": "function", "function": {"name": "Take"}}, max_tokens=100, seed=1,
        )  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Take)


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int = Field(ge=0, le=9)
    colour: Colour


class Drawing(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["line", "dot"]
    points: list[Point] = Field(min_length=1, max_length=2)
    note: str | None = Field(max_length=4)


class TestForms:
    """Nested models, references, enums and unions, as the client's own schema generator writes them."""

    def test_a_pydantic_model(self, client: Client) -> None:
        fields: dict[str, Any] = {"messages": USER, "max_tokens": 180, "seed": 3, "temperature": 0.7}
        fields["extra_body"] = {"logit_bias": {"4": -100, "5": -100}}  # the tiny model prefers white space
        answer = client.call("chat.completions.parse", response_format=Drawing, **fields)
        drawing = answer.choices[0].message.parsed
        assert isinstance(drawing, Drawing) and 1 <= len(drawing.points) <= 2

    def test_a_pydantic_model_streamed(self, live: Live) -> None:
        extra = {"logit_bias": {"4": -100, "5": -100}}
        with live.openai().chat.completions.stream(
            model=MODEL, messages=USER, response_format=Point, max_tokens=120, seed=3, extra_body=extra
        ) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Point)

    def test_responses_parse(self, client: Client) -> None:
        extra = {"logit_bias": {"4": -100, "5": -100}, "seed": 3}
        answer = client.call("responses.parse", input="abc", text_format=Point, max_output_tokens=120, extra_body=extra)
        assert isinstance(answer.output_parsed, Point)

    def test_any_json_object(self, client: Client) -> None:
        extra = {"logit_bias": {"4": -100, "5": -100}}
        for seed in range(3):
            answer = client.call(
                CHAT, messages=USER, response_format={"type": "json_object"}, max_tokens=200, seed=seed,
                temperature=0.5, extra_body=extra,
            )  # fmt: skip
            (choice,) = answer.choices
            assert choice.message.content.startswith("{")
            if choice.finish_reason == "stop":
                assert isinstance(json.loads(choice.message.content), dict)

    def test_an_unsupported_schema_is_an_error(self, client: Client) -> None:
        constraint = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
        with pytest.raises(openai.BadRequestError, match="nonsense"):
            client.call(CHAT, messages=USER, response_format=constraint)
