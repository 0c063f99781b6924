"""Tools of /v1/responses as functions that a chat offers, and calls of them as output items.

Functions of a namespace are offered one by one, under the namespace's name and their own. A custom tool, whose argument
is one text, is offered as a function with one parameter. Tools that OpenAI's own servers run (web search, code
interpreter, …) are left out, and named as ignored.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from quire.output.parsers.deltas import CallStart
from quire.server.errors import bad_request
from quire.server.protocol.conversation import ChatFunction, ChatTool, CustomTool
from quire.server.protocol.fields import FieldReader
from quire.server.protocol.responses import (
    ResponseCustomTool,
    ResponseNamespace,
    ResponseOutputCall,
    ResponseOutputCustomCall,
    ResponseTool,
)


class OfferedTools:
    """The tools of one request."""

    def __init__(self, given: Sequence[dict[str, Any]] | None, fields: FieldReader) -> None:
        self.tools: list[ChatTool] = []
        self._namespaces: dict[str, tuple[str, str]] = {}
        """The namespace and the name of each function that has one, by the name it is offered under."""
        self._customs: set[str] = set()
        for index, tool in enumerate(given or ()):
            self._add(tool, f"tools[{index}]", fields)

    def _add(self, tool: dict[str, Any], where: str, fields: FieldReader, namespace: str | None = None) -> None:
        kind = tool.get("type", "function")
        if kind == "function":
            function = fields.convert(tool, ResponseTool, where)
            name = qualified(namespace, function.name)
            if namespace is not None:
                self._namespaces[name] = namespace, function.name
            self.tools.append(
                ChatTool(
                    function=ChatFunction(
                        name=name,
                        description=function.description,
                        parameters=function.parameters,
                        strict=function.strict,
                    )
                )
            )
        elif kind == "custom":
            custom = fields.convert(tool, ResponseCustomTool, where)
            name = qualified(namespace, custom.name)
            self._customs.add(name)
            self.tools.append(
                ChatTool(custom=CustomTool(name=name, description=custom.description, format=custom.format))
            )
        elif kind == "namespace" and namespace is None:
            group = fields.convert(tool, ResponseNamespace, where)
            for index, member in enumerate(group.tools):
                self._add(member, f"{where}.tools[{index}]", fields, group.name)
        elif isinstance(kind, str):
            fields.ignore(f"{where}.{kind}")
        else:
            raise bad_request(f"{where}.type must be text", f"{where}.type")

    def item_of(self, start: CallStart) -> ResponseOutputCall | ResponseOutputCustomCall:
        """The output item of a call that begins."""
        if start.name in self._customs:
            return ResponseOutputCustomCall(f"ctc_{uuid.uuid4().hex}", "in_progress", start.id, start.name, "")
        namespace, name = self._namespaces.get(start.name, (None, start.name))
        item = ResponseOutputCall(f"fc_{uuid.uuid4().hex}", "in_progress", start.id, name, "")
        if namespace is not None:
            item.namespace = namespace
        return item


def qualified(namespace: str | None, name: str) -> str:
    """The name that a function of a namespace is offered under."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"
