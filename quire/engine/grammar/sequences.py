"""One sequence and where it stands in its grammar."""

from __future__ import annotations

import numpy as np
import xgrammar
from numpy.typing import NDArray

from quire.engine.grammar.wire import DEAD_END

NOT_ALLOWED = "token {token} was drawn, which the form does not allow here"


class GrammarSequence:
    """Takes tokens as they are drawn, and says which may come next."""

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        end_ids: list[int],
        stop_ids: list[int],
        min_tokens: int,
        after: bytes,
        texts: list[bytes],
    ) -> None:
        """`after`: the grammar begins when this has appeared; empty: at once."""
        self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=end_ids)
        self._ends = np.array(end_ids, np.int64)
        self._stops = np.array(stop_ids, np.int64)
        self._min_tokens = min_tokens
        self._after = after
        self._texts = texts
        self._tail = b""
        self._count = 0

    def accept(self, token: int) -> None:
        """The token was drawn; raises ValueError if it was not allowed."""
        self._count += 1
        if self._after:
            self._look_for_beginning(token)
        elif not self._matcher.accept_token(token):
            raise ValueError(NOT_ALLOWED.format(token=token))

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next; raises ValueError if there are none."""
        mask.fill(-1)
        if self._after:
            _clear(mask, self._ends)  # the form is still to come
        else:
            self._matcher.fill_next_token_bitmask(mask[None])
        if not mask.any():
            raise ValueError(DEAD_END)
        if self._count < self._min_tokens:
            kept = mask.copy()
            _clear(mask, self._stops)
            if not mask.any():  # where the form is complete nothing else can come, however few tokens there are
                mask[:] = kept

    def _look_for_beginning(self, token: int) -> None:
        text = self._texts[token] if token < len(self._texts) else b""
        self._tail += text
        if self._after in self._tail:
            self._after = b""
        else:
            self._tail = self._tail[-len(self._after) :]


def _clear(mask: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
    words = mask.view(np.uint32)
    for token in tokens.tolist():
        if token >> 5 < len(words):
            words[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
