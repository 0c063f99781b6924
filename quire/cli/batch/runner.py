"""Lines through the application, so many at once."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quire.cli.batch.files import BatchInput, BatchOutput, BatchRequest, BatchResult, LineError, read_line
from quire.cli.bench.load.client import RunCounters

if TYPE_CHECKING:
    from starlette.types import ASGIApp
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

MAX_ATTEMPTS = 5
"""Of a request that meets a full or restarting engine."""
RETRY_STATUSES = (429, 503)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _OnlyUsage(msgspec.Struct):
    usage: _Usage | None = None


@dataclass
class BatchRunner:
    """A run over one input. `tally` tells how far it is."""

    app: ASGIApp
    key: str
    concurrency: int
    tally: RunCounters
    skipped: int = 0

    async def run(self, source: BatchInput, output: BatchOutput) -> None:
        """Answer every line that has no answer yet. Leaving early drops what runs, and keeps what was answered."""
        seen = set(output.done)
        workers = [asyncio.create_task(self._work(source, seen, output)) for _ in range(self.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:  # one failed, or we were cancelled: nobody is left behind
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, source: BatchInput, seen: set[str], output: BatchOutput) -> None:
        """Take a line, answer it, and again: no more of the input is held than what runs."""
        while (line := await source.next()) is not None:
            number, text = line
            try:
                asked = read_line(text, number)
                if asked.custom_id in output.done:
                    self.skipped += 1
                    continue
                if asked.custom_id in seen:
                    what = f"line {number}: custom_id {asked.custom_id!r} was there before"
                    raise LineError("duplicate_custom_id", what, asked.custom_id)
                seen.add(asked.custom_id)
            except LineError as error:
                if str(error) in output.told:
                    self.skipped += 1
                    continue
                result = BatchResult.of_error(error)
                self.tally.sent += 1
            else:
                self.tally.sent += 1
                result = await self._answer(asked)
            output.write(result)
            self.tally.done += 1
            self.tally.failed += not result.ok

    async def _answer(self, asked: BatchRequest) -> BatchResult:
        request_id = f"batch-{secrets.token_hex(12)}"
        headers = {"authorization": f"Bearer {self.key}", "x-request-id": request_id}
        for attempt in range(1, MAX_ATTEMPTS + 1):
            answer = await post(self.app, asked.url, bytes(asked.body), headers)
            if answer.status not in RETRY_STATUSES or attempt == MAX_ATTEMPTS:
                break
            await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
        if answer.status == 200:
            self.tally.tokens += _generated(answer.body)
        return BatchResult.of(asked.custom_id, answer.status, request_id, answer.body or b"null")


def _generated(body: bytes) -> int:
    try:
        usage = msgspec.json.decode(body, type=_OnlyUsage).usage
    except msgspec.MsgspecError:
        return 0
    return 0 if usage is None else usage.completion_tokens or usage.output_tokens


@dataclass
class AsgiResponse:
    """What it answered."""

    status: int
    headers: dict[str, str]
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, headers: dict[str, str]) -> AsgiResponse:
    """One POST of JSON, to its end. Runs in the caller's task: cancelling it is a client that hangs up."""
    answer = AsgiResponse(0, {}, b"")
    pieces: list[bytes] = []
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not incoming:
            await asyncio.Event().wait()  # this client never hangs up; whoever waits for that is cancelled
        return incoming.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            pieces.append(message.get("body", b""))

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
    answer.body = b"".join(pieces)
    return answer
