"""Which JSON schemas a grammar can keep. What it would silently leave out is refused by name."""

from __future__ import annotations

from typing import Any

from quire.errors import ValidationError
from quire.messages.pattern import check_json_pattern

MAX_DEPTH = 64
MAX_SCHEMAS = 10_000

_REFUSED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "$dynamicRef", "$recursiveRef", "additionalItems",
)  # fmt: skip
_ONE = ("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames", "items")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_CHOOSERS = ("$ref", "anyOf", "oneOf", "allOf")
"""Where one of these is given, a grammar looks at nothing else."""
_CONSTRAINTS = frozenset(
    (
        *_CHOOSERS, "type", "enum", "const", "properties", "patternProperties", "required", "items", "prefixItems",
        "additionalProperties", "unevaluatedProperties", "propertyNames", "minProperties", "maxProperties", "minItems",
        "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "pattern", "format",
        "minLength", "maxLength",
    )
)  # fmt: skip


def check_schema(root: dict[str, Any]) -> None:
    """Raise if output made for this schema need not be valid under it. `oneOf` is taken as `anyOf`."""
    seen = 0
    queue: list[tuple[Any, str, int]] = [(root, "", 1)]
    while queue:
        schema, path, depth = queue.pop()
        seen += 1
        if seen > MAX_SCHEMAS:
            raise _refused(f"more than {MAX_SCHEMAS} schemas in one")
        if depth > MAX_DEPTH:
            raise _refused(f"nested more than {MAX_DEPTH} deep")
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise _refused(f"{path or 'the root'} must be an object, got {type(schema).__name__}")
        inside = _inner(schema, path)
        _check_one(schema, path, root)
        queue += [(inner, f"{path}/{name}", depth + 1) for name, inner in inside]


def _inner(schema: dict[str, Any], path: str) -> list[tuple[str, Any]]:
    """The schemas directly inside one."""
    found = [(name, schema[name]) for name in _ONE if name in schema]
    for name in _LISTS:
        listed = schema.get(name, [])
        if not isinstance(listed, list):
            raise _refused(f"{path}/{name} must be a list, got {type(listed).__name__}")
        found += [(f"{name}/{i}", inner) for i, inner in enumerate(listed)]
    for name in _MAPS:
        named = schema.get(name, {})
        if not isinstance(named, dict):
            raise _refused(f"{path}/{name} must be an object, got {type(named).__name__}")
        found += [(f"{name}/{key}", inner) for key, inner in named.items()]
    return found


def _check_one(schema: dict[str, Any], path: str, root: dict[str, Any]) -> None:
    where = path or "the root"
    for name in _REFUSED:
        if name in schema:
            raise _refused(f"{where} uses {name!r}, which is not supported")
    if schema.get("uniqueItems") is True:
        raise _refused(f"{where} uses 'uniqueItems', which is not supported")
    _check_chooser(schema, where, root)
    _check_required(schema, where)
    if not isinstance(schema.get("format", ""), str):
        raise _refused(f"{where} has a 'format' that is no string")
    if "pattern" in schema:
        together = [name for name in ("minLength", "maxLength", "format") if name in schema]
        if together:
            raise _refused(f"{where} uses 'pattern' and {together[0]!r} together, which is not supported")
    for pattern in [schema["pattern"]] if "pattern" in schema else schema.get("patternProperties", {}):
        try:
            check_json_pattern(pattern)
        except ValueError as error:
            raise _refused(f"{where} has the pattern {pattern!r}: {error}") from error


def _check_chooser(schema: dict[str, Any], where: str, root: dict[str, Any]) -> None:
    chooser = next((name for name in _CHOOSERS if name in schema), None)
    if chooser is None:
        return
    besides = [name for name in schema if name in _CONSTRAINTS and name != chooser]
    if besides == ["type"] and chooser != "$ref" and isinstance(schema[chooser], list):
        besides = [] if all(_has_type(inner, schema["type"]) for inner in schema[chooser]) else besides
    if besides:
        raise _refused(f"{where} uses {chooser!r} and {besides[0]!r} together, which is not supported; merge them")
    if chooser == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1:
        raise _refused(f"{where} uses 'allOf' with {len(schema['allOf'])} schemas; only one is supported; merge them")
    if chooser == "$ref" and not _resolves(schema["$ref"], root):
        raise _refused(f"{where} refers to {schema['$ref']!r}; only places inside the schema (#/$defs/…) are known")


def _has_type(schema: Any, kind: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == kind


def _resolves(reference: Any, root: Any) -> bool:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return False
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict) and part in root:
            root = root[part]
        elif isinstance(root, list) and part.isdecimal() and int(part) < len(root):
            root = root[int(part)]
        else:
            return False
    return True


def _check_required(schema: dict[str, Any], where: str) -> None:
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refused(f"{where} has a 'required' that is no list of strings")
    unknown = [name for name in required if name not in schema.get("properties", {})]
    if unknown:
        raise _refused(f"{where} requires {unknown[0]!r}, which its properties do not describe")


def _refused(what: str) -> ValidationError:
    return ValidationError(f"structured_outputs.json: {what}", "structured_outputs.json")
