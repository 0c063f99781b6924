"""Mistral: a special token, then either of two notations."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from quire.output.parsers.incremental import Reads
from quire.output.parsers.tools.base import CallParser, mistral_id

_NAME = re.compile(r"[^\s\[\]{}]+")
_ID = re.compile(r"[A-Za-z0-9]+")


class MistralParser(CallParser):
    """`[TOOL_CALLS][{"name": "f", "arguments": {…}}, …]`, and since 2025 `[TOOL_CALLS]f[ARGS]{…}` for each call.

    The later notation may name an id (`[CALL_ID]…`) or leave `[ARGS]` out.
    """

    tags = ("[TOOL_CALLS]",)
    needs_special_tokens = True
    notation = (
        "To call tools, answer with a list of their names and arguments in JSON:\n"
        '[TOOL_CALLS][{"name": "a tool\'s name", "arguments": {"a parameter": "its value"}}]\n'
        "Where no tool helps, answer in plain words."
    )

    def __init__(self, offered: Collection[str] | None = None, new_id: Callable[[], str] = mistral_id) -> None:
        super().__init__(offered, new_id)

    def _calls(self, opener: str) -> Reads[None]:
        start = yield from self._take_next("{[")
        if start:
            yield from self._objects(start, is_marked=True)
        else:
            yield from self._named_call()

    def _named_call(self) -> Reads[None]:
        name = yield from self._take_run(_NAME)
        yield from self._skip_spaces()
        if (yield from self._take_word("[CALL_ID]")):
            yield from self._take_run(_ID)
        yield from self._take_word("[ARGS]")
        if (yield from self._skip_spaces()) == "{" and self._accepts(name, is_marked=True):
            yield from self._stream_arguments(name)
