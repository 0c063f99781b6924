"""Text as token ids."""

from __future__ import annotations

from typing import Any

from quire.errors import ValidationError


def encoded(tokenizer: Any, text: str, parameter: str, add_special_tokens: bool) -> list[int]:
    """What a tokenizer makes of a text. Half a surrogate pair, which is what Python makes of bytes that are not UTF-8,
    is no text."""
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
