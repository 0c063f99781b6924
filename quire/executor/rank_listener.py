"""Connections from ranks on other machines: each begins with a secret, or is closed.

A rank makes two: one for messages, one for beats that show that it lives.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable

MESSAGES, BEATS = 0, 1
SECRET_BYTES = 32
GREETING_SECONDS = 5.0
"""So long a caller has to say who it is."""
GONE_SECONDS = 10
"""A machine that says nothing any more, not even goodbye, is given up after so long."""
_GREETING = struct.Struct(f"<{SECRET_BYTES}sIB")
_MOST_STRANGERS = 64
"""Callers that have not said who they are yet."""


class RankListener:
    """Listens where ranks can reach it, until all of them are there."""

    def __init__(self, host: str, size: int) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        """For the ranks, over a way that others do not see."""
        self._size = size
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=max(16, 2 * size))
        self._listener.setblocking(False)
        self._known: dict[tuple[int, int], socket.socket] = {}

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def admit(self, look: Callable[[], None], deadline: float) -> tuple[list[socket.socket], list[socket.socket]]:
        """The ranks' connections for messages and for beats, in order. `look` is called now and then and may raise; so
        does the deadline pass, with TimeoutError."""
        strangers: dict[socket.socket, tuple[bytearray, float]] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                while len(self._known) < 2 * self._size:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{self._missing()} did not connect to {self.address[0]}")
                    for key, _ in selector.select(0.1):
                        if key.fileobj is self._listener:
                            self._open(selector, strangers)
                        else:
                            self._hear(key.fileobj, selector, strangers)  # type: ignore[arg-type]
                    for stranger, (_, until) in list(strangers.items()):
                        if time.monotonic() > until:
                            _dismiss(stranger, selector, strangers)
                    look()
            finally:
                for stranger in list(strangers):
                    _dismiss(stranger, selector, strangers)
        known, self._known = self._known, {}
        return [known[rank, MESSAGES] for rank in range(self._size)], [known[rank, BEATS] for rank in range(self._size)]

    def close(self) -> None:
        self._listener.close()
        for sock in self._known.values():
            sock.close()

    def _open(self, selector: selectors.BaseSelector, strangers: dict[socket.socket, tuple[bytearray, float]]) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if len(strangers) >= _MOST_STRANGERS:
                sock.close()
                return
            sock.setblocking(False)
            strangers[sock] = (bytearray(), time.monotonic() + GREETING_SECONDS)
            selector.register(sock, selectors.EVENT_READ)

    def _hear(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        strangers: dict[socket.socket, tuple[bytearray, float]],
    ) -> None:
        said, _ = strangers[sock]
        try:
            # Not a byte more than the greeting: what follows it is for somebody else.
            data = sock.recv(_GREETING.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        if data and len(said) < _GREETING.size:
            return
        if not data or not self._knows(bytes(said), sock):
            _dismiss(sock, selector, strangers)
            return
        del strangers[sock]
        selector.unregister(sock)
        sock.setblocking(True)

    def _knows(self, greeting: bytes, sock: socket.socket) -> bool:
        secret, rank, kind = _GREETING.unpack(greeting)
        if not hmac.compare_digest(secret, self.secret):
            return False
        if rank >= self._size or kind not in (MESSAGES, BEATS) or (rank, kind) in self._known:
            return False
        _prepare(sock, kind)
        self._known[rank, kind] = sock
        return True

    def _missing(self) -> str:
        ranks = [rank for rank in range(self._size) if not {(rank, MESSAGES), (rank, BEATS)} <= self._known.keys()]
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {self._size}"


def dial(address: tuple[str, int], secret: bytes, rank: int, kind: int, seconds: float = 30.0) -> socket.socket:
    """A rank's connection to the engine."""
    sock = socket.create_connection(address, timeout=seconds)
    try:
        sock.sendall(_GREETING.pack(secret, rank, kind))
        sock.settimeout(None)
        _prepare(sock, kind)
    except BaseException:
        sock.close()
        raise
    return sock


def _prepare(sock: socket.socket, kind: int) -> None:
    """No delays; and a machine that has gone without a word shows within seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    # Not for messages: a rank in a long step takes none for a while, and must not be given up for that.
    if kind == BEATS and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * GONE_SECONDS)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _dismiss(
    sock: socket.socket, selector: selectors.BaseSelector, strangers: dict[socket.socket, tuple[bytearray, float]]
) -> None:
    del strangers[sock]
    selector.unregister(sock)
    sock.close()
