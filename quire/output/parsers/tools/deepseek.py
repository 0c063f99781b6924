"""DeepSeek V3 and V3.1, Kimi K2: a section of calls, each a name and its arguments in JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import ClassVar

from quire.output.parsers.incremental import Reads
from quire.output.parsers.tools.base import CallParser, openai_id

_NAME = re.compile(r"[^\s<|｜{}]+")
_KIMI_NUMBER = re.compile(r":\d+$")


class SectionParser(CallParser):
    """`section begin, (begin, name, separator, {…}, end)*, section end`; the marks are special tokens."""

    needs_special_tokens = True
    begin: ClassVar[str]
    separator: ClassVar[str]
    end: ClassVar[str]
    section_end: ClassVar[str]

    def _calls(self, opener: str) -> Reads[None]:
        first = self._count
        if opener == self.begin and not (yield from self._call()):  # after a broken one
            return
        yield from self._skip_spaces()
        while (yield from self._take_word(self.begin)):
            if not (yield from self._call()):
                return
            yield from self._skip_spaces()
        if (yield from self._take_word(self.section_end)) and self._count > first:  # an empty section is text
            self._held.clear()

    def _call(self) -> Reads[bool]:
        name = yield from self._name()
        yield from self._skip_spaces()
        if not self._accepts(name, is_marked=True) or not (yield from self._is_next("{")):
            return False
        if not (yield from self._stream_arguments(name)):
            return False
        yield from self._after_arguments()
        if (yield from self._take_word(self.end)):
            self._held.clear()
        return True

    def _name(self) -> Reads[str]:
        """The name, with what stands between it and the arguments."""
        name = yield from self._take_run(_NAME)
        return name if (yield from self._take_word(self.separator)) else ""

    def _after_arguments(self) -> Reads[None]:
        yield from self._skip_spaces()


class DeepSeekV31Parser(SectionParser):
    """`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>`."""

    begin = "<｜tool▁call▁begin｜>"
    tags = ("<｜tool▁calls▁begin｜>", begin)
    separator = "<｜tool▁sep｜>"
    end = "<｜tool▁call▁end｜>"
    section_end = "<｜tool▁calls▁end｜>"
    notation = (
        "To call tools, answer with their names and arguments between these marks:\n"
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_name<｜tool▁sep｜>{"a_parameter": "its value"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>\nWhere no tool helps, answer in plain words."
    )


class DeepSeekV3Parser(DeepSeekV31Parser):
    """The same, with `function<｜tool▁sep｜>f` and the arguments in a block of code."""

    notation = (
        "To call tools, answer with their names and arguments between these marks:\n"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>tool_name\n"
        '```json\n{"a_parameter": "its value"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>\n'
        "Where no tool helps, answer in plain words."
    )

    def _name(self) -> Reads[str]:
        kind = yield from self._take_run(_NAME)
        if not kind or not (yield from self._take_word(self.separator)):
            return ""
        name = yield from self._take_run(_NAME)
        yield from self._skip_spaces()
        yield from self._take_word("```json")
        return name

    def _after_arguments(self) -> Reads[None]:
        yield from self._skip_spaces()
        yield from self._take_word("```")
        yield from self._skip_spaces()


class KimiK2Parser(SectionParser):
    """Kimi K2: names have a prefix and a number, `functions.f:0`. All of it is the call's id: the model knows the
    result by it."""

    begin = "<|tool_call_begin|>"
    tags = ("<|tool_calls_section_begin|>", begin)
    separator = "<|tool_call_argument_begin|>"
    end = "<|tool_call_end|>"
    section_end = "<|tool_calls_section_end|>"
    notation = (
        "To call tools, answer with their names and arguments between these marks:\n"
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.tool_name:0<|tool_call_argument_begin|>"
        '{"a_parameter": "its value"}<|tool_call_end|><|tool_calls_section_end|>\n'
        "Where no tool helps, answer in plain words."
    )

    def __init__(self, offered: Collection[str] | None = None, new_id: Callable[[], str] | None = None) -> None:
        super().__init__(offered, openai_id if new_id is None else new_id)
        self._keeps_ids = new_id is None

    def _name(self) -> Reads[str]:
        name = yield from self._take_run(_NAME)
        yield from self._skip_spaces()
        if not (yield from self._take_word(self.separator)):
            return ""
        if self._keeps_ids:
            self._new_id = (lambda: name) if _KIMI_NUMBER.search(name) else openai_id
        return _KIMI_NUMBER.sub("", name).removeprefix("functions.")
