"""A ring buffer in shared memory: a message to every rank is written once, and each rank reads it there.

The socket to a rank is the doorbell: it carries the message's position, in order with the other messages. The writer
never waits. A message that does not fit, because a rank is behind or the message is too long, is sent over the sockets
instead; so a slow or dead rank does not block the writer.
"""

from __future__ import annotations

import mmap

from quire.messages.shared_memory import SharedMemory, map_shared

RING_BYTES = 8 << 20
MIN_BYTES = 64 << 10
"""Shorter messages are faster over the sockets (benchmarks/plan_broadcast.py)."""
_LINE = 64
"""Bytes per reader's position: a cache line each, to avoid false sharing."""


class RingWriter:
    """The engine's end."""

    def __init__(self, readers: int, size: int = RING_BYTES) -> None:
        self._size = size
        self._start = readers * _LINE
        self._memory = SharedMemory(self._start + size)
        self._data = memoryview(self._memory.data)
        # Positions count all bytes ever passed, gaps at the end of the ring included. Each reader writes only its own.
        self._positions = self._data[: self._start].cast("Q")[:: _LINE // 8]
        self._end = 0

    def fileno(self) -> int:
        """For the ranks to inherit."""
        return self._memory.fileno()

    def put(self, message: bytes | memoryview) -> int | None:
        """Position of the message; None if it does not fit until readers have read more."""
        at, offset = self._end, self._end % self._size
        if offset + len(message) > self._size:  # a message is never in two pieces
            at, offset = at + self._size - offset, 0
        read = min(self._positions)
        if read == self._end:
            read = at  # nothing is left to read: the gap is free as well
        if at + len(message) - read > self._size:
            return None
        self._data[self._start + offset : self._start + offset + len(message)] = message
        self._end = at + len(message)
        return at

    def close(self) -> None:
        self._positions.release()
        self._data.release()
        self._memory.close()


class RingReader:
    """A rank's end."""

    def __init__(self, memory: mmap.mmap, readers: int, reader: int) -> None:
        self._start = readers * _LINE
        self._size = len(memory) - self._start
        self._data = memoryview(memory)
        self._position = self._data[reader * _LINE : (reader + 1) * _LINE].cast("Q")

    @classmethod
    def inherit(cls, descriptor: int, readers: int, reader: int) -> RingReader:
        return cls(map_shared(descriptor), readers, reader)

    def take(self, at: int, length: int) -> bytes:
        """The message at this position, whose memory may be overwritten from now on."""
        begin = self._start + at % self._size
        message = bytes(self._data[begin : begin + length])
        self._position[0] = at + length
        return message
