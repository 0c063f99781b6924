"""A session in one file, to take elsewhere.

    magic 8 B, version 4 B, blake3 of the rest 32 B, then name, times, fingerprint, notes and tokens (msgpack)

Tokens only. KV under content keys is shared with everybody, so KV from a file of unknown origin could put words into
other people's mouths; whoever imports computes it again.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec
from blake3 import blake3

from quire.errors import StoreError, ValidationError
from quire.kvcache.offload.disk.errors import unavailable
from quire.kvcache.offload.disk.files import write_then_rename
from quire.sessions.log.names import name_of
from quire.sessions.log.state import Session, unpack_tokens
from quire.sessions.log.store import SessionStore

MAGIC = b"quireSE\n"
VERSION = 1
_HEAD = struct.Struct("<8sI32s")


class Exported(msgspec.Struct):
    """What such a file holds."""

    name: str
    created: float
    fingerprint: bytes
    meta: dict[str, str]
    tokens: bytes


def exported_bytes(store: SessionStore, name: str) -> bytes:
    """What such a file holds of this session."""
    session, tokens = store.get(name), store.tokens(name)
    body = msgspec.msgpack.encode(
        Exported(name_of(session.name), session.created, session.fingerprint, session.meta, tokens.tobytes())
    )
    return _HEAD.pack(MAGIC, VERSION, blake3(body).digest()) + body


def export_session(store: SessionStore, name: str, path: str | os.PathLike[str]) -> None:
    """Write the session to a file: all of it, or the file stays as it was."""
    write_export(exported_bytes(store, name), path)


def write_export(data: bytes, path: str | os.PathLike[str]) -> None:
    """Write such a file: all of it, or the file stays as it was."""
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
    """Make a session of such a file, under its own name or another. `fingerprint`: refuse tokens of any other model."""
    exported = read_export(path)
    check_model(exported, fingerprint, path)
    return store.create(
        name or exported.name, unpack_tokens(exported.tokens),
        fingerprint=exported.fingerprint, salt=salt, ttl=ttl, meta=exported.meta,
    )  # fmt: skip


def check_model(exported: Exported, fingerprint: bytes | None, source: object) -> None:
    """Raise if its tokens mean something else to the model of this fingerprint."""
    if fingerprint is not None and exported.fingerprint != fingerprint:
        raise ValidationError(f"{source} holds a session of another model: its tokens mean nothing here", "path")


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of such a file, unchecked."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error


def read_export(path: str | os.PathLike[str]) -> Exported:
    """What the file holds. Raises if it is damaged, cut short, or something else."""
    return decode_export(read_file(path), path)


def decode_export(data: bytes, path: object = "the file") -> Exported:
    """What such bytes hold. `path`: what to call them."""
    if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise ValidationError(f"{path} is no exported session", "path", str(path))
    _, version, digest = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ValidationError(f"{path} has format {version}, this quire reads {VERSION}", "path", str(path))
    if blake3(data[_HEAD.size :]).digest() != digest:
        raise ValidationError(f"{path} is damaged: its checksum does not fit", "path", str(path))
    try:
        exported = msgspec.msgpack.decode(data[_HEAD.size :], type=Exported)
    except msgspec.DecodeError as error:
        raise ValidationError(f"{path} is no exported session: {error}", "path", str(path)) from None
    if len(exported.tokens) % 4:
        raise ValidationError(f"{path} is damaged: a piece of a token", "path", str(path))
    return exported
