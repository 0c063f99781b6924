"""Whether a rank is alive: heartbeats in shared memory, or over a connection from another machine.

A thread of the rank beats, so a long step does not count as silence; a process that is stopped, or never releases the
interpreter lock, does.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from quire.messages.shared_memory import SharedMemory

MEMORY_BEAT_SECONDS = 0.25
SOCKET_BEAT_SECONDS = 0.5
SILENT_SECONDS = 10.0
"""A rank without a heartbeat for this long hangs."""


class Liveness(Protocol):
    """Detects ranks that have stopped running without exiting."""

    def watch(self) -> None:
        """Start measuring silence from now on."""
        ...

    def silent(self) -> int | None:
        """A rank without a heartbeat for SILENT_SECONDS since `watch`."""
        ...


def beat_in_memory(counters: mmap.mmap, rank: int) -> None:
    """In a thread of the rank, until the process ends."""
    while True:
        counters[rank] = (counters[rank] + 1) % 256
        time.sleep(MEMORY_BEAT_SECONDS)


class MemoryHeartbeats:
    """The engine's side: a byte of shared memory per rank, which changes while the rank runs."""

    def __init__(self, size: int) -> None:
        self._memory = SharedMemory(size)
        self._seen = bytes(size)
        self._since = [0.0] * size

    def fileno(self) -> int:
        """For the ranks to inherit."""
        return self._memory.fileno()

    def watch(self) -> None:
        self._seen = bytes(self._memory.data)
        self._since = [time.monotonic()] * len(self._seen)

    def silent(self) -> int | None:
        now, new = time.monotonic(), bytes(self._memory.data)
        for rank, (old, value) in enumerate(zip(self._seen, new, strict=True)):
            if old != value:
                self._since[rank] = now
        self._seen = new
        return next((rank for rank, since in enumerate(self._since) if now - since > SILENT_SECONDS), None)

    def close(self) -> None:
        self._memory.close()


def beat_over_socket(sock: socket.socket) -> None:
    """In a thread of the rank: exits the process, whatever it is doing, when the engine has closed the connection."""
    try:
        while True:
            sock.sendall(b"\0")
            time.sleep(SOCKET_BEAT_SECONDS)
    except OSError:
        os._exit(1)


class SocketHeartbeats:
    """The engine's side: a connection per rank. A thread always reads them, so that nothing piles up."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = list(sockets)
        self._last = [time.monotonic()] * len(self._sockets)
        self._since = 0.0
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(
            target=_listen, args=(self._sockets, self._stopped, self._last), name="quire-heartbeats", daemon=True
        )
        self._thread.start()

    def watch(self) -> None:
        self._since = time.monotonic()

    def silent(self) -> int | None:
        now = time.monotonic()
        late = (rank for rank, last in enumerate(self._last) if now - max(last, self._since) > SILENT_SECONDS)
        return next(late, None)

    def close(self) -> None:
        self._stop.close()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
        for sock in (*self._sockets, self._stopped):
            sock.close()


def _listen(sockets: Sequence[socket.socket], stop: socket.socket, last: list[float]) -> None:
    poll = select.poll()
    rank_of = {sock.fileno(): rank for rank, sock in enumerate(sockets)}
    for descriptor in (stop.fileno(), *rank_of):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor not in rank_of:
                return
            try:
                data = sockets[rank_of[descriptor]].recv(4096)
            except OSError:
                data = b""
            if data:
                last[rank_of[descriptor]] = time.monotonic()
            else:
                poll.unregister(descriptor)  # closed: the message connection reports it, or else the silence
