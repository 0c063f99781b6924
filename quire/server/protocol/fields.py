"""The rule for the fields of request bodies, at every level of them:

| a field that | is |
|---|---|
| would change the answer | honoured, or refused with a 400 that says what to do instead |
| is a hint or a client's bookkeeping (`Hint`) | accepted without effect |
| is unknown | left out, and named in the response header `x-quire-ignored`, the log line and a metric |

Null and empty values ask for nothing, and so are accepted for refused fields. Numbers and booleans may be written as
text, and whole numbers as floats. With `--strict-fields` unknown fields are refused.

A body that needs none of this is decoded once, straight into its struct, at no extra cost: the structs forbid unknown
fields, and only a body that the decoder refuses is read again, along the types of its struct.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from quire.server.errors import as_decode_error, bad_request

T = TypeVar("T")

IGNORED_HEADER = b"x-quire-ignored"
MOST_NAMES = 16
"""Ignored fields that a response names; "..." stands for further ones."""
LONGEST_NAME = 64
"""Characters of such a name."""
_INDEX = re.compile(r"\[\d+\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")

_LARGEST_WHOLE = 2**53
"""Up to here every integer is exactly representable as a float."""
INTEGER_TEXT = r"^[ ]*[+-]?[0-9]{1,40}(\.0+)?[ ]*$"
NUMBER_TEXT = r"^[ ]*[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,3})?[ ]*$"
_INTEGER, _NUMBER = re.compile(INTEGER_TEXT), re.compile(NUMBER_TEXT)
_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
_LETTERS = ("".join(f"[{letter}{letter.upper()}]" for letter in word) for word in _BOOLEANS)
BOOLEAN_TEXT = f"^({'|'.join(_LETTERS)})$"
"""Texts that are taken as integers, numbers and booleans: the ones of pydantic's lax mode."""


