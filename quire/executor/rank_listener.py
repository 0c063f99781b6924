"""Connections from ranks on other machines: each starts with a shared secret, or is closed.

A rank opens two: one for messages, one for heartbeats.
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

MESSAGES, HEARTBEATS = 0, 1
SECRET_BYTES = 32
HANDSHAKE_SECONDS = 5.0
"""How long a new connection may take to authenticate."""
TIMEOUT_SECONDS = 10
"""A heartbeat connection whose peer acknowledges nothing for this long is closed."""
_HANDSHAKE = struct.Struct(f"<{SECRET_BYTES}sIB")
"""Secret, rank, MESSAGES or HEARTBEATS."""
_MAX_PENDING = 64
"""Connections that have not authenticated yet."""


class RankListener:
    """Listens until all ranks have connected."""

    def __init__(self, host: str, size: int) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        """Must reach the ranks over a trusted channel."""
        self._size = size
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=max(16, 2 * size))
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._pending: dict[socket.socket, tuple[bytearray, float]] = {}
        """Bytes of the handshake so far, and its deadline."""
        self._accepted: dict[tuple[int, int], socket.socket] = {}

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def accept_all(self, check: Callable[[], None], deadline: float) -> tuple[list[socket.socket], list[socket.socket]]:
        """The ranks' message and heartbeat connections, by rank. `check` is called repeatedly and may raise; raises
        TimeoutError after the deadline."""
        try:
            while len(self._accepted) < 2 * self._size:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self._missing()} did not connect to {self.address[0]}")
                for key, _ in self._selector.select(0.1):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read_handshake(key.fileobj)  # type: ignore[arg-type]
                self._drop_pending(before=time.monotonic())
                check()
        finally:
            self._drop_pending()
        accepted, self._accepted = self._accepted, {}
        ranks = range(self._size)
        return [accepted[rank, MESSAGES] for rank in ranks], [accepted[rank, HEARTBEATS] for rank in ranks]

    def close(self) -> None:
        self._selector.close()
        self._listener.close()
        for sock in self._accepted.values():
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if len(self._pending) >= _MAX_PENDING:
                sock.close()
                return
            sock.setblocking(False)
            self._pending[sock] = (bytearray(), time.monotonic() + HANDSHAKE_SECONDS)
            self._selector.register(sock, selectors.EVENT_READ)

    def _read_handshake(self, sock: socket.socket) -> None:
        """Read more of a connection's handshake; accept or close the connection when it is complete."""
        received, _ = self._pending[sock]
        try:
            # Not a byte more than the handshake: the rest belongs to the connection's reader.
            data = sock.recv(_HANDSHAKE.size - len(received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received += data
        if data and len(received) < _HANDSHAKE.size:
            return
        if not data or not self._authenticate(bytes(received), sock):
            self._drop(sock)
            return
        del self._pending[sock]
        self._selector.unregister(sock)
        sock.setblocking(True)

    def _authenticate(self, handshake: bytes, sock: socket.socket) -> bool:
        secret, rank, kind = _HANDSHAKE.unpack(handshake)
        if not hmac.compare_digest(secret, self.secret):
            return False
        if rank >= self._size or kind not in (MESSAGES, HEARTBEATS) or (rank, kind) in self._accepted:
            return False
        _set_options(sock, kind)
        self._accepted[rank, kind] = sock
        return True

    def _drop_pending(self, before: float = float("inf")) -> None:
        """Close connections whose handshake was due before this time."""
        for sock, (_, deadline) in list(self._pending.items()):
            if deadline < before:
                self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        del self._pending[sock]
        self._selector.unregister(sock)
        sock.close()

    def _missing(self) -> str:
        both = (MESSAGES, HEARTBEATS)
        ranks = [rank for rank in range(self._size) if any((rank, kind) not in self._accepted for kind in both)]
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {self._size}"


def connect_to_engine(
    address: tuple[str, int], secret: bytes, rank: int, kind: int, seconds: float = 30.0
) -> socket.socket:
    """A rank's connection to the engine's listener."""
    sock = socket.create_connection(address, timeout=seconds)
    try:
        sock.sendall(_HANDSHAKE.pack(secret, rank, kind))
        sock.settimeout(None)
        _set_options(sock, kind)
    except BaseException:
        sock.close()
        raise
    return sock


def _set_options(sock: socket.socket, kind: int) -> None:
    """No delays; a machine that vanishes without closing its connections is noticed within seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    # Not for messages: a rank in a long step reads none for a while, and must not be dropped for that.
    if kind == HEARTBEATS and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * TIMEOUT_SECONDS)
