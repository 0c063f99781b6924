"""Models without a format of their own, prompted to write calls in JSON."""

from __future__ import annotations

from quire.output.parsers.incremental import Reads
from quire.output.parsers.tools.base import CallParser

_FENCE = "```"


class JsonParser(CallParser):
    """`{"name": "f", "arguments": {…}}`, or a list of such, from the start of a line or in a fenced block."""

    tags = ("```json", _FENCE)
    bare = "{["
    notation = (
        "To call one, answer with nothing but its name and arguments in JSON, several calls as a list:\n"
        '{"name": "a tool\'s name", "arguments": {"a parameter": "its value"}}\n'
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        is_fenced = opener in self.tags
        start = (yield from self._take_next(self.bare)) if is_fenced else opener
        # A fence alone does not mark a call: users request JSON too.
        if not start or not (yield from self._objects(start, is_marked=False)) or not is_fenced:
            return
        while start := (yield from self._take_next(self.bare)):
            if not (yield from self._objects(start, is_marked=False)):
                return
        if (yield from self._take_word(_FENCE)):
            self._held.clear()
