"""Routes for whoever runs the server; they exist only with --admin-key, and only it opens them."""

from __future__ import annotations

import msgspec

from quire.messages.memory_map import MemoryMap
from quire.server.http import Exchange
from quire.server.routing import Route
from quire.server.state import Server


class ResetAnswer(msgspec.Struct):
    is_empty: bool
    """No block had to stay with a running request."""


class Stats(msgspec.Struct):
    status: str
    open_requests: int
    queued_tokens: int
    restarts: int
    engine: dict[str, float]


async def reset_prefix_cache(server: Server, exchange: Exchange) -> None:
    """Forget all cached prefixes."""
    await exchange.reply(ResetAnswer(await server.llm.reset_prefix_cache()))


async def stats(server: Server, exchange: Exchange) -> None:
    """The engine's figures and the server's."""
    figures = {metric.name: metric.value for metric in await server.llm.get_metrics()}
    await exchange.reply(
        Stats(
            status=server.supervisor.status,
            open_requests=server.admission.requests,
            queued_tokens=server.admission.queued_tokens,
            restarts=server.supervisor.restarts,
            engine=figures,
        )
    )


async def memory(server: Server, exchange: Exchange) -> None:
    """Who holds which blocks, on the device and in the tiers below; `quire inspect --url` draws it."""
    await exchange.reply(await server.llm.memory_map())


ROUTES = [
    Route("POST", "/admin/reset_prefix_cache", reset_prefix_cache, answer=ResetAnswer, errors=(503,)),
    Route("GET", "/admin/memory", memory, answer=MemoryMap, errors=(503,)),
    Route("GET", "/admin/stats", stats, answer=Stats, errors=(503,)),
]
