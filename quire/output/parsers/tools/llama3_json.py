"""Llama 3.1, 3.2 and 3.3: bare JSON."""

from __future__ import annotations

from quire.output.parsers.incremental import Reads
from quire.output.parsers.tools.base import CallParser


class Llama3JsonParser(CallParser):
    """`{"name": "f", "parameters": {…}}` at the start of a line or after `<|python_tag|>`; several with `;` between."""

    tags = ("<|python_tag|>",)
    bare = "{["
    notation = (
        "To call one, answer with nothing but its name and parameters in JSON, several calls with ; between:\n"
        '{"name": "a tool\'s name", "parameters": {"a parameter": "its value"}}\n'
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        is_marked = opener in self.tags
        start = (yield from self._take_next(self.bare)) if is_marked else opener
        while start:
            if not (yield from self._objects(start, is_marked)) or not (yield from self._take_next(";")):
                return
            start = yield from self._take_next(self.bare)
