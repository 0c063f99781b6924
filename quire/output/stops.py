"""Stop strings, found across tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one sequence's text for the strings that end it."""

    def __init__(self, strings: Sequence[str], include: bool) -> None:
        self._strings = strings
        self._include = include
        self._last_characters = frozenset(string[-1] for string in strings)
        self.held = max((len(string) for string in strings), default=1) - 1 if not include else 0
        """Characters at the end of the text that may turn out to begin a stop string, and are not shown yet."""

    def find(self, text: str, new: int) -> tuple[str, int] | None:
        """The stop string that completes first within the last `new` characters, and where the text then ends.

        Two that complete at the same character are decided by their order in the list.
        """
        if not new or self._last_characters.isdisjoint(text[-new:]):
            return None
        best: tuple[int, int, str] | None = None
        for order, string in enumerate(self._strings):
            at = text.find(string, max(0, len(text) - new - len(string) + 1))
            if at >= 0 and (best is None or (at + len(string), order) < best[:2]):
                best = (at + len(string), order, string)
        if best is None:
            return None
        end, _, string = best
        return string, end if self._include else end - len(string)
