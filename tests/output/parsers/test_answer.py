"""Reasoning, content and calls of one answer."""

from __future__ import annotations

import pytest

from quire.output.parsers.answer import AnswerReader
from quire.output.parsers.deltas import Content, ToolCall, gather
from quire.output.parsers.reasoning import make_reasoning_split
from quire.output.parsers.tools.base import make_tool_parser

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def reader(prompt: str = "") -> AnswerReader:
    return AnswerReader(make_reasoning_split("qwen3", prompt), make_tool_parser("hermes", {"f"}, lambda: "call_x"))


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_thinking_then_content_then_a_call(size: int) -> None:
    text = f"<think>\nShould I write {CALL}?\n</think>\n\nI will look.\n{CALL}"
    machine = reader()
    deltas = [delta for i in range(0, len(text), size) for delta in machine.push(text[i : i + size])]
    answer = gather(deltas + machine.finish())
    assert answer.reasoning == f"Should I write {CALL}?"
    assert answer.content == "I will look."
    assert answer.calls == [ToolCall("call_x", "f", '{"a": 1}', True)]


def test_a_call_right_after_thinking_the_prompt_opened() -> None:
    answer = reader("<|im_start|>assistant\n<think>\n").parse(f"Yes.\n</think>\n\n{CALL}")
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("Yes.", "", 1)


def test_neither_reasoning_nor_calls() -> None:
    machine = AnswerReader()
    assert machine.push("<think>") == [Content("<think>")]
    assert machine.push("") == []
    assert machine.finish() == []
    assert not machine.needs_special_tokens
    assert AnswerReader(parser=make_tool_parser("mistral")).needs_special_tokens
