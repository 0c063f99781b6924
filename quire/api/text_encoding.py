"""Text as token ids and back, with work bounded by the model's length, however long the text is.

Tokenizing takes about a second a megabyte, without the interpreter's lock, and a hundred bytes a token; making lists of
the tokens takes the lock. So long texts are read in pieces, and those that cannot fit are refused early.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from quire.api.work_pool import check_abandoned
from quire.errors import ValidationError

SHORT_CHARACTERS = 1 << 15
PIECE_CHARACTERS = 1 << 16
WHOLE_BYTES = (1 << 17, 1 << 19)
"""Four bytes for each token of the model's length, at least and at most this: a text of so many is encoded at once."""
LONGEST_BYTES = 1 << 20
BYTES_PER_TOKEN = 16
"""No text of more bytes a token than this is tried, if it is longer than LONGEST_BYTES."""
CUT_TOKENS = 4
"""How many more tokens two pieces of a text may have than the text."""
MARGIN_TOKENS = 64
"""After this many, the tokens of a text's end are those of the whole text."""
PIECE_TOKENS = 1 << 14
CUT_TRIES = 64


class TextEncoder:
    """A tokenizer for a model of `max_tokens`. Any thread may call it."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._whole = min(max(4 * max_tokens, WHOLE_BYTES[0]), WHOLE_BYTES[1])

    @property
    def longest(self) -> int:
        """Characters of the longest text that is tried."""
        most = max(LONGEST_BYTES, BYTES_PER_TOKEN * self._max_tokens)
        return min(most, self._max_tokens * longest_token(self.tokenizer))

    def encode(self, text: str, parameter: str = "prompt", add_special_tokens: bool = True) -> list[int]:
        """The text's tokens; raises if there are far more than the model reads."""
        if len(text) > self.longest:
            raise self._too_long(f"{len(text)} characters; at most {self.longest} can fit", parameter)
        if len(text) > SHORT_CHARACTERS and not self._is_whole(text):
            self._check_pieces(text, parameter)
        return encode_text(self.tokenizer, text, parameter, add_special_tokens)

    def encode_end(self, text: str, keep: int, parameter: str = "prompt", add_special_tokens: bool = True) -> list[int]:
        """At least the last `keep` tokens of a text; all if it is not long."""
        text = text[-self.longest :] if len(text) > SHORT_CHARACTERS else text
        size = self._window(keep)
        while len(text) > size:
            tokens = encode_text(self.tokenizer, text[-size:], parameter, add_special_tokens)
            if len(tokens) >= keep + MARGIN_TOKENS:
                return tokens
            check_abandoned()
            size *= 2
        return encode_text(self.tokenizer, text, parameter, add_special_tokens)

    def encode_start(self, text: str, keep: int, parameter: str, add_special_tokens: bool = True) -> list[int]:
        """At least the first `keep` tokens of a text; all if it is not long. A token that ends every text is last."""
        text = text[: self.longest] if len(text) > SHORT_CHARACTERS else text
        size = self._window(keep)
        while len(text) > size:
            tokens = encode_text(self.tokenizer, text[:size], parameter, add_special_tokens)
            if len(tokens) >= keep + MARGIN_TOKENS:
                return tokens
            check_abandoned()
            size *= 2
        return encode_text(self.tokenizer, text, parameter, add_special_tokens)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The tokens' text."""
        pieces, start = [], 0
        while len(tokens) - start > 2 * PIECE_TOKENS:
            end = self._cut(tokens, start + PIECE_TOKENS, skip_special_tokens)
            pieces.append(self._decode(tokens[start:end], skip_special_tokens))
            start = end
            check_abandoned()
        return "".join([*pieces, self._decode(tokens[start:], skip_special_tokens)])

    def _decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def _cut(self, tokens: Sequence[int], at: int, skip_special_tokens: bool) -> int:
        """A place from `at` on where the texts of both sides make the text of the whole: not within a character, and
        where the decoder drops no space."""
        for place in range(at, at + CUT_TRIES):
            before, after = tokens[place - MARGIN_TOKENS : place], tokens[place : place + MARGIN_TOKENS]
            parts = self._decode(before, skip_special_tokens) + self._decode(after, skip_special_tokens)
            if parts == self._decode([*before, *after], skip_special_tokens):
                return place
        return len(tokens)

    def _is_whole(self, text: str) -> bool:
        """Whether a text can be encoded at once: it has not more tokens than bytes."""
        return (len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))) <= self._whole

    def _window(self, keep: int) -> int:
        """Characters from which `keep` tokens most likely come."""
        return max(PIECE_CHARACTERS, min(4 * keep, WHOLE_BYTES[1]))

    def _check_pieces(self, text: str, parameter: str) -> None:
        """Count tokens piece by piece, and stop when there are certainly too many."""
        count = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            count += max(0, len(encode_text(self.tokenizer, piece, parameter, False)) - CUT_TOKENS)
            if count > self._max_tokens:
                raise self._too_long(f"more than {count} tokens", parameter)
            check_abandoned()

    def _too_long(self, what: str, parameter: str) -> ValidationError:
        return ValidationError(
            f"This model's maximum context length is {self._max_tokens} tokens. However, the prompt has {what}. "
            "Shorten the prompt",
            parameter,
        )


def check_truncation(keep: int | None, longest: int) -> None:
    """Raise if a prompt is to be cut to more tokens than the model reads: it would then be refused or not, by its
    length."""
    if keep is not None and keep > longest:
        raise ValidationError(
            f"truncate_prompt_tokens is {keep}, and the model's maximum context length is {longest}: choose fewer, or "
            "-1 for as many as fit",
            "truncate_prompt_tokens",
            keep,
        )


@lru_cache(maxsize=4)
def longest_token(tokenizer: Any) -> int:
    """Characters of the vocabulary's longest token."""
    return max(map(len, tokenizer.get_vocab()))


def encode_text(tokenizer: Any, text: str, parameter: str, add_special_tokens: bool) -> list[int]:
    """Text as token ids. A lone surrogate, which Python reads from bytes that are not UTF-8, is refused."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except (TypeError, UnicodeEncodeError):
        at = next((at for at, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
        if at is None:
            raise
        raise ValidationError(
            f"{parameter} holds {text[at]!r}, half a surrogate pair, which is no character: was it read from bytes "
            "that are not UTF-8?",
            parameter,
            text[at],
        ) from None
