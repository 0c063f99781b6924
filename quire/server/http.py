"""HTTP as the routes see it: an `Exchange` is one request and its answer, an `EventStream` an answer in events.

A route is `async def route(server, exchange)`. It reads with `await exchange.read_json(Kind)`, answers with
`await exchange.reply(struct)` or through `exchange.events()`, and raises for everything else: errors become answers, or
the last event of a stream that has begun. While something is generated it runs inside `async with exchange.watched()`,
so that a client that hangs up, a deadline or the end of the server interrupts it: the route is cancelled, and leaves
what it does through its own `finally`s.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from quire.server.errors import ApiError, as_decode_error, bad_request, error_json
from quire.server.limits import OpenBodies

T = TypeVar("T")

JSON = b"application/json"
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that gathers events until a buffer is full would hide the streaming
]
SLOWEST_BODY = 1024
"""Bytes a second: a body in drops would come for ever, and none of them late."""
ABORT = "quire.abort"
"""Where the protocol puts what cuts a connection, in a request's scope."""
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
TIMEOUT_HEADER = "x-request-timeout"
_timeout = getattr(asyncio, "timeout", None)
"""Since Python 3.11. Unlike `wait_for` it needs no task, which would cost every request a turn of the event loop."""
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

_LARGEST_WHOLE = 2**53
"""Up to here every whole number is a float of its own."""

HeaderList = list[tuple[bytes, bytes]]


class ClientDisconnectedError(Exception):
    """The client has gone: nobody is there to be answered."""


def error_event(error: ApiError) -> bytes:
    """How a stream of OpenAI's kind ends when it fails."""
    return b"data: " + error_json(error) + b"\n\n" + DONE


class Exchange:
    """One HTTP request and its answer."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, max_body: int, stall: float, bodies: OpenBodies
    ) -> None:
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.arrived = time.monotonic()
        self.id = self._request_id()
        """The client's X-Request-Id, or one of ours."""
        self.tenant = ""
        """Who asks; set where the key is checked."""
        self.extra_headers: HeaderList = []
        """Go out with the answer, whatever it is."""
        self.client_names: Mapping[str, str] = {}
        """What fields are called inside, and what the body that was read calls them."""
        self.error_body: Callable[[ApiError], bytes] = error_json
        """How errors look before the answer has begun…"""
        self.error_event: Callable[[ApiError], bytes] = error_event
        """…and in a stream. Routes of another API's shape put their own here."""
        self.is_started = False
        self.status = 0
        """The answer's, once it has begun."""
        self.is_complete = False
        self.sending_since = 0.0
        """Since when the client has not taken what it was sent; 0 if it has."""
        self.interruption: ApiError | ClientDisconnectedError | None = None
        """Why the route was cancelled."""
        self._task = asyncio.current_task()
        self._receive = receive
        self._send = send
        self._max_body = max_body
        self._stall = stall
        self._bodies = bodies
        self._body_bytes = 0
        self._watchers = 0

    # Reading

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    @property
    def path_params(self) -> dict[str, Any]:
        """Parts of the path that the route names."""
        return self.scope.get("path_params", {})

    async def read_json(self, kind: type[T]) -> T:
        """The body as a struct; raises `ApiError` for anything else."""
        self._check_content_type()
        body = decode(await self.read_body(), kind)
        self.client_names = getattr(body, "client_names", {})
        return body

    async def read_body(self) -> bytes:
        """The whole body, within the limit."""
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body:
            raise self._too_large(int(declared))
        body, size, begin = [], 0, time.monotonic()
        while True:
            message = await self._next_message(begin + self._stall + size / SLOWEST_BODY - time.monotonic())
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size > self._max_body:
                raise self._too_large(size)
            self._bodies.take(len(piece))
            self._body_bytes = size
            body.append(piece)
            if not message.get("more_body", False):
                return b"".join(body)

    async def _next_message(self, seconds: float) -> Message:
        try:
            if _timeout is None:
                message = await asyncio.wait_for(self._receive(), max(0.0, seconds))
            else:
                async with _timeout(max(0.0, seconds)):
                    message = await self._receive()
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"the body did not come within {self._stall:g} seconds", headers={"Connection": "close"}
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        return message

    def _too_large(self, size: int) -> ApiError:
        return ApiError(
            413,
            f"the body has {size} bytes or more; at most {self._max_body} (--max-body-bytes)",
            headers={"Connection": "close"},  # or the rest of it would have to be read
        )

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
        """The id that the body gives, if it gives one, stands above the header's."""
        if given is not None:
            if not _REQUEST_ID.fullmatch(given):
                raise bad_request("request_id must be 1 to 128 printable ASCII characters without spaces", "request_id")
            self.id = given

    # Answering

    async def reply(
        self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None, content_type: bytes = JSON
    ) -> None:
        """The whole answer: a struct, or bytes that are ready."""
        data = body if isinstance(body, bytes) else _encode(body)
        listed = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        if data:
            listed.append((b"content-type", content_type))
        listed.append((b"content-length", str(len(data)).encode()))
        await self.start(status, listed)
        await self.send_body(data, more=False)

    async def fail(self, error: ApiError) -> None:
        """An error as the answer, or as its last event."""
        if self.is_complete:
            return
        if self.is_started:
            await self.send_body(self.error_event(error), more=False)
        else:
            await self.reply(self.error_body(error), error.status, error.headers)

    def events(self) -> EventStream:
        """An answer in events."""
        return EventStream(self)

    async def start(self, status: int, headers: HeaderList) -> None:
        """Status and headers."""
        self.is_started = True
        self.status = status
        self.sending_since = time.monotonic()  # an answer before this one may still be on its way
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.extra_headers]})
        self.sending_since = 0.0

    async def send_body(self, data: bytes, more: bool) -> None:
        """A piece of the answer. Waits while the client is behind."""
        self.sending_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.sending_since = 0.0
        self.is_complete = not more

    # Being interrupted

    def interrupt(self, why: ApiError | ClientDisconnectedError) -> None:
        """Cancel the route, if it lets itself be: the answer is then this error, or none at all."""
        if self._watchers and self.interruption is None and not self.is_complete and self._task is not None:
            self.interruption = why
            self._task.cancel()

    def end(self) -> None:
        """The route is over: nobody can be interrupted any more, and nothing is held."""
        self._task = None
        self._bodies.release(self._body_bytes)
        self._body_bytes = 0

    def abort(self) -> None:
        """Cut the connection: the client does not read what is on its way to it."""
        if (cut := self.scope.get(ABORT)) is not None:
            cut()

    @asynccontextmanager
    async def interruptible(self, seconds: float | None = None) -> AsyncIterator[None]:
        """The block is cancelled if the client hangs up, if it takes too long, or if the server ends."""
        seconds = min((each for each in (seconds, self._asked_seconds()) if each is not None), default=None)
        loop = asyncio.get_running_loop()
        watcher = loop.create_task(self._watch())
        timer = None
        if seconds is not None:
            late = ApiError(408, f"the request took longer than its {seconds:g} seconds")
            timer = loop.call_later(max(0.0, self.arrived + seconds - time.monotonic()), self.interrupt, late)
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1
            watcher.cancel()
            if timer is not None:
                timer.cancel()

    def _asked_seconds(self) -> float | None:
        """The header's bound on the time, for clients that cannot put one in the body."""
        given = self.headers.get(TIMEOUT_HEADER)
        if given is None:
            return None
        if not _SECONDS.fullmatch(given) or not float(given):
            raise bad_request(f"{TIMEOUT_HEADER} must be a number of seconds above 0, got {given[:20]!r}")
        return float(given)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientDisconnectedError())


