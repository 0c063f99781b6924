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


CODER_CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("text, reasoning, content, calls", [
    (f"I look.\n\n{CALL}", "I look.", "", 1),
    (f"<think>I look.\n\n{CALL}\n{CALL}\n", "I look.", "", 2),
    (f"I could write {CALL} here.\n</think>\n\nNo.", f"I could write {CALL} here.", "No.", 0),
    (f"I write {CALL}\n{CALL}\n</think>{CALL}", f"I write {CALL}\n{CALL}", "", 1),
    (f"Use <tool_call> tags? {CALL}", "Use <tool_call> tags?", "", 1),
    ("In <tool_call>{ there is </think>it.", "In <tool_call>{ there is", "it.", 0),
    (f"A quote: {CALL} and on", f"A quote: {CALL} and on", "", 0),
    ("Hm. <tool_call>", "Hm. <tool_call>", "", 0),
])  # fmt: skip
def test_qwen3_may_forget_to_close_its_thought_before_a_call(
    text: str, reasoning: str, content: str, calls: int, size: int
) -> None:
    machine = reader("<|im_start|>assistant\n<think>\n")
    deltas = [delta for i in range(0, len(text), size) for delta in machine.push(text[i : i + size])]
    answer = gather(deltas + machine.finish())
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert answer.calls == [ToolCall("call_x", "f", '{"a": 1}', True)] * calls


def test_calls_end_the_thought_of_other_notations() -> None:
    parser = make_tool_parser("qwen3_coder", {"f": None}, lambda: "call_x")
    answer = AnswerReader(make_reasoning_split("qwen3", "<think>"), parser).parse(f"I look. {CODER_CALL}")
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("I look.", "", 1)
    call = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    kimi = AnswerReader(make_reasoning_split("kimi_k2", "<think>"), make_tool_parser("kimi_k2", {"f"}))
    answer = kimi.parse(f"I look. {call}<|tool_calls_section_end|>")
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("I look.", "", 1)


def test_tags_around_an_answer_are_dropped() -> None:
    for name, word in (("hunyuan_a13b", "answer"), ("ernie45", "response")):
        text = f"<think>\nHm.\n</think>\n<{word}>\nA < b,\nyes.\n</{word}>\n"
        for place in range(len(text) + 1):
            split = make_reasoning_split(name)
            answer = gather(split.push(text[:place]) + split.push(text[place:]) + split.finish())
            assert (answer.reasoning, answer.content) == ("Hm.", "A < b,\nyes.")
