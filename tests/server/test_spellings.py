"""Other spellings of what the server has: older, shorter or vendors' own. Each does what the usual one does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.messages.structured import StructuredOutputsParams
from quire.server.chat_generation import template_kwargs
from quire.server.errors import ApiError
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.conversation import NamedTool
from quire.server.protocol.fields import FieldReader
from quire.server.protocol.sampling import structured_outputs
from tests.server.conftest import Live
from tests.server.scripted import ANSWER, Script, call

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "abc"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


def chat(**fields: Any) -> ChatRequest:
    return FieldReader(is_strict=True).decode(json.dumps({"messages": USER, **fields}).encode(), ChatRequest)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


class TestForms:
    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
            ({"response_format": {"type": "json_schema", "schema": SCHEMA, "name": "n"}}, {"json": SCHEMA}),
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json": SCHEMA}),
            ({"response_format": {"type": "json_object"}}, {"json_object": True}),
            ({"guided_json": SCHEMA}, {"json": SCHEMA}),
            ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "outlines"}, {"json": json.dumps(SCHEMA)}),
            ({"guided_regex": "a+"}, {"regex": "a+"}),
            ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
            ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ],
    )  # fmt: skip
    def test_the_form_is_the_same(self, fields: dict[str, Any], expected: dict[str, Any]) -> None:
        assert structured_outputs(chat(**fields)) == StructuredOutputsParams(**expected)

    def test_the_answer_has_it(self, live: Live) -> None:
        for fields in ({"guided_regex": "[xy]{3}"}, {"guided_choice": ["xyx", "yyx"]}):
            answer = live.post(TEXT, {"prompt": "abc", "max_tokens": 9, **fields}).json()["choices"][0]["text"]
            assert len(answer) == 3 and set(answer) <= {"x", "y"}

    def test_an_error_names_the_field_as_it_was_sent(self, live: Live) -> None:
        error = live.post(TEXT, {"prompt": "abc", "guided_json": {"not": {}}}).json()["error"]
        assert error["param"] == "guided_json" and "structured_outputs" not in error["message"]


class TestToolChoices:
    def test_functions_are_tools(self) -> None:
        request = chat(functions=[tool("f")["function"]], function_call={"name": "f"})
        assert request.tools is not None and [each.function.name for each in request.tools] == ["f"]
        assert isinstance(request.tool_choice, NamedTool) and request.tool_choice.function.name == "f"
        assert chat(functions=[tool("f")["function"]], function_call="none").tool_choice == "none"

    def test_allowed_tools_are_those_that_are_offered(self) -> None:
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
        request = chat(tools=[tool("f"), tool("g")], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        assert request.tools is not None and [each.function.name for each in request.tools] == ["g"]
        assert request.tool_choice == "required"
        with pytest.raises(ApiError, match="'g', which is not among tools"):
            chat(tools=[tool("f")], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
    def test_a_form_beside_a_required_call_is_that_of_a_text(self, live: Live, choice: Any) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "never"}}}
        body = {
            "messages": USER,
            "tools": [tool("f")],
            "tool_choice": choice,
            "response_format": form,
            "max_tokens": 90,
        }
        (choice,) = live.post(CHAT, body).json()["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["a"] in ("x", "y")

    def test_structured_outputs_beside_a_named_tool_are_refused(self, live: Live) -> None:
        choice = {"type": "function", "function": {"name": "f"}}
        body = {"messages": USER, "tools": [tool("f")], "tool_choice": choice, "structured_outputs": {"regex": "a"}}
        assert live.post(CHAT, body).status_code == 400


def streamed(live: Live, body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The deltas of a streamed answer, and its finish reasons."""
    lines = live.post(CHAT, {**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [choice["delta"] for choice in choices], [c["finish_reason"] for c in choices if c["finish_reason"]]


class TestOtherCalls:
    """Calls in the answer have the form of the tools in the request."""

    CUSTOM: Any = (
        {"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": {"type": "text"}}},
    )

    def test_a_call_of_functions(self, scripted: Live, script: Script) -> None:
        script.answer = lambda prompt: call("f", a="x")
        body = {"messages": USER, "functions": [tool("f")["function"]]}
        (choice,) = scripted.post(CHAT, body).json()["choices"]
        assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
        made = choice["message"]["function_call"]
        assert (made["name"], json.loads(made["arguments"])) == ("f", {"a": "x"})
        deltas, reasons = streamed(scripted, body)
        parts = [delta["function_call"] for delta in deltas if "function_call" in delta]
        assert "".join(part.get("name", "") for part in parts) == "f" and reasons == ["function_call"]
        assert "".join(part["arguments"] for part in parts) == made["arguments"]
        script.answer = lambda prompt: ANSWER
        back = [*USER, choice["message"], {"role": "function", "name": "f", "content": "5"}]
        answer = scripted.post(CHAT, {**body, "messages": back}).json()
        assert answer["choices"][0]["message"]["content"] == ANSWER
        assert '"name": "f"' in script.prompts[-1] and script.prompts[-1].endswith("[tool]  5[assistant]")

    def test_a_call_of_a_custom_tool(self, scripted: Live, script: Script) -> None:
        script.answer = lambda prompt: call("patch", input="+ x\n- y")
        body = {"messages": USER, "tools": list(self.CUSTOM)}
        (made,) = scripted.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
        assert (made["type"], made["custom"]) == ("custom", {"name": "patch", "input": "+ x\n- y"})
        deltas, _ = streamed(scripted, body)
        parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
        assert parts[0]["type"] == "custom" and parts[0]["custom"]["name"] == "patch"
        assert "".join(part["custom"].get("input", "") for part in parts) == "+ x\n- y"
        result = {"role": "tool", "tool_call_id": made["id"], "content": "patched"}
        scripted.post(CHAT, {**body, "messages": [*USER, {"role": "assistant", "tool_calls": [made]}, result]})
        assert "+ x" in script.prompts[-1] and "patched" in script.prompts[-1]

    def test_arguments_may_be_an_object(self, scripted: Live, script: Script) -> None:
        made = {"id": "c", "function": {"name": "f", "arguments": {"a": {"b": [1]}}}}
        messages = [*USER, {"role": "assistant", "tool_calls": [made]}, {"role": "tool", "content": "5"}]
        assert scripted.post(CHAT, {"messages": messages}).status_code == 200
        assert '{"name": "f", "arguments": {"a": {"b": [1]}}}' in script.prompts[-1]
        deep: Any = 1
        for _ in range(100):
            deep = {"a": deep}
        made["function"]["arguments"] = deep
        refused = scripted.post(CHAT, {"messages": messages})
        assert refused.status_code == 400 and "nested" in refused.text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": True}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
        ({"reasoning": {"effort": "high"}}, {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
         {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}),
    ],
)  # fmt: skip
def test_every_switch_of_reasoning_reaches_the_template(
    live: Live, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert template_kwargs(live.server, chat(**fields)) == expected


def test_reasoning_may_be_left_out() -> None:
    assert chat().keeps_reasoning and not chat(reasoning={"exclude": True}).keeps_reasoning


class TestEcho:
    def test_an_answer_begins_with_the_message_that_it_continues(self, live: Live) -> None:
        body = {"messages": [*USER, {"role": "assistant", "content": "And so"}], "continue_final_message": True,
                "add_generation_prompt": False, "temperature": 0, "max_tokens": 5}  # fmt: skip
        plain = live.post(CHAT, body).json()["choices"][0]["message"]
        echoed = live.post(CHAT, {**body, "echo": True}).json()
        assert echoed["choices"][0]["message"]["content"] == "And so" + plain["content"]
        assert echoed["choices"][0]["message"]["role"] == "assistant"
        assert len(echoed["prompt_logprobs"]) == echoed["usage"]["prompt_tokens"]
        deltas, _ = streamed(live, {**body, "echo": True})
        assert "".join(delta.get("content", "") for delta in deltas) == "And so" + plain["content"]

    def test_a_question_is_not_echoed(self, live: Live) -> None:
        body = {"messages": USER, "temperature": 0, "max_tokens": 5}
        plain = live.post(CHAT, body).json()["choices"][0]["message"]["content"]
        assert live.post(CHAT, {**body, "echo": True}).json()["choices"][0]["message"]["content"] == plain


def test_the_prompt_can_be_returned(live: Live) -> None:
    body = {"messages": USER, "max_tokens": 1, "return_prompt_text": True}
    assert live.post(CHAT, body).json()["prompt_text"] == "<|user|>abc</s><|assistant|>"
    assert live.post(CHAT, {"messages": USER, "max_tokens": 1}).json()["prompt_text"] is None


@pytest.mark.parametrize("given", ["abcdefgh", None])
def test_either_end_of_a_prompt_is_truncated(live: Live, given: str | None) -> None:
    tokens = live.server.tokenizer.encode("abcdefgh")
    body = {"prompt": given or tokens, "truncate_prompt_tokens": 3, "max_tokens": 1, "return_token_ids": True}
    for side, expected in ((None, tokens[-3:]), ("left", tokens[-3:]), ("right", tokens[:3])):
        (choice,) = live.post(TEXT, {**body, "truncation_side": side}).json()["choices"]
        assert choice["prompt_token_ids"] == expected


def test_a_high_temperature_is_drawn_from(live: Live) -> None:
    body = {
        "prompt": "abc",
        "temperature": 50.0,
        "top_k": -1,
        "top_p": 1,
        "max_tokens": 60,
        "ignore_eos": True,
        "seed": 1,
    }
    text = live.post(TEXT, body).json()["choices"][0]["text"]
    assert len(set(text)) > 20, "nearly all characters are as likely as each other"


def test_what_vllm_sends_as_null_is_there(live: Live) -> None:
    answer = live.post(CHAT, {"messages": USER, "max_tokens": 1}).json()
    whole = ("service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params")
    assert all(answer[name] is None for name in whole)
    choice = answer["choices"][0]
    assert choice["token_ids"] is None and choice["logprobs"] is None
    answer = live.post(TEXT, {"prompt": "abc", "max_tokens": 1}).json()
    assert all(answer[name] is None for name in ("service_tier", "system_fingerprint", "kv_transfer_params"))
    choice = answer["choices"][0]
    assert all(choice[name] is None for name in ("token_ids", "prompt_token_ids", "prompt_logprobs", "stop_reason"))
