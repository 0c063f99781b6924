"""Tool parsers by name."""

from __future__ import annotations

from collections.abc import Callable, Collection

from quire.output.parsers.tools.base import ToolParser
from quire.registry import resolve

TOOL_PARSERS = {
    "hermes": "quire.output.parsers.tools.hermes.HermesParser",
    "json": "quire.output.parsers.tools.json.JsonParser",
    "llama3_json": "quire.output.parsers.tools.llama3_json.Llama3JsonParser",
    "mistral": "quire.output.parsers.tools.mistral.MistralParser",
    "pythonic": "quire.output.parsers.tools.pythonic.PythonicParser",
}


def notation_of(name: str) -> str:
    """Instructions for writing calls that this parser reads; "" if it has none."""
    return str(getattr(resolve("tool-call parser", name, TOOL_PARSERS), "notation", ""))


def make_tool_parser(
    name: str, offered: Collection[str] | None = None, new_id: Callable[[], str] | None = None
) -> ToolParser:
    """A fresh parser for one answer; `name` is one of `TOOL_PARSERS` or a dotted path to a class.

    `offered` names the tools of the request, and `new_id` makes the ids of calls (otherwise as the format wants them).
    """
    parser = resolve("tool-call parser", name, TOOL_PARSERS)
    made: ToolParser = parser(offered) if new_id is None else parser(offered, new_id)
    return made
