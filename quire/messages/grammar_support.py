"""Checks that grammars support a JSON schema or regular expression; keywords they would ignore are refused by name."""

from __future__ import annotations

from typing import Any

from quire.errors import ValidationError

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


def _check_required(schema: dict[str, Any], where: str) -> None:
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refused(f"{where} has a 'required' that is not a list of strings")
    unknown = [name for name in required if name not in schema.get("properties", {})]
    if unknown:
        raise _refused(f"{where} requires {unknown[0]!r}, which its properties do not describe")


def _refused(what: str) -> ValidationError:
    return ValidationError(f"structured_outputs.json: {what}", "structured_outputs.json")


# Regular expressions

_ESCAPES = frozenset("dDwWsStnrfv0xu")
"""Letters and digits with a meaning after a backslash. Punctuation stands for itself."""


def plain_regex(pattern: str) -> str:
    """The pattern for a whole output: without anchors, and with a dot that matches no line break."""
    return "".join(_pieces(pattern))


def check_json_pattern(pattern: object) -> None:
    """Raise ValueError if a string generated for this pattern, in quotes, might not be JSON or might not match."""
    if not isinstance(pattern, str):
        raise ValueError("a pattern is a string")
    for piece in _pieces(pattern):
        if piece in ('"', "\\\\", '\\"', "\\n", "\\r", "\\t", "\\f", "\\v", "\\0") or piece < " ":
            raise ValueError(f"{piece!r} would have to be escaped in JSON, which is not supported in patterns")


def _pieces(pattern: str) -> list[str]:
    """Characters, escapes and classes, as a grammar takes them; anchors around a whole alternative are left out."""
    pieces: list[str] = []
    at, depth, end = 0, 0, len(pattern)
    begins = True
    while at < end:
        char = pattern[at]
        piece = char
        if char == "\\":
            piece = _escape(pattern, at)
        elif char == "[":
            piece = _class(pattern, at)
        at += len(piece)
        if char == "^":
            if depth or not begins:
                raise ValueError("'^' is supported only at the beginning of an alternative outside parentheses")
            continue
        if char == "$":
            if depth or not (at == end or pattern[at] == "|"):
                raise ValueError("'$' is supported only at the end of an alternative outside parentheses")
            continue
        depth += (char == "(") - (char == ")")
        begins = char == "|"
        pieces.append("[^\\n]" if char == "." else piece)
    return pieces


def _escape(pattern: str, at: int) -> str:
    following = pattern[at + 1 : at + 2]
    if not following:
        raise ValueError("it ends in a backslash")
    if following.isalnum() and following not in _ESCAPES:
        raise ValueError(f"'\\{following}' is not supported")
    return pattern[at : at + 2]


def _class(pattern: str, at: int) -> str:
    end = at + 1 + pattern.startswith("^", at + 1)
    end += pattern.startswith("]", end)  # the first character stands for itself
    while end < len(pattern) and pattern[end] != "]":
        if pattern.startswith("[:", end):
            raise ValueError("named classes such as [:alpha:] are not supported")
        end += len(_escape(pattern, end)) if pattern[end] == "\\" else 1
    if end >= len(pattern):
        raise ValueError("a '[' is not closed")
    return pattern[at : end + 1]
