"""Beats over a connection, from ranks that share no memory with the engine."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Sequence

from quire.executor import pulse

BEAT_SECONDS = 0.5


def beat_over(sock: socket.socket) -> None:
    """In a thread of the rank, for ever: whatever the process is in the middle of, it ends when nobody listens."""
    try:
        while True:
            sock.sendall(b"\0")
            time.sleep(BEAT_SECONDS)
    except OSError:
        os._exit(1)


class Heartbeats:
    """The engine's view of them. A thread reads them always, so that nothing piles up while nobody asks."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = list(sockets)
        self._last = [time.monotonic()] * len(self._sockets)
        self._since = 0.0
        self._ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(
            target=_listen, args=(self._sockets, self._theirs, self._last), name="quire-heartbeats", daemon=True
        )
        self._thread.start()

    def watch(self) -> None:
        """Begin to look: what was before is forgotten."""
        self._since = time.monotonic()

    def silent(self) -> int | None:
        """A rank that has said nothing for too long since `watch`."""
        now = time.monotonic()
        late = (rank for rank, last in enumerate(self._last) if now - max(last, self._since) > pulse.SILENT_SECONDS)
        return next(late, None)

    def close(self) -> None:
        self._ours.close()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
        for sock in (*self._sockets, self._theirs):
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
                poll.unregister(descriptor)  # it has gone: silence tells, or the other connection before
