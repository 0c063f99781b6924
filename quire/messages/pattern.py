"""Which regular expressions a grammar can keep, and in what writing it means the same as everywhere else."""

from __future__ import annotations

_ESCAPES = frozenset("dDwWsStnrfv0xu")
"""Letters and digits that mean something after a backslash. Marks mean themselves."""


def plain_regex(pattern: str) -> str:
    """The pattern for a whole output: without anchors, and with a dot that matches no line break."""
    return "".join(_pieces(pattern))


def check_json_pattern(pattern: object) -> None:
    """Raise ValueError if a string made for this pattern, put in quotes, need not be JSON, or need not match."""
    if not isinstance(pattern, str):
        raise ValueError("a pattern is a string")
    for piece in _pieces(pattern):
        if piece in ('"', "\\\\", '\\"', "\\n", "\\r", "\\t", "\\f", "\\v", "\\0") or piece < " ":
            raise ValueError(f"{piece!r} would have to be escaped in JSON, which is not supported in patterns")


def _pieces(pattern: str) -> list[str]:
    """Characters, escapes and classes, as they are to be written; anchors around a whole alternative are left out."""
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
    end += pattern.startswith("]", end)  # as the first character it means itself
    while end < len(pattern) and pattern[end] != "]":
        if pattern.startswith("[:", end):
            raise ValueError("named classes such as [:alpha:] are not supported")
        end += len(_escape(pattern, end)) if pattern[end] == "\\" else 1
    if end >= len(pattern):
        raise ValueError("a '[' is not closed")
    return pattern[at : end + 1]
