"""Runs batch requests through the server's application, a limited number at once."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quire.cli.batch.files import BatchInput, BatchOutput, BatchRequest, BatchResult, LineError, read_line
from quire.cli.bench.load.client import RunCounters

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

MAX_ATTEMPTS = 5
"""Of a request, while the engine is full or restarting."""
RETRY_STATUSES = (429, 503)
HELD_FACTOR = 16
"""Most results, as a multiple of the concurrency, that wait for a slow request of an earlier line."""
INVALID_LINE = "invalid_line"


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _OnlyUsage(msgspec.Struct):
    usage: _Usage | None = None


class OrderedResults:
    """Writes results in the order of their lines. Only some wait for those of earlier lines: then no line is begun."""

    def __init__(self, output: BatchOutput, most_open: int) -> None:
        self._output = output
        self._most_open = most_open
        self._open: dict[int, BatchResult | None] = {}
        """By line number, in order: the result, or None while the line is run."""
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def wait_for_room(self) -> None:
        await self._has_room.wait()

    def begin(self, number: int) -> None:
        """A line is run; lines begin in their order."""
        self._open[number] = None
        if len(self._open) >= self._most_open:
            self._has_room.clear()

    def finish(self, number: int, result: BatchResult | None) -> None:
        """A line has its result; None: it needs none."""
        if result is None:
            del self._open[number]
        else:
            self._open[number] = result
        for first, ready in list(self._open.items()):
            if ready is None:
                break
            self._output.write(ready)
            del self._open[first]
        if len(self._open) < self._most_open:
            self._has_room.set()

    def write_rest(self) -> None:
        """Write results that wait for lines that will have none, because the run was stopped."""
        for result in self._open.values():
            if result is not None:
                self._output.write(result)
        self._open.clear()


@dataclass
class BatchRunner:
    """Runs the requests of one input; `counters` has the progress."""

    app: ASGIApp
    key: str
    concurrency: int
    counters: RunCounters
    skipped: int = 0
    invalid: int = 0
    """Lines that are no requests."""

    async def run(self, source: BatchInput, output: BatchOutput) -> None:
        """Run every line that has no result yet. Cancelling drops running requests and keeps the results so far."""
        seen = set(output.done)
        results = OrderedResults(output, HELD_FACTOR * self.concurrency)
        workers = [asyncio.create_task(self._work(source, seen, output, results)) for _ in range(self.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:  # one failed, or we were cancelled: stop the others
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            results.write_rest()

    async def _work(self, source: BatchInput, seen: set[str], output: BatchOutput, results: OrderedResults) -> None:
        """Run one line after another. Only running requests, and some results, are in memory."""
        while True:
            await results.wait_for_room()
            if (line := await source.next()) is None:
                return
            number, text = line
            results.begin(number)
            result = await self._run_line(number, text, seen, output)
            results.finish(number, result)
            if result is not None:
                self.counters.done += 1
                self.counters.failed += not result.ok

    async def _run_line(self, number: int, text: bytes, seen: set[str], output: BatchOutput) -> BatchResult | None:
        """A line's result; None if an earlier run has it."""
        try:
            request = read_line(text, number)
            if request.custom_id in output.done:
                self.skipped += 1
                return None
            if request.custom_id in seen:
                what = f"line {number}: custom_id {request.custom_id!r} appeared before"
                raise LineError("duplicate_custom_id", what, request.custom_id)
            seen.add(request.custom_id)
        except LineError as error:
            self.invalid += error.code == INVALID_LINE
            if output.was_reported(error):
                self.skipped += 1
                return None
            self.counters.sent += 1
            return BatchResult.of_error(error)
        self.counters.sent += 1
        return await self._send(request)

    async def _send(self, request: BatchRequest) -> BatchResult:
        request_id = f"batch-{secrets.token_hex(12)}"
        headers = {"authorization": f"Bearer {self.key}", "x-request-id": request_id}
        for attempt in range(1, MAX_ATTEMPTS + 1):
            response = await post(self.app, request.url, bytes(request.body), headers)
            if response.status not in RETRY_STATUSES or attempt == MAX_ATTEMPTS:
                break
            await asyncio.sleep(float(response.headers.get("retry-after", 1)))
        if response.status == 200:
            self.counters.tokens += _generated(response.body)
        return BatchResult.of(request.custom_id, response.status, request_id, response.body)


def _generated(body: bytes) -> int:
    try:
        usage = msgspec.json.decode(body, type=_OnlyUsage).usage
    except msgspec.MsgspecError:
        return 0
    return 0 if usage is None else usage.completion_tokens or usage.output_tokens


@dataclass
class AsgiResponse:
    """Response of the application."""

    status: int
    headers: dict[str, str]
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, headers: dict[str, str]) -> AsgiResponse:
    """POST JSON and read the whole response. Runs in the caller's task: cancelling is like a client disconnect."""
    response = AsgiResponse(0, {}, b"")
    parts: list[bytes] = []
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not incoming:
            await asyncio.Event().wait()  # this client never disconnects; code that waits for it is cancelled
        return incoming.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
            response.headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            parts.append(message.get("body", b""))

    named = {**headers, "content-type": "application/json", "content-length": str(len(body)), "host": "batch"}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in named.items()],
        "client": None,
        "server": ("batch", 80),
    }
    await app(scope, receive, send)
    response.body = b"".join(parts)
    return response
