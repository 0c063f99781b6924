"""Checks of regular expressions and EBNF grammars before the grammar library reads them.

The library takes some numbers modulo 2**32, and some escapes for plain letters, without an error: what it would read as
something else is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_COUNT = 2**31 - 1
"""Largest count of a repetition."""
MAX_CODE_POINT = 0x10FFFF

_ESCAPES = frozenset("dDwWsStnrfv0xu")
"""Letters and digits with a meaning after a backslash. Punctuation stands for itself."""
_ESCAPED_IN_JSON = frozenset(('"', "\\\\", '\\"', "\\n", "\\r", "\\t", "\\f", "\\v", "\\0"))
_COUNTS = re.compile(r"\{([0-9]+)(?:,([0-9]*))?\}")
_CODE_POINT = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]+)\})")


def check_count(digits: str) -> None:
    """Raise ValueError if a count is above MAX_COUNT."""
    value = digits.lstrip("0") or "0"
    if len(value) > len(str(MAX_COUNT)) or int(value) > MAX_COUNT:
        raise ValueError(f"the count {_shortened(digits)} is above {MAX_COUNT}")


# Regular expressions


def plain_regex(pattern: str) -> str:
    """The pattern for a whole output: without anchors, and with a dot that matches no line break."""
    return "".join(_pieces(pattern))


def check_json_pattern(pattern: object) -> None:
    """Raise ValueError if a string generated for this pattern, in quotes, might not be JSON or might not match."""
    if not isinstance(pattern, str):
        raise ValueError("a pattern is a string")
    for piece in _pieces(pattern):
        written = _CODE_POINT.fullmatch(piece)
        char = chr(_value(written)) if written else piece
        if char < " " or piece in _ESCAPED_IN_JSON or (written and char in '"\\'):
            raise ValueError(f"{piece!r} would have to be escaped in JSON, which is not supported in patterns")


def _pieces(pattern: str) -> Iterator[str]:
    """Characters, escapes, classes and counts, as a grammar takes them; anchors around a whole alternative are left
    out."""
    at, depth, end = 0, 0, len(pattern)
    begins = True
    while at < end:
        char = pattern[at]
        piece = char
        if char == "\\":
            piece = _escape(pattern, at)
        elif char == "[":
            piece = _class(pattern, at)
        elif char == "{" and (counts := _COUNTS.match(pattern, at)):
            piece = counts[0]
            for digits in filter(None, counts.groups()):
                check_count(digits)
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
        yield "[^\\n]" if char == "." else piece


def _escape(pattern: str, at: int) -> str:
    following = pattern[at + 1 : at + 2]
    if not following:
        raise ValueError("it ends in a backslash")
    if following.isalnum() and following not in _ESCAPES:
        raise ValueError(f"'\\{following}' is not supported")
    if following not in "xu":
        return pattern[at : at + 2]
    if (written := _CODE_POINT.match(pattern, at)) is None:
        raise ValueError(f"{pattern[at : at + 6]!r}: write two hexadecimal digits after \\x, four or {{…}} after \\u")
    _check_code_point(_value(written), written[0])
    return written[0]


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


def _value(written: re.Match[str]) -> int:
    return int(next(filter(None, written.groups())), 16)


def _check_code_point(value: int, written: str) -> None:
    if value > MAX_CODE_POINT or 0xD800 <= value <= 0xDFFF:
        kind = "half a surrogate pair" if value <= MAX_CODE_POINT else f"above {MAX_CODE_POINT:X}"
        raise ValueError(f"{_shortened(written)!r} is no character ({kind}); write the character itself")


# Grammars

_GRAMMAR_PART = re.compile(
    r"""
    \#[^\n]*                        # a comment
  | (?P<text> "(?:[^"\\\n]|\\.)*" | \[(?:[^\]\\\n]|\\.)*\] )
  | (?P<number> (?<![\w.-])[0-9]+ )  # outside names
    """,
    re.VERBOSE,
)
_GRAMMAR_ESCAPE = re.compile(r"\\(?:\\|x([0-9A-Fa-f]+)|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")


def check_grammar(grammar: str) -> None:
    """Raise ValueError if a number in an EBNF grammar overflows: the count of a repetition, or a character's code."""
    for part in _GRAMMAR_PART.finditer(grammar):
        if part["number"]:
            check_count(part["number"])
        for escape in _GRAMMAR_ESCAPE.finditer(part["text"] or ""):
            if escape[0] != "\\\\":
                _check_code_point(_value(escape), escape[0])


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
