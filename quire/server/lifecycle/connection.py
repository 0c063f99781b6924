"""uvicorn's HTTP parser for clients that mean no good: bounds on heads, on time and on what is asked ahead."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.server.errors import ApiError, error_json, phrase
from quire.server.http import ABORT

HEAD_SECONDS = 30.0
"""A client that has begun a connection gets so long to say what it wants."""
MOST_AHEAD = 16
"""Requests that a client may send before the first of them is answered."""

UPGRADE = (b"upgrade", b"http2-settings")
"""Headers that ask for another protocol, and what announces them in Connection."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. uvicorn with httptools takes headers of any size; this does not."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._max_head: int = getattr(self.config, "max_header_bytes", 1 << 16)
        self._stall: float = getattr(self.config, "stall_timeout", 60.0)
        self._is_in_head = True
        self._bare_bytes = 0
        """Came since a body's last piece, or since a message's end: heads, trailers, the frames of chunks."""
        self._is_deaf = False
        """What still comes is not looked at."""
        self._unanswered: list[RequestResponseCycle] = []
        """Requests in the order they came. uvicorn knows the last one only, and would tell no other of the end."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._unread_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        for cycle in self._waiting():
            _disconnect(cycle)
        super().connection_lost(exc)
        if self.scope is not None:
            del self.scope[ABORT]  # type: ignore[misc]  # it leads back here

    def data_received(self, data: bytes) -> None:
        """Headers count as they come: one that never ends would be gathered inside the parser."""
        if self._is_deaf:
            return
        self._bare_bytes += len(data)
        if self._is_in_head and self._bare_bytes > self._max_head and self._is_unfinished(data):
            self._refuse(self._too_long())
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as wish:
            self._read_without_upgrade(data[wish.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "what was sent is not HTTP/1.1, or breaks its rules"))
            return
        if not self._is_in_head and self._bare_bytes > self._max_head:  # trailers: headers behind a body in chunks
            self._refuse(self._too_long())

    def _is_unfinished(self, data: bytes) -> bool:
        """Whether the head does not end within the bound: what comes after it is the body's."""
        before = self._bare_bytes - len(data)
        return b"\r\n\r\n" not in data[: max(0, self._max_head - before) + 3]

    def _unset_keepalive_if_required(self) -> None:
        """uvicorn stops the timer of an idle connection at the first byte. Here a whole head is needed."""

    # Messages

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self.scope[ABORT] = self._cut  # type: ignore[literal-required]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # a proxy that checks headers does not check trailers: they say nothing here
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # read again without that wish
        self._is_in_head = False
        self._bare_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super()._unset_keepalive_if_required()
        super().on_headers_complete()
        self._unanswered = [*self._waiting(), self.cycle]
        if len(self._unanswered) > 1:
            self.flow.resume_reading()  # uvicorn looks away until the first is answered, and would not see a hang-up
        if len(self._unanswered) > MOST_AHEAD:
            self._stop_listening()

    def on_body(self, body: bytes) -> None:
        self._bare_bytes = 0
        super().on_body(body)
        if self.flow.read_paused and len(self._waiting()) > 1:  # nobody takes this body yet
            self._stop_listening()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._is_in_head = True  # the next one on this connection
        self._bare_bytes = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self._wait_for_reader()

    def _read_without_upgrade(self, rest: bytes) -> None:
        """A client may wish for another protocol and goes on in this one (Java's own does); the parser would not."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(ApiError(405, "CONNECT is for proxies"))
            return
        head = [method + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:
            if name == b"connection":
                kept = [token for token in value.split(b",") if token.strip().lower() not in UPGRADE]
                head.append(b"connection:" + b",".join(kept))
            elif name not in UPGRADE:
                head.append(name + b":" + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets its own
        self._bare_bytes = 0
        self.data_received(b"\r\n".join([*head, b"", rest]))

    def _waiting(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._unanswered if not cycle.response_complete]

    # Ends

    def _wait_for_reader(self, unread: int = -1) -> None:
        """An answer is over when it is written, not when it is read: one that nobody takes must not stay for ever."""
        left = self.transport.get_write_buffer_size()
        if left == unread:
            self._cut()
        elif left:
            self._unread_timer = self.loop.call_later(self._stall, self._wait_for_reader, left)

    def _cut(self) -> None:
        self.transport.abort()

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_listening(self) -> None:
        """The request that is being answered is the last one."""
        self._is_deaf = True
        self.pipeline.clear()
        self._waiting()[0].keep_alive = False
        self.flow.resume_reading()

    def _refuse(self, error: ApiError) -> None:
        """Answer what cannot be read. Whatever was asked before it has its answer first: then nothing more is said."""
        waiting = self._waiting()
        if waiting and not (len(waiting) == 1 and waiting[0].more_body):
            self._stop_listening()
            return
        if not self._has_begun():
            self.transport.write(_plain_answer(error))
        self._is_deaf = True
        for cycle in waiting:
            _disconnect(cycle)
        self.transport.close()

    def _has_begun(self) -> bool:
        """Whether the message that is being read has an answer already, or a part of one."""
        return self.cycle is not None and self.cycle.more_body and self.cycle.response_started

    def _too_long(self) -> ApiError:
        return ApiError(431, f"request line and headers are longer than {self._max_head} bytes (--max-header-bytes)")


def _disconnect(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()


def _plain_answer(error: ApiError) -> bytes:
    """An error in full, for whoever has no request to answer."""
    body = error_json(error)
    head = (
        f"HTTP/1.1 {error.status} {phrase(error.status)}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
