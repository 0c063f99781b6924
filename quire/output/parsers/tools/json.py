"""Models without a format of their own, prompted to write calls in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from quire.output.parsers.incremental import Reads
from quire.output.parsers.tools.base import CallParser

_FENCE = "```"
_THOUGHT_END = "</think>"


class JsonParser(CallParser):
    """`{"name": "f", "arguments": {…}}`, or a list of such, from the start of a line or in a fenced block."""

    tags: ClassVar[tuple[str, ...]] = ("```json", _FENCE)
    bare = "{["
    marks: ClassVar[Mapping[str, str]] = {}
    """Tags that can only mean calls, and what ends each."""
    notation = (
        "To call one, answer with nothing but its name and arguments in JSON, several calls as a list:\n"
        '{"name": "a tool\'s name", "arguments": {"a parameter": "its value"}}\n'
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        is_tagged = opener in self.tags
        start = (yield from self._take_next(self.bare)) if is_tagged else opener
        # A fence alone does not mark a call: users request JSON too.
        is_marked = opener in self.marks
        if not start or not (yield from self._objects(start, is_marked)) or not is_tagged:
            return
        while start := (yield from self._take_next(self.bare)):
            if not (yield from self._objects(start, is_marked)):
                return
        if (closing := self.marks.get(opener, _FENCE)) and (yield from self._take_word(closing)):
            self._held.clear()


class XlamParser(JsonParser):
    """xLAM 2: the same, also right after its thinking, and lists after either of two marks."""

    marks: ClassVar[Mapping[str, str]] = {"[TOOL_CALLS]": "", "<tool_call>": "</tool_call>"}
    tags = (*JsonParser.tags, *marks)
    needs_special_tokens = True
    _last = ""

    def _add_content(self, text: str) -> None:
        super()._add_content(text)
        self._last = (self._last + text)[-len(_THOUGHT_END) :]
        self._is_line_start |= self._last == _THOUGHT_END
