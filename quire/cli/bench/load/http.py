"""A minimal HTTP/1.1 client, so that the load generator is not the bottleneck.

A general client spends about 100 µs of CPU time on every event of a stream; with 64 streams of 200 tokens/s that is
more than a core. Here bytes go from the socket through a C parser to the code that times them.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools

from quire.errors import ValidationError

MAX_IDLE_SECONDS = 3.0
"""Servers close idle connections after 5 s or more; one that closes during a request would count as a failure."""


class LostConnectionError(Exception):
    """The connection failed or ended before the response did. `kind` is the category of the failure."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class ResponseHandler(Protocol):
    """Receives a response as it arrives."""

    def begin(self, status: int) -> None:
        """The headers have arrived."""

    def feed(self, body: bytes, at: float) -> None:
        """A part of the body, and the time it arrived."""


class WholeResponse:
    """A response that is read as a whole."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    def begin(self, status: int) -> None:
        self.status = status

    def feed(self, body: bytes, at: float) -> None:
        self.body += body


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._handler: ResponseHandler | None = None
        self._done: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._at = 0.0
        self._has_begun = False
        self._is_framed = False
        self.is_reusable = False
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, handler: ResponseHandler) -> None:
        """Send `request` and pass the response to `handler`; returns at its end. Cancelling closes the connection."""
        if self._transport is None:
            raise LostConnectionError("connection lost", "the server closed the connection")
        self._parser = httptools.HttpResponseParser(self)
        self._handler, self._has_begun, self._is_framed, self.is_reusable = handler, False, False, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._handler = self._done = None
            if not self.is_reusable:
                self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._done is None:  # data without a request
            self.close()
            return
        self._at = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # The parser wraps an exception of a callback, with the cause as its context.
            self._end(error.__context__ or LostConnectionError("malformed HTTP", f"{error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._has_begun and not self._is_framed and error is None:
            self._end(None)  # a body without a length ends with the connection
            return
        why = f": {error}" if error else ""
        if self._has_begun:
            self._end(LostConnectionError("cut off", f"the connection ended within the response{why}"))
        else:
            detail = f"the server closed the connection without a response{why}"
            self._end(LostConnectionError("connection lost", detail))

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        self._has_begun = True
        if self._handler is not None:
            self._handler.begin(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._handler is not None:
            self._handler.feed(body, self._at)

    def on_message_complete(self) -> None:
        self.is_reusable = self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)


class Host:
    """A server and its idle connections."""

    def __init__(self, base_url: str, headers: dict[str, str]) -> None:
        self.url = base_url.rstrip("/").removesuffix("/v1")  # accepted with or without /v1
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValidationError(f"{base_url!r} is not the URL of a server: give one like http://127.0.0.1:8000")
        self._name, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._secure = ssl.create_default_context() if parts.scheme == "https" else None
        self._root = parts.path
        self._idle: list[Connection] = []
        given = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", "User-Agent": "quire-bench", **headers}
        for name, value in given.items():
            if not (name + value).isprintable() or not value.isascii():
                raise ValidationError(f"the header {name} has characters that are not allowed in headers")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in given.items())

    async def get(self, path: str) -> WholeResponse:
        """Send a GET and return the response."""
        response = WholeResponse()
        await self._send(self._head("GET", path) + b"\r\n", response)
        return response

    async def post(self, path: str, body: bytes, handler: ResponseHandler) -> None:
        """Send a POST of JSON."""
        head = self._head("POST", path) + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        await self._send(head + body, handler)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _head(self, method: str, path: str) -> bytes:
        return f"{method} {self._root}{path} HTTP/1.1\r\n{self._headers}".encode()

    async def _send(self, request: bytes, handler: ResponseHandler) -> None:
        """Requests are not retried: if the server closes the connection, the request has failed."""
        connection = self._reusable() or await self._connect()
        await connection.exchange(request, handler)
        if connection.is_reusable:
            connection.idle_since = time.perf_counter()
            self._idle.append(connection)

    def _reusable(self) -> Connection | None:
        """The connection used last, if it was idle for less than MAX_IDLE_SECONDS."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.perf_counter() - connection.idle_since < MAX_IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, self._name, self._port, ssl=self._secure)
        except ConnectionRefusedError as error:
            raise LostConnectionError("connection refused", f"nothing listens at {self.url}") from error
        except OSError as error:
            raise LostConnectionError("no connection", f"{self.url}: {error}") from error
        return connection
