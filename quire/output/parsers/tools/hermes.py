"""Hermes, Qwen 2.5, Qwen 3, LongCat: JSON between tags."""

from __future__ import annotations

import re
from typing import ClassVar

from quire.output.parsers.incremental import Reads
from quire.output.parsers.tools.base import CallParser

_SPARE_BRACES = re.compile(r"[}\s]+")


class HermesParser(CallParser):
    """`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, any number of times."""

    tags = ("<tool_call>",)
    closing: ClassVar[str] = "</tool_call>"
    notation = (
        "To call one, answer with its name and arguments between these tags, once for each call:\n"
        '<tool_call>\n{"name": "a tool\'s name", "arguments": {"a parameter": "its value"}}\n</tool_call>\n'
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        start = yield from self._take_next("{[")
        if not start:
            return
        while start:
            if not (yield from self._objects(start, is_marked=True)):
                return
            start = yield from self._take_next("{")
        # Small models miscount the braces at the end.
        yield from self._take_run(_SPARE_BRACES)
        if (yield from self._take_word(self.closing)):
            self._held.clear()


class LongcatParser(HermesParser):
    """LongCat-Flash: the same with tags of its own."""

    tags = ("<longcat_tool_call>",)
    closing = "</longcat_tool_call>"
    notation = HermesParser.notation.replace("tool_call>", "longcat_tool_call>")
