"""Incremental parsing with generators: a parser is written as if the whole text were available."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

from quire.output.parsers.deltas import Delta, ParsedAnswer, gather, merged

T = TypeVar("T")
Reads = Generator[None, None, T]
"""A parsing function: it yields where it needs more text, and returns what it read."""

SPACES = " \t\r\n"
SPACE_RUN = re.compile(r"[ \t\r\n]+")


class IncrementalParser:
    """Text in, deltas out. A subclass implements `_run`, a generator that yields whenever it needs more text.

    `_run` may depend on the characters alone, never on where a piece of text ended: the deltas are then the same
    however the text was cut. The helpers here ensure that. After `finish` reads do not wait, and past the end they
    return "".
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._out: list[Delta] = []
        self._body = self._run()

    def push(self, text: str) -> list[Delta]:
        """Add text of the answer; returns the deltas that are now certain."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._advance()

    def finish(self) -> list[Delta]:
        """The answer has ended; returns the deltas held back."""
        self._ended = True
        return self._advance()

    def parse(self, text: str) -> ParsedAnswer:
        """A whole answer in one piece."""
        return gather(self.push(text) + self.finish())

    def _advance(self) -> list[Delta]:
        next(self._body, None)
        out, self._out = self._out, []
        return merged(out)

    def _run(self) -> Reads[None]:
        raise NotImplementedError

    def _peek(self) -> Reads[str]:
        """The next character, "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def _is_next(self, word: str) -> Reads[bool]:
        """Whether `word` comes next; takes nothing."""
        while True:
            seen = self._text[self._at : self._at + len(word)]
            if seen == word:
                return True
            if self._ended or not word.startswith(seen):
                return False
            yield

    def _take(self, count: int) -> str:
        """Move past characters that have arrived."""
        start, self._at = self._at, self._at + count
        return self._text[start : self._at]

    def _take_word(self, word: str) -> Reads[bool]:
        """Move past `word` if it comes next."""
        if (yield from self._is_next(word)):
            self._take(len(word))
            return True
        return False

    def _take_run(self, pattern: re.Pattern[str]) -> Reads[str]:
        """Move past everything that a character class (`[…]+`) matches."""
        pieces = []
        while (yield from self._peek()):
            match = pattern.match(self._text, self._at)
            if match is None:
                break
            pieces.append(self._take(match.end() - self._at))
        return "".join(pieces)

    def _skip_spaces(self) -> Reads[str]:
        """Move past white space; returns the character after it."""
        yield from self._take_run(SPACE_RUN)
        return (yield from self._peek())
