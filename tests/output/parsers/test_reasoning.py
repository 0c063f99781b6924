"""The split between reasoning and answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ValidationError
from quire.messages.structured import StructuredOutputsParams
from quire.output.parsers.deltas import Content, Reasoning
from quire.output.parsers.reasoning import ThinkSplit, make_reasoning_split
from tests.output.parsers.cuts import cut, read

FRAGMENTS = ["<think>", "</think>", "<th", "</", "<", ">", "think", "\n", " ", "text", "😀", "<tool_call>"]


@settings(deadline=None)
@given(cut(st.lists(st.sampled_from(FRAGMENTS), max_size=15).map("".join)), st.booleans())
def test_any_text_splits_the_same_in_any_pieces(answer: tuple[str, list[str]], opened: bool) -> None:
    text, pieces = answer
    whole = ThinkSplit(opened).parse(text)
    assert read(ThinkSplit(opened), pieces) == whole
    body = text.strip(" \n")
    is_inside = opened or body.startswith("<think>")
    if not is_inside:
        assert (whole.reasoning, whole.content) == ("", text)
        return
    reasoning, closing, content = body.removeprefix("<think>").partition("</think>")
    assert whole.reasoning == reasoning.strip(" \n")
    assert whole.content.rstrip() == content.strip(" \n")
    assert closing or not whole.content


@pytest.mark.parametrize("prompt, answer, reasoning, content", [
    ("", "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
    ("<|assistant|>\n<think>\n", "hm\n</think>\n\nYes.", "hm", "Yes."),
    ("<|assistant|>\n<think>\n", "<think>\nhm</think>Yes.", "hm", "Yes."),
    ("<|assistant|>\n<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("<|assistant|>\n<think>\n", "still thinking", "still thinking", ""),
    ("", "<think>still thinking </thi", "still thinking </thi", ""),
    ("", "No thoughts. <think> is a tag.", "", "No thoughts. <think> is a tag."),
    ("", "<think>a</think>b</think>", "a", "b</think>"),
    ("", "<think></think>", "", ""),
])  # fmt: skip
def test_templates_and_models(prompt: str, answer: str, reasoning: str, content: str) -> None:
    split = make_reasoning_split("qwen3", prompt).parse(answer)
    assert (split.reasoning, split.content) == (reasoning, content)


def test_text_is_streamed_as_it_arrives() -> None:
    split = ThinkSplit(opened=True)
    assert split.push("One thought </") == [Reasoning("One thought")]
    assert split.push("b> more") == [Reasoning(" </b> more")]
    assert split.push("\n</think>") == []
    assert split.push("\n\nThe") == [Content("The")]
    assert split.push(" end ") == [Content(" end ")]
    assert split.finish() == []


def test_other_markers_and_unknown_names() -> None:
    split = make_reasoning_split("mistral")
    assert split.needs_special_tokens
    answer = split.parse("[THINK]hm[/THINK]Yes.")
    assert (answer.reasoning, answer.content) == ("hm", "Yes.")
    with pytest.raises(ValidationError, match="unknown reasoning parser"):
        make_reasoning_split("ponder")


FORM = StructuredOutputsParams(choice=["yes", "no"])
NO_THOUGHT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name, prompt, switches, after, opening", [
    ("qwen3", "<|im_start|>assistant\n<think>\n", {}, ["</think>"], None),
    ("qwen3", "<|im_start|>assistant\n", {}, ["</think>"], ["<think>"]),
    ("qwen3", "<|im_start|>assistant\n", {"enable_thinking": True}, ["</think>"], ["<think>"]),
    ("qwen3", NO_THOUGHT, {"enable_thinking": False}, None, None),
    ("qwen3", NO_THOUGHT, {}, None, None),
    ("qwen3", "<|im_start|>assistant\n", {"enable_thinking": False}, None, None),
    ("deepseek_v3", "<｜Assistant｜></think>", {"thinking": False}, None, None),
    ("glm45", "<|assistant|>", {}, ["</think>"], ["<think>", "\n<think>"]),
    ("granite", "<|assistant|>", {}, None, None),
    ("granite", "<|assistant|>", {"thinking": True}, ["Here is my response:", "Here's my response:"],
     ["Here is my thought process:", "Here's my thought process:"]),
    ("mistral", "[/INST]", {}, ["[/THINK]"], ["[THINK]"]),
    ("openai_gptoss", "<|end|><|start|>assistant", {},
     ["<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"], None),
])  # fmt: skip
def test_a_form_begins_after_the_thinking(
    name: str, prompt: str, switches: dict[str, Any], after: list[str] | None, opening: list[str] | None
) -> None:
    form = type(make_reasoning_split(name)).after_thinking(FORM, prompt, switches)
    assert (form.choice, form.after, form.opening) == (["yes", "no"], after, opening)


def test_a_megabyte_of_reasoning_in_single_characters() -> None:
    text = "a < b, " * 150_000
    assert read(ThinkSplit(opened=True), text).reasoning == text.strip()
