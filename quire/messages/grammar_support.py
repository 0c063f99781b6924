"""Checks that grammars support a JSON schema or a structural tag; keywords they would ignore are refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from quire.errors import ValidationError
from quire.messages.grammar_syntax import MAX_COUNT, check_grammar, check_json_pattern, plain_regex

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
"""If a schema has one of these, a grammar ignores its other keywords."""
_CONSTRAINTS = frozenset(
    (
        *_CHOOSERS, "type", "enum", "const", "properties", "patternProperties", "required", "items", "prefixItems",
        "additionalProperties", "unevaluatedProperties", "propertyNames", "minProperties", "maxProperties", "minItems",
        "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "pattern", "format",
        "minLength", "maxLength",
    )
)  # fmt: skip
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NEEDS_TYPE = {
    **dict.fromkeys((*_BOUNDS, "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), "string"),
    **dict.fromkeys(("minItems", "maxItems"), "array"),
    **dict.fromkeys(("minProperties", "maxProperties", "patternProperties", "propertyNames"), "object"),
}
"""A grammar ignores these in a schema without a type…"""
_IMPLIES_TYPE = frozenset(
    (*_CHOOSERS, "type", "enum", "const", "properties", "additionalProperties", "unevaluatedProperties", "required",
     "items", "prefixItems")
)  # fmt: skip
"""…unless it has one of these."""
MAX_MULTIPLE = 1024
"""The largest `multipleOf` that a grammar keeps."""
_INT64 = range(-(2**63), 2**63)


def check_schema(root: dict[str, Any]) -> None:
    """Raise if output generated for this schema might not be valid under it. `oneOf` is taken as `anyOf`."""
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
    if not path.endswith("/propertyNames"):  # names are strings
        _check_type(schema, where)
    _check_numbers(schema, where)
    _check_required(schema, where)
    if not isinstance(schema.get("format", ""), str):
        raise _refused(f"{where} has a 'format' that is not a string")
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
        raise _refused(f"{where} refers to {schema['$ref']!r}; only places inside the schema (#/$defs/…) are supported")


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


def _check_type(schema: dict[str, Any], where: str) -> None:
    if _IMPLIES_TYPE.isdisjoint(schema):
        for name, kind in _NEEDS_TYPE.items():
            if name in schema:
                raise _refused(
                    f'{where} uses {name!r} without a \'type\', which is not supported; add "type": "{kind}"'
                )


def _check_numbers(schema: dict[str, Any], where: str) -> None:
    for name in _COUNTS:
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
            raise _refused(f"{where} has {name} = {_shown(value)}: it must be an integer from 0 to {MAX_COUNT}")
    for name in (*_BOUNDS, "multipleOf"):
        value = schema.get(name, 0)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (isinstance(value, float) and not math.isfinite(value)):
            raise _refused(f"{where} has {name} = {_shown(value)}: it must be a finite number")
    if "multipleOf" in schema:
        _check_multiple(schema, where)
    for value in _scalars([schema.get("enum"), schema.get("const")]):
        if isinstance(value, int) and value not in _INT64:
            raise _refused(f"{where} has the value {_shown(value)}; integers of at most 64 bits are supported")
        if isinstance(value, float) and not math.isfinite(value):
            raise _refused(f"{where} has a value that is too large for a number")


def _check_multiple(schema: dict[str, Any], where: str) -> None:
    value, kind = schema["multipleOf"], schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if "number" in kinds or value not in range(1, MAX_MULTIPLE + 1):
        raise _refused(
            f"{where} has multipleOf = {_shown(value)}; supported are whole numbers from 1 to {MAX_MULTIPLE}, for type "
            "'integer'"
        )
    if beside := next((name for name in _BOUNDS if name in schema), None):
        raise _refused(f"{where} uses 'multipleOf' and {beside!r} together, which is not supported")


def _scalars(value: Any) -> Iterator[Any]:
    """The values inside lists and objects."""
    queue = [value]
    while queue:
        value = queue.pop()
        if isinstance(value, (list, dict)):
            queue += value if isinstance(value, list) else value.values()
        else:
            yield value


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_required(schema: dict[str, Any], where: str) -> None:
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refused(f"{where} has a 'required' that is not a list of strings")
    unknown = [name for name in required if name not in schema.get("properties", {})]
    if unknown:
        raise _refused(f"{where} requires {unknown[0]!r}, which its properties do not describe")


def _refused(what: str) -> ValidationError:
    return ValidationError(f"structured_outputs.json: {what}", "structured_outputs.json")


# Structural tags


def check_structural_tag(tag: dict[str, Any]) -> None:
    """Raise if a schema, pattern, grammar or count inside a tag would be read as something else."""
    queue: list[Any] = [tag]
    while queue:
        part = queue.pop()
        if isinstance(part, dict):
            _check_tag_part(part)
            queue += [value for name, value in part.items() if name not in ("json_schema", "schema")]
        elif isinstance(part, list):
            queue += part


def _check_tag_part(part: dict[str, Any]) -> None:
    kind = part.get("type")
    try:
        if kind == "regex" and isinstance(pattern := part.get("pattern"), str):
            plain_regex(pattern)
        elif kind == "grammar" and isinstance(grammar := part.get("grammar"), str):
            check_grammar(grammar)
        elif kind == "repeat":
            for end, least in (("min", 0), ("max", -1)):
                if isinstance(count := part.get(end, 0), int) and not least <= count <= MAX_COUNT:
                    raise ValueError(f"a repeat has {end} = {_shown(count)}: it must be {least} to {MAX_COUNT}")
        for schema in (part.get("json_schema"), part.get("schema")):
            if isinstance(schema, dict):
                check_schema(schema)
    except ValueError as error:
        name = "structured_outputs.structural_tag"
        reason = str(error).removeprefix("structured_outputs.json: ")
        raise ValidationError(f"{name}: {reason}", name) from None
