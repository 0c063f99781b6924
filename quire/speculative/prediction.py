"""Drafts from the text that a client expects as the answer, as with OpenAI's `prediction`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from quire.speculative.suffix import History

MAX_PREDICTED_TOKENS = 1 << 14
"""Tokens of a prediction that are used: 20 bytes each while the request runs."""
GRAM, LONGEST = 3, 32
"""Shortest and longest run of the output's last tokens that is looked for in the prediction, once they differ."""


class PredictedText:
    """A predicted output, and where the output is in it. Knows one sequence."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens[:MAX_PREDICTED_TOKENS])
        self._at: int | None = 0
        """The predicted token that comes next; None: the output is elsewhere."""
        self._furthest = 0
        self._trust = len(self._tokens)
        """Tokens before `_at` that the output has, too; at its beginning all are trusted."""
        self._recent: deque[int] = deque(maxlen=LONGEST)
        self._history: History | None = None
        self.num_read = 0
        """Tokens of the output that were read."""
        self.accepted = 0
        """Tokens of the prediction that the output has in their place."""

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that the output does not have."""
        return len(self._tokens) - min(self.accepted, len(self._tokens))

    def read(self, output: Sequence[int]) -> None:
        """The output goes on with these tokens."""
        for token in output:
            self.num_read += 1
            self._recent.append(token)
            if self._at is not None and self._at < len(self._tokens) and self._tokens[self._at] == token:
                self._at += 1
                self._trust += 1
                self.accepted += 1
                self._furthest = max(self._furthest, self._at)
            else:
                self._at = self._find()

    def run(self, most: int) -> list[int]:
        """At most `most` tokens that may come next. After a difference they are as many as agreed since."""
        return [] if self._at is None else self._tokens[self._at : self._at + min(most, self._trust)]

    def _find(self) -> int | None:
        """Where the prediction goes on after the output's last tokens: the first such place that is not behind the
        output, if there is one."""
        if self._history is None:
            self._history = History(GRAM, max(1, len(self._tokens)), len(self._tokens))
            self._history.add(self._tokens)
        length, places = self._history.find(np.array(self._recent, np.int32))
        if not length:
            return None
        self._trust = length
        ahead = places[places >= self._furthest]
        return int(ahead.min() if len(ahead) else places.max())
