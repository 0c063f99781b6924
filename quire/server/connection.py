"""uvicorn's HTTP parser with a bound on headers, on the time they may take, and a way to cut a connection."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server.errors import ApiError, error_json
from quire.server.http import ABORT

HEAD_SECONDS = 30.0
"""A client that has begun a connection gets so long to say what it wants."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. uvicorn with httptools takes headers of any size; this does not."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._max_head: int = getattr(self.config, "max_header_bytes", 1 << 16)
        self._is_in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Headers count as they come: one that never ends would be gathered inside the parser."""
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._max_head and self._is_unfinished(data):
                self._refuse()
                return
        super().data_received(data)

    def _is_unfinished(self, data: bytes) -> bool:
        """Whether the head does not end within the bound: what comes after it is the body's."""
        before = self._head_bytes - len(data)
        return b"\r\n\r\n" not in data[: max(0, self._max_head - before) + 3]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self.scope[ABORT] = self._cut  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True  # the next one on this connection; keep-alive has its own timer
        self._head_bytes = 0

    def _cut(self) -> None:
        self.transport.abort()

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self) -> None:
        error = ApiError(431, f"request line and headers are longer than {self._max_head} bytes (--max-header-bytes)")
        body = error_json(error)
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
