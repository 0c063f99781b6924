"""Messages over a stream between processes, each preceded by its length."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

LARGEST = 2**32 - 1
"""Bytes of the largest message."""
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 20


def frame(data: bytes) -> bytes:
    """A message with its length, as sent."""
    return _LENGTH.pack(len(data)) + data


def unframe(data: bytes) -> memoryview:
    """The message in a whole frame."""
    return memoryview(data)[_LENGTH.size :]


class SocketReader:
    """Reads a socket through one buffer. `recv` would allocate one for every message and shrink it, which fragments the
    heap."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def receive(self) -> memoryview:
        """The bytes that arrived, valid until the next call; empty when the other end is closed. Raises OSError."""
        return self._buffer[: self._socket.recv_into(self._buffer)]


class FrameSplitter:
    """Cuts a stream of bytes into messages."""

    def __init__(self, largest: int = LARGEST) -> None:
        """`largest`: bytes of the largest message accepted."""
        self._largest = largest
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The messages that `data` completes. Raises ValueError for a length above the limit."""
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
