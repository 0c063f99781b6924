"""Frames: pieces of a log that can be told whole from damaged, each on its own.

    front   56 B: magic, kind, length of name, version, length of payload, safe, id, seq, digest of payload, check
    name    the session's name, in frames that begin a session's story anew
    payload
    padding to a multiple of 8
    name    again
    back    56 B: as the front, with another magic

The check covers the fields and the name, keyed by a nonce of the file, so that nothing a user wrote into a payload
passes for a frame. Front and back say the same: damage to one of them costs nothing, damage to the payload costs one
frame, and whose frame it was is known. `safe` is how far the file was known to be on the disk when the frame was
written: damage before that is damage, damage after the last such mark is what a crash leaves of unfinished writes.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import NamedTuple

from blake3 import blake3

VERSION = 1
FRONT, BACK = b"QSf\x01", b"QSb\x01"
HEAD = struct.Struct("<4sBBHIIQQ16s8s")
HEAD_BYTES = HEAD.size


class FrameKind(enum.IntEnum):
    """What a frame says."""

    CHUNK = 1
    """256 tokens. `id` is the chunk, `seq` the chunk before it."""
    STATE = 2
    """All of a session. `id` is the session, `seq` counts its frames."""
    APPEND = 3
    """Tokens added to the session's last ones."""
    DELETE = 4
    """The session is no more."""


class Frame(NamedTuple):
    """What is to be written."""

    kind: FrameKind
    id: int
    seq: int
    payload: bytes
    name: str = ""


class Found(NamedTuple):
    """A stretch of a log: a frame, whole or not, or (`kind` None) bytes that nobody can account for."""

    offset: int
    end: int
    kind: FrameKind | None
    id: int = 0
    seq: int = 0
    name: str = ""
    safe: int = 0
    payload: bytes = b""
    whole: bool = False
    digest: bytes = b""


def frame_bytes(payload: int, name: int = 0) -> int:
    """Length of a frame."""
    return 2 * HEAD_BYTES + 2 * name + payload + (-(payload + 2 * name) % 8)


def digest_of(payload: bytes) -> bytes:
    """What tells a payload from any other."""
    return blake3(payload).digest(16)


def encode(frame: Frame, safe: int, nonce: bytes) -> bytes:
    """The bytes of a frame."""
    name = frame.name.encode()
    digest = digest_of(frame.payload)
    fields = (frame.kind, len(name), VERSION, len(frame.payload), safe, frame.id, frame.seq, digest)
    front = _head(FRONT, fields, name, nonce)
    back = _head(BACK, fields, name, nonce)
    padding = bytes(-(len(frame.payload) + 2 * len(name)) % 8)
    return b"".join((front, name, frame.payload, padding, name, back))


def decode(data: bytes, offset: int, nonce: bytes) -> Found | None:
    """The frame whose front is at `offset`; None if there is no front."""
    head = data[offset : offset + HEAD_BYTES]
    if len(head) < HEAD_BYTES or head[:4] != FRONT:
        return None
    name = data[offset + HEAD_BYTES : offset + HEAD_BYTES + head[5]]
    return _frame(data, offset, head, name) if _genuine(head, name, nonce) else None


def scan(data: bytes, start: int, nonce: bytes) -> Iterator[Found]:
    """All that is to be found from `start` on, in order; zeros at the end are room, not damage."""
    end = len(data.rstrip(b"\0"))
    while start < end:
        found = decode(data, start, nonce) or _next_frame(data, start, nonce)
        if found is None:
            yield Found(start, end, None)
            return
        if found.offset > start:
            yield Found(start, found.offset, None)
        yield found
        start = found.end


def _next_frame(data: bytes, start: int, nonce: bytes) -> Found | None:
    """The first frame with an intact front or back after a place where none begins."""
    fronts, backs = _places(data, FRONT, start), _places(data, BACK, start)
    front, back = next(fronts, None), next(backs, None)
    while front is not None or back is not None:
        if back is None or (front is not None and front < back):
            assert front is not None
            if found := decode(data, front, nonce):
                return found
            front = next(fronts, None)
        else:
            if found := _decode_back(data, back, start, nonce):
                return found
            back = next(backs, None)
    return None


def _decode_back(data: bytes, offset: int, start: int, nonce: bytes) -> Found | None:
    head = data[offset : offset + HEAD_BYTES]
    if len(head) < HEAD_BYTES or offset - head[5] < start:
        return None
    name = data[offset - head[5] : offset]
    begin = offset + HEAD_BYTES - frame_bytes(HEAD.unpack(head)[4], head[5])
    return _frame(data, begin, head, name) if begin >= start and _genuine(head, name, nonce) else None


def _places(data: bytes, magic: bytes, start: int) -> Iterator[int]:
    while (start := data.find(magic, start)) >= 0:
        yield start
        start += 1


def _frame(data: bytes, offset: int, head: bytes, name: bytes) -> Found:
    _, kind, _, _, length, safe, number, seq, digest, _ = HEAD.unpack(head)
    begin = offset + HEAD_BYTES + len(name)
    payload = data[begin : begin + length]
    whole = len(payload) == length and digest_of(payload) == digest
    end = offset + frame_bytes(length, len(name))
    return Found(
        offset, end, FrameKind(kind), number, seq, name.decode(), safe, payload if whole else b"", whole, digest
    )


def _head(magic: bytes, fields: tuple[object, ...], name: bytes, nonce: bytes) -> bytes:
    head = HEAD.pack(magic, *fields, bytes(8))[:-8]
    return head + blake3(head + name, key=nonce).digest(8)


def _genuine(head: bytes, name: bytes, nonce: bytes) -> bool:
    return blake3(head[:-8] + name, key=nonce).digest(8) == head[-8:]
