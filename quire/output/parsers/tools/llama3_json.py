"""Llama 3.1, 3.2 and 3.3: bare JSON."""

from __future__ import annotations

from quire.output.parsers.incremental import Reads
from quire.output.parsers.tools.base import CallParser


class Llama3JsonParser(CallParser):
    """`{"name": "f", "parameters": {…}}` anywhere in the text or after `<|python_tag|>`; several with `;` between.

    Bare JSON may turn out to be no call until its last character, so calls are emitted as a whole.
    """

    tags = ("<|python_tag|>",)
    bare = "{["
    streams_objects = False
    notation = (
        "To call one, answer with nothing but its name and parameters in JSON, several calls with ; between:\n"
        '{"name": "a tool\'s name", "parameters": {"a parameter": "its value"}}\n'
        "Where no tool helps, answer in plain words."
    )
    _last = ""
    """The last two characters of the content that are not white space."""

    def _calls(self, opener: str) -> Reads[None]:
        is_marked = opener in self.tags
        start = (yield from self._take_next(self.bare)) if is_marked else opener
        while start:
            if not (yield from self._objects(start, is_marked)) or not (yield from self._take_next(";")):
                return
            start = yield from self._take_next(self.bare)

    def _opener(self) -> Reads[str]:
        opener = yield from super()._opener()
        character = self._text[self._at]
        # Within JSON that is no call, a part of it is none either.
        is_inner = self._last.endswith(("{", "[")) or self._last == '":'
        return opener or (character if character in self.bare and not is_inner else "")

    def _add_content(self, text: str) -> None:
        super()._add_content(text)
        self._last = (self._last + "".join(text.rsplit(None, 2)[-2:]))[-2:]

    def _start(self, name: str) -> None:
        super()._start(name)
        self._last = ""
