"""Accepts the connections of a port that several fronts share, so that each front has about as many."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from quire.resource_limits import descriptor_limit, log_cause
from quire.server.fronts.counts import Count, FrontCounts

logger = logging.getLogger(__name__)

SLACK = 4
"""A front may have so many connections more than the one with the fewest, and a sixteenth more…"""
SLACK_SHARE = 16
PAUSE_SECONDS = 0.002
"""…and leaves those that arrive beyond that to the others for so long."""
AT_ONCE = 16
"""If they are still there then, it accepts so many: the others are busy."""
SHORT_SECONDS = 0.1
"""After this a front without a free descriptor tries again."""
NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class FrontListener:
    """Stands for uvicorn's server of the shared socket.

    Without it, a front accepts whatever waits when it is scheduled: of 512 clients that connect at once, one of two
    fronts may get 400, and keeps them as long as they stay connected.
    """

    def __init__(
        self,
        sock: socket.socket,
        counts: FrontCounts,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext | None,
    ) -> None:
        """Accepts at once."""
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._counts = counts
        self._make_protocol = make_protocol
        self._context = context
        self._opening: set[asyncio.Task[Any]] = set()
        """Connections that are accepted, and not yet counted by their protocol."""
        self._pause: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        counts.add(Count.ACCEPTING, 1)
        self._loop.add_reader(sock, self._on_readable)

    def close(self) -> None:
        """Accept no more."""
        self._counts.add(Count.ACCEPTING, -1)
        if self._pause is None:
            self._loop.remove_reader(self._sock)
        else:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Wait for connections that are being opened."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    @property
    def _has_share(self) -> bool:
        """Whether this front has its share of all connections."""
        fewest = self._counts.fewest_connections()
        return self._counts.own(Count.CONNECTIONS) + len(self._opening) >= fewest + SLACK + fewest // SLACK_SHARE

    def _on_readable(self) -> None:
        while not self._has_share:
            if not self._accept():
                return
        self._wait(PAUSE_SECONDS)

    def _wait(self, seconds: float) -> None:
        if self._pause is None:
            self._loop.remove_reader(self._sock)
            self._pause = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        """The pause is over."""
        self._pause = None
        for _ in range(AT_ONCE):
            if not self._accept():
                break
        if self._pause is None:
            self._loop.add_reader(self._sock, self._on_readable)

    def _accept(self) -> bool:
        """Accept one connection, if one waits."""
        try:
            made, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in NO_RESOURCES:
                raise
            log_cause(f"{error.strerror}: a connection cannot be accepted; {descriptor_limit()} files may be open")
            self._wait(SHORT_SECONDS)
            return False
        made.setblocking(False)
        task = asyncio.ensure_future(self._open(made))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return True

    async def _open(self, made: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, made, ssl=self._context)
        except (OSError, asyncio.TimeoutError) as error:  # the client has left, or speaks no TLS
            logger.debug("a connection was not opened: %s", error)
            made.close()
