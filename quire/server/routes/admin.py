"""Routes for operators; they exist only with --admin-key, and require it."""

from __future__ import annotations

import contextlib

import msgspec
from starlette.datastructures import QueryParams

from quire.errors import EngineDeadError
from quire.messages.experts import Rebalanced
from quire.messages.memory_map import MemoryMap
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.http import Exchange
from quire.server.routing import Route


class ResetAnswer(msgspec.Struct):
    is_empty: bool
    """False if running requests still hold blocks."""


class ReplicaStats(msgspec.Struct):
    """One of several engines."""

    status: str
    open_requests: int
    restarts: int
    engine: dict[str, float]
    """Its metrics by name; empty while it is down."""


class ServerStats(msgspec.Struct, omit_defaults=True):
    status: str
    open_requests: int
    queued_tokens: int
    restarts: int
    engine: dict[str, float]
    """Metrics of all engines together; empty while none is up."""
    replicas: list[ReplicaStats] = []
    """Each engine, if there are several."""


async def reset_prefix_cache(context: ServerContext, exchange: Exchange) -> None:
    """Empty the prefix cache."""
    await exchange.reply(ResetAnswer(await context.llm.reset_prefix_cache()))


async def rebalance_experts(context: ServerContext, exchange: Exchange) -> None:
    """Redistribute experts over ranks by load, with --enable-expert-parallel."""
    await exchange.reply(await context.llm.rebalance_experts())


async def stats(context: ServerContext, exchange: Exchange) -> None:
    """Metrics of the engine and the server."""
    metrics: dict[str, float] = {}
    with contextlib.suppress(EngineDeadError):
        metrics = {metric.name: metric.value for metric in await context.llm.get_metrics()}
    await exchange.reply(
        ServerStats(
            status=context.supervisor.status,
            open_requests=context.admission.requests,
            queued_tokens=context.admission.queued_tokens,
            restarts=context.supervisor.restarts,
            engine=metrics,
            replicas=await _replicas(context) if len(context.llm.replicas) > 1 else [],
        )
    )


async def _replicas(context: ServerContext) -> list[ReplicaStats]:
    found = []
    for replica, supervisor in zip(context.llm.replicas, context.supervisor.each, strict=True):
        metrics: dict[str, float] = {}
        with contextlib.suppress(EngineDeadError):
            metrics = {metric.name: metric.value for metric in await replica.get_metrics()}
        found.append(ReplicaStats(supervisor.status, replica.num_open_requests, supervisor.restarts, metrics))
    return found


async def memory(context: ServerContext, exchange: Exchange) -> None:
    """A map of blocks and their owners, on the device and in lower tiers; `quire inspect --url` draws it."""
    given = QueryParams(exchange.scope["query_string"]).get("replica", "0")
    if not given.isdecimal():
        raise bad_request(f"replica must be a number, got {given[:40]!r}", "replica")
    await exchange.reply(await context.llm.memory_map(int(given[:9])))


_REPLICA = {"type": "integer", "minimum": 0, "default": 0}

ROUTES = [
    Route("POST", "/admin/reset_prefix_cache", reset_prefix_cache, answer=ResetAnswer, errors=(503,)),
    Route("POST", "/admin/rebalance_experts", rebalance_experts, answer=Rebalanced, errors=(400, 503)),
    Route("GET", "/admin/memory", memory, answer=MemoryMap, errors=(503,), query={"replica": _REPLICA}),
    Route("GET", "/admin/stats", stats, answer=ServerStats, errors=(503,)),
]
