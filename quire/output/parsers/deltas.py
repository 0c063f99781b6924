"""The parts of an answer as they are generated: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Union

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's thinking."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A tool call begins; `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More text of a call's arguments, which together are a JSON object."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """A call's arguments end; if not `complete` they are cut off and not valid JSON: the call must not be run."""

    index: int
    complete: bool


Delta = Union[Reasoning, Content, CallStart, CallArguments, CallEnd]


class ToolCall(msgspec.Struct):
    """A whole tool call."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False


class ParsedAnswer(msgspec.Struct):
    """A whole answer."""

    reasoning: str
    content: str
    calls: list[ToolCall]


def gather(deltas: Iterable[Delta]) -> ParsedAnswer:
    """The answer that these deltas add up to."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, Reasoning):
            reasoning.append(delta.text)
        elif isinstance(delta, Content):
            content.append(delta.text)
        elif isinstance(delta, CallStart):
            calls.append(ToolCall(delta.id, delta.name))
            arguments.append([])
        elif isinstance(delta, CallArguments):
            arguments[delta.index].append(delta.text)
        else:
            calls[delta.index].complete = delta.complete
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return ParsedAnswer("".join(reasoning), "".join(content), calls)


def merged(deltas: list[Delta]) -> list[Delta]:
    """The deltas with adjacent ones of one kind joined, so that a piece of text becomes few chunks."""
    if len(deltas) < 2:
        return deltas
    joined: list[Delta] = []
    for _, group in groupby(deltas, key=lambda delta: (type(delta), getattr(delta, "index", None))):
        run = list(group)
        first = run[0]
        if len(run) > 1 and not isinstance(first, CallStart | CallEnd):
            first = msgspec.structs.replace(first, text="".join([piece.text for piece in run]))  # type: ignore[union-attr]
        joined.append(first)
    return joined
