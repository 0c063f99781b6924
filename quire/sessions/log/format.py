"""The format of the log's files: a header in four copies, then frames; and a summary and an index beside each file.

A frame can be verified on its own:

    front   56 B: magic, kind, length of name, version, length of payload, safe, id, seq, digest of payload, check
    name    the session's name, in STATE and DELETE frames
    payload
    padding to a multiple of 8
    name    again
    back    56 B: as the front, with another magic

The check covers the fields and the name, keyed by a nonce of the file, so that nothing in a payload that a user wrote
can pass for a frame. Front and back are equal: damage to one of them costs nothing, damage to the payload costs one
frame, and it is known whose frame it was. `safe` is how much of the file was durable when the frame was written: damage
before that is real; damage after the last such mark is what a crash leaves of unfinished writes.
"""

from __future__ import annotations

import enum
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from blake3 import blake3

from quire.errors import StoreUnavailableError

logger = logging.getLogger(__name__)

FILE_VERSION = 1
FILE_MAGIC = b"quireSL\n"
FILE_HEADER = struct.Struct("<8sII32s8s8x")
HEADER_COPIES = 4
BODY = HEADER_COPIES * FILE_HEADER.size
"""Where the frames of a file begin."""

FRAME_VERSION = 1
INDEX_VERSION = 1
FRONT, BACK = b"QSf\x01", b"QSb\x01"
HEAD = struct.Struct("<4sBBHIIQQ16s8s")
HEAD_BYTES = HEAD.size
TIME = struct.Struct("<d")
"""Begins the payload of an APPEND frame: when the session was used. Tokens follow."""


class FrameKind(enum.IntEnum):
    """What a frame records."""

    CHUNK = 1
    """256 tokens. `id` is the chunk's number, `seq` that of the chunk before it."""
    STATE = 2
    """All of a session. `id` is the session's number, `seq` counts its frames."""
    APPEND = 3
    """Tokens appended to the session."""
    DELETE = 4
    """The session was deleted."""


class Frame(NamedTuple):
    """A frame to be written."""

    kind: FrameKind
    id: int
    seq: int
    payload: bytes
    name: str = ""


class ScannedFrame(NamedTuple):
    """A frame found in a file, with an intact payload (`whole`) or not; `kind` None: unidentified bytes."""

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
    """The digest of a payload."""
    return blake3(payload).digest(16)


def encode(frame: Frame, safe: int, nonce: bytes) -> bytes:
    """The bytes of a frame."""
    name = frame.name.encode()
    digest = digest_of(frame.payload)
    fields = (frame.kind, len(name), FRAME_VERSION, len(frame.payload), safe, frame.id, frame.seq, digest)
    front = _head(FRONT, fields, name, nonce)
    back = _head(BACK, fields, name, nonce)
    padding = bytes(-(len(frame.payload) + 2 * len(name)) % 8)
    return b"".join((front, name, frame.payload, padding, name, back))


def decode(data: bytes, offset: int, nonce: bytes) -> ScannedFrame | None:
    """The frame whose front is at `offset`; None if there is no valid front."""
    head = data[offset : offset + HEAD_BYTES]
    if len(head) < HEAD_BYTES or head[:4] != FRONT:
        return None
    name = data[offset + HEAD_BYTES : offset + HEAD_BYTES + head[5]]
    return _frame(data, offset, head, name) if _is_valid(head, name, nonce) else None


def scan(data: bytes, start: int, nonce: bytes) -> Iterator[ScannedFrame]:
    """All frames from `start` on, in order; zeros at the end are reserved space, not damage."""
    end = len(data.rstrip(b"\0"))
    while start < end:
        found = decode(data, start, nonce) or _next_frame(data, start, nonce)
        if found is None:
            yield ScannedFrame(start, end, None)
            return
        if found.offset > start:
            yield ScannedFrame(start, found.offset, None)
        yield found
        start = found.end


def _next_frame(data: bytes, start: int, nonce: bytes) -> ScannedFrame | None:
    """The first frame with a valid front or back after `start`, where none begins."""
    fronts, backs = _find_all(data, FRONT, start), _find_all(data, BACK, start)
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


def _decode_back(data: bytes, offset: int, start: int, nonce: bytes) -> ScannedFrame | None:
    head = data[offset : offset + HEAD_BYTES]
    if len(head) < HEAD_BYTES or offset - head[5] < start:
        return None
    name = data[offset - head[5] : offset]
    begin = offset + HEAD_BYTES - frame_bytes(HEAD.unpack(head)[4], head[5])
    return _frame(data, begin, head, name) if begin >= start and _is_valid(head, name, nonce) else None


