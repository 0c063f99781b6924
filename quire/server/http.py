"""HTTP as the routes see it: an `Exchange` is one request and its response, an `EventStream` a response in events.

A route is `async def route(context, exchange)`. It reads with `await exchange.read_json(Kind)`, answers with
`await exchange.reply(struct)` or through `exchange.events()`, and raises for everything else: an error becomes the
response, or the last event of a stream that has begun. Work that grows with the body, it does with
`await exchange.work(function, …)`: for a small body at once, otherwise in a thread. While it generates it runs inside
`async with exchange.interruptible()`: a client that disconnects, a deadline or the server's shutdown cancels the route,
which cleans up in its own `finally` blocks.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Message, Receive, Scope, Send

from quire.api.work_pool import WorkPool
from quire.messages.adapter_use import AdapterUse
from quire.messages.json_limits import check_json
from quire.server.errors import ApiError, bad_request, error_json
from quire.server.limits import RequestLimits
from quire.server.protocol.fields import FieldReader

T = TypeVar("T")

JSON = b"application/json"
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not buffer events
]
SMALL_BODY = 4096
"""Bytes: requests up to this size are read and prepared in the event loop, others in a thread."""
LONGEST_QUERY = 4096
SLOWEST_BODY = 1024
"""Bytes per second: without it, a body sent byte by byte would never time out."""
ABORT = "quire.abort"
"""Key of the ASGI scope that holds the function that aborts the connection."""
CHUNKS = "quire.chunks"
"""Key of the ASGI scope that holds the response's `ChunkWriter`."""
DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode
TIMEOUT_HEADER = "x-request-timeout"
_timeout = getattr(asyncio, "timeout", None)
"""Since Python 3.11. Unlike `wait_for` it needs no task, which would cost every request a pass of the event loop."""
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

HeaderList = list[tuple[bytes, bytes]]


class ChunkWriter(Protocol):
    """Writes parts of a chunked response at once. The ASGI way takes a coroutine and two objects for each."""

    def is_ready(self) -> bool:
        """Whether the response has begun, and the client reads fast enough."""
        ...

    def write(self, parts: Sequence[bytes]) -> None:
        """Write parts of the body, each a chunk; only while it is ready."""
        ...


class ClientDisconnectedError(Exception):
    """The client has disconnected: no response is sent."""


def error_event(error: ApiError) -> bytes:
    """The last event of an OpenAI stream that fails."""
    return b"data: " + error_json(error) + b"\n\n" + DONE


