"""Health, readiness, load, version, metrics and the OpenAPI document."""

from __future__ import annotations

import msgspec

from quire.server.context import ServerContext
from quire.server.errors import ApiError, unavailable
from quire.server.http import Exchange
from quire.server.routing import Route

METRICS = b"text/plain; version=0.0.4; charset=utf-8"
NOT_SERVING = "the server computes no requests now; a request with a key is told why"


class ServerLoad(msgspec.Struct):
    server_load: int
    """Requests being answered."""


class Version(msgspec.Struct):
    version: str


async def health(context: ServerContext, exchange: Exchange) -> None:
    """200 if the engine completes steps, or has nothing to do. The error says why only to clients with a key."""
    state = await context.supervisor.health()
    if not state.ok:
        raise _for_anyone(context, exchange, unavailable(state.message, context.retry_after))
    await exchange.reply(b"")


async def ready(context: ServerContext, exchange: Exchange) -> None:
    """200 while requests are computed: not while draining, and not without an engine."""
    context.check_serving()
    context.check_engine()
    await exchange.reply(b"")


async def ping(context: ServerContext, exchange: Exchange) -> None:
    """As /ready, but needs no key. The error says why only to clients with a key."""
    try:
        await ready(context, exchange)
    except ApiError as error:
        raise _for_anyone(context, exchange, error) from None


def _for_anyone(context: ServerContext, exchange: Exchange, error: ApiError) -> ApiError:
    """The error, without its reason if the server has keys and the request has none of them."""
    if context.keys:
        try:
            context.keys.check(exchange.headers)
        except ApiError:
            return ApiError(error.status, NOT_SERVING, headers=error.headers)
    return error


async def load(context: ServerContext, exchange: Exchange) -> None:
    """The number of open requests."""
    await exchange.reply(ServerLoad(context.admission.requests))


async def version(context: ServerContext, exchange: Exchange) -> None:
    """The server's version."""
    await exchange.reply(Version(context.version))


async def metrics(context: ServerContext, exchange: Exchange) -> None:
    """Metrics in Prometheus' text format."""
    await exchange.reply(await context.metrics.page(), content_type=METRICS)


async def openapi(context: ServerContext, exchange: Exchange) -> None:
    """The OpenAPI document."""
    await exchange.reply(context.openapi)


ROUTES = [
    Route("GET", "/health", health, errors=(503,), is_public=True, is_hubs=True),
    Route("GET", "/ready", ready, errors=(503,)),
    Route("GET", "/ping", ping, errors=(503,), is_public=True),
    Route("POST", "/ping", ping, errors=(503,), is_public=True),
    Route("GET", "/load", load, answer=ServerLoad),
    Route("GET", "/version", version, answer=Version),
    Route("GET", "/metrics", metrics, errors=(503,), media_type="text/plain", is_hubs=True),
    Route("GET", "/openapi.json", openapi, answer=dict),
]
