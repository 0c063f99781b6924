"""The OpenAPI document, built from the route table and the structs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from quire.api.adapters import MAX_ADAPTERS_PER_REQUEST
from quire.server.context import ServerContext
from quire.server.errors import ErrorBody, phrase
from quire.server.protocol.common import Body
from quire.server.protocol.fields import BOOLEAN_TEXT, INTEGER_TEXT, NUMBER_TEXT
from quire.server.protocol.messages import ANTHROPIC_BLOCKS, AnthropicImageBlock
from quire.server.protocol.responses import INPUT_ITEMS
from quire.server.protocol.values import IMAGE_PARTS, SESSION_NAME, TEXT_PARTS
from quire.server.routing import ADMIN, Route

REFERENCES = "#/components/schemas/{name}"
NESTED_OBJECTS = {"$input_items": INPUT_ITEMS, "$content_blocks": ANTHROPIC_BLOCKS}
"""Objects in a body that its route decodes itself, by the placeholders that fields use for them."""
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_AS_TEXT: dict[str, dict[str, Any]] = {
    "integer": {"type": ["integer", "string"], "pattern": INTEGER_TEXT},
    "number": {"type": ["number", "string"], "pattern": NUMBER_TEXT},
    "boolean": {"type": ["boolean", "string", "integer"], "pattern": BOOLEAN_TEXT, "minimum": 0, "maximum": 1},
}
_SOME_TEXT = {"type": "string", "minLength": 1}
PROMPT_EMBEDS = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
_PATH_SCHEMAS = {"session": {"type": "string", "pattern": SESSION_NAME}}


def document(context: ServerContext, routes: Sequence[Route]) -> bytes:
    """The document as JSON."""
    named = [kind for route in routes for kind in _types_of(route)]
    kinds = [kind for whole in named for kind in _alternatives(whole) if _is_struct(kind)]
    nested = [kind for kinds_by_name in NESTED_OBJECTS.values() for kind in kinds_by_name.values()]
    kinds = list(dict.fromkeys([*kinds, *nested, ErrorBody]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCES)
    by_kind: dict[Any, Any] = dict(zip(kinds, schemas, strict=True))
    by_kind |= {
        kind: {"anyOf": [by_kind[part] for part in _alternatives(kind)]} for kind in named if _is_untagged_union(kind)
    }
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Body):
            _list_neutral_values(kind, components[by_kind[kind]["$ref"].rpartition("/")[2]])
    _describe_rule(components, context.config.strict_fields)
    components = _fill_in(components, _server_values(context, by_kind))
    if not context.llm.config.enable_prompt_embeds:
        _require(components["CompletionRequest"], "prompt")
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, by_kind, context)
    schemes = {name: {"type": "http", "scheme": "bearer"} for name in ("key", "admin")}
    return msgspec.json.encode(
        {
            "openapi": "3.2.0",  # the first version that can describe the events of a stream
            "info": {"title": "quire", "version": context.version, "summary": "An OpenAI-compatible inference server"},
            "servers": [{"url": context.config.root_path or "/"}],
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": schemes},
        }
    )


def _describe_rule(components: dict[str, Any], is_strict: bool) -> None:
    """Describe the rule for fields: what request bodies accept beyond the types of their structs."""
    for kind in _subclasses(Body):
        if (described := components.get(kind.__name__)) is None:
            continue
        if not is_strict:
            described.pop("additionalProperties", None)
        for name, given in described["properties"].items():
            _widen(given)
            if name not in described.get("required", ()) and given.get("type") not in (None, "null"):
                described["properties"][name] = {"anyOf": [given, {"type": "null"}]}
            elif given.get("type") == "null":
                described["properties"][name] = {"enum": [None, "", [], {}], "default": None}


def _require(schema: dict[str, Any], name: str) -> None:
    """Describe a field with a default as required."""
    schema["required"] = [*schema.get("required", ()), name]
    given = schema["properties"][name]
    given.pop("default", None)
    given["anyOf"] = [kind for kind in given["anyOf"] if kind != {"type": "null"}]


def _subclasses(kind: type[Body]) -> Iterator[type[Body]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _widen(schema: Any) -> None:
    """Numbers and booleans may be text."""
    if isinstance(schema, list):
        for inner in schema:
            _widen(inner)
    elif isinstance(schema, dict):
        _widen(list(schema.values()))
        schema.update(_AS_TEXT.get(str(schema.get("type")), {}))


def _list_neutral_values(kind: type[Body], schema: dict[str, Any]) -> None:
    """List the accepted values of fields that are accepted only without effect."""
    for name, values in kind.neutral.items():
        schema["properties"][name] = {"enum": [*values, None], "default": None}


def _server_values(context: ServerContext, schemas: dict[Any, Any]) -> dict[str, Any]:
    """Values that depend on the running server, by the placeholders that field types use for them."""
    vocabulary, logprobs = context.llm.info.model.vocab_size, context.llm.config.max_logprobs
    takes_images = "image" in context.llm.inputs.media.modalities
    nested = {
        name: [schemas[kind] for kind in kinds.values() if takes_images or kind is not AnthropicImageBlock]
        for name, kinds in NESTED_OBJECTS.items()
    }
    adapters = [entry.name for entry in context.adapters]
    return nested | {
        "$processor_settings": [
            {"enum": [None, {}, [], ""]},
            *([{"type": "object"}] if context.config.trust_request_mm_kwargs else []),
        ],
        "$prompt_embeds": PROMPT_EMBEDS if context.llm.config.enable_prompt_embeds else [{"enum": ["", []]}],
        "$parts": TEXT_PARTS + (IMAGE_PARTS if takes_images else []),
        "$names": [*context.names, *adapters],
        "$adapters": adapters or [""],
        "$max_adapters": min(len(adapters), MAX_ADAPTERS_PER_REQUEST),
        "$max_model_len": context.max_model_len,
        "$max_samples": context.config.max_samples,
        "$last_token": vocabulary - 1,
        "$least_logprobs": -1 if logprobs < 0 else 0,
        "$max_logprobs": vocabulary if logprobs < 0 else logprobs,
    }


def _fill_in(schema: Any, values: dict[str, Any]) -> Any:
    """A schema with its placeholders replaced."""
    if isinstance(schema, dict):
        return {name: _fill_in(value, values) for name, value in schema.items()}
    if isinstance(schema, list):
        return [_fill_in(value, values) for value in schema]
    return values.get(schema, schema) if isinstance(schema, str) else schema


def _operation(route: Route, schemas: dict[Any, Any], context: ServerContext) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": (inspect.getdoc(route.handler) or "").partition("\n")[0],
        "responses": {"200": _success_response(route, schemas)},
    }
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.body_type != "application/json":
        schema = {"type": "string", "format": "binary"}
        operation["requestBody"] = {"required": True, "content": {route.body_type: {"schema": schema}}}
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas[route.body]}}}
    for status in route.statuses:
        operation["responses"][str(status)] = {
            "description": phrase(status),
            "content": {"application/json": {"schema": schemas[_error_kind(route)]}},
        }
    if route.path.startswith(ADMIN) or route.needs_admin:
        operation["security"] = [{"admin": []}]
    elif context.keys and not route.is_public:
        operation["security"] = [{"key": []}]
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS.get(name, _SOME_TEXT)}
        for name in _PARAMETER.findall(route.path)
    ]
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in route.query.items()
    ]
    return in_path + in_query


def _success_response(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "OK"}
    content: dict[str, Any] = {}
    if route.answer is not None:
        content["application/json"] = {"schema": _schema(route.answer, schemas)}
    if route.is_binary:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    if route.answer is None and route.media_type != "application/json":
        content[route.media_type] = {"schema": {"type": "string"}}
    if route.event is not None:
        content["text/event-stream"] = {
            "itemSchema": {"type": "object", "properties": {"data": _event_data(route, schemas)}, "required": ["data"]}
        }
    return answer | ({"content": content} if content else {})


def _event_data(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    """JSON as text: an event; in OpenAI streams also an error, or [DONE] at the end."""
    if not route.last_data:
        return {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": _schema(route.event, schemas),
        }
    content = {"anyOf": [_schema(route.event, schemas), schemas[_error_kind(route)]]}
    data = {"contentMediaType": "application/json", "contentSchema": content}
    return {"type": "string", "anyOf": [{"const": route.last_data}, data]}


def _types_of(route: Route) -> tuple[Any, ...]:
    return route.body, *_as_tuple(route.answer), *_as_tuple(route.event), _error_kind(route)


def _as_tuple(kind: Any) -> tuple[Any, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


def _schema(kind: Any, schemas: dict[Any, Any]) -> dict[str, Any]:
    """The schema of one type, or of one of several."""
    found = [schemas.get(each, {"type": "object"}) for each in _as_tuple(kind)]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _error_kind(route: Route) -> Any:
    return ErrorBody if route.error_style is None else route.error_style.kind


def _is_struct(kind: Any) -> bool:
    """Whether it is a struct or a union of structs."""
    return get_origin(kind) is Union or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))


def _is_untagged_union(kind: Any) -> bool:
    """Whether it is `A | B` of untagged structs, which msgspec cannot decode and so does not describe."""
    return isinstance(kind, UnionType)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if _is_untagged_union(kind) else (kind,)
