"""Streamed and whole answers are read by one machine: every parser, every kind of text, every cut of it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest

from quire.output.detokenizer import Vocabulary
from quire.output.parsers.answer import AnswerReader
from quire.output.parsers.deltas import CallArguments, CallEnd, CallStart, Delta, ParsedAnswer, gather
from quire.output.parsers.reasoning import REASONING_PARSERS, make_reasoning_split
from quire.output.parsers.tools.base import TOOL_PARSERS, make_tool_parser
from quire.registry import resolve
from tests.conftest import tiny_tokenizer
from tests.output.parsers import test_tools
from tests.output.parsers.cuts import pieces_of
from tests.output.parsers.test_model_formats import OFFERED, SAME, WRITERS
from tests.output.parsers.test_tools import ids

TOOLS = [name for name in TOOL_PARSERS if name not in SAME]
REASONERS = list(REASONING_PARSERS)
CALLS = [("get_weather", {"text": 'Ω "b"\n', "count": 3, "items": [1, "x"]}), ("f", {})]
RANDOM_CUTS = 8
MARK = re.compile(r"｜DSML｜|</?(?!｜DSML)[A-Za-z_|｜▁:]+>|\[[A-Z_]+\]|<\|\"\|>")
MARKED = [name for name in TOOLS if make_tool_parser(name).needs_special_tokens and name != "phi4_mini_json"]


def written(name: str) -> str:
    if name in WRITERS:
        return WRITERS[name](CALLS)
    return test_tools.FORMATS[name](CALLS, False)


@cache
def texts_of(name: str) -> list[str]:
    """Answers in a tool parser's notation: whole, with text around, truncated, and damaged."""
    calls = written(name)
    chance = random.Random(name)
    texts = [f"Ich schaue nach 😀.\n{calls}", f"{calls}\nDone < all > 5 [1] {{2}}.", calls + calls]
    texts += [calls[: chance.randrange(1, len(calls))] for _ in range(2)]
    for _ in range(2):
        at = chance.randrange(len(calls))
        texts.append(calls[:at] + chance.choice(["", '"', "}", "<", "\n", "\\", "é"]) + calls[at + 1 :])
    return texts


def thoughts_of(name: str) -> list[str]:
    """Answers with reasoning in a parser's notation, some not closed, and one with a call in it."""
    split = resolve("reasoning parser", name, REASONING_PARSERS)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    texts = [
        f"{split.lead}{opening}\nHm, é < 2 {call} \n{closing}\n\nThe answer.\n{call}"
        for opening in (split.opening, *split.other_openings, "")
        for closing in (split.closing, *split.other_closings, "")
    ]
    return [*texts, f"{split.opening}a{split.closing}<answer>\n b </answer> ", f"{split.opening} a {call}", " \n"]


def cuts_of(text: str, has_every_split: bool) -> Iterable[list[str]]:
    yield list(text)
    if has_every_split:
        for place in range(len(text) + 1):
            yield [text[:place], text[place:]]
    chance = random.Random(text)
    for _ in range(RANDOM_CUTS):
        yield pieces_of(text, chance.sample(range(len(text) + 1), k=min(len(text), chance.randrange(2, 9))))


def check(make: Callable[[], Any], text: str, has_every_split: bool = True) -> None:
    whole = make().parse(text)
    for pieces in cuts_of(text, has_every_split):
        check_stream(make(), pieces, whole)


def check_stream(machine: Any, pieces: Iterable[str], whole: ParsedAnswer) -> None:
    """The pieces add up to the whole answer, and every delta continues what came before it."""
    deltas: list[Delta] = [delta for piece in pieces for delta in machine.push(piece)]
    deltas += machine.finish()
    assert gather(deltas) == whole
    arguments, ended = "", True
    starts = 0
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert ended and (delta.index, delta.name) == (starts, whole.calls[starts].name)
            arguments, ended, starts = "", False, starts + 1
        elif isinstance(delta, CallArguments):
            assert not ended and delta.index == starts - 1 and delta.text
            arguments += delta.text
            assert whole.calls[delta.index].arguments.startswith(arguments)
        elif isinstance(delta, CallEnd):
            assert not ended and delta.index == starts - 1 and arguments == whole.calls[delta.index].arguments
            ended = True
    assert ended
    assert machine.finish() == []


@pytest.mark.parametrize("name", TOOLS)
def test_tool_parsers(name: str) -> None:
    for text in texts_of(name):
        check(lambda: make_tool_parser(name, OFFERED, ids()), text)
    chance = random.Random(name)
    for other in chance.sample(TOOLS, k=6):  # notations of others
        check(lambda: make_tool_parser(name, None, ids()), texts_of(other)[0], has_every_split=False)


@pytest.mark.parametrize("name", REASONERS)
@pytest.mark.parametrize("is_opened", [False, True])
def test_reasoning_parsers(name: str, is_opened: bool) -> None:
    prompt = resolve("reasoning parser", name, REASONING_PARSERS).opening if is_opened else ""

    def make() -> AnswerReader:
        return AnswerReader(make_reasoning_split(name, prompt), make_tool_parser("hermes", OFFERED, ids()))

    for number, text in enumerate(thoughts_of(name)):
        check(lambda: make_reasoning_split(name, prompt), text, has_every_split=False)
        check(make, text, has_every_split=number == 0)


@pytest.mark.parametrize("name", MARKED)
def test_marks_that_are_special_tokens_come_whole(name: str) -> None:
    """Token by token, as the engine delivers them."""
    text = "I look." + written(name).replace("Ω", "O")
    marks = set(MARK.findall(text))
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
    vocabulary = Vocabulary(tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = vocabulary.detokenizer([], skip_special=False)
    pieces = [detokenizer.push([token]) for token in tokens] + [detokenizer.flush()]
    assert "".join(pieces) == text and marks and marks <= set(pieces)
    check_stream(make_tool_parser(name, OFFERED, ids()), pieces, make_tool_parser(name, OFFERED, ids()).parse(text))