class FieldReader:
    """Reads one request's body by the rule, and remembers what it left out."""

    def __init__(self, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self.ignored: list[str] = []
        """The fields that were left out, of printable ASCII characters, each once; at most `MOST_NAMES`."""
        self._is_more = False

    def decode(self, data: bytes, kind: type[T]) -> T:
        """Decode JSON into a struct; raises 400 naming the field."""
        try:
            decoder: msgspec.json.Decoder[T] = _decoder(kind)  # type: ignore[arg-type]
            try:
                return decoder.decode(data)
            except msgspec.ValidationError:
                return self._convert(msgspec.json.decode(data), kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise as_decode_error(error, getattr(kind, "hints", {})) from None

    def convert(self, value: Any, kind: type[T], where: str) -> T:
        """An object inside a body, found at `where`, as a struct; raises 400 naming the field."""
        try:
            try:
                return msgspec.convert(value, kind)
            except msgspec.ValidationError:
                return self._convert(value, kind, where)
        except (msgspec.ValidationError, RecursionError) as error:
            wrong = as_decode_error(error, getattr(kind, "hints", {}))
            raise bad_request(f"{where}: {wrong.message}", f"{where}.{wrong.param}" if wrong.param else where) from None

    def ignore(self, path: str) -> None:
        """Note that a field had no effect; raises 400 with `--strict-fields`. `path`: such as `messages[0].colour`."""
        if self._is_strict:
            raise bad_request(f"{path} is not supported", path)
        if len(self.ignored) == MOST_NAMES:
            self._is_more = True
            return
        name = _UNSAFE.sub("?", _INDEX.sub("[]", path[: 4 * LONGEST_NAME])[:LONGEST_NAME])
        if name not in self.ignored:
            self.ignored.append(name)

    def ignore_keys(self, given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
        """The rule for an object that is not decoded into a struct: ignore its keys that are not `known`."""
        if not given.keys() <= known:
            for name in given.keys() - known:
                self._leave_out(f"{where}.{name}", given[name])

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response header that names what was left out, if anything was."""
        if not self.ignored:
            return []
        return [(IGNORED_HEADER, ", ".join([*self.ignored, *(["..."] if self._is_more else [])]).encode("ascii"))]

    def _convert(self, value: Any, kind: type[T], where: str = "") -> T:
        lenient = _LenientReading(self, [where] if where else [])
        return msgspec.convert(lenient.read(value, _type_of(kind)), kind, str_keys=True)  # type: ignore[arg-type]

    def _leave_out(self, path: str, value: Any) -> None:
        """An unknown field. Null asks for nothing, so nothing is ignored."""
        if value is not None or self._is_strict:
            self.ignore(path)


class _LenientReading:
    """Reads plain JSON along a type: leaves out what the rule leaves out, and converts numbers and booleans to the
    types that are expected. What is wrong otherwise stays, and is refused by the conversion that follows."""

    def __init__(self, reader: FieldReader, path: list[str]) -> None:
        self._reader = reader
        self._path = path

    def read(self, value: Any, kind: inspect.Type) -> Any:
        """The value as its type expects it."""
        kind = _bare(kind)
        if isinstance(kind, inspect.UnionType):
            kind = _member(kind, value)
        if isinstance(value, dict):
            if isinstance(kind, inspect.StructType):
                return self._read_struct(value, kind)
            if isinstance(kind, inspect.DictType) and not isinstance(_bare(kind.value_type), inspect.AnyType):
                return {key: self.read(item, kind.value_type) for key, item in value.items()}
        elif isinstance(value, list):
            if isinstance(kind, inspect.ListType) and not isinstance(_bare(kind.item_type), inspect.AnyType):
                return self._read_list(value, kind.item_type)
        elif isinstance(kind, inspect.IntType):
            return _as_integer(value)
        elif isinstance(kind, inspect.FloatType):
            return _as_number(value)
        elif isinstance(kind, inspect.BoolType):
            return _as_boolean(value)
        return None if isinstance(kind, inspect.NoneType) and asks_for_nothing(value) else value

    def _read_list(self, values: list[Any], kind: inspect.Type) -> list[Any]:
        read = []
        self._path.append("")
        for index, item in enumerate(values):
            if isinstance(item, dict):
                self._path[-1] = f"[{index}]"
            read.append(self.read(item, kind))
        self._path.pop()
        return read

    def _read_struct(self, given: dict[str, Any], kind: inspect.StructType) -> dict[str, Any]:
        fields = _fields_of(kind)
        refused: Mapping[str, str] = getattr(kind.cls, "hints", {})
        read = {}
        for name, value in given.items():
            field = fields.get(name)
            if field is None:
                path = self._at(name)
                if name in refused:
                    if not asks_for_nothing(value):
                        raise bad_request(f"{path} is not supported: {refused[name]}", path)
                else:
                    self._reader._leave_out(path, value)
            elif value is not None or _takes_null(field):
                self._path.append(f".{name}")
                read[name] = self.read(value, field.type)
                self._path.pop()
            elif field.required:
                read[name] = None
        return read

    def _at(self, name: str) -> str:
        return f"{''.join(self._path)}.{name[: 4 * LONGEST_NAME]}".removeprefix(".")


def asks_for_nothing(value: Any) -> bool:
    """Whether a field with this value has no effect, whatever it means: null or empty."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


@functools.lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@functools.lru_cache(maxsize=256)
def _type_of(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


_fields: dict[type, dict[str, inspect.Field]] = {}


def _fields_of(kind: inspect.StructType) -> dict[str, inspect.Field]:
    found = _fields.get(kind.cls)
    if found is None:
        found = _fields[kind.cls] = {field.encode_name: field for field in kind.fields}
    return found


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _takes_null(field: inspect.Field) -> bool:
    kind = _bare(field.type)
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return any(isinstance(_bare(member), (inspect.NoneType, inspect.AnyType)) for member in members)


_BY_VALUE: tuple[tuple[type, tuple[type[inspect.Type], ...]], ...] = (
    (dict, (inspect.StructType, inspect.DictType)),
    (list, (inspect.ListType,)),
    (str, (inspect.StrType, inspect.LiteralType, inspect.IntType, inspect.FloatType, inspect.BoolType)),
    (bool, (inspect.BoolType,)),
    (int, (inspect.IntType, inspect.FloatType, inspect.BoolType)),
    (float, (inspect.FloatType, inspect.IntType, inspect.BoolType)),
)
"""For a value of each Python type, the types that may take it, first choice first."""


def _member(union: inspect.UnionType, value: Any) -> inspect.Type:
    """The member of a union that takes this value."""
    members = [_bare(member) for member in union.types]
    for of_value, kinds in _BY_VALUE:
        if isinstance(value, of_value):
            for kind in kinds:
                for member in members:
                    if isinstance(member, kind):
                        return member
    return inspect.AnyType()


def _as_integer(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_WHOLE:
        return int(value)
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value.partition(".")[0])
    return value


def _as_number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _as_boolean(value: Any) -> Any:
    if isinstance(value, str):
        return _BOOLEANS.get(value.lower(), value)
    return bool(value) if isinstance(value, (int, float)) and value in (0, 1) else value
