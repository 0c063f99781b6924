"""When tokens came, summed over all requests: taken where tokens arrive, so that slow readers change nothing."""

from __future__ import annotations

from quire.messages.histogram import Histogram
from quire.messages.metric_table import GAP_BOUNDS


class TokenTimes:
    """The number of tokens, and the gaps between the tokens of each sample: one fewer than it has tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self.gaps = Histogram(GAP_BOUNDS)

    def note(self, count: int, now: float, before: float) -> None:
        """`count` tokens of a sample came now; the last before them came at `before` (0: they are its first).

        Several at once share the time they took: the count and the sum of gaps stay true.
        """
        self.tokens += count
        if before:
            self.gaps.add((now - before) / count, count)
        elif count > 1:
            self.gaps.add(0.0, count - 1)

    def note_whole(self, count: int, seconds: float) -> None:
        """All `count` tokens of a sample, told at its end; `seconds` lie between its first and its last."""
        self.tokens += count
        if count > 1:
            self.gaps.add(seconds / (count - 1), count - 1)
