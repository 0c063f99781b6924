"""`StructuredOutputsParams`: the form a request's output must have. Names and meanings are vLLM's."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from quire.errors import ValidationError, short_repr
from quire.messages.grammar_support import check_schema, check_structural_tag
from quire.messages.grammar_syntax import check_grammar, plain_regex

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHARACTERS = 1 << 18
"""A longer schema, pattern, list or grammar is refused before it is parsed."""
MAX_AFTER, MAX_TEXTS = 256, 8
"""Characters of a text of `after` or `opening`, and such texts."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, frozen=True):
    """The form the output must have: exactly one of `json`, `regex`, `choice`, `grammar`, `json_object` and
    `structural_tag`. A dict given for a schema or a tag is kept as JSON text."""

    json: str | dict[str, Any] | None = None
    """A JSON schema. Properties it does not name do not appear in the output."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A grammar in EBNF (GBNF); its first rule is `root`."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """JSON on one line, with one space after each colon and comma; otherwise the model chooses white space, within a
    bound on its length."""
    disable_additional_properties: bool = False
    """Accepted; always on."""
    whitespace_pattern: str | None = None
    """Refused: grammars do not support it."""
    structural_tag: str | dict[str, Any] | None = None
    after: str | list[str] | None = None
    """The form applies after this text in the output, or the first of these (`</think>`); what comes before is free."""
    is_checked: bool = False
    """Set once the form is checked: the engine's process does not check it again."""
    opening: list[str] | None = None
    """With `after`: only an output that begins with one of these texts (`<think>`) has a free part. Any other has the
    form from its first token, as have all if the form can begin with such a text."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValidationError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}; got {', '.join(given) or 'none'}",
                "structured_outputs",
                given,
            )
        self._check_kind(given[0])
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, "true or false", getattr(self, name))
        if self.whitespace_pattern is not None:
            raise ValidationError(
                "structured_outputs.whitespace_pattern is not supported; disable_any_whitespace=True gives JSON on "
                "one line",
                "structured_outputs.whitespace_pattern",
                self.whitespace_pattern,
            )
        self._check_free_part()

    def _check_free_part(self) -> None:
        for name in ("after", "opening"):
            value = getattr(self, name)
            if value is None:
                continue
            texts = [value] if isinstance(value, str) and name == "after" else value
            if not isinstance(texts, list) or not 0 < len(texts) <= MAX_TEXTS:
                raise _invalid(name, f"a list of 1 to {MAX_TEXTS} texts", value)
            for text in texts:
                _check_text(name, text, MAX_AFTER)
        if self.opening is not None and self.after is None:
            raise _invalid("opening", "left out where there is no after", self.opening)

    @property
    def kind(self) -> str:
        """The name of the form that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def _check_kind(self, kind: str) -> None:
        value = getattr(self, kind)
        if kind in ("json", "structural_tag"):
            if self.is_checked and isinstance(value, str):
                return
            text, parsed = _json_text(kind, value)
            msgspec.structs.force_setattr(self, kind, text)
            (check_schema if kind == "json" else check_structural_tag)(parsed)
            msgspec.structs.force_setattr(self, "is_checked", True)
        elif kind == "choice":
            _check_choice(value)
            msgspec.structs.force_setattr(self, kind, list(dict.fromkeys(value)))
        elif kind == "json_object":
            if value is not True:
                raise _invalid(kind, "true, or left out", value)
        elif not (self.is_checked and isinstance(value, str)):
            _check_text(kind, value, MAX_CHARACTERS)
            _check_syntax(kind, value)
            msgspec.structs.force_setattr(self, "is_checked", True)


def _check_text(name: str, value: Any, longest: int) -> None:
    if not isinstance(value, str) or not value.strip():
        raise _invalid(name, "a non-empty string", value)
    if len(value) > longest:
        raise _too_long(name, len(value), longest)


def _check_choice(value: Any) -> None:
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(text, str) for text in value):
        raise _invalid("choice", "a non-empty list of strings", value)
    if not any(value):
        raise _invalid("choice", "a list with at least one non-empty string", value)
    if (length := sum(len(text) for text in value)) > MAX_CHARACTERS:
        raise _too_long("choice", length, MAX_CHARACTERS)


def _check_syntax(kind: str, value: str) -> None:
    if kind == "regex" and "\0" in value:
        raise _invalid("regex", "without a NUL character", value)
    try:
        (plain_regex if kind == "regex" else check_grammar)(value)
    except ValueError as error:
        raise ValidationError(f"structured_outputs.{kind}: {error}", f"structured_outputs.{kind}", value) from error


def _json_text(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    """A schema or a tag as JSON text, and parsed. Text stays as it is: the order of keys and the numbers matter."""
    if not isinstance(value, (str, dict)):
        raise _invalid(name, "a JSON object, or one as text", value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, dict) else value
        _check_text(name, text, MAX_CHARACTERS)
        parsed = json.loads(text)
    except ValidationError:
        raise
    except RecursionError as error:
        raise ValidationError(f"structured_outputs.{name} is nested too deep", f"structured_outputs.{name}") from error
    except (TypeError, ValueError) as error:
        raise ValidationError(
            f"structured_outputs.{name} is not JSON: {error}", f"structured_outputs.{name}"
        ) from error
    if not isinstance(parsed, dict) or not parsed:
        raise _invalid(name, "a non-empty JSON object", value)
    return text, parsed


def _invalid(name: str, wanted: str, value: Any) -> ValidationError:
    return ValidationError(
        f"structured_outputs.{name} must be {wanted}, got {short_repr(value)}", f"structured_outputs.{name}", value
    )


def _too_long(name: str, length: int, longest: int) -> ValidationError:
    return ValidationError(
        f"structured_outputs.{name} has {length} characters; at most {longest}", f"structured_outputs.{name}", length
    )
