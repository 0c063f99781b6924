"""FunctionGemma and Gemma 4: `call:f{a:1,b:…}` between marks, where strings have marks of their own."""

from __future__ import annotations

import re
from typing import ClassVar

from quire.output.parsers.incremental import SPACES, Reads
from quire.output.parsers.tools.base import CallParser, to_json

_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"[^:{}\[\],<]+")
_BARE = re.compile(r"[^,{}\[\]<]+")
_WORDS = {"true", "false", "null"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_DEEPEST = 64


class FunctionGemmaParser(CallParser):
    """`<start_function_call>call:f{a:1,b:<escape>text<escape>}<end_function_call>`; a call is emitted at its end."""

    tags = ("<start_function_call>",)
    closing: ClassVar[str] = "<end_function_call>"
    quote: ClassVar[str] = "<escape>"
    needs_special_tokens = True
    notation = (
        "To call one, answer with its name and arguments between these marks, once for each call:\n"
        "<start_function_call>call:tool_name{a_parameter:<escape>its value<escape>}<end_function_call>\n"
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        yield from self._skip_spaces()
        if not (yield from self._take_word("call:")):
            return
        name = yield from self._take_run(_NAME)
        if not self._accepts(name, is_marked=True) or not (yield from self._take_next("{")):
            return
        arguments = yield from self._object_of_values(1)
        if arguments is None:
            return
        self._emit(name, arguments)
        yield from self._skip_spaces()
        if (yield from self._take_word(self.closing)):
            self._held.clear()

    def _object_of_values(self, depth: int) -> Reads[str | None]:
        """`key:value,…}` as JSON, after its brace; None if it is something else."""
        fields: list[str] = []
        if (yield from self._take_next("}")):
            return "{}"
        while True:
            yield from self._skip_spaces()
            if (yield from self._is_next(self.quote)):
                key = yield from self._quoted()
            else:
                key = (yield from self._take_run(_KEY)).strip(SPACES)
            if not key or not (yield from self._take_next(":")):
                return None
            value = yield from self._value(depth)
            if value is None:
                return None
            fields.append(f"{to_json(key)}: {value}")
            separator = yield from self._take_next(",}")
            if not separator and value.startswith('"') and (yield from self._peek()) not in ("", *"]<"):
                separator = ","  # small models leave it out after a string, whose end is marked
            if separator != ",":
                return "{" + ", ".join(fields) + "}" if separator else None

    def _list_of_values(self, depth: int) -> Reads[str | None]:
        items: list[str] = []
        if (yield from self._take_next("]")):
            return "[]"
        while True:
            value = yield from self._value(depth)
            if value is None:
                return None
            items.append(value)
            separator = yield from self._take_next(",]")
            if separator != ",":
                return "[" + ", ".join(items) + "]" if separator else None

    def _value(self, depth: int) -> Reads[str | None]:
        yield from self._skip_spaces()
        if (yield from self._is_next(self.quote)):
            text = yield from self._quoted()
            return None if text is None else to_json(text)
        opening = yield from self._take_next("{[")
        if opening:
            if depth == _DEEPEST:
                return None
            read = self._object_of_values if opening == "{" else self._list_of_values
            return (yield from read(depth + 1))
        bare = (yield from self._take_run(_BARE)).strip(SPACES)
        if not bare:
            return None
        return bare if bare in _WORDS or _NUMBER.fullmatch(bare) else to_json(bare)

    def _quoted(self) -> Reads[str | None]:
        yield from self._take_word(self.quote)
        pieces: list[str] = []
        while (yield from self._peek()):
            if (yield from self._take_word(self.quote)):
                return "".join(pieces)
            end = self._text.find(self.quote[0], self._at + 1)
            pieces.append(self._take((end if end >= 0 else len(self._text)) - self._at))
        return None


class Gemma4Parser(FunctionGemmaParser):
    """`<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>`."""

    tags = ("<|tool_call>",)
    closing = "<tool_call|>"
    quote = '<|"|>'
    notation = (
        "To call one, answer with its name and arguments between these marks, once for each call:\n"
        '<|tool_call>call:tool_name{a_parameter:<|"|>its value<|"|>}<tool_call|>\n'
        "Where no tool helps, answer in plain words."
    )
