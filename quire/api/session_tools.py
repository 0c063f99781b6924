"""Whether an answer calls tools: then its session sleeps until their results come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.api.chat import ChatRenderer
from quire.output.parsers.toolcalls import guess_parser
from quire.output.parsers.tools.registry import make_tool_parser


def calls_tools(answer: Sequence[int], tools: Sequence[Any], renderer: ChatRenderer) -> bool:
    """Whether these tokens hold calls, in the notation that the chat template teaches."""
    parser = make_tool_parser(guess_parser(renderer.template(tools)), {tool_name(tool) for tool in tools})
    skips = not parser.needs_special_tokens
    text = renderer.tokenizer.decode(list(answer), skip_special_tokens=skips)
    return bool(parser.parse(text).calls)


def tool_name(tool: Any) -> str:
    """A tool's name: it is a schema, or a Python function."""
    if not isinstance(tool, Mapping):
        return str(getattr(tool, "__name__", ""))
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""
