"""Splits a model's text into reasoning, content and tool calls."""

from __future__ import annotations

from quire.output.parsers.deltas import Content, Delta, ParsedAnswer, gather
from quire.output.parsers.reasoning import ThinkSplit
from quire.output.parsers.tools.base import ToolParser


class AnswerReader:
    """The reasoning parser of one answer, then its tool parser; with neither, all text is content."""

    def __init__(self, split: ThinkSplit | None = None, parser: ToolParser | None = None) -> None:
        self._split = split
        self._parser = parser

    @property
    def needs_special_tokens(self) -> bool:
        """Whether special tokens must be left in the text."""
        return any(parser is not None and parser.needs_special_tokens for parser in (self._split, self._parser))

    def push(self, text: str) -> list[Delta]:
        """Add text of the answer; returns the deltas that are now certain."""
        return self._parse([Content(text)] if self._split is None else self._split.push(text))

    def finish(self) -> list[Delta]:
        """The answer has ended; returns the deltas held back."""
        deltas = self._parse([] if self._split is None else self._split.finish())
        return deltas if self._parser is None else deltas + self._parser.finish()

    def parse(self, text: str) -> ParsedAnswer:
        """A whole answer, exactly as if pushed in pieces."""
        return gather(self.push(text) + self.finish())

    def _parse(self, deltas: list[Delta]) -> list[Delta]:
        parsed: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Content) and self._parser is not None:
                parsed += self._parser.push(delta.text)
            elif not isinstance(delta, Content) or delta.text:
                parsed.append(delta)
        return parsed
