"""Token times summed over all requests; taken where tokens arrive, so that slow readers do not change them."""

from __future__ import annotations

from quire.messages.histogram import Histogram
from quire.messages.metric_table import GAP_BOUNDS


class TokenTimes:
    """The number of tokens, and the gaps between the tokens of each sequence (one fewer than its tokens)."""

    def __init__(self) -> None:
        self.tokens = 0
        self.gaps = Histogram(GAP_BOUNDS)

    def note(self, count: int, now: float, before: float) -> None:
        """`count` tokens of a sequence came now; the previous one came at `before` (0: these are the first).

        Tokens that come together share the time since then, so that the count and the sum of gaps stay right.
        """
        self.tokens += count
        if before:
            self.gaps.add((now - before) / count, count)
        elif count > 1:
            self.gaps.add(0.0, count - 1)

    def note_whole(self, count: int, seconds: float) -> None:
        """All `count` tokens of a sequence, noted at its end; `seconds`: from its first to its last."""
        self.tokens += count
        if count > 1:
            self.gaps.add(seconds / (count - 1), count - 1)
