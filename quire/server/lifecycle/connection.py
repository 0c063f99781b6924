"""uvicorn's HTTP protocol hardened against hostile clients: limits on header size, time and pipelined requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.resource_limits import are_descriptors_short, descriptor_limit, log_cause
from quire.server.errors import ApiError, error_json, phrase, unavailable
from quire.server.fronts.counts import Count, FrontCounts
from quire.server.http import ABORT, CHUNKS

HEAD_SECONDS = 30.0
"""Seconds from connecting to the end of the first request's headers."""
REFUSED_SECONDS = 1.0
"""The same for a connection that will be refused."""
MAX_PIPELINED = 16
"""Requests that a client may send before the first of them is answered."""

VERSIONS = ("1.0", "1.1")
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")

UPGRADE = (b"upgrade", b"http2-settings")
"""Headers that request another protocol; Connection lists them too."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. uvicorn with httptools accepts headers of any size; this does not."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._max_head: int = getattr(self.config, "max_header_bytes", 1 << 16)
        self._stall: float = getattr(self.config, "stall_timeout", 60.0)
        self._counts: FrontCounts | None = getattr(self.config, "front_counts", None)
        """Set if several fronts share the port."""
        self._is_in_head = True
        self._unframed_bytes = 0
        """Received since the last piece of a body or the end of a message: headers, trailers, chunk framing."""
        self._is_one_too_many = False
        """Few descriptors are left: it is answered with 503, and closed."""
        self._refusal: ApiError | None = None
        """Why the headers just parsed are refused."""
        self._ignores_input = False
        """Further input is discarded."""
        self._unanswered: list[RequestResponseCycle] = []
        """Open requests in order of arrival; uvicorn keeps only the last one."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._counts is not None:
            self._counts.add(Count.CONNECTIONS, 1)
        sock = transport.get_extra_info("socket")
        self._is_one_too_many = sock is not None and are_descriptors_short(sock.fileno())
        seconds = REFUSED_SECONDS if self._is_one_too_many else HEAD_SECONDS
        self._head_timer = self.loop.call_later(seconds, self._close_if_open)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._counts is not None:
            self._counts.add(Count.CONNECTIONS, -1)
        for timer in (self._head_timer, self._unread_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        for cycle in self._open_requests():
            _disconnect(cycle)
        super().connection_lost(exc)
        if self.scope is not None:
            del self.scope[ABORT]  # type: ignore[misc]  # it refers to this object

    def data_received(self, data: bytes) -> None:
        """Count headers as they arrive: the parser would buffer one that never ends."""
        if self._ignores_input:
            return
        if self._is_one_too_many:
            log_cause(f"connections leave no free file descriptor: the limit is {descriptor_limit()} (ulimit -n)")
            self._reject(unavailable("the server has too many open connections; try again"))
            return
        self._unframed_bytes += len(data)
        if self._is_in_head and self._unframed_bytes > self._max_head and self._is_unfinished(data):
            self._reject(self._headers_too_long())
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._reject(self._refusal or ApiError(400, "the request is not valid HTTP/1.1"))
            return
        if not self._is_in_head and self._unframed_bytes > self._max_head:  # trailers: headers after a chunked body
            self._reject(self._headers_too_long())

    def _is_unfinished(self, data: bytes) -> bool:
        """Whether the headers do not end within the limit; bytes after them belong to the body."""
        before = self._unframed_bytes - len(data)
        return b"\r\n\r\n" not in data[: max(0, self._max_head - before) + 3]

    def _unset_keepalive_if_required(self) -> None:
        """uvicorn stops the keep-alive timer at the first byte. Here it takes complete headers."""

    # Messages

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self.scope[ABORT] = self._abort  # type: ignore[literal-required]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # trailers are ignored: a proxy that checks headers does not check them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # parsed again without the upgrade
        if (wrong := ambiguity(self.parser.get_http_version(), self.headers)) is not None:
            self._refusal = wrong
            raise ValueError  # stops the parser
        self._is_in_head = False
        self._unframed_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super()._unset_keepalive_if_required()
        super().on_headers_complete()
        self.scope[CHUNKS] = CycleChunks(self.cycle)  # type: ignore[literal-required]
        self._unanswered = [*self._open_requests(), self.cycle]
        if len(self._unanswered) > 1:
            self.flow.resume_reading()  # uvicorn pauses reading until the first is answered and would miss a disconnect
        if len(self._unanswered) > MAX_PIPELINED:
            self._ignore_further_requests()
            raise ValueError  # stops the parser: what was received may hold ten thousand more

    def on_body(self, body: bytes) -> None:
        self._unframed_bytes = 0
        super().on_body(body)
        if self.flow.read_paused and len(self._open_requests()) > 1:  # this body is not being read yet
            self._ignore_further_requests()
            raise ValueError  # stops the parser

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._is_in_head = True  # the next one on this connection
        self._unframed_bytes = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self._abort_if_unread()

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Parse the request without its upgrade headers, which httptools would stop at (Java's client sends them)."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._reject(ApiError(405, "CONNECT is not supported: this server is not a proxy"))
            return
        head = [method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                kept = [token for token in value.split(b",") if token.strip().lower() not in UPGRADE]
                head.append(b"connection:" + b",".join(kept))
            elif name not in UPGRADE:
                head.append(name + b":" + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._unframed_bytes = 0
        self.data_received(b"\r\n".join([*head, b"", rest]))

    def _open_requests(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._unanswered if not cycle.response_complete]

    # Closing

    def _abort_if_unread(self, unread: int = -1) -> None:
        """Abort the connection if the client reads nothing of a finished response for `stall_timeout` seconds."""
        left = self.transport.get_write_buffer_size()
        if left == unread:
            self._abort()
        elif left:
            self._unread_timer = self.loop.call_later(self._stall, self._abort_if_unread, left)

    def _abort(self) -> None:
        self.transport.abort()

    def _close_if_open(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _ignore_further_requests(self) -> None:
        """The request being answered is the connection's last."""
        self._ignores_input = True
        self.pipeline.clear()
        self._open_requests()[0].keep_alive = False
        self.flow.resume_reading()

    def _reject(self, error: ApiError) -> None:
        """Answer a request that cannot be parsed; if earlier ones are open, only those are answered."""
        waiting = self._open_requests()
        if waiting and not (len(waiting) == 1 and waiting[0].more_body):
            self._ignore_further_requests()
            return
        if not self._has_response_begun():
            self.transport.write(_raw_response(error))
        self._ignores_input = True
        for cycle in waiting:
            _disconnect(cycle)
        self.transport.close()

    def _has_response_begun(self) -> bool:
        """Whether the request being read already has a response, or part of one."""
        return self.cycle is not None and self.cycle.more_body and self.cycle.response_started

    def _headers_too_long(self) -> ApiError:
        return ApiError(431, f"request line and headers are longer than {self._max_head} bytes (--max-header-bytes)")


class CycleChunks:
    """The `ChunkWriter` of one response: writes what `RequestResponseCycle.send` would."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def is_ready(self) -> bool:
        cycle = self._cycle
        return (
            cycle.response_started
            and cycle.chunked_encoding is True
            and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
        )

    def write(self, parts: Sequence[bytes]) -> None:
        self._cycle.transport.write(b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts]))


def ambiguity(version: str, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
    """What a proxy in front might have read differently: the host, or where the body ends. None: nothing."""
    if version not in VERSIONS:
        return ApiError(505, f"HTTP/{version} is not supported: use HTTP/1.1")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1 and (hosts or version == "1.1"):
        return ApiError(400, f"an HTTP/1.1 request has one Host header, and this one has {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        return ApiError(400, f"the Host header {hosts[0][:100].decode('latin-1')!r} is not a host")
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        return ApiError(400, "HTTP/1.0 has no Transfer-Encoding: send Content-Length")
    if codings and codings != [b"chunked"]:
        parts = [part.strip().lower() for value in codings for part in value.split(b",")]
        shown = b", ".join(codings)[:100].decode("latin-1")
        if parts[-1] != b"chunked" or parts.count(b"chunked") > 1:  # the body has no end
            return ApiError(400, f"Transfer-Encoding {shown!r} does not end in one 'chunked'")
        if len(parts) > 1:
            return ApiError(501, f"Transfer-Encoding {shown!r} is not supported: send the body as it is, or chunked")
    return None


def _disconnect(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()


def _raw_response(error: ApiError) -> bytes:
    """A complete HTTP error response, for input that is not a request."""
    body = error_json(error)
    head = (
        f"HTTP/1.1 {error.status} {phrase(error.status)}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    )
    head += "".join(f"{name.lower()}: {value}\r\n" for name, value in error.headers.items()) + "\r\n"
    return head.encode() + body
