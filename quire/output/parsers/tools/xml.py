"""Qwen3-Coder, Seed-OSS, GLM, Hunyuan 3, MiniCPM 5: a tag for each parameter, with plain text in it.

The text does not say whether `1` is a number or a string: the tool's schema does. Where there is none, text that is
JSON but not a JSON string is taken as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from quire.output.parsers.incremental import SPACES, Reads
from quire.output.parsers.tools.base import CallParser, to_json

_LITERALS = {"True": True, "False": False, "None": None}
_JSON_TYPES: Mapping[type, Collection[str]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}


class XmlParser(CallParser):
    """Reads calls of tags. A string is streamed while it is read; another value is emitted at its closing tag."""

    value_end: ClassVar[str]
    padding: ClassVar[str] = ""
    """What surrounds a value and is not a part of it."""

    def _stream_value(self, name: str, key: str, is_first: bool, is_string: bool | None = None) -> Reads[bool]:
        """Emit one parameter, whose value comes next. False if its closing tag never comes.

        `is_string`: whether the text is a string, where the format says so.
        """
        schema = _schema_of(self._offered, name, key)
        self._held.clear()
        self._add_arguments(("{" if is_first else ", ") + to_json(key) + ": ")
        if self.padding:
            yield from self._take_word(self.padding)
        types = _types(schema)
        if is_string or (is_string is None and types == {"string"}):
            return (yield from self._stream_string())
        pieces: list[str] = []
        while (yield from self._peek()):
            if (yield from self._take_word(self.value_end)):
                text = "".join(pieces).removesuffix(self.padding) if self.padding else "".join(pieces)
                self._held.clear()
                self._add_arguments(to_json(_typed(text, types)))
                return True
            pieces.append(self._take_text(self.value_end[0]))
        self._held.clear()
        return False

    def _stream_string(self) -> Reads[bool]:
        self._add_arguments('"')
        end = self.padding + self.value_end
        while (yield from self._peek()):
            if (yield from self._take_word(end)) or (yield from self._take_word(self.value_end)):
                self._held.clear()
                self._add_arguments('"')
                return True
            self._add_arguments(to_json(self._take_text(end[0]))[1:-1])
            self._held.clear()
        return False

    def _take_text(self, first: str) -> str:
        """One character, which begins no closing tag, and those after it up to one that may (`first`, or a tag's)."""
        places = [self._text.find(mark, self._at + 1) for mark in {first, self.value_end[0]}]
        end = min((place for place in places if place >= 0), default=len(self._text))
        return self._take(end - self._at)

    def _take_until(self, pattern: re.Pattern[str], mark: str) -> Reads[str]:
        """A name, and the mark after it; "" if there is something else."""
        name = yield from self._take_run(pattern)
        return name if (yield from self._take_word(mark)) else ""

    def _finish_call(self, is_first: bool, complete: bool = True) -> None:
        if complete:
            self._held.clear()
            self._add_arguments("{}" if is_first else "}")
        self._end(complete)


class Qwen3CoderParser(XmlParser):
    """`<tool_call>\\n<function=f>\\n<parameter=a>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>`."""

    tags = ("<tool_call>", "<function=")
    wrapper_end: ClassVar[str] = "</tool_call>"
    value_end = "</parameter>"
    padding = "\n"
    _name = re.compile(r"[^\s<>=]+")
    notation = (
        "To call one, answer with its name and parameters in these tags, once for each call:\n<tool_call>\n"
        "<function=tool_name>\n<parameter=a_parameter>\nits value\n</parameter>\n</function>\n</tool_call>\n"
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        if opener != "<function=":
            yield from self._skip_spaces()
            if not (yield from self._take_word("<function=")):
                return
        name = yield from self._take_until(self._name, ">")
        if not self._accepts(name, is_marked=True):
            return
        yield from self._skip_spaces()
        if not ((yield from self._is_next("<parameter=")) or (yield from self._is_next("</function>"))):
            return
        self._start(name)
        count = 0
        while (yield from self._take_word("<parameter=")):
            key = yield from self._take_until(self._name, ">")
            if not key or not (yield from self._stream_value(name, key, count == 0)):
                self._finish_call(count == 0, complete=False)
                return
            count += 1
            yield from self._skip_spaces()
        # Some models leave out the function's closing tag.
        is_closed = (yield from self._take_word("</function>")) or (yield from self._is_next(self.wrapper_end))
        self._finish_call(count == 0, complete=is_closed)
        yield from self._skip_spaces()
        if (yield from self._take_word(self.wrapper_end)):
            self._held.clear()


class SeedOssParser(Qwen3CoderParser):
    """Seed-OSS: the same in a wrapper of its own, and values without line breaks around them."""

    tags = ("<seed:tool_call>", "<function=")
    wrapper_end = "</seed:tool_call>"
    padding = ""
    notation = (
        "To call one, answer with its name and parameters in these tags, once for each call:\n<seed:tool_call>\n"
        "<function=tool_name>\n<parameter=a_parameter>its value</parameter>\n</function>\n</seed:tool_call>\n"
        "Where no tool helps, answer in plain words."
    )


class Glm45Parser(XmlParser):
    """`<tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>`."""

    tags: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    value_end = "</arg_value>"
    _name = re.compile(r"[^\s<>{}\[\]]+")
    separator: ClassVar[str] = ""
    """What may follow the name."""
    _key = re.compile(r"[^<]+")
    notation = (
        "To call one, answer with its name and arguments in these tags, once for each call:\n<tool_call>tool_name\n"
        "<arg_key>a_parameter</arg_key>\n<arg_value>its value</arg_value>\n</tool_call>\n"
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        yield from self._skip_spaces()
        name = yield from self._take_run(self._name)
        if self.separator:
            yield from self._take_word(self.separator)
        yield from self._skip_spaces()
        is_call = (yield from self._is_next("<arg_key>")) or (yield from self._is_next("</tool_call>"))
        if not is_call or not self._accepts(name, is_marked=True):
            return
        self._start(name)
        count = 0
        while (yield from self._take_word("<arg_key>")):
            key = (yield from self._take_until(self._key, "</arg_key>")).strip(SPACES)
            yield from self._skip_spaces()
            is_value = bool(key) and (yield from self._take_word("<arg_value>"))
            if not is_value or not (yield from self._stream_value(name, key, count == 0)):
                self._finish_call(count == 0, complete=False)
                return
            count += 1
            yield from self._skip_spaces()
        is_closed = yield from self._take_word("</tool_call>")
        self._finish_call(count == 0, complete=is_closed)


class HunyuanV3Parser(Glm45Parser):
    """Hunyuan 3: `<tool_calls><tool_call>f<tool_sep>` and the rest as in GLM-4.5, with a mark around all calls."""

    tags = ("<tool_calls>", "<tool_call>")
    separator = "<tool_sep>"
    needs_special_tokens = True
    notation = (
        "To call tools, answer with their names and arguments in these tags:\n<tool_calls>\n<tool_call>tool_name"
        "<tool_sep>\n<arg_key>a_parameter</arg_key>\n<arg_value>its value</arg_value>\n</tool_call>\n</tool_calls>\n"
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        if opener == "<tool_call>":
            yield from super()._calls(opener)
            return
        first = self._count
        yield from self._skip_spaces()
        while (yield from self._take_word("<tool_call>")):
            count = self._count
            yield from super()._calls(opener)
            if self._count == count or not self._is_whole:
                return
            yield from self._skip_spaces()
        if (yield from self._take_word("</tool_calls>")) and self._count > first:
            self._held.clear()


class MiniCpm5Parser(XmlParser):
    """MiniCPM 5: `<function name="f"><param name="a">value</param></function>`; a value may be a CDATA section."""

    tags = ('<function name="',)
    value_end = "</param>"
    needs_special_tokens = True
    _name = re.compile(r"[^<>\"\n]+")
    notation = (
        "To call one, answer with its name and parameters in these tags, once for each call:\n"
        '<function name="tool_name"><param name="a_parameter">its value</param></function>\n'
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        name = yield from self._take_until(self._name, '">')
        yield from self._skip_spaces()
        is_call = (yield from self._is_next('<param name="')) or (yield from self._is_next("</function>"))
        if not is_call or not self._accepts(name, is_marked=True):
            return
        self._start(name)
        count = 0
        while (yield from self._take_word('<param name="')):
            key = yield from self._take_until(self._name, '">')
            is_section = yield from self._take_word("<![CDATA[")
            self.value_end = "]]></param>" if is_section else "</param>"  # type: ignore[misc]
            if not key or not (yield from self._stream_value(name, key, count == 0)):
                self._finish_call(count == 0, complete=False)
                return
            count += 1
            yield from self._skip_spaces()
        self._finish_call(count == 0, complete=(yield from self._take_word("</function>")))


def _schema_of(offered: Collection[str] | None, name: str, key: str) -> Any:
    """The schema of a tool's parameter; None if it is not known."""
    parameters = offered.get(name) if isinstance(offered, Mapping) else None
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    if isinstance(schema.get("enum"), list):
        return set().union(*(_JSON_TYPES[type(each)] for each in schema["enum"]))
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {str(each) for each in given}
    choices = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return set().union(*map(_types, choices))


def _typed(text: str, types: set[str]) -> Any:
    """The value that the text stands for, of one of the types if it can be."""
    bare = text.strip(SPACES)
    try:
        value = _LITERALS[bare] if bare in _LITERALS else json.loads(bare)
        to_json(value)
    except (ValueError, RecursionError):  # not JSON, or a number that cannot be represented
        return text
    if isinstance(value, str):  # a JSON string, written with its quotes
        return text if not types or "string" in types else value
    return value if not types or types & set(_JSON_TYPES[type(value)]) or "string" not in types else text
