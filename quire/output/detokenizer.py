"""Incremental detokenization that never splits a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
"""Prompt tokens a decoder may need for correct spaces at the start of the output."""
LONGEST_CHARACTER = 8
"""Tokens. A character may span a few byte tokens; text that does not decode after this many never will."""


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; bytes of an incomplete character are held until the next call."""
        ...

    def flush(self) -> str:
        """The text held at the end: an incomplete character becomes U+FFFD."""
        ...


class Vocabulary:
    """A tokenizer's vocabulary, prepared once for all requests."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Not all_special_ids alone: it has only those with a role (end, padding, …).
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
        self._bytes = _byte_table(tokenizer)
        self._texts: dict[int, str] = {}
        """Texts of single tokens, filled on demand."""
        self._whole: dict[int, str | None] = {}
        """The same for `ByteDetokenizer`; None for tokens that are not whole characters."""
        self._windows: dict[bool, dict[int, str]] = {False: {}, True: {}}
        """The same for `WindowDetokenizer`: without and with spaces between special tokens."""

    def detokenizer(
        self, prompt: Sequence[int], skip_special: bool, spaces_between_special: bool = True
    ) -> Detokenizer:
        """A detokenizer for one sequence that continues `prompt`."""
        skipped = self.special if skip_special else frozenset()
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes, skipped, self._whole)
        texts = self._windows[spaces_between_special]
        return WindowDetokenizer(self.tokenizer, prompt, skipped, spaces_between_special, texts)

    def text_of(self, token: int) -> str:
        """A token by itself, as logprobs show it."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode(token)
        return text

    def _decode(self, token: int) -> str:
        if self._bytes is not None:
            return self._bytes[token].decode("utf-8", "replace") if token < len(self._bytes) else ""
        text: str = self.tokenizer.decode([token])
        return text


class ByteDetokenizer:
    """For byte-level vocabularies: every token is a run of bytes, so decoding is joining."""

    def __init__(self, table: list[bytes], skipped: frozenset[int], whole: dict[int, str | None] | None = None) -> None:
        """`whole`: texts of tokens that are whole characters, which all detokenizers of the table share."""
        self._table = table
        self._skipped = skipped
        self._whole = {} if whole is None else whole
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds_bytes = False
        """The decoder has bytes of an incomplete character."""

    def push(self, tokens: Sequence[int]) -> str:
        table, skipped = self._table, self._skipped
        if len(tokens) == 1 and not self._holds_bytes:  # nearly every step: most tokens are whole characters
            token = tokens[0]
            if token in skipped or token >= len(table):
                return ""
            text = self._whole.get(token, "")
            if text == "":
                text = self._whole[token] = _as_characters(table[token])
            if text is not None:
                return text
        data = b"".join([table[token] for token in tokens if token not in skipped and token < len(table)])
        text = self._decoder.decode(data)
        self._holds_bytes = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decode a short window with and without the new tokens, and take the difference."""

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], skipped: frozenset[int], spaces: bool, texts: dict[int, str]
    ) -> None:
        """`texts`: of tokens by themselves, which all detokenizers of these settings share."""
        self._tokenizer = tokenizer
        self._texts = texts
        self._skipped = skipped
        self._spaces = spaces
        self._window = self._context([token for token in prompt[-2 * CONTEXT_TOKENS :] if token not in skipped])
        self._num_returned = len(self._window)
        """Tokens of the window whose text has been returned."""

    def push(self, tokens: Sequence[int]) -> str:
        text = ""
        for token in tokens:
            if token not in self._skipped:
                self._window.append(token)
                text += self._advance(final=False)
        return text

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before, after = self._decode_returned(), self._decode(self._window)
        pending = len(self._window) - self._num_returned
        if not final and after.endswith(REPLACEMENT) and pending < LONGEST_CHARACTER:
            return ""
        new = after[len(before) :]
        if new:
            # The text just returned is the next context: a window that began inside a character would not decode.
            del self._window[: self._num_returned]
            self._num_returned = len(self._window)
        return new

    def _context(self, prompt: list[int]) -> list[int]:
        """The prompt's last tokens, a few more if the cut would split a character."""
        for count in range(CONTEXT_TOKENS, len(prompt)):
            if REPLACEMENT not in self._decode(prompt[-count:]):
                return prompt[-count:]
        return prompt

    def _decode_returned(self) -> str:
        """The window's text that has been returned; mostly one token's."""
        returned = self._window[: self._num_returned]
        if len(returned) != 1:
            return self._decode(returned)
        text = self._texts.get(returned[0])
        if text is None:
            text = self._texts[returned[0]] = self._decode(returned)
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=False, spaces_between_special_tokens=self._spaces
        )
        return text


def _as_characters(data: bytes) -> str | None:
    """Bytes as text; None unless they are whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _byte_table(tokenizer: Any) -> list[bytes] | None:
    """The bytes of each token, for tokenizers whose decoder is plain byte-level; None for others."""
    from tokenizers.decoders import ByteLevel

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.decoder, ByteLevel):
        return None
    byte_of = {character: byte for byte, character in _byte_characters().items()}
    table = [b""] * len(tokenizer)
    for text, token in tokenizer.get_vocab().items():
        if token < len(table):
            try:
                table[token] = bytes([byte_of[character] for character in text])
            except KeyError:  # an added token with characters outside the byte alphabet stands for itself
                table[token] = text.encode()
    return table


def _byte_characters() -> dict[int, str]:
    """Byte → the printable character that byte-level vocabularies write for it: itself, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