def _find_all(data: bytes, magic: bytes, start: int) -> Iterator[int]:
    while (start := data.find(magic, start)) >= 0:
        yield start
        start += 1


def _frame(data: bytes, offset: int, head: bytes, name: bytes) -> ScannedFrame:
    _, kind, _, _, length, safe, number, seq, digest, _ = HEAD.unpack(head)
    begin = offset + HEAD_BYTES + len(name)
    payload = data[begin : begin + length]
    whole = len(payload) == length and digest_of(payload) == digest
    end = offset + frame_bytes(length, len(name))
    return ScannedFrame(
        offset, end, FrameKind(kind), number, seq, name.decode(), safe, payload if whole else b"", whole, digest
    )


def _head(magic: bytes, fields: tuple[object, ...], name: bytes, nonce: bytes) -> bytes:
    head = HEAD.pack(magic, *fields, bytes(8))[:-8]
    return head + blake3(head + name, key=nonce).digest(8)


def _is_valid(head: bytes, name: bytes, nonce: bytes) -> bool:
    return blake3(head[:-8] + name, key=nonce).digest(8) == head[-8:]


# Files


class Summary(msgspec.Struct, array_like=True):
    """What a file held when it was closed: its nonce, its length, and the last frame of each session in it."""

    nonce: bytes
    length: int
    sessions: list[tuple[int, int, str, bool]]
    """id, seq, name, and whether that frame deleted the session"""


def file_header(number: int, nonce: bytes) -> bytes:
    """All copies of a file's header."""
    fields = FILE_MAGIC + struct.pack("<II", FILE_VERSION, number) + nonce
    return FILE_HEADER.pack(FILE_MAGIC, FILE_VERSION, number, nonce, blake3(fields).digest(8)) * HEADER_COPIES


def read_nonce(path: Path, data: bytes, number: int) -> bytes | None:
    """The file's nonce, from any intact copy of its header."""
    for copy in range(HEADER_COPIES):
        header = data[FILE_HEADER.size * copy : FILE_HEADER.size * (copy + 1)]
        if len(header) < FILE_HEADER.size:
            break
        magic, version, named, nonce, check = FILE_HEADER.unpack(header)
        if magic != FILE_MAGIC or blake3(header[:48]).digest(8) != check:
            continue
        if version != FILE_VERSION:
            raise StoreUnavailableError(
                f"{path} has format {version}, this quire writes {FILE_VERSION}: "
                "use the quire that wrote it, or another folder"
            )
        if named == number:
            return nonce
    return None


CHUNK_ROW = struct.Struct("<QQ16sII")
"""A chunk in an index: number, number of the chunk before, digest, file, offset."""
SESSION_ROW = struct.Struct("<QQBII")
"""A frame of a session in an index: the session's number, seq, kind, offset, length."""


class FileIndex(msgspec.Struct, array_like=True):
    """Where the frames of an undamaged file are, so that opening it reads no chunk. It is valid while the file has this
    length and modification time."""

    version: int
    length: int
    modified: int
    """Nanoseconds since the epoch."""
    chunks: bytes
    """Rows of CHUNK_ROW."""
    sessions: bytes
    """Rows of SESSION_ROW: every STATE, APPEND and DELETE frame, in order."""


Stored = TypeVar("Stored", Summary, FileIndex)


def encode_beside(content: Summary | FileIndex) -> bytes:
    """The bytes of a file beside a log file."""
    data = msgspec.msgpack.encode(content)
    return blake3(data).digest(16) + data


def read_beside(path: Path, kind: type[Stored]) -> Stored | None:
    """The content of such a file; None if it is missing or damaged."""
    try:
        data = path.read_bytes()
        if blake3(data[16:]).digest(16) == data[:16]:
            return msgspec.msgpack.decode(data[16:], type=kind)
    except (OSError, msgspec.DecodeError):
        return None
    return None


def without_torn_end(frames: list[ScannedFrame], summary: Summary | None) -> list[ScannedFrame]:
    """The frames up to the first damaged one after everything that is known to have been durable."""
    durable = max((frame.safe for frame in frames if frame.kind is not None), default=0)
    if summary is not None:
        durable = max(durable, summary.length)
    for i, frame in enumerate(frames):
        if not frame.whole and frame.offset >= durable:
            logger.info("dropping %d bytes of unfinished writes", frames[-1].end - frame.offset)
            return frames[:i]
    return frames
