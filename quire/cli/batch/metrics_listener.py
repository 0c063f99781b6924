"""Metrics over HTTP while a batch runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

from quire.server.config import ServerConfig
from quire.server.routes.system import METRICS
from quire.server.serve import listening

Message = MutableMapping[str, Any]


@contextlib.asynccontextmanager
async def metrics_listener(config: ServerConfig, page: Callable[[], Awaitable[bytes]]) -> AsyncIterator[str]:
    """Answers every request with the metrics; yields the address. There are no other routes."""

    async def application(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        body = await page()
        headers = [(b"content-type", METRICS), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    with listening(config) as (sock, address):
        server = uvicorn.Server(
            uvicorn.Config(application, ws="none", lifespan="off", log_config=None, access_log=False)
        )
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[sock])
        try:
            yield address
        finally:
            server.force_exit = True  # a scrape that is open does not hold up the end
            await server.shutdown(sockets=[sock])
