"""One JSON value, checked while it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_SPACES = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMERIC = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ALPHABETIC = re.compile(r"[A-Za-z]+")
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_LONGEST_NUMBER = 512
_LONGEST_WORD = 5

State = Callable[[str, int], int]


class JsonScanner:
    """Reads one JSON value to its end and no further. Its output is at any time a prefix of valid JSON.

    Three common mistakes of models have one possible correction and are corrected: raw control characters in a string
    (a newline in code), a backslash before a character that JSON does not escape (a regular expression), and Python's
    True, False and None. Any other error is a failure.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._state: State = self._value
        self._closers: list[str] = []
        self._is_key = False
        self._out: list[str] = []
        self._pending = ""
        """A number, word or escape that may be incomplete, as it was written."""

    def feed(self, text: str, at: int) -> int:
        """Continue at `at`; returns where it stopped: the end of `text` or of the value, or the wrong character."""
        while at < len(text) and not self.done and not self.failed:
            at = self._state(text, at)
        return at

    def take(self) -> str:
        """The JSON checked since the last call."""
        out, self._out = self._out, []
        return "".join(out)

    def take_pending(self) -> str:
        """Characters read that did not become valid JSON before the end."""
        pending, self._pending = self._pending, ""
        return pending

    # Each state reads at `at` and returns where to continue: `at` itself if the character belongs to the next state.

    def _value(self, text: str, at: int) -> int:
        character = text[at]
        if character == '"':
            return self._open_string(text, at, is_key=False)
        if character == "{":
            self._closers.append("}")
            self._state = self._first_key
        elif character == "[":
            self._closers.append("]")
            self._state = self._first_item
        elif character == "-" or "0" <= character <= "9":
            self._state = self._number
            return at
        elif character.isascii() and character.isalpha():
            self._state = self._word
            return at
        else:
            return self._spaces_or_fail(text, at)
        return self._keep(text, at)

    def _first_item(self, text: str, at: int) -> int:
        return self._close(text, at) if text[at] == "]" else self._stay_on_spaces(text, at, self._value)

    def _first_key(self, text: str, at: int) -> int:
        return self._close(text, at) if text[at] == "}" else self._stay_on_spaces(text, at, self._key)

    def _key(self, text: str, at: int) -> int:
        if text[at] == '"':
            return self._open_string(text, at, is_key=True)
        return self._spaces_or_fail(text, at)

    def _colon(self, text: str, at: int) -> int:
        if text[at] != ":":
            return self._spaces_or_fail(text, at)
        self._state = self._value
        return self._keep(text, at)

    def _after_value(self, text: str, at: int) -> int:
        if text[at] == self._closers[-1]:
            return self._close(text, at)
        if text[at] != ",":
            return self._spaces_or_fail(text, at)
        self._state = self._key if self._closers[-1] == "}" else self._value
        return self._keep(text, at)

    def _string(self, text: str, at: int) -> int:
        plain = _PLAIN.match(text, at)
        if plain is not None:
            self._out.append(plain.group())
            return plain.end()
        character = text[at]
        if character == '"':
            if self._is_key:
                self._state = self._colon
            else:
                self._end_value()
            return self._keep(text, at)
        if character == "\\":
            self._pending = character
            self._state = self._escape
        else:
            self._out.append(json.dumps(character)[1:-1])
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        character, escape = text[at], self._pending
        if escape == "\\":
            goes_on, is_whole = character == "u", character in '"\\/bfnrt'
        else:
            goes_on, is_whole = character in _HEX and len(escape) < 5, character in _HEX and len(escape) == 5
        if goes_on:
            self._pending += character
            return at + 1
        self._pending = ""
        self._state = self._string
        # An invalid escape keeps its backslash, which is escaped.
        self._out.append(escape + character if is_whole else "\\" + escape)
        return at + 1 if is_whole else at

    def _number(self, text: str, at: int) -> int:
        at = self._gather(_NUMERIC, _LONGEST_NUMBER, text, at)
        if at < len(text) and not self.failed:
            self._settle(self._pending if _NUMBER.fullmatch(self._pending) else None)
        return at

    def _word(self, text: str, at: int) -> int:
        at = self._gather(_ALPHABETIC, _LONGEST_WORD, text, at)
        if at < len(text) and not self.failed:
            self._settle(_WORDS.get(self._pending))
        return at

    def _gather(self, pattern: re.Pattern[str], longest: int, text: str, at: int) -> int:
        """Extend the pending text while `pattern` matches, to at most `longest` characters."""
        match = pattern.match(text, at, at + longest - len(self._pending))
        if match is not None:
            self._pending += match.group()
            at = match.end()
        if len(self._pending) == longest and at < len(text) and pattern.match(text, at):
            self.failed = True
        return at

    def _settle(self, written: str | None) -> None:
        """End the pending text, which is `written` in JSON; None: invalid."""
        if written is None:
            self.failed = True
            return
        self._pending = ""
        self._out.append(written)
        self._end_value()

    def _open_string(self, text: str, at: int, is_key: bool) -> int:
        self._is_key = is_key
        self._state = self._string
        return self._keep(text, at)

    def _close(self, text: str, at: int) -> int:
        self._closers.pop()
        self._end_value()
        return self._keep(text, at)

    def _end_value(self) -> None:
        self.done = not self._closers
        self._state = self._after_value

    def _keep(self, text: str, at: int) -> int:
        self._out.append(text[at])
        return at + 1

    def _stay_on_spaces(self, text: str, at: int, otherwise: State) -> int:
        spaces = _SPACES.match(text, at)
        if spaces is None:
            self._state = otherwise
            return at
        self._out.append(spaces.group())
        return spaces.end()

    def _spaces_or_fail(self, text: str, at: int) -> int:
        spaces = _SPACES.match(text, at)
        if spaces is None:
            self.failed = True
            return at
        self._out.append(spaces.group())
        return spaces.end()
