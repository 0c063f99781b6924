"""Messages rendered incrementally give the text of the whole conversation, or are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quire.api.chat import ChatRenderer
from quire.api.conversation import IncrementalRenderer, Render, without_overlap
from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.loading.hub import DEFAULT_MODEL, find_model
from quire.loading.tokenizer import load_tokenizer
from tests.api.chat_templates import BRACKETS, CHATML, HEADERS, THINKING
from tests.conftest import CHAT_TEMPLATE, tiny_tokenizer

Message = dict[str, Any]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def msg(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def writer(template: str, tools: list[Any] | None = None) -> Render:
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer, template)
    return lambda messages, opens: renderer.render_text(messages, tools=tools, add_generation_prompt=opens)


TALK = [
    [msg("user", "one")], "two", [msg("user", "three")], "four", [msg("user", "five")], "six", [msg("user", "7")],
]  # fmt: skip


def piecewise(write: Render, pieces: list[Any], end: str) -> tuple[str, list[Message]]:
    """The text of a session after these messages and answers, each answer with the model's end token."""
    conversation, text, whole = IncrementalRenderer(write), "", []
    for piece in pieces:
        if isinstance(piece, str):
            text += piece + end
            whole.append(msg("assistant", piece))
        else:
            text += conversation.following(piece, text)[0] if text else conversation.first(piece)
            whole += piece
    return text, whole


@pytest.mark.parametrize("system", [[], [msg("system", "Be brief.")]], ids=["plain", "system"])
@pytest.mark.parametrize(
    "template, end", [(CHATML, "<|im_end|>"), (HEADERS, "<|eot|>"), (THINKING, "<|im_end|>")],
    ids=["chatml", "headers", "thinking"],
)  # fmt: skip
def test_pieces_make_the_whole(template: str, end: str, system: list[Message]) -> None:
    write = writer(template)
    first, *rest = TALK
    text, whole = piecewise(write, [[*system, *first], *rest], end)
    assert text == write(whole, True)
    alone, whole = piecewise(write, [system, first, *rest] if system else [first, *rest], end)
    assert alone == write(whole, True), "a system message may come before the rest"


def test_the_same_without_a_system_message_where_the_template_moves_it_about() -> None:
    write = writer(BRACKETS)
    # The template renders a space before answers that no tokenizer adds: it belongs to the answer.
    text, whole = piecewise(write, [piece if isinstance(piece, list) else f" {piece}" for piece in TALK], "</s>")
    assert text == write(whole, True)


@pytest.mark.parametrize("first", [[msg("system", "Be brief."), msg("user", "one")], [msg("system", "Be brief.")]])
def test_a_template_that_rewrites_what_was_said_is_refused(first: list[Message]) -> None:
    with pytest.raises(ValidationError, match="differently once more follow"):
        IncrementalRenderer(writer(BRACKETS)).first(first)


def test_tools_that_move_to_the_last_question_are_refused() -> None:
    with pytest.raises(ValidationError, match="differently once more follow"):
        IncrementalRenderer(writer(BRACKETS, [TOOL])).first([msg("user", "one")])


@pytest.mark.parametrize("template, end", [(HEADERS, "<|eot|>"), (THINKING, "<|im_end|>"), (BRACKETS, "</s>")])
def test_a_tools_result_follows_the_call(template: str, end: str) -> None:
    write = writer(template)
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    history = [msg("user", "one"), msg("assistant", "", tool_calls=[call])]
    result = [msg("tool", "42", tool_call_id="abcdefghi")]
    whole = write([*history, *result], True)
    text = whole[: whole.index(end, whole.index('"f"')) + len(end)]  # as the model leaves it
    assert text + IncrementalRenderer(write).following(result, text)[0] == whole


@pytest.mark.parametrize("template", [CHATML, HEADERS, BRACKETS, THINKING, CHAT_TEMPLATE])
def test_messages_cannot_follow_an_unanswered_question(template: str) -> None:
    conversation = IncrementalRenderer(writer(template))
    text = conversation.first([msg("user", "one")])
    with pytest.raises(ValidationError, match="has no answer yet"):
        conversation.following([msg("user", "two")], text)


def test_an_answer_that_was_cut_short_is_closed_first() -> None:
    conversation = IncrementalRenderer(writer(CHATML))
    text = conversation.first([msg("user", "one")]) + "two and"
    added, is_closed = conversation.following([msg("user", "three")], text)
    assert added.startswith("<|im_end|>\n<|im_start|>user") and not is_closed


def test_messages_a_template_refuses_stay_refused() -> None:
    with pytest.raises(ValidationError, match="unknown role"):
        IncrementalRenderer(writer(CHAT_TEMPLATE)).following([msg("system", "x")], "hello</s>")


def test_the_default_models_own_template() -> None:
    tokenizer = load_tokenizer(find_model(EngineConfig(model=DEFAULT_MODEL)))
    renderer = ChatRenderer(tokenizer)

    def write(messages: Sequence[Message], opens: bool) -> str:
        return renderer.render_text(messages, add_generation_prompt=opens)

    text, whole = piecewise(write, TALK, "<|im_end|>")
    assert text == write(whole, True)


@pytest.mark.parametrize(
    "text, following, left",
    [("a</s>", "</s>\nb", "\nb"), ("a", "</s>b", "</s>b"), ("", "x", "x"), ("aab", "abc", "c"), ("x", "", "")],
)
def test_overlap(text: str, following: str, left: str) -> None:
    assert without_overlap(text, following) == left
