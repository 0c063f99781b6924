"""Messages over a stream between processes of ours: each behind its length."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

LARGEST = 2**32 - 1
"""Bytes a message may have."""
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 20


def frame(data: bytes) -> bytes:
    """A message as it goes over the stream."""
    return _LENGTH.pack(len(data)) + data


def unframe(data: bytes) -> memoryview:
    """The message in a whole frame."""
    return memoryview(data)[_LENGTH.size :]


class Inlet:
    """Reads a socket through one buffer. `recv` would make a new one for every message and cut it down to size, and a
    heap of such cuts grows although nothing in it does."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def receive(self) -> memoryview:
        """What has come, until the next call; empty when the other end is closed. Raises as the socket does."""
        return self._buffer[: self._socket.recv_into(self._buffer)]


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self, largest: int = LARGEST) -> None:
        """`largest`: bytes a message may have."""
        self._largest = largest
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The messages that `data` completes. Raises ValueError when one is announced that is too large."""
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, at)
                if length > self._largest:
                    raise ValueError(f"a message of {length} bytes is announced, {self._largest} are allowed")
                end = at + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                message = bytes(self._buffer[at + _LENGTH.size : end])
                at = end
                yield message
        finally:
            del self._buffer[:at]
