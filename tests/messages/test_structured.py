"""StructuredOutputsParams: what is refused, with which message, and how accepted values are normalized."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from quire import SamplingParams, StructuredOutputsParams
from quire.errors import ValidationError
from quire.messages.grammar_support import MAX_DEPTH
from quire.messages.grammar_syntax import plain_regex
from quire.messages.structured import KINDS, MAX_CHARACTERS

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema}
    return schema


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag; got none"),
    ({"json": PERSON, "regex": "a"}, "got json, regex"),
    ({"json": ""}, "non-empty string"),
    ({"json": {}}, "non-empty JSON object"),
    ({"json": "{"}, "not JSON"),
    ({"json": "[1]"}, "must be a non-empty JSON object"),
    ({"json": 3}, "must be a JSON object"),
    ({"json": {"minimum": float("nan")}}, "not JSON"),
    ({"json": "[" * 50_000}, "nested too deep"),
    ({"json": '{"a":' * 50_000}, "nested too deep"),
    ({"json": nested(MAX_DEPTH + 1)}, f"nested more than {MAX_DEPTH} deep"),
    ({"json": {"enum": ["x" * MAX_CHARACTERS]}}, f"at most {MAX_CHARACTERS}"),
    ({"regex": ""}, "non-empty string"),
    ({"regex": "a\0b"}, "NUL"),
    ({"regex": "a" * (MAX_CHARACTERS + 1)}, f"{MAX_CHARACTERS + 1} characters"),
    ({"regex": r"\bword"}, r"'\b' is not supported"),
    ({"regex": "a^b"}, "'^' is supported only"),
    ({"regex": "(a$)b"}, "'$' is supported only"),
    ({"regex": "[[:alpha:]]"}, "named classes"),
    ({"regex": "a{4294967297}"}, "the count 4294967297 is above 2147483647"),
    ({"regex": "(a|b){2147483648}"}, "the count 2147483648"),
    ({"regex": "a{1,4294967296}"}, "the count 4294967296"),
    ({"regex": "a{4294967296,}?"}, "the count 4294967296"),
    ({"regex": rf"\\{{{'9' * 10_000}}}"}, "is above"),
    ({"regex": r"\u{110000}"}, "is no character"),
    ({"regex": r"[a-\u{FFFFFFFFF}]"}, "is no character"),
    ({"regex": r"\uD83D\uDE00"}, "half a surrogate pair"),
    ({"regex": r"\xZZ"}, "two hexadecimal digits"),
    ({"regex": r"[\u12]"}, "two hexadecimal digits"),
    ({"regex": r"x\x4"}, "two hexadecimal digits"),
    ({"grammar": 'root ::= "a"{4294967297}'}, "the count 4294967297"),
    ({"grammar": 'root ::= ("a" | x){ 1 , 4294967296 }\nx ::= "b"'}, "the count 4294967296"),
    ({"grammar": r'root ::= "\U00110000"'}, "is no character"),
    ({"grammar": r"root ::= [a-\U00110000]"}, "is no character"),
    ({"grammar": r'root ::= "\x110000000041"'}, "is no character"),
    ({"structural_tag": {"format": {"type": "regex", "pattern": "a{4294967297}"}}}, "the count 4294967297"),
    (
        {
            "structural_tag": {
                "format": {"type": "or", "elements": [{"type": "grammar", "grammar": "r ::= x{2147483648}"}]}
            }
        },
        "the count 2147483648",
    ),
    ({"structural_tag": {"format": {"type": "repeat", "min": 0, "max": 4294967297}}}, "a repeat has max = 4294967297"),
    (
        {"structural_tag": {"structures": [{"begin": "a", "schema": {"type": "string", "minLength": -1}, "end": "b"}]}},
        "minLength = -1",
    ),
    ({"choice": []}, "non-empty list of strings"),
    ({"choice": ["a", 1]}, "list of strings"),
    ({"choice": "ab"}, "list of strings"),
    ({"choice": [""]}, "at least one non-empty string"),
    ({"grammar": " "}, "non-empty string"),
    ({"json_object": False}, "true, or left out"),
    ({"structural_tag": ""}, "non-empty string"),
    ({"json_object": True, "whitespace_pattern": " ?"}, "whitespace_pattern is not supported"),
    ({"json_object": True, "disable_any_whitespace": "yes"}, "true or false"),
    ({"json_object": True, "after": ""}, "non-empty string"),
]


@pytest.mark.parametrize("fields, message", BAD, ids=[str(fields)[:40] for fields, _ in BAD])
def test_invalid_values_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match="structured_outputs") as caught:
        StructuredOutputsParams(**fields)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400
    assert (caught.value.parameter or "").startswith("structured_outputs")


UNKEPT: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "string"}}, "'not'"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "array", "contains": {"const": 1}}, "'contains'"),
    ({"if": {}, "then": {}}, "'if'"),
    ({"type": "object", "properties": {"a": {"dependentRequired": {"a": ["b"]}}}}, "/properties/a uses"),
    ({"allOf": [PERSON, PERSON]}, "only one is supported"),
    ({"anyOf": [PERSON], "properties": {}}, "'anyOf' and 'properties' together"),
    ({"type": "object", "anyOf": [{"type": "string"}]}, "'anyOf' and 'type' together"),
    ({"$ref": "https://example.com/x.json"}, "only places inside the schema"),
    ({"$ref": "#/$defs/missing"}, "only places inside the schema"),
    ({"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": {"type": "integer"}}}, "'$ref' and 'minimum' together"),
    ({"type": "object", "properties": {}, "required": ["a"]}, "requires 'a'"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "'pattern' and 'maxLength' together"),
    ({"type": "string", "pattern": 'say "hi"'}, "would have to be escaped"),
    ({"type": "string", "pattern": r"\bx"}, "is not supported"),
    ({"type": "object", "properties": {"a": 3}}, "/properties/a must be an object"),
    ({"anyOf": "x"}, "must be a list"),
    ({"type": "object", "required": "ab"}, "not a list of strings"),
    ({"type": "object", "required": [["a"]]}, "not a list of strings"),
    ({"type": "object", "required": [{}]}, "not a list of strings"),
    ({"type": "object", "properties": None, "required": ["a"]}, "/properties must be an object, got NoneType"),
    ({"type": "object", "patternProperties": 5}, "/patternProperties must be an object"),
    ({"$defs": 5, "$ref": "#/$defs/x"}, "/$defs must be an object"),
    ({"type": "string", "format": 5}, "a 'format' that is not a string"),
    ({"type": "string", "pattern": "a{4294967297}"}, "the count 4294967297"),
    ({"type": "string", "pattern": r"\x22"}, "would have to be escaped"),
    ({"type": "string", "pattern": r"\u005c"}, "would have to be escaped"),
    ({"type": "object", "patternProperties": {"a{4294967297}": {}}}, "the count 4294967297"),
    ({"type": "object", "propertyNames": {"pattern": "a{4294967297}"}}, "the count 4294967297"),
    ({"type": "string", "minLength": -1}, "minLength = -1"),
    ({"type": "string", "maxLength": -1}, "maxLength = -1"),
    ({"type": "string", "maxLength": 2**32 + 1}, "maxLength = 4294967297"),
    ({"type": "string", "minLength": True}, "minLength = True"),
    ({"type": "array", "minItems": -1}, "minItems = -1"),
    ({"type": "array", "maxItems": 2**31}, "maxItems = 2147483648"),
    ({"type": "object", "maxProperties": 2**32 + 1}, "maxProperties = 4294967297"),
    ({"type": "object", "minProperties": 2**32 + 1}, "minProperties = 4294967297"),
    ({"type": "object", "maxProperties": 10**4000}, "an integer of 13288 bits"),
    ({"type": "integer", "minimum": "3"}, "minimum = '3'"),
    ({"type": "integer", "multipleOf": 1025}, "multipleOf = 1025"),
    ({"type": "integer", "multipleOf": 2**64 + 3}, "multipleOf = 18446744073709551619"),
    ({"type": "integer", "multipleOf": 1.5}, "multipleOf = 1.5"),
    ({"type": "number", "multipleOf": 3}, "for type 'integer'"),
    ({"type": "integer", "multipleOf": 3, "minimum": 4}, "'multipleOf' and 'minimum' together"),
    ({"minimum": 3}, "'minimum' without a 'type'"),
    ({"pattern": "a"}, "'pattern' without a 'type'"),
    ({"maxItems": 1}, "'maxItems' without a 'type'"),
    ({"type": "object", "properties": {"a": {"minProperties": 1}}}, "/properties/a uses 'minProperties' without"),
    ({"const": 10**22}, "the value 10000000000000000000000"),
    ({"enum": [{"a": [2**63]}]}, "the value 9223372036854775808"),
]


@pytest.mark.parametrize("schema, message", UNKEPT, ids=[message for _, message in UNKEPT])
def test_a_schema_that_a_grammar_would_not_enforce_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        StructuredOutputsParams(json=schema)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        PERSON,
        nested(MAX_DEPTH),
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {"enum": [{"not": 1}]}}},
        {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}], "title": "t", "$defs": {"a/b": PERSON}},
        {"allOf": [{"$ref": "#/$defs/a"}], "description": "d", "$defs": {"a": PERSON}},
        {"type": "string", "anyOf": [{"type": "string", "enum": ["a"]}, {"type": "string", "pattern": "^b+$"}]},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "string", "maxLength": 2**31 - 1},
        {"type": "integer", "multipleOf": 1024},
        {"type": "number", "minimum": -1e99, "exclusiveMaximum": 10**30},
        {"properties": {"a": {"type": "boolean"}}, "maxProperties": 1},
        {"items": {"type": "boolean"}, "minItems": 1},
        {"type": "object", "propertyNames": {"pattern": "a{0,3}"}, "additionalProperties": {"const": -(2**63)}},
        {"enum": [1, "a{4294967297}"], "title": "a{4294967297}"},
    ],
)
def test_common_schemas_are_accepted(schema: dict[str, Any]) -> None:
    StructuredOutputsParams(json=schema)


@pytest.mark.parametrize(
    "pattern, same, other",
    [
        ("^a.b$", ["axb"], ["a\nb", "axbx"]),
        ("^a$|^b$", ["a", "b"], ["ab"]),
        (r"[.$^\]]\.\$", ["$.$", "].$"], ["a.$", ".a$"]),
        (r"(\d+|[a-z]*)?x", ["12x", "abx", "x"], ["1a"]),
    ],
)
def test_a_simplified_pattern_matches_the_same(pattern: str, same: list[str], other: list[str]) -> None:
    written = plain_regex(pattern)
    for text in same:
        assert re.fullmatch(pattern, text) and re.fullmatch(written, text)
    for text in other:
        assert not re.fullmatch(pattern, text) and not re.fullmatch(written, text)


@pytest.mark.parametrize(
    "form",
    [
        {"regex": r"[{4294967297}]\{4294967297\}"},
        {"regex": r"a{2147483647}|\u{10FFFF}\x41\u00e9"},
        {"grammar": 'root ::= "{9999999999}" [{9999999999}] r9999999999 # {9999999999}\n"\\\\UFFFFFFFF"'},
        {"grammar": r'root ::= "\"{9999999999}"{3}'},
        {"structural_tag": {"format": {"type": "repeat", "min": 0, "max": -1, "content": {"type": "any_text"}}}},
    ],
)  # fmt: skip
def test_large_numbers_that_are_no_counts_are_accepted(form: dict[str, Any]) -> None:
    StructuredOutputsParams(**form)


def test_every_kind_of_constraint_round_trips() -> None:
    constraints = dict(zip(KINDS, [PERSON, "a+", ["x", "y", "x"], 'root ::= "a"', True, {"format": {}}], strict=True))
    for kind, value in constraints.items():
        constraint = StructuredOutputsParams(**{kind: value})  # type: ignore[arg-type]
        assert constraint.kind == kind
        params = SamplingParams(structured_outputs=constraint)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
        assert params.clone().structured_outputs == constraint
        assert SamplingParams.from_optional(structured_outputs=constraint, top_k=None).structured_outputs == constraint
    assert StructuredOutputsParams(choice=["x", "y", "x"]).choice == ["x", "y"]


def test_params_accept_no_other_type_for_a_constraint() -> None:
    with pytest.raises(ValidationError, match="must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_a_constraint_ends_the_output_even_with_ignore_eos() -> None:
    from quire.messages.request import NewRequest

    params = SamplingParams(ignore_eos=True, stop_token_ids=[7], structured_outputs=StructuredOutputsParams(regex="a"))
    assert NewRequest("a", [1], params, 10, eos_ids=[2, 3]).stop_ids == [2, 3, 7]
