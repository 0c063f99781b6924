"""Export files: one session in one file, to be imported elsewhere.

    magic 8 B, version 4 B, blake3 of the rest 32 B, then name, created, fingerprint, metadata and tokens (msgpack)

Tokens only. KV blocks are shared by content key among all requests, so KV from an untrusted file could change the
output of other users; it is computed again after an import.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from quire.errors import StoreError, ValidationError
from quire.kvcache.offload.disk.files import unavailable, write_then_rename
from quire.sessions.log.state import Session, name_of, unpack_tokens
from quire.sessions.log.store import SessionStore

MAGIC = b"quireSE\n"
VERSION = 1
_HEAD = struct.Struct("<8sI32s")


class ExportedSession(msgspec.Struct):
    """The content of an export file."""

    name: str
    created: float
    fingerprint: bytes
    meta: dict[str, str]
    tokens: bytes


def exported_bytes(store: SessionStore, name: str) -> bytes:
    """The bytes of an export file of this session."""
    session, tokens = store.get(name), store.tokens(name)
    if session.spans:  # a file must not be able to name what other requests have cached
        raise ValidationError(
            f"session {name_of(session.name)!r} has images, and files hold tokens alone: it cannot be exported", "name"
        )
    body = msgspec.msgpack.encode(
        ExportedSession(name_of(session.name), session.created, session.fingerprint, session.meta, tokens.tobytes())
    )
    return _HEAD.pack(MAGIC, VERSION, blake3(body).digest()) + body


def export_session(store: SessionStore, name: str, path: str | os.PathLike[str]) -> None:
    """Write the session to a file, atomically."""
    write_export(exported_bytes(store, name), path)


def write_export(data: bytes, path: str | os.PathLike[str]) -> None:
    """Write an export file, atomically."""
    target = Path(path).expanduser().absolute()
    try:
        write_then_rename(target, data)
    except OSError as error:
        raise unavailable(target.parent, error) from error


def import_session(
    store: SessionStore,
    path: str | os.PathLike[str],
    name: str | None = None,
    *,
    fingerprint: bytes | None = None,
    salt: str = "",
    ttl: float | None = None,
) -> Session:
    """Create a session from an export file. `name`: if not its own. `fingerprint`: refuse token ids of other models."""
    exported = read_export(path)
    check_model(exported, fingerprint, path)
    check_token_ids(exported, None, path)
    return store.create(
        name or exported.name, unpack_tokens(exported.tokens),
        fingerprint=exported.fingerprint, salt=salt, ttl=ttl, meta=exported.meta,
    )  # fmt: skip


def check_model(exported: ExportedSession, fingerprint: bytes | None, source: object) -> None:
    """Raise if the token ids belong to a model of another fingerprint."""
    if fingerprint is not None and exported.fingerprint != fingerprint:
        raise ValidationError(f"{source} holds a session of another model, which has other token ids", "path")


def check_token_ids(exported: ExportedSession, vocab_size: int | None, source: object) -> None:
    """Raise if a token id is negative or outside the vocabulary. The checksum is no proof: it can be computed again."""
    tokens = unpack_tokens(exported.tokens)
    wrong = np.flatnonzero((tokens < 0) | (tokens >= (2**31 if vocab_size is None else vocab_size)))
    if len(wrong):
        bound = "which is negative" if vocab_size is None else f"outside the vocabulary of {vocab_size}"
        at = int(wrong[0])
        raise ValidationError(
            f"{source} holds token id {tokens[at]} at position {at}, {bound}: it was not exported by this model",
            "path",
            int(tokens[at]),
        )


def check_length(exported: ExportedSession, max_model_len: int | None, source: object) -> None:
    """Raise if the session is longer than the model's context: it could never have a turn."""
    length = len(exported.tokens) // 4
    if max_model_len is not None and length > max_model_len:
        raise ValidationError(
            f"{source} holds a session of {length} tokens, and max_model_len is {max_model_len}", "path", length
        )


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of an export file, unchecked."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def read_export(path: str | os.PathLike[str]) -> ExportedSession:
    """The content of an export file. Raises if it is damaged or not an export file."""
    return decode_export(read_file(path), path)


def decode_export(data: bytes, path: object = "the file") -> ExportedSession:
    """The content of an export file's bytes. `path`: their name in errors."""
    if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise ValidationError(f"{path} is not an exported session", "path", str(path))
    _, version, digest = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ValidationError(f"{path} has format {version}, this quire reads {VERSION}", "path", str(path))
    if blake3(data[_HEAD.size :]).digest() != digest:
        raise ValidationError(f"{path} is damaged: its checksum is wrong", "path", str(path))
    try:
        exported = msgspec.msgpack.decode(data[_HEAD.size :], type=ExportedSession)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValidationError(f"{path} is not an exported session: {error}", "path", str(path)) from None
    if len(exported.tokens) % 4:
        raise ValidationError(f"{path} is damaged: its last token is incomplete", "path", str(path))
    return exported
