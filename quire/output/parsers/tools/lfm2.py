"""LFM2 and LFM2.5: a list of calls between marks, as Python writes them, or nearly."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from quire.output.parsers.incremental import SPACES, Reads
from quire.output.parsers.tools.base import as_arguments
from quire.output.parsers.tools.pythonic import PythonicParser, arguments_of

_CLOSING = "<|tool_call_end|>"
_NAME = re.compile(r"\s*([^\W\d][\w.]*)\s*\(")
_SEPARATOR = re.compile(r"\s*,")
_CODE = re.compile(r"""[^"'()\[\]{},#]+""")
_PLAIN = {'"': re.compile(r'[^"\\\r\n\0]+'), "'": re.compile(r"[^'\\\r\n\0]+")}
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\0": "\\x00"}
_AFTER_VALUE = re.compile(r"\s*(?:,\s*[^\W\d]\w*\s*=|\)\s*(?:,|\]|\Z))")
"""What follows the last quote of an argument: another argument, or the end of the call."""
_AFTER_ITEM = re.compile(r"\s*[,:\]}]")
"""The same within a list or an object."""
_PADDED = re.compile(r"(?<![\w.])0+(?=\d)")
_DEEPEST = 64


class Lfm2Parser(PythonicParser):
    """`<|tool_call_start|>[f(a=1, b="x"), g()]<|tool_call_end|>`, or a list of call objects in JSON.

    The block is read to its end, because what the model writes is not always Python: quotes within quotes that are not
    escaped (a shell's), line breaks in strings, zeros before numbers, sets. Calls that can be read are emitted, and
    what lies between them is content. A block that is repeated after its end is dropped.
    """

    tags = ("<|tool_call_start|>",)
    bare = ""
    needs_special_tokens = True
    notation = (
        "To call tools, answer with a list of calls as Python writes them, between these marks:\n"
        '<|tool_call_start|>[tool_name(a_parameter="its value")]<|tool_call_end|>\n'
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        pieces: list[str] = []
        while (yield from self._peek()) and not (yield from self._is_next(_CLOSING)):
            end = self._text.find(_CLOSING[0], self._at + 1)
            pieces.append(self._take((end if end >= 0 else len(self._text)) - self._at))
        is_closed = yield from self._take_word(_CLOSING)
        block = "".join(pieces)
        if not self._emit_all(block) or not is_closed:
            return
        self._held.clear()
        if (yield from self._is_next(block + _CLOSING)):
            self._take(len(block + _CLOSING))
            self._held.clear()

    def _emit_all(self, block: str) -> bool:
        """Emit the calls of a block; whether there are any."""
        first = self._count
        stripped = block.strip(SPACES)
        if stripped.startswith(("{", "[{")):
            for name, arguments in _json_calls(stripped):
                if self._accepts(name, is_marked=True):
                    self._emit(name, arguments)
            return self._count > first
        at = len(block) - len(block.lstrip(SPACES))
        at += block[at : at + 1] == "["
        while found := _NAME.match(block, at):
            call = _read_call(block, found)
            if call is None:
                break
            if call.arguments is not None:
                self._emit(found[1], call.arguments)
            elif self._count > first:
                self._add_content(block[at : call.end])
            separator = _SEPARATOR.match(block, call.end)
            if separator is None:
                at = call.end
                break
            at = separator.end()
        rest = block[at:].strip(SPACES + "]")
        if self._count > first and rest:
            self._add_content(block[at:])
        return self._count > first


class _ReadCall(NamedTuple):
    """A call's arguments as JSON, None if they cannot be represented; and the position after it."""

    arguments: str | None
    end: int


def _read_call(block: str, name: re.Match[str]) -> _ReadCall | None:
    """The call whose name and parenthesis were found; None if it has no end."""
    read = _read_arguments(block, name.end(), is_strict=True)
    call = None if read is None else _ReadCall(arguments_of(read[0], with_sets=True), read[1])
    if call is not None and call.arguments is not None:
        return call
    lenient = _read_arguments(block, name.end(), is_strict=False)
    if lenient is not None and (arguments := arguments_of(lenient[0], with_sets=True)) is not None:
        return _ReadCall(arguments, lenient[1])
    return call


def _read_arguments(block: str, at: int, is_strict: bool) -> tuple[list[str], int] | None:
    """The Python source of each argument, and the position after the call; None if it has no end. Not `is_strict`: a
    quote ends a string only if what follows it looks so."""
    arguments: list[str] = []
    source: list[str] = []
    depth = 0
    while at < len(block):
        character = block[at]
        if character in _PLAIN:
            end = _read_string(block, at, source, None if is_strict else _AFTER_ITEM if depth else _AFTER_VALUE)
            if end is None:
                return None
            at = end
            continue
        if depth == 0 and character in "),":
            arguments.append("".join(source))
            source.clear()
            if character == ")":
                return [each for each in arguments if each.strip()], at + 1
            at += 1
            continue
        depth += (character in "([{") - (character in ")]}")
        if character == "#" or not 0 <= depth <= _DEEPEST:
            return None
        code = _CODE.match(block, at)
        source.append(_PADDED.sub("", code[0]) if code else character)
        at = code.end() if code else at + 1
    return None


def _read_string(block: str, at: int, source: list[str], after: re.Pattern[str] | None) -> int | None:
    """Append a string to `source` as Python writes it; returns the position after it, None if it has no end. `after`:
    what must follow its last quote."""
    quote = block[at]
    source.append(quote)
    at += 1
    while at < len(block):
        if plain := _PLAIN[quote].match(block, at):
            source.append(plain[0])
            at = plain.end()
        elif block[at] == "\\":
            source.append(block[at : at + 2])
            at += 2
        elif block[at] == quote:
            if after is None or after.match(block, at + 1):
                source.append(quote)
                return at + 1
            source.append("\\" + quote)
            at += 1
        else:
            source.append(_ESCAPES[block[at]])
            at += 1
    return None


def _json_calls(block: str) -> list[tuple[str, str]]:
    """Names and arguments of call objects; none if there is anything else."""
    try:
        given = json.loads(block)
    except (ValueError, RecursionError):
        return []
    calls: list[tuple[str, str]] = []
    for each in given if isinstance(given, list) else [given]:
        name = each.get("name") if isinstance(each, dict) else None
        value = each.get("arguments", each.get("parameters", {})) if isinstance(each, dict) else None
        arguments = as_arguments(json.dumps(value))
        if not isinstance(name, str) or arguments is None:
            return []
        calls.append((name, arguments))
    return calls
