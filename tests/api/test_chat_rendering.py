"""Chat templates render the same text as with transformers, for any messages."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.api.chat import MAX_CACHED, ChatRenderer
from quire.errors import ValidationError
from tests.api.chat_templates import ALL, BRACKETS, CHATML, THINKING
from tests.conftest import tiny_tokenizer

WORDS = [
    "hello",
    " world",
    "\n",
    "{{ x }}",
    "<think>hm</think>\n\n",
    "é😀",
    "<|im_end|>",
    "  ",
    "a\tb",
    "'\"",
    "&<>",
    "{%",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": 'Looks "things" up',
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        },
    }
    for name in ("search", "weather")
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Messages in any order, with tool calls among them."""

    def text() -> str:
        return "".join(rng.choices(WORDS, k=rng.randrange(6)))

    messages = [{"role": "system", "content": text()}] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(1, 6)):
        messages.append({"role": "user", "content": text()})
        answer: dict[str, Any] = {"role": "assistant", "content": text()}
        if rng.random() < 0.3:
            answer["reasoning_content"] = text()
        if rng.random() < 0.4:
            arguments = {"q": text(), "n": [1, {"x": None}]}
            call = {"id": "abcdefghi", "type": "function", "function": {"name": "search", "arguments": arguments}}
            messages.append({**answer, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "abcdefghi", "content": text()})
            continue
        messages.append(answer)
    if rng.random() < 0.5:
        messages.append({"role": "user", "content": text()})
    return messages


def outcome(render: Any) -> str:
    """The text, or a marker for an error."""
    try:
        return str(render())
    except Exception as error:
        return f"failed: {type(error).__name__ if not isinstance(error, ValueError) else 'refused'}"


@pytest.mark.parametrize("name", ALL)
def test_the_text_is_that_of_transformers(tokenizer: Any, name: str) -> None:
    renderer = ChatRenderer(tokenizer, ALL[name])
    rng = random.Random(name)
    rendered = 0
    for _ in range(120):
        messages = conversation(rng)
        tools = TOOLS if rng.random() < 0.5 else None
        kwargs = {"enable_thinking": rng.random() < 0.5} if rng.random() < 0.5 else {}
        begins = rng.random() < 0.7
        ours = outcome(lambda: renderer.render_text(
            messages, tools=tools, add_generation_prompt=begins, chat_template_kwargs=kwargs))  # fmt: skip  # noqa: B023
        theirs = outcome(lambda: tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=ALL[name], add_generation_prompt=begins, tokenize=False, **kwargs))  # fmt: skip  # noqa: B023,E501
        if not theirs.startswith("failed"):
            rendered += 1
            assert ours == theirs
        else:
            assert ours.startswith("failed")
    assert rendered > 60


@pytest.mark.parametrize("name", ["chatml", "thinking", "headers"])
def test_the_last_message_is_continued_as_in_transformers(tokenizer: Any, name: str) -> None:
    renderer = ChatRenderer(tokenizer, ALL[name])
    for content in ("And so", "And so  ", "  x\n", "a\n\nb"):
        messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": content}]
        theirs = tokenizer.apply_chat_template(
            messages, chat_template=ALL[name], continue_final_message=True, tokenize=False
        )
        assert renderer.render_text(messages, add_generation_prompt=False, continue_final_message=True) == theirs


def test_the_default_models_own_template_and_tokens() -> None:
    from quire.config import EngineConfig
    from quire.loading.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(EngineConfig.model)
    renderer = ChatRenderer(tokenizer)
    rng = random.Random(5)
    for _ in range(40):
        messages = [message for message in conversation(rng) if message["role"] != "tool"]
        for message in messages:
            message.pop("tool_calls", None)
        text, tokens = renderer.render(messages)
        assert text == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokens == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


