"""A small OpenAI server with known delays and faults, to check the load generator's results."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """A received request."""

    at: float
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class StubServer:
    """Responses of `tokens` tokens, the first after `first` seconds, the others `gap` apart; `fault` breaks them."""

    first: float = 0.0
    gap: float = 0.0
    tokens: int = 4
    fault: str = ""
    usage: bool = True
    seen: list[Seen] = field(default_factory=list)
    hang_ups: int = 0
    """Clients that disconnected before the end of their response."""
    connections: int = 0
    url: str = ""
    every: int = 1
    """Only every this many requests have the fault."""
    on_request: Callable[[int], object] = lambda count: None
    """Called with the number of requests received."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        except ConnectionError:
            self.hang_ups += 1
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
        path = head[0].split()[1]
        if path == "/v1/models":
            return self._whole(writer, 200, {"object": "list", "data": [{"id": "stub", "object": "model"}]})
        self.seen.append(Seen(time.perf_counter(), path, headers, body))
        self.on_request(len(self.seen))
        fault = self.fault if len(self.seen) % self.every == 0 else ""
        if fault == "429":
            return self._whole(writer, 429, {"error": {"message": "the queue is full", "type": "rate_limit_error"}})
        if fault == "hang up":
            return False
        if fault == "no stream":
            return self._whole(writer, 200, {"choices": [{"text": "all at once"}]})
        return await self._stream(writer, path.endswith("chat/completions"), fault)

    def _whole(self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> bool:
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)
        return True

    async def _stream(self, writer: asyncio.StreamWriter, chat: bool, fault: str) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if chat:
            _send(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        begin = time.perf_counter()
        for i in range(self.tokens):
            await asyncio.sleep(max(0.0, begin + self.first + i * self.gap - time.perf_counter()))
            if writer.is_closing():
                self.hang_ups += 1
                return False
            if i == 2 and fault == "cut":
                return False
            if i == 2 and fault == "malformed":
                _frame(writer, b'data: {"choices": [{"te\n\n')
            if i == 2 and fault == "error event":
                _send(writer, {"error": {"message": "the engine died"}})
            if i == 2 and fault == "stall":
                await asyncio.sleep(60)
            text = f"w{i} "
            _send(writer, {"choices": [{"index": 0, "delta": {"content": text}} if chat else {"text": text}]})
            await writer.drain()
        if fault == "no end":
            return self._end(writer)
        end: dict[str, Any] = {"finish_reason": "length", **({"delta": {}} if chat else {"text": ""})}
        _send(writer, {"choices": [end]})
        if self.usage:
            cached = {"cached_tokens": 3}
            counts = {"prompt_tokens": 7, "completion_tokens": self.tokens, "prompt_tokens_details": cached}
            _send(writer, {"choices": [], "usage": counts})
        _frame(writer, b"data: [DONE]\n\n")
        if fault == "done, then cut":
            await writer.drain()
            return False
        return self._end(writer)

    def _end(self, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"0\r\n\r\n")
        return True


def _send(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _frame(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Sent in two parts: a chunk is not an event."""
    for part in (data[:9], data[9:]):
        writer.write(b"%x\r\n" % len(part) + part + b"\r\n")


@contextmanager
def running(port: int = 0, **settings: Any) -> Iterator[StubServer]:
    """A server in its own thread, at `url`; `port` 0: any free one."""
    stub = StubServer(**settings)
    loop = asyncio.new_event_loop()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(stub.serve, "127.0.0.1", port)

    server = loop.run_until_complete(start())
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield stub
    finally:

        async def stop() -> None:
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
