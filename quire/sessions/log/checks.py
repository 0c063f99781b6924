"""What a session may be given."""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import ValidationError
from quire.sessions.log.names import name_of
from quire.sessions.log.state import MAX_META_BYTES, SessionState, num_tokens


def check_place(state: SessionState, at: int, what: str) -> None:
    """`at` is a place among the session's tokens, where it is to be `what`."""
    total = num_tokens(state)
    if not isinstance(at, int) or not 0 <= at <= total:
        raise ValidationError(
            f"session {name_of(state.name)!r} has {total} tokens: it cannot be {what} at {at!r}", "at", at
        )


def checked_ttl(ttl: float | None) -> float | None:
    """A time to live."""
    if ttl is not None and not (isinstance(ttl, (int, float)) and 0 < ttl < float("inf")):
        raise ValidationError(f"ttl is {ttl!r}: a number of seconds above 0, or None for ever", "ttl", ttl)
    return ttl


def checked_meta(meta: Mapping[str, str]) -> dict[str, str]:
    """Notes."""
    if not isinstance(meta, Mapping) or not all(isinstance(text, str) for pair in meta.items() for text in pair):
        raise ValidationError("meta maps text to text", "meta")
    size = sum(len(key.encode()) + len(value.encode()) for key, value in meta.items())
    if size > MAX_META_BYTES:
        raise ValidationError(f"meta has {size} bytes, {MAX_META_BYTES} at most", "meta")
    return dict(meta)