class EventStream:
    """Server-sent events. The answer begins with the first one, so that what fails before has a status of its own."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._is_kept = exchange.scope.get("http_version", "1.1") != "1.1"
        """Older versions cannot tell where an answer in pieces ends: they get all of it at once."""
        self._kept: list[bytes] = []

    async def send(self, event: Any) -> None:
        """One event: a struct as its data."""
        await self.send_bytes(b"data: " + _encode(event) + b"\n\n")

    async def send_bytes(self, data: bytes) -> None:
        """One or several events as they go over the wire."""
        exchange = self._exchange
        if self._is_kept:
            self._kept.append(data)
            return
        if not exchange.is_started:
            await exchange.start(200, EVENTS)
        await exchange.send_body(data, more=True)

    async def close(self, last: bytes = DONE) -> None:
        """The end, told in OpenAI's manner unless another is given."""
        if not self._exchange.is_started:
            length = [(b"content-length", b"%d" % (sum(map(len, self._kept)) + len(last)))] if self._is_kept else []
            await self._exchange.start(200, EVENTS + length)
        await self._exchange.send_body(b"".join([*self._kept, last]), more=False)


def named_event(name: str, event: Any) -> bytes:
    """An event with a name, as it goes over the wire."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(event) + b"\n\n"


@functools.lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(data: bytes, kind: type[T]) -> T:
    """JSON as a struct, or an error that names the field. A struct's `hints` tell what to use for what it refuses."""
    hints: Mapping[str, str] = getattr(kind, "hints", {})
    try:
        decoder: msgspec.json.Decoder[T] = _decoder(kind)  # type: ignore[arg-type]
        try:
            return decoder.decode(data)
        except msgspec.ValidationError as error:
            if not any(sign in str(error) for sign in ("got `float`", "unknown field")):
                raise
            plain = _whole_numbers(msgspec.json.decode(data))
            return msgspec.convert(_without_nulls(plain, hints), kind, str_keys=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise as_decode_error(error, hints) from None


def _without_nulls(body: Any, refused: Mapping[str, str]) -> Any:
    """A field that is refused asks for nothing where it is null."""
    if not isinstance(body, dict):
        return body
    return {name: value for name, value in body.items() if value is not None or name not in refused}


def _whole_numbers(value: Any) -> Any:
    """1.0 as 1: to JSON they are the same, and some languages write no other."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_WHOLE:
        return int(value)
    if isinstance(value, dict):
        return {name: _whole_numbers(item) for name, item in value.items()}
    return [_whole_numbers(item) for item in value] if isinstance(value, list) else value
