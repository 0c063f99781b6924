"""Which parser a name stands for."""

from __future__ import annotations

from collections.abc import Callable, Collection

from quire.registry import resolve
from quire.server.tools.base import ToolParser

TOOL_PARSERS = {
    "hermes": "quire.server.tools.hermes.HermesParser",
    "json": "quire.server.tools.json.JsonParser",
    "llama3_json": "quire.server.tools.llama3_json.Llama3JsonParser",
    "mistral": "quire.server.tools.mistral.MistralParser",
    "pythonic": "quire.server.tools.pythonic.PythonicParser",
}


def make_tool_parser(
    name: str, offered: Collection[str] | None = None, new_id: Callable[[], str] | None = None
) -> ToolParser:
    """A fresh parser for one answer; `name` is one of `TOOL_PARSERS` or a dotted path to a class of your own.

    `offered` names the tools of the request, and `new_id` makes the ids of calls (otherwise as the format wants them).
    """
    parser = resolve("tool-call parser", name, TOOL_PARSERS)
    made: ToolParser = parser(offered) if new_id is None else parser(offered, new_id)
    return made
