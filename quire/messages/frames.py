"""Messages over a stream between processes, each preceded by its length."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

LARGEST = 2**32 - 1
"""Bytes of the largest message."""
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 20
TURN_BYTES = 1 << 14
"""What an event loop reads in one pass, unless a message is longer: a few hundred outputs. The rest of what waits in
the socket is for its next passes."""


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

    def receive(self, most: int = _READ_BYTES) -> memoryview:
        """The bytes that arrived, `most` or fewer, valid until the next call; empty when the other end is closed.
        Raises OSError."""
        return self._buffer[: self._socket.recv_into(self._buffer, min(most, _READ_BYTES))]


class FrameSplitter:
    """Cuts a stream of bytes into messages."""

    def __init__(self, largest: int = LARGEST) -> None:
        """`largest`: bytes of the largest message accepted."""
        self._largest = largest
        self._buffer = bytearray()

    @property
    def missing(self) -> int:
        """Bytes that the message in progress still lacks; 0: its length is not known yet."""
        if len(self._buffer) < _LENGTH.size:
            return 0
        return _LENGTH.size + int(_LENGTH.unpack_from(self._buffer)[0]) - len(self._buffer)

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
