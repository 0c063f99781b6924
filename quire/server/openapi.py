"""The OpenAPI document, made from the route table and the structs themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any, Union, get_origin

import msgspec

from quire.server.errors import ErrorBody, phrase
from quire.server.routing import ADMIN, Route
from quire.server.state import Server

REFERENCES = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def document(server: Server, routes: Sequence[Route]) -> bytes:
    """The document as JSON."""
    kinds = [kind for route in routes for kind in _kinds(route) if _is_struct(kind)]
    kinds = list(dict.fromkeys([*kinds, ErrorBody]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCES)
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, by_kind, server)
    schemes = {name: {"type": "http", "scheme": "bearer"} for name in ("key", "admin")}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "quire", "version": server.version, "summary": "An OpenAI-compatible inference server"},
            "servers": [{"url": server.config.root_path or "/"}],
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": schemes},
        }
    )


def _operation(route: Route, schemas: dict[Any, Any], server: Server) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": (inspect.getdoc(route.handler) or "").partition("\n")[0],
        "responses": {"200": _answer(route, schemas)},
    }
    if names := _PARAMETER.findall(route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas[route.body]}}}
    for status in route.statuses:
        operation["responses"][str(status)] = {
            "description": phrase(status),
            "content": {"application/json": {"schema": schemas[_error_kind(route)]}},
        }
    if route.path.startswith(ADMIN):
        operation["security"] = [{"admin": []}]
    elif server.keys and not route.is_open:
        operation["security"] = [{"key": []}]
    return operation


def _answer(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "OK"}
    content: dict[str, Any] = {}
    if route.answer is not None:
        content["application/json"] = {"schema": schemas.get(route.answer, {"type": "object"})}
    elif route.media_type != "application/json":
        content[route.media_type] = {"schema": {"type": "string"}}
    if route.event is not None:
        # Each event's data, up to [DONE], is one of these.
        content["text/event-stream"] = {"schema": {"type": "string"}, "itemSchema": schemas[route.event]}
    return answer | ({"content": content} if content else {})


def _kinds(route: Route) -> tuple[Any, ...]:
    return route.body, route.answer, route.event, _error_kind(route)


def _error_kind(route: Route) -> Any:
    return ErrorBody if route.failing is None else route.failing.kind


def _is_struct(kind: Any) -> bool:
    """Or several of them."""
    return get_origin(kind) is Union or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))
