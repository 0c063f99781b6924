"""The part of an output before its form begins, such as a model's thinking."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.messages.structured import StructuredOutputsParams


class FreePart:
    """The texts that begin and end the free part of an output, and the tokens that can write a beginning."""

    def __init__(self, form: StructuredOutputsParams, texts: Sequence[bytes]) -> None:
        """`texts`: the bytes of every token."""
        after = [form.after] if isinstance(form.after, str) else form.after or []
        self.ends = tuple(text.encode() for text in after)
        """The first of these ends it; none: there is no free part."""
        self.openings = tuple(text.encode() for text in form.opening or ())
        """It is there only if the output begins with one of these; none: it always is."""
        self._longest_end = max(map(len, self.ends), default=0)
        self._texts = texts
        self._candidates: list[int] | None = None
        self._continuing: dict[bytes, NDArray[np.int64]] = {}

    def end_in(self, text: bytes) -> bool:
        """Whether the free part ends in this text."""
        return any(end in text for end in self.ends)

    def tail(self, text: bytes) -> bytes:
        """As much of the text's end as may be the beginning of an end."""
        return text[-self._longest_end :]

    def after_opening(self, text: bytes) -> bytes | None:
        """What follows the opening that the text begins with; None: it begins with none."""
        return next((text[len(each) :] for each in self.openings if text.startswith(each)), None)

    def may_open(self, text: bytes) -> bool:
        """Whether an opening begins with this text."""
        return any(each.startswith(text) for each in self.openings)

    def continuing(self, seen: bytes) -> NDArray[np.int64]:
        """The tokens that continue `seen`, the output so far, to an opening or the beginning of one."""
        found = self._continuing.get(seen)
        if found is None:
            rests = tuple(each[len(seen) :] for each in self.openings if each.startswith(seen))
            tokens = [
                token
                for token in self._openers
                if (text := self._texts[token]).startswith(rests) or any(rest.startswith(text) for rest in rests)
            ]
            found = self._continuing[seen] = np.array(tokens, np.int64)
        return found

    @property
    def _openers(self) -> list[int]:
        """Tokens that are within an opening, or begin with the end of one: found once, the vocabulary is large."""
        if self._candidates is None:
            ends = tuple(each[at:] for each in self.openings for at in range(len(each)))
            self._candidates = [
                token
                for token, text in enumerate(self._texts)
                if text and (text.startswith(ends) or any(text in each for each in self.openings))
            ]
        return self._candidates
