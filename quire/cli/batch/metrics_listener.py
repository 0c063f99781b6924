"""Metrics over HTTP while a batch runs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

from quire.server.routes.system import METRICS

Message = MutableMapping[str, Any]


@contextlib.asynccontextmanager
async def metrics_listener(sock: socket.socket, page: Callable[[], Awaitable[bytes]]) -> AsyncIterator[None]:
    """Answers every request with the metrics, without a key. There are no other routes."""

    async def application(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        body = await page()
        headers = [(b"content-type", METRICS), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    server = uvicorn.Server(uvicorn.Config(application, ws="none", lifespan="off", log_config=None, access_log=False))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[sock])
    try:
        yield
    finally:
        server.force_exit = True  # a scrape that is open does not hold up the end
        await server.shutdown(sockets=[sock])
