"""What is known of a session."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from quire.errors import ValidationError

CHUNK_TOKENS = 256
CHUNK_BYTES = 4 * CHUNK_TOKENS
MAX_META_BYTES = 4096


class SessionState(msgspec.Struct, array_like=True, frozen=True):
    """All of a session but the tokens of its full chunks: what a STATE frame says."""

    name: str
    created: float
    used: float
    ttl: float | None = None
    fingerprint: bytes = b""
    salt: str = ""
    parent: str = ""
    forked_at: int = 0
    tip: int = 0
    chunked: int = 0
    tail: bytes = b""
    kv_tokens: int = 0
    kv_fingerprint: bytes = b""
    meta: dict[str, str] = {}
    lost: str = ""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A session as others see it."""

    id: int
    """Grows with every session made: the order of lists, and what a page goes on from."""
    name: str
    created: float
    used: float
    """Seconds since the epoch of the last append, fork or touch."""
    expires: float | None
    num_tokens: int
    fingerprint: bytes
    """The model its tokens belong to."""
    salt: str
    """Whose prefix cache its blocks belong to (a tenant)."""
    parent: str | None
    """The session it was forked from, and after how many tokens. It may be gone by now."""
    forked_at: int
    kv_tokens: int
    """How many of its tokens had their KV handed to the store of this fingerprint; what is left of it, nobody knows."""
    kv_fingerprint: bytes
    meta: dict[str, str]
    lost: str | None
    """Why its tokens are lost, if they are."""


class Page(msgspec.Struct, frozen=True):
    """Some sessions in the order they were made. `after` asks for the next page; None: this is the last one."""

    sessions: list[Session]
    after: int | None


class SessionStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the store holds."""

    sessions: int
    chunks: int
    log_bytes: int
    live_bytes: int
    files: int
    damaged_bytes: int


def view(number: int, state: SessionState) -> Session:
    """The public face of a state."""
    return Session(
        id=number, name=state.name, created=state.created, used=state.used, expires=expiry(state),
        num_tokens=num_tokens(state), fingerprint=state.fingerprint, salt=state.salt, parent=state.parent or None,
        forked_at=state.forked_at, kv_tokens=state.kv_tokens, kv_fingerprint=state.kv_fingerprint,
        meta=dict(state.meta), lost=state.lost or None,
    )  # fmt: skip


def num_tokens(state: SessionState) -> int:
    """How many tokens the session holds."""
    return state.chunked + len(state.tail) // 4


def expiry(state: SessionState) -> float | None:
    """When the session ends by itself."""
    return None if state.ttl is None else state.used + state.ttl


def pack_tokens(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Tokens as they are kept: 32 bits each."""
    try:
        array = np.asarray(tokens)
        if array.size == 0:
            return b""
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError
        if array.min() < -(2**31) or array.max() >= 2**31:
            raise OverflowError
    except (ValueError, OverflowError):
        raise ValidationError("tokens are a flat list of integers of 32 bits", "tokens") from None
    return array.astype("<i4").tobytes()


def unpack_tokens(data: bytes) -> np.ndarray:
    """Tokens as others see them: an int32 array."""
    return np.frombuffer(data, "<i4")
