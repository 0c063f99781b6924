"""One end of the socket between the hub and a front, in an event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from quire.messages.frames import TURN_BYTES, FrameSplitter, SocketReader

MAX_UNSENT_BYTES = 256 << 20
"""A front that leaves so much unread does not run any more, and is killed."""


class FrontLink:
    """Sends without waiting, and delivers whole messages."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._inlet = SocketReader(sock)
        self._frames = FrameSplitter()
        self._unsent = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_payload: Callable[[bytes], None] = lambda payload: None
        self.on_close: Callable[[], None] = lambda: None
        """Called once, when the other end is closed or reads nothing."""

    def attach(self) -> None:
        """Let the running event loop read messages."""
        if self._loop is None and self._socket.fileno() >= 0:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket, self._read)
            self._write()

    def send(self, data: bytes) -> None:
        """Send framed messages, or buffer them until the socket has room."""
        if self._socket.fileno() < 0:
            return
        self._unsent += data
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.close()
            self.on_close()
        else:
            self._write()

    def close(self) -> None:
        """Stop sending and receiving."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket.close()
        self._unsent.clear()

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            if self._loop is not None:
                self._loop.add_writer(self._socket, self._write)
            return
        except OSError:
            self._unsent.clear()  # the other end is closed, which the reader reports
        if self._loop is not None:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._inlet.receive(max(TURN_BYTES, self._frames.missing))
        except BlockingIOError:
            return
        except OSError:
            data = memoryview(b"")
        if not data:
            self.close()
            self.on_close()
            return
        for payload in self._frames.feed(data):
            self.on_payload(payload)
