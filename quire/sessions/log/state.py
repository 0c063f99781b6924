"""What a session is: its name, its state, and the limits of what it may be given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from blake3 import blake3

from quire.errors import SessionExistsError, SessionLostError, ValidationError
from quire.messages.media import KeySpan
from quire.sessions.log.format import frame_bytes
from quire.sessions.log.spans import StoredSpan

CHUNK_TOKENS = 256
CHUNK_BYTES = 4 * CHUNK_TOKENS
CHUNK_FRAME_BYTES = frame_bytes(CHUNK_BYTES)
STATE_BYTES = 400
"""Of a session without tokens and metadata, about."""
MAX_META_BYTES = 4096
MAX_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,127}")
_OWNER = re.compile(r"[0-9a-f]{16}")
_SEPARATOR = "|"


# Names. A tenant's session is stored under a key of owner id and name, so that tenants' names never collide.


def check_name(name: object) -> str:
    """The name, if it is valid. It is never used as a path, but it is shown, logged and put into URLs."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = repr(name) if len(repr(name)) <= 80 else repr(name)[:77] + "..."
        raise ValidationError(
            f"{shown} cannot name a session: 1 to {MAX_NAME} letters, digits or any of _ . : @ - , "
            "the first a letter, a digit or _",
            "name",
            name,
        )
    return name


def session_key(tenant: str, name: object) -> str:
    """The key of a tenant's session; without a tenant, the name itself."""
    return check_name(name) if not tenant else f"{owner_id(tenant)}{_SEPARATOR}{check_name(name)}"


def check_key(key: object) -> str:
    """The key, if `session_key` can have made it."""
    owner, separator, name = key.rpartition(_SEPARATOR) if isinstance(key, str) else ("", "", key)
    if separator and not _OWNER.fullmatch(owner):
        check_name(key)
    check_name(name)
    return str(key)


def owner_id(tenant: str) -> str:
    """The owner's part of a tenant's keys: of one length, however long the tenant's name is."""
    return blake3(tenant.encode("utf-8", "surrogatepass")).hexdigest(8) if tenant else ""


def owner_of(key: str) -> str:
    """The owner's part of a key; "" without tenants."""
    return key.rpartition(_SEPARATOR)[0]


def name_of(key: str) -> str:
    """The session's name, without the owner's part."""
    return key.rpartition(_SEPARATOR)[2]


# State


class SessionState(msgspec.Struct, array_like=True, frozen=True):
    """All of a session but the tokens of its full chunks: the payload of a STATE frame."""

    name: str
    created: float
    used: float
    ttl: float | None = None
    fingerprint: bytes = b""
    salt: str = ""
    parent: str = ""
    forked_at: int = 0
    tip: int = 0
    """Number of the last full chunk; 0: none."""
    chunked: int = 0
    """Tokens in full chunks."""
    tail: bytes = b""
    """Tokens after them."""
    kv_tokens: int = 0
    kv_fingerprint: bytes = b""
    meta: dict[str, str] = {}
    lost: str = ""
    spans: tuple[StoredSpan, ...] = ()
    """What it has in place of token ids."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A session as callers of the store see it."""

    id: int
    """Rises with every session created: the order of lists, and the cursor of pages."""
    name: str
    created: float
    used: float
    """Seconds since the epoch of the last append, fork or touch."""
    expires: float | None
    num_tokens: int
    fingerprint: bytes
    """The model its token ids belong to."""
    salt: str
    """The prefix cache its blocks belong to (a tenant's)."""
    parent: str | None
    """The session it was forked from, after `forked_at` tokens. It may be deleted by now."""
    forked_at: int
    kv_tokens: int
    """How many of its tokens had their KV handed to the block store of `kv_fingerprint`. Blocks may be gone since."""
    kv_fingerprint: bytes
    meta: dict[str, str]
    lost: str | None
    """Why its tokens are lost, if they are."""
    spans: tuple[StoredSpan, ...] = ()
    """What it has in place of token ids."""

    @property
    def key_spans(self) -> list[KeySpan]:
        """The same, for content keys."""
        return [span.key for span in self.spans]


class SessionUse(msgspec.Struct):
    """What sessions use of the store. A fork counts in full: tokens that sessions share count for each of them."""

    sessions: int = 0
    tokens: int = 0
    bytes: int = 0


class Page(msgspec.Struct, frozen=True):
    """Sessions in order of creation. Pass `after` to get the next page; None: this is the last."""

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
    """The state as callers of the store see it."""
    return Session(
        id=number, name=state.name, created=state.created, used=state.used, expires=expiry(state),
        num_tokens=num_tokens(state), fingerprint=state.fingerprint, salt=state.salt, parent=state.parent or None,
        forked_at=state.forked_at, kv_tokens=state.kv_tokens, kv_fingerprint=state.kv_fingerprint,
        meta=dict(state.meta), lost=state.lost or None, spans=state.spans,
    )  # fmt: skip


def num_tokens(state: SessionState) -> int:
    """How many tokens the session has."""
    return state.chunked + len(state.tail) // 4


def stored_bytes(sessions: int, tokens: int, meta: Mapping[str, str]) -> int:
    """About how many bytes this adds to the log."""
    chunks = tokens // CHUNK_TOKENS
    size = sessions * STATE_BYTES + chunks * CHUNK_FRAME_BYTES + 4 * (tokens - CHUNK_TOKENS * chunks)
    return size + sum(len(text.encode()) for pair in meta.items() for text in pair)


def expiry(state: SessionState) -> float | None:
    """When the session expires."""
    return None if state.ttl is None else state.used + state.ttl


def exists_error(key: str) -> SessionExistsError:
    """The error for a name that is in use."""
    return SessionExistsError(
        f"a session {name_of(key)!r} exists already: choose another name, or delete it", "name", key
    )


def lost_error(name: str, reason: str) -> SessionLostError:
    """The error for a session whose tokens are damaged."""
    return SessionLostError(
        f"session {name!r} is lost: {reason}. Delete it and create it again, or accept what is left of it (recover)",
        name,
    )


# Limits


def check_position(state: SessionState, at: int, what: str) -> None:
    """Check that `at` is a position among the session's tokens. `what`: the operation, for the error."""
    total = num_tokens(state)
    if not isinstance(at, int) or not 0 <= at <= total:
        raise ValidationError(
            f"session {name_of(state.name)!r} has {total} tokens: it cannot be {what} at {at!r}", "at", at
        )


def checked_ttl(ttl: float | None) -> float | None:
    """The time to live, if it is valid."""
    if ttl is not None and not (isinstance(ttl, (int, float)) and 0 < ttl < float("inf")):
        raise ValidationError(f"ttl is {ttl!r}: it must be seconds above 0, or None for no expiry", "ttl", ttl)
    return ttl


def checked_meta(meta: Mapping[str, str]) -> dict[str, str]:
    """The metadata, if it is valid."""
    if not isinstance(meta, Mapping) or not all(isinstance(text, str) for pair in meta.items() for text in pair):
        raise ValidationError("meta maps text to text", "meta")
    size = sum(len(key.encode()) + len(value.encode()) for key, value in meta.items())
    if size > MAX_META_BYTES:
        raise ValidationError(f"meta has {size} bytes, {MAX_META_BYTES} at most", "meta")
    return dict(meta)


def pack_tokens(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Tokens as they are stored: 32 bits each."""
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
    """Stored tokens as an int32 array."""
    return np.frombuffer(data, "<i4")