class Exchange:
    """One HTTP request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: RequestLimits) -> None:
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.arrived = time.monotonic()
        self.id = self._request_id()
        """The client's X-Request-Id, or a generated one. Response ids, logs, traces and the engine use it."""
        self.tenant = ""
        """Set when the key is checked."""
        self.adapters: list[AdapterUse] = []
        """LoRA adapters that the request is computed with; set when its model is checked."""
        self.extra_headers: HeaderList = []
        """Sent with every response."""
        self.fields = FieldReader(limits.strict_fields)
        """Reads the body, and knows which of its fields had no effect."""
        self.client_names: Mapping[str, str] = {}
        """Maps internal field names to those of the client's body."""
        self.error_body: Callable[[ApiError], bytes] = error_json
        """Encodes an error as a response body. Routes of other APIs set their own…"""
        self.error_event: Callable[[ApiError], bytes] = error_event
        """…and an error as the last event of a stream."""
        self.is_started = False
        self.status = 0
        """The response's, once it has begun."""
        self.is_complete = False
        self.sending_since = 0.0
        """Monotonic time since when a send has been blocked by the client; 0 if none is."""
        self.interruption: ApiError | ClientDisconnectedError | None = None
        """Why the route was cancelled."""
        self._task = asyncio.current_task()
        self._receive = receive
        self._send = send
        self._limits = limits
        self.keeps_body = False
        """Whether the body can be read again."""
        self._body: bytes | None = None
        self._body_bytes = 0
        self._interruptible = 0

    # Reading

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    @property
    def path_params(self) -> dict[str, Any]:
        """The path parameters of the route."""
        return self.scope.get("path_params", {})

    @property
    def query(self) -> QueryParams:
        """The query parameters; raises 400 for a long query, whose pairs would take long to parse."""
        given: bytes = self.scope["query_string"]
        if len(given) > LONGEST_QUERY:
            raise bad_request(f"the query has {len(given)} bytes; at most {LONGEST_QUERY}")
        return QueryParams(given)

    async def read_json(self, kind: type[T]) -> T:
        """The body as a struct; raises `ApiError` for anything else."""
        self._check_content_type()
        data = await self.read_body()
        await self._limits.turns.take()
        body = await self.work(self._decode, data, kind)
        self.client_names = getattr(body, "client_names", {})
        return body

    def _decode(self, data: bytes, kind: type[T]) -> T:
        check_json(data, self._limits.json, "the body")
        body = self.fields.decode(data, kind)
        if len(data) > SMALL_BODY and (check := getattr(body, "check_sizes", None)) is not None:
            check()
        return body

    async def read_body(self, longest: int | None = None) -> bytes:
        """The whole body; raises 413 if it is too large, 408 if it is too slow. `longest`: bytes, if fewer than any
        body may have."""
        if self._body is not None:
            return self._body
        most = self._limits.max_body if longest is None else min(longest, self._limits.max_body)
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise self._too_large(int(declared), most)
        body, size, begin = [], 0, time.monotonic()
        while True:
            message = await self._next_message(begin + self._limits.stall + size / SLOWEST_BODY - time.monotonic())
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size > most:
                raise self._too_large(size, most)
            self._limits.bodies.take(len(piece))
            self._body_bytes = size
            body.append(piece)
            if not message.get("more_body", False):
                self._body = b"".join(body) if self.keeps_body else None
                return b"".join(body) if self._body is None else self._body

    async def _next_message(self, seconds: float) -> Message:
        try:
            if _timeout is None:
                message = await asyncio.wait_for(self._receive(), max(0.0, seconds))
            else:
                async with _timeout(max(0.0, seconds)):
                    message = await self._receive()
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self._limits.stall:g} seconds", headers={"Connection": "close"}
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        return message

    def _too_large(self, size: int, most: int) -> ApiError:
        flag = " (--max-body-bytes)" if most == self._limits.max_body else ""
        return ApiError(
            413,
            f"the body has {size} bytes or more; at most {most}{flag}",
            headers={"Connection": "close"},  # otherwise the rest of it would have to be read
        )

    async def work(
        self, function: Callable[..., T], *arguments: Any, is_long: bool = False, has_media: bool = False
    ) -> T:
        """The result of a call whose time depends on the body: made in a thread if that is not small, or if it
        `is_long` anyway. `has_media`: it may fetch and decode images, in a thread of another pool."""
        if has_media:
            return await self._call_in(self._limits.media_work, function, *arguments)
        return await self.call(self._body_bytes > SMALL_BODY or is_long, function, *arguments)

    async def call(self, in_thread: bool, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a call, made here or in a thread, when this tenant has a turn. A client that disconnects before
        that ends the request."""
        return await self._call_in(self._limits.work, function, *arguments) if in_thread else function(*arguments)

    async def _call_in(self, pool: WorkPool, function: Callable[..., T], *arguments: Any) -> T:
        if self._interruptible:
            return await pool.run(function, *arguments, tenant=self.tenant)
        async with self.interruptible():
            return await pool.run(function, *arguments, tenant=self.tenant)

    def _check_content_type(self) -> None:
        given = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if given != "application/json" and not (given.startswith("application/") and given.endswith("+json")):
            raise ApiError(415, f"the body must be application/json, and Content-Type is {given or 'missing'}")
        coding = self.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            raise ApiError(415, f"Content-Encoding {coding} is not supported: send the body as it is")

    def _request_id(self) -> str:
        given = self.headers.get("x-request-id", "")
        return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    def set_request_id(self, given: str | None) -> None:
        """Use the id given in the body, if any, instead of the header's."""
        if given is not None:
            if not _REQUEST_ID.fullmatch(given):
                raise bad_request("request_id must be 1 to 128 printable ASCII characters without spaces", "request_id")
            self.id = given

    # Answering

    async def reply(
        self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None, content_type: bytes = JSON
    ) -> None:
        """Send the whole response: a struct, or encoded bytes."""
        data = body if isinstance(body, bytes) else encode(body)
        listed = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        if data:
            listed.append((b"content-type", content_type))
        listed.append((b"content-length", str(len(data)).encode()))
        await self.start(status, listed)
        await self.send_body(data, more=False)

    async def fail(self, error: ApiError) -> None:
        """Send an error as the response, or as its last event."""
        if self.is_complete:
            return
        if self.is_started:
            await self.send_body(self.error_event(error), more=False)
        else:
            await self.reply(self.error_body(error), error.status, error.headers)

    def events(self) -> EventStream:
        """A response in server-sent events."""
        return EventStream(self)

    async def start(self, status: int, headers: HeaderList) -> None:
        """Send status and headers."""
        self.is_started = True
        self.status = status
        self.sending_since = time.monotonic()  # a previous response on this connection may still be in the send buffer
        every = [*headers, *self.extra_headers, *self.fields.headers]
        await self._send({"type": "http.response.start", "status": status, "headers": every})
        self.sending_since = 0.0

    async def send_body(self, data: bytes, more: bool) -> None:
        """Send part of the body. Waits while the client reads too slowly (backpressure)."""
        self.sending_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.sending_since = 0.0
        self.is_complete = not more

    # Interruption

    def interrupt(self, why: ApiError | ClientDisconnectedError) -> None:
        """Cancel the route if it is in an `interruptible` block; `why` is the response, or none if disconnected."""
        if self._interruptible and self.interruption is None and not self.is_complete and self._task is not None:
            self.interruption = why
            self._task.cancel()

    def end(self) -> None:
        """The route has ended: release the body's memory; interruptions have no effect any more."""
        self._task = None
        self.scope.pop(CHUNKS, None)  # a reference cycle
        self._limits.bodies.release(self._body_bytes)
        self._body_bytes = 0

    def abort(self) -> None:
        """Abort the connection of a client that does not read."""
        if (cut := self.scope.get(ABORT)) is not None:
            cut()

    @asynccontextmanager
    async def interruptible(self, seconds: float | None = None) -> AsyncIterator[None]:
        """The block is cancelled if the client disconnects, at the deadline, or when the server shuts down."""
        seconds = min((each for each in (seconds, self._header_timeout()) if each is not None), default=None)
        loop = asyncio.get_running_loop()
        watcher = loop.create_task(self._wait_for_disconnect())
        timer = None
        if seconds is not None:
            late = ApiError(408, f"the request took longer than its {seconds:g} seconds")
            timer = loop.call_later(max(0.0, self.arrived + seconds - time.monotonic()), self.interrupt, late)
        self._interruptible += 1
        try:
            yield
        finally:
            self._interruptible -= 1
            watcher.cancel()
            if timer is not None:
                timer.cancel()

    def _header_timeout(self) -> float | None:
        """The timeout given in the header, for clients that cannot set it in the body."""
        given = self.headers.get(TIMEOUT_HEADER)
        if given is None:
            return None
        if not _SECONDS.fullmatch(given) or not float(given):
            raise bad_request(f"{TIMEOUT_HEADER} must be a number of seconds above 0, got {given[:20]!r}")
        return float(given)

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientDisconnectedError())


