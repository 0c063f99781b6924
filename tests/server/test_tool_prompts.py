"""Tools get into the prompt, whether or not the chat template renders them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from quire.api.chat import ChatRenderer
from quire.loading.hub import DEFAULT_MODEL
from quire.output.parsers.toolcalls import with_preamble
from quire.output.parsers.tools.base import TOOL_PARSERS, make_tool_parser, notation_of
from quire.server.tool_prompts import ToolPrompts
from tests.conftest import CHAT_TEMPLATE, tiny_tokenizer
from tests.server.conftest import Live

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = [{"role": "user", "content": "How is the weather in Rome?"}]
TELLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + CHAT_TEMPLATE


def prompt_of(live: Live, **body: Any) -> str:
    """The prompt text that the model gets."""
    answer = live.post("/tokenize", body)
    assert answer.status_code == 200, answer.text
    return str(live.post("/detokenize", {"tokens": answer.json()["tokens"]}).json()["prompt"])


class TestDefaultModel:
    """Its template does not render tools."""

    def test_the_prompt_describes_the_tool_and_the_call_format(self, real: Live) -> None:
        prompt = prompt_of(real, messages=ASKED, tools=[WEATHER])
        assert prompt.startswith("<|im_start|>system\n")
        system, _, rest = prompt.partition("<|im_end|>")
        line = next(line for line in system.splitlines() if line.startswith("{"))
        assert json.loads(line) == WEATHER["function"]
        assert "<tool_call>" in system and "get_weather" not in rest

    def test_the_description_follows_an_existing_system_message(self, real: Live) -> None:
        prompt = prompt_of(real, messages=[{"role": "system", "content": "You are a pirate."}, *ASKED], tools=[WEATHER])
        assert prompt.startswith("<|im_start|>system\nYou are a pirate.\n\nYou have tools")
        assert prompt.count("<|im_start|>system") == 1

    def test_without_tools_nothing_is_added(self, real: Live) -> None:
        assert "tools" not in prompt_of(real, messages=ASKED)

    @pytest.mark.parametrize("stream", [False, True])
    def test_its_parser_is_chosen_automatically(self, real: Live, stream: bool) -> None:
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        fields: dict[str, Any] = {"messages": ASKED, "tools": [WEATHER], "model": DEFAULT_MODEL, "max_tokens": 60}
        fields["extra_body"] = {"structured_outputs": {"choice": [call]}}
        client = real.openai().chat.completions
        if stream:
            with client.stream(**fields) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.create(**fields).choices[0]
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        (made,) = choice.message.tool_calls or ()
        assert made.type == "function"
        assert (made.function.name, json.loads(made.function.arguments)) == ("get_weather", {"city": "Rome"})


class TestTemplates:
    def test_a_template_that_renders_tools_is_not_changed(self) -> None:
        prompts = ToolPrompts(ChatRenderer(tiny_tokenizer(), TELLS))
        assert not prompts.ignores_tools()
        assert prompts.parser() == "json"
        assert ToolPrompts(ChatRenderer(tiny_tokenizer(), TELLS.replace("<tools>", "<tool_call>"))).parser() == "hermes"

    def test_a_template_that_needs_more_than_a_user_message_is_not_changed(self) -> None:
        picky = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no') }}{% endif %}" + CHAT_TEMPLATE
        assert not ToolPrompts(ChatRenderer(tiny_tokenizer(), picky)).ignores_tools()

    def test_without_a_system_role_the_description_goes_into_the_user_message(self) -> None:
        prompts = ToolPrompts(ChatRenderer(tiny_tokenizer()))
        assert prompts.ignores_tools() and prompts.parser() == "hermes"
        text = prompts.render([{"role": "user", "content": "hi"}], "TOOLS")
        assert text == "<|user|>TOOLS\n\nhi</s><|assistant|>"
        parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert prompts.render(parts, "TOOLS").startswith("<|user|>TOOLS")

    def test_errors_of_a_conversation_are_still_reported(self) -> None:
        with pytest.raises(ValueError, match="unknown role"):
            ToolPrompts(ChatRenderer(tiny_tokenizer())).render([{"role": "ghost", "content": "hi"}], "TOOLS")

    def test_a_configured_parser_wins(self) -> None:
        assert ToolPrompts(ChatRenderer(tiny_tokenizer()), "pythonic").parser() == "pythonic"

    def test_the_callers_messages_are_not_changed(self) -> None:
        messages = [{"role": "system", "content": "a"}]
        assert with_preamble(messages, "b", "system") == [{"role": "system", "content": "a\n\nb"}]
        assert messages == [{"role": "system", "content": "a"}]


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_the_documented_call_format_is_parsed(parser: str) -> None:
    """The example call of each format's description is parsed as a call by its own parser."""
    answer = make_tool_parser(parser).parse(notation_of(parser))
    assert answer.calls and all(call.complete for call in answer.calls)
    assert json.loads(answer.calls[0].arguments)


@pytest.mark.parametrize(
    ("settings", "body"),
    [
        ({"enable_tool_preamble": False}, {}),
        ({"enable_tool_preamble": True}, {"tool_choice": "none"}),
        ({"enable_tool_preamble": True, "enable_auto_tool_choice": False}, {}),
    ],
)
def test_with_tool_choice_none_nothing_is_added(
    serving: Callable[..., Live], settings: dict[str, Any], body: dict[str, Any]
) -> None:
    live = serving(**settings)
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_token_ids": True}
    plain = live.post("/v1/chat/completions", fields).json()
    with_tools = live.post("/v1/chat/completions", {**fields, "tools": [WEATHER], **body}).json()
    assert with_tools["prompt_token_ids"] == plain["prompt_token_ids"]


def test_a_requests_own_template_is_not_inspected_unless_trusted(serving: Callable[..., Live]) -> None:
    live = serving(enable_tool_preamble=True)
    answer = live.post("/v1/chat/completions", {"messages": ASKED, "tools": [WEATHER], "chat_template": "{{ 1 // 0 }}"})
    assert answer.status_code == 400 and "--trust-request-chat-template" in answer.json()["error"]["message"]
