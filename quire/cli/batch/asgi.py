"""An ASGI application called as a function: no socket, no client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message


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
