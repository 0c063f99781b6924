"""Llama 4, ToolACE and others: a list of calls as Python writes them."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from quire.output.parsers.incremental import Reads
from quire.output.parsers.tools.base import CallParser, to_json

_NAME = re.compile(r"[\w.]+")
_CODE = re.compile(r"""[^"'()\[\]{},#]+""")
_IN_STRING = {'"': re.compile(r'[^"\\\r\n]+'), "'": re.compile(r"[^'\\\r\n]+")}
_IN_LONG_STRING = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
_DEEPEST = 64
_CONSTANTS = {"true": True, "false": False, "null": None}
_CLOSERS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}


class PythonicParser(CallParser):
    """`[f(a=1, b="x"), g()]` from the start of a line, or between the tags of Llama 4 or LFM2.

    A call is emitted at its closing parenthesis: before that the types of its arguments are not known. Values
    are literals; nothing is ever evaluated.
    """

    tags = tuple(_CLOSERS)
    bare = "["
    notation = (
        "To call tools, answer with nothing but a list of calls as Python writes them:\n"
        '[tool_name(a_parameter="its value"), another_tool()]\n'
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        self._unreadable: list[str] = []
        is_marked = opener in self.tags
        if is_marked and not (yield from self._take_next("[")):
            return
        first = self._count
        while (yield from self._skip_spaces()) != "]":
            if not (yield from self._call(is_marked)):
                return
            if not (yield from self._take_next(",")):
                break
        is_closed = yield from self._take_next("]")
        if is_closed and self._count > first:  # an empty list is text
            self._drop_held()
            yield from self._skip_spaces()
            if is_marked and (yield from self._take_word(_CLOSERS[opener])):
                self._held.clear()

    def _call(self, is_marked: bool) -> Reads[bool]:
        """Read a call, emit it, and return whether it has an end. One whose arguments are not literals becomes content;
        those beside it stay calls."""
        start = len(self._held)
        name = yield from self._take_run(_NAME)
        if not self._accepts(name, is_marked) or not all(part.isidentifier() for part in name.split(".")):
            return False
        if not (yield from self._take_next("(")):
            return False
        written = yield from self._read_arguments()
        if written is None:
            return False
        arguments = arguments_of(written)
        if arguments is None:
            self._unreadable.append("".join(self._held[start:]))
        else:
            self._drop_held()
            self._emit(name, arguments)
        return True

    def _drop_held(self) -> None:
        """What is held belongs to calls, but for those that cannot be read."""
        self._held.clear()
        for text in self._unreadable:
            self._add_content(text)
        self._unreadable.clear()

    def _read_arguments(self) -> Reads[list[str] | None]:
        """The source of each argument, up to the parenthesis that closes the call; None if it never comes."""
        arguments: list[str] = []
        source: list[str] = []
        depth = 0
        while character := (yield from self._peek()):
            if character in _IN_STRING:
                yield from self._read_string_into(source, character)
                continue
            if character == ")" and depth == 0:
                self._take(1)
                return [*arguments, "".join(source)] if "".join(source).strip() else arguments
            if character == "," and depth == 0:
                self._take(1)
                arguments.append("".join(source))
                source.clear()
                continue
            depth += (character in "([{") - (character in ")]}")
            if character == "#" or not 0 <= depth <= _DEEPEST:
                return None
            source.append((yield from self._take_run(_CODE)) or self._take(1))
        return None

    def _read_string_into(self, source: list[str], quote: str) -> Reads[None]:
        is_long = yield from self._is_next(quote * 3)
        end = quote * 3 if is_long else quote
        plain = (_IN_LONG_STRING if is_long else _IN_STRING)[quote]
        source.append(self._take(len(end)))
        while (yield from self._peek()):
            source.append((yield from self._take_run(plain)))
            if (yield from self._is_next(end)):
                source.append(self._take(len(end)))
                return
            character = yield from self._peek()
            if character == "\\":
                source.append(self._take(1))
                if (yield from self._peek()):
                    source.append(self._take(1))
            elif character in ("\n", "\r") and not is_long:
                # Models break lines inside short strings, which Python does not allow.
                source.append("\\n" if self._take(1) == "\n" else "\\r")
            elif character:
                source.append(self._take(1))


class Olmo3Parser(PythonicParser):
    """OLMo 3: calls on lines of their own between `<function_calls>` and `</function_calls>`."""

    tags = ("<function_calls>",)
    bare = ""
    notation = (
        "To call tools, answer with calls as Python writes them, one on each line, between these tags:\n"
        '<function_calls>\ntool_name(a_parameter="its value")\n</function_calls>\n'
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        self._unreadable = []
        first = self._count
        while (yield from self._skip_spaces()) not in ("<", ""):
            if not (yield from self._call(is_marked=True)):
                return
        if (yield from self._take_word("</function_calls>")) and self._count > first:
            self._drop_held()


def arguments_of(written: list[str], with_sets: bool = False) -> str | None:
    """Arguments `name=literal` as one JSON object; None if any is something else. `with_sets`: a set is a list."""
    values: dict[str, Any] = {}
    for argument in written:
        # The name is not parsed as Python: it may be a keyword (`from`, `class`).
        name, equals, source = argument.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier() or name in values:
            return None
        try:
            values[name] = _literal(_parse(source), with_sets)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
    try:
        return to_json(values)
    except ValueError:  # infinity, or an integer of thousands of digits
        return None


def _parse(source: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unknown escapes in strings, which keep their backslash
        return ast.parse(f"({source}\n)", mode="eval").body


def _literal(node: ast.expr, with_sets: bool = False) -> Any:
    """The value of a literal that JSON can represent; `true`, `false` and `null` are accepted too."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple) or (with_sets and isinstance(node, ast.Set)):
        return [_literal(item, with_sets) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _literal(value, with_sets) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _literal(node.operand)
        if type(value) in (int, float):
            return -value if isinstance(node.op, ast.USub) else value
    raise ValueError(f"not a literal that JSON can represent: {ast.dump(node)[:100]}")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key of a JSON object must be a string")