class TestMessages:
    def render(self, tokenizer: Any, messages: Any, template: str = THINKING, **options: Any) -> str:
        return ChatRenderer(tokenizer, template).render_text(messages, **options)

    def test_parts_become_one_text_where_the_template_wants_text(self, tokenizer: Any) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
        assert "one\ntwo" in self.render(tokenizer, [{"role": "user", "content": parts}], CHATML)

    def test_parts_stay_parts_where_the_template_loops_over_them(self, tokenizer: Any) -> None:
        loops = "{% for m in messages %}{% for p in m['content'] %}({{ p['text'] }}){% endfor %}{% endfor %}"
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        assert self.render(tokenizer, [{"role": "user", "content": parts}], loops) == "(one)(two)"
        assert self.render(tokenizer, [{"role": "user", "content": "whole"}], loops) == "(whole)"

    @pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "imaginary"])
    def test_parts_that_are_not_text_are_refused_by_name(self, tokenizer: Any, kind: str) -> None:
        part = {"type": kind, kind: {"url": "http://127.0.0.1/x"}}
        with pytest.raises(ValidationError, match=rf"messages\[0\].content\[0\].*{kind}.*text parts only"):
            self.render(tokenizer, [{"role": "user", "content": [part]}])

    @pytest.mark.parametrize("kind", [{"a": 1}, ["text"], 7, None])
    def test_parts_with_an_invalid_type_are_refused(self, tokenizer: Any, kind: Any) -> None:
        with pytest.raises(ValidationError, match=r"messages\[0\].content\[0\].*text parts only"):
            self.render(tokenizer, [{"role": "user", "content": [{"type": kind, "text": "a"}]}])

    def test_arguments_sent_as_text_are_written_as_an_object(self, tokenizer: Any) -> None:
        def asked(arguments: Any) -> list[dict[str, Any]]:
            call = {"id": "abcdefghi", "type": "function", "function": {"name": "search", "arguments": arguments}}
            return [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]

        as_object = self.render(tokenizer, asked({"q": "x"}))
        assert self.render(tokenizer, asked(json.dumps({"q": "x"}))) == as_object
        assert '"arguments": {"q": "x"}' in as_object
        assert '"arguments": {}' in self.render(tokenizer, asked(""))
        for broken in ("{", "[1]", "7", "[" * 100_000):
            with pytest.raises(ValidationError, match="JSON|more than 65536 values"):
                self.render(tokenizer, asked(broken))

    def test_an_answer_that_only_calls_has_no_content(self, tokenizer: Any) -> None:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
        assert "None" not in self.render(tokenizer, messages, CHATML)
        assert "[TOOL_CALLS]" in self.render(tokenizer, messages, BRACKETS)
        asks = "{% for m in messages %}{% if m['content'] is none %}NONE{% endif %}{% endfor %}"
        assert self.render(tokenizer, messages, asks) == "NONE"

    @pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
    def test_thinking_reaches_the_template_under_any_name(self, tokenizer: Any, name: str) -> None:
        answer = {"role": "assistant", "content": "4", name: "two and two"}
        assert "<think>\ntwo and two\n</think>" in self.render(tokenizer, [{"role": "user", "content": "?"}, answer])

    @pytest.mark.parametrize(
        ("messages", "says"),
        [
            ([], "empty"),
            (["hello"], r"messages\[0\] is a str"),
            ([{"content": "x"}], "needs a role"),
            ([{"role": 3, "content": "x"}], "needs a role"),
            ([{"role": "user"}], "no content"),
            ([{"role": "user", "content": None}], "no content"),
            ([{"role": "user", "content": 7}], "text or a list of parts"),
            ([{"role": "user", "content": {"a": 1}}], "text or a list of parts"),
            ([{"role": "user", "content": [{"type": "text"}]}], "text part whose text is None"),
            ([{"role": "assistant", "tool_calls": "f()"}], "list of calls"),
            ([{"role": "assistant", "tool_calls": [{}]}], "needs a function"),
            ([{"role": "user", "content": "x", "extra": object()}], "not JSON"),
            ([{"role": "user", "content": "x"}] * 20_000, "20000 messages; at most"),
        ],
    )
    def test_errors_name_the_problem(self, tokenizer: Any, messages: Any, says: str) -> None:
        with pytest.raises(ValidationError, match=says):
            self.render(tokenizer, messages)

    def test_deep_nesting_is_refused(self, tokenizer: Any) -> None:
        deep: Any = "x"
        for _ in range(5000):
            deep = [deep]
        with pytest.raises(ValidationError, match="nested deeper"):
            self.render(tokenizer, [{"role": "user", "content": "x", "extra": deep}])

    def test_a_templates_own_error_is_passed_on(self, tokenizer: Any) -> None:
        with pytest.raises(ValidationError, match="no such role: wizard"):
            self.render(tokenizer, [{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}], BRACKETS)


class TestTemplates:
    def test_a_model_without_a_template_is_an_error(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = None
        with pytest.raises(ValidationError, match="no chat template"):
            ChatRenderer(tokenizer).render([{"role": "user", "content": "x"}])

    def test_tools_may_have_a_separate_template(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = {"default": "plain", "tool_use": "tools", "other": "other"}
        renderer, messages = ChatRenderer(tokenizer), [{"role": "user", "content": "x"}]
        assert renderer.render_text(messages) == "plain"
        assert renderer.render_text(messages, tools=TOOLS) == "tools"
        assert renderer.render_text(messages, chat_template="other") == "other"

    def test_functions_can_be_tools(self, tokenizer: Any) -> None:
        def add(a: int, b: int) -> int:
            """Adds.

            Args:
                a: One.
                b: Two.
            """
            return a + b

        messages = [{"role": "user", "content": "x"}]
        theirs = tokenizer.apply_chat_template(messages, tools=[add], chat_template=THINKING, tokenize=False)
        ours = ChatRenderer(tokenizer, THINKING).render_text(messages, tools=[add], add_generation_prompt=False)
        assert ours == theirs

    def test_compiled_templates_are_kept_up_to_a_bound(self, tokenizer: Any) -> None:
        renderer = ChatRenderer(tokenizer)
        for index in range(3 * MAX_CACHED):
            text = renderer.render_text([{"role": "user", "content": "x"}], chat_template=f"{{# #}}{index}")
            assert text == str(index)
        assert len(renderer._compiled) == MAX_CACHED

    def test_a_message_is_never_run(self, tokenizer: Any) -> None:
        content = "{{ 7 * 7 }}{% for i in range(9) %}x{% endfor %}"
        assert content in ChatRenderer(tokenizer).render_text([{"role": "user", "content": content}])
