"""Harmony, the format of gpt-oss: an answer of several messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>the answer<|return|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

The prompt ends with `<|start|>assistant`. Messages to a recipient are calls; the others are reasoning in the channel
`analysis`, and content in `commentary` and `final`. Messages of one kind have a line break between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from quire.output.parsers.deltas import Content, Reasoning
from quire.output.parsers.incremental import IncrementalParser, Reads
from quire.output.parsers.reasoning import ThinkSplit
from quire.output.parsers.tools.base import CallParser

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_BEGINS = ("<|start|>", "<|channel|>")
_IN_HEADER = ("<|start|>", "<|channel|>", "<|constrain|>")
_LONGEST_HEADER = 300
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class _Header(NamedTuple):
    channel: str
    recipient: str | None


class _Messages(IncrementalParser):
    """Reads the parts of messages."""

    def _header(self, read: str = "") -> Reads[_Header | None]:
        """Everything up to the message's text, after what has been `read` of it; None if something else comes."""
        while character := (yield from self._peek()):
            if character == "<":
                if (yield from self._take_word(_MESSAGE)):
                    channel, recipient = _CHANNEL.search(read), _RECIPIENT.search(read)
                    return _Header(channel[1] if channel else "", recipient[1] if recipient else None)
                for mark in _IN_HEADER:
                    if (yield from self._take_word(mark)):
                        read += mark
                        break
                else:
                    return None
            else:
                read += self._take(1)
            if len(read) > _LONGEST_HEADER:
                return None
        return None

    def _text_of_message(self, emit: Callable[[str], None]) -> Reads[None]:
        """The message's text, and its end."""
        while (yield from self._peek()):
            for mark in _ENDS:
                if (yield from self._take_word(mark)):
                    return
            for mark in _BEGINS:  # an end was left out
                if (yield from self._is_next(mark)):
                    return
            end = self._text.find("<", self._at + 1)
            emit(IncrementalParser._take(self, (end if end >= 0 else len(self._text)) - self._at))

    def _begins_header(self) -> Reads[bool]:
        for mark in (*_BEGINS, " to=", "to="):
            if (yield from self._is_next(mark)):
                return True
        return False


class HarmonySplit(_Messages, ThinkSplit):
    """Messages to the model itself are reasoning, those to the user content; calls are left as they are, as content."""

    opening = "<|start|>assistant"
    closing = "<|channel|>final<|message|>"
    other_closings = ("<|channel|>final <|constrain|>json<|message|>",)
    needs_special_tokens = True

    def _run(self) -> Reads[None]:
        self._has: set[type] = set()
        is_start = self._opened
        while (yield from self._peek()):
            if not ((yield from self._begins_header()) if is_start else (yield from self._begins_message())):
                is_start = False
                end = self._text.find("<", self._at + 1)
                self._out.append(Content(self._take((end if end >= 0 else len(self._text)) - self._at)))
                continue
            taken: list[str] = []
            header = yield from self._recorded_header(taken)
            if header is None:
                self._out.append(Content("".join(taken)))
                is_start = False
                continue
            yield from self._message(header)
            is_start = False

    def _begins_message(self) -> Reads[bool]:
        for mark in _BEGINS:
            if (yield from self._is_next(mark)):
                return True
        return False

    def _recorded_header(self, taken: list[str]) -> Reads[_Header | None]:
        self._taken = taken
        try:
            return (yield from self._header())
        finally:
            self._taken = None

    _taken: list[str] | None = None

    def _take(self, count: int) -> str:
        text = super()._take(count)
        if self._taken is not None:
            self._taken.append(text)
        return text

    def _message(self, header: _Header) -> Reads[None]:
        if header.recipient is not None:
            start = f"<|start|>assistant to={header.recipient}<|channel|>{header.channel}<|message|>"
            self._out.append(Content(start))
            yield from self._text_of_message(lambda text: self._out.append(Content(text)))
            self._out.append(Content("<|call|>"))
            return
        kind = Reasoning if header.channel == "analysis" else Content
        separator = "\n" if kind in self._has else ""

        def emit(text: str) -> None:
            nonlocal separator
            self._has.add(kind)
            self._out.append(kind(separator + text))
            separator = ""

        yield from self._text_of_message(emit)


class HarmonyParser(_Messages, CallParser):
    """Calls, and content without marks; reasoning too, where nothing before it has read that."""

    tags = _BEGINS
    needs_special_tokens = True
    notation = (
        "To call one, answer with a message to it:\n"
        '<|channel|>commentary to=functions.tool_name <|constrain|>json<|message|>{"a_parameter": "its value"}'
        "<|call|>\nWhere no tool helps, answer in plain words."
    )

    def _run(self) -> Reads[None]:
        self._has_reasoned = False
        for mark in (" to=", "to="):
            if (yield from self._is_next(mark)):
                yield from self._calls("")
                self._release()
                break
        yield from super()._run()

    def _calls(self, opener: str) -> Reads[None]:
        header = yield from self._header(opener)
        if header is None:
            return
        if header.recipient is None:
            self._held.clear()
            yield from self._text_of_message(self._reason if header.channel == "analysis" else self._add_content)
            self._held.clear()
            self._has_reasoned = self._has_reasoned or header.channel == "analysis"
            return
        name = header.recipient.removeprefix("functions.")
        if not self._accepts(name, is_marked=True):
            return
        yield from self._skip_spaces()
        if not (yield from self._is_next("{")):
            return
        yield from self._stream_arguments(name)
        # What follows the arguments within the message is not content.
        yield from self._text_of_message(lambda text: None)
        self._held.clear()

    def _reason(self, text: str) -> None:
        self._out.append(Reasoning("\n" + text if self._has_reasoned else text))
        self._has_reasoned = False