class EventStream:
    """Server-sent events. The response begins with the first one, so that an earlier failure has its own status."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._is_buffered = exchange.scope.get("http_version", "1.1") != "1.1"
        """HTTP/1.0 has no chunked encoding: all events are sent at once, with a content length."""
        self._buffered: list[bytes] = []
        self.chunks: ChunkWriter | None = None if self._is_buffered else exchange.scope.get(CHUNKS)
        """Writes events without waiting, where the connection can do that."""

    async def send(self, event: Any) -> None:
        """Send one event with a struct as its data."""
        await self.send_bytes(event_bytes(event))

    async def send_bytes(self, data: bytes) -> None:
        """Send one or more encoded events."""
        exchange = self._exchange
        if self._is_buffered:
            self._buffered.append(data)
            return
        if not exchange.is_started:
            await exchange.start(200, EVENTS)
        await exchange.send_body(data, more=True)

    async def close(self, last: bytes = DONE) -> None:
        """End the stream with `last`, by default OpenAI's [DONE]."""
        if not self._exchange.is_started:
            length = (
                [(b"content-length", b"%d" % (sum(map(len, self._buffered)) + len(last)))] if self._is_buffered else []
            )
            await self._exchange.start(200, EVENTS + length)
        await self._exchange.send_body(b"".join([*self._buffered, last]), more=False)


class EventTemplate:
    """An event in which only one text changes: the rest is encoded once."""

    TEXT = "\0"
    """Stands for the text. It is escaped, and no other text can contain the escaped form in quotes."""

    def __init__(self, event: Any) -> None:
        head, text, tail = (b"data: " + encode(event) + b"\n\n").partition(encode(self.TEXT))
        if not text:
            raise ValueError("the event does not contain EventTemplate.TEXT")
        self._head, self._tail = head, tail

    def fill(self, text: str) -> bytes:
        """The encoded event with this text."""
        return self._head + encode(text) + self._tail


def event_bytes(event: Any) -> bytes:
    """An encoded event with a struct as its data."""
    return b"data: " + encode(event) + b"\n\n"


def named_event(name: str, event: Any) -> bytes:
    """An encoded event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + encode(event) + b"\n\n"
