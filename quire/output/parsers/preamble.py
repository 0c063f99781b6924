"""Tools told in words, to a model whose chat template says nothing of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol


class OfferedFunction(Protocol):
    """A tool that the model may call."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str | None: ...

    @property
    def parameters(self) -> dict[str, Any] | None:
        """A JSON schema."""


def tool_preamble(functions: Sequence[OfferedFunction], how: str) -> str:
    """What a system message says of tools: each on a line of its own as JSON, then `how` they are called."""
    lines = "\n".join(json.dumps(_described(function), ensure_ascii=False) for function in functions)
    intro = "You have tools: functions that you can call. Here they are in JSON, one a line."
    return f"{intro}\n<tools>\n{lines}\n</tools>\n{how}"


def with_preamble(messages: Sequence[dict[str, Any]], preamble: str, role: str) -> list[dict[str, Any]]:
    """The conversation with the preamble in its first message of this role, or as a first message of its own.

    After a system message's own words, but before a user's: there it introduces what is asked.
    """
    told = [dict(message) for message in messages]
    at = next((index for index, message in enumerate(told) if message.get("role") == role), None)
    if at is None or (role == "system" and at > 0):
        return [{"role": role, "content": preamble}, *told]
    content = told[at].get("content") or ""
    if isinstance(content, str):
        pair = (content, preamble) if role == "system" else (preamble, content)
        told[at]["content"] = "\n\n".join(text for text in pair if text)
    else:
        part = {"type": "text", "text": preamble}
        told[at]["content"] = [*content, part] if role == "system" else [part, *content]
    return told


def _described(function: OfferedFunction) -> dict[str, Any]:
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in fields.items() if value is not None}
