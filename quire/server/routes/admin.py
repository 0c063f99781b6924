"""Routes for operators; they exist only with --admin-key, and require it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import msgspec

from quire.api.engine_group import merged_metrics
from quire.api.replica import Replica
from quire.engine.stats import Metric
from quire.errors import EngineDeadError
from quire.messages.experts import Rebalanced
from quire.messages.memory_map import MemoryMap
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.http import Exchange
from quire.server.lifecycle.answer_watch import answer_or_reason, answering
from quire.server.lifecycle.supervisor import Supervisor
from quire.server.routes.engine import ADMIN_ROUTES
from quire.server.routing import Route


class ResetAnswer(msgspec.Struct):
    is_empty: bool
    """False if running requests still hold blocks."""


class ReloadAnswer(msgspec.Struct):
    engines: int
    """Engines that were replaced."""
    seconds: float
    resumed_requests: int
    """Requests that went on at another engine."""


class TunerStats(msgspec.Struct):
    """What the tuner chose for the last step, and from what."""

    drafts_per_decode: float
    expected_tokens_per_decode: float
    acceptance_by_position: list[float]
    """Share of drafts that are expected to be accepted if all before them are."""
    step_ms_by_drafts: list[float]
    """Expected time of a step with as many decodes, by drafts of each decode, from none on; empty: not measured."""
    draft_cost: float
    """Share of the time of a step without drafts that a draft for every decode costs…"""
    proposal_cost: float
    """…and that it takes to make one on the device."""
    probes: float
    """Decodes with drafts that were not expected to pay, to find out whether that has changed."""


class SpeculationStats(msgspec.Struct, omit_defaults=True):
    """What speculation does, and why."""

    draws: float
    """Draws that verified drafts."""
    draft_tokens: float
    accepted_tokens: float
    tokens_per_draw: float
    """Tokens of a draw that verified drafts, the drawn one included."""
    accepted_by_position: list[float]
    """Drafts that were accepted, by their place in a draw."""
    decodes_by_drafts: list[float]
    """Decodes by the number of drafts that were chosen for them, from none on."""
    decodes_without_drafts: dict[str, float]
    """Decodes without drafts by reason: excluded, unavailable, unprofitable."""
    tuner: TunerStats | None = None
    """What is chosen now; left out with `"tune": false`."""


class ReplicaStats(msgspec.Struct, omit_defaults=True):
    """One of several engines."""

    status: str
    open_requests: int
    restarts: int
    engine: dict[str, float]
    """Its metrics by name; empty while it is down."""
    speculation: SpeculationStats | None = None
    """With `speculative_config`."""


class ServerStats(msgspec.Struct, omit_defaults=True):
    status: str
    open_requests: int
    queued_tokens: int
    restarts: int
    engine: dict[str, float]
    """Metrics of all engines together; empty while none is up, or while it is stopped: `status` says so."""
    replicas: list[ReplicaStats] = []
    """Each engine, if there are several."""
    speculation: SpeculationStats | None = None
    """Of all engines together, with `speculative_config`."""


async def reset_prefix_cache(context: ServerContext, exchange: Exchange) -> None:
    """Empty the prefix cache."""
    async with exchange.interruptible(), answering(exchange, context.supervisor.each):
        await exchange.reply(ResetAnswer(await context.llm.reset_prefix_cache()))


async def rebalance_experts(context: ServerContext, exchange: Exchange) -> None:
    """Redistribute experts over ranks by load, with --enable-expert-parallel."""
    async with exchange.interruptible(), answering(exchange, context.supervisor.each):
        await exchange.reply(await context.llm.rebalance_experts())


async def reload(context: ServerContext, exchange: Exchange) -> None:
    """Replace the engines by new ones, one replica after the other; responds when all are ready. No request is lost: an
    engine's requests have --reload-timeout seconds to finish there, then they go on elsewhere."""
    begin, before = time.monotonic(), context.llm.num_resumed
    async with exchange.interruptible():
        await asyncio.shield(context.reload())
        resumed = context.llm.num_resumed - before
        await exchange.reply(ReloadAnswer(len(context.llm.replicas), time.monotonic() - begin, resumed))


async def stats(context: ServerContext, exchange: Exchange) -> None:
    """Metrics of the engine and the server."""
    replicas = list(zip(context.llm.replicas, context.supervisor.each, strict=True))
    async with exchange.interruptible():
        found = await asyncio.gather(*(_metrics(replica, supervisor) for replica, supervisor in replicas))
    reasons = [reason for _, reason in found if reason]
    every = merged_metrics([metrics for metrics, _ in found if metrics])
    await exchange.reply(
        ServerStats(
            status="; ".join(reasons) or context.supervisor.status,
            open_requests=context.admission.requests,
            queued_tokens=context.admission.queued_tokens,
            restarts=context.supervisor.restarts,
            engine=_values(every),
            replicas=[
                ReplicaStats(
                    reason or supervisor.status,
                    replica.num_open_requests,
                    supervisor.restarts,
                    _values(metrics),
                    speculation_stats(metrics),
                )
                for (replica, supervisor), (metrics, reason) in zip(replicas, found, strict=True)
            ]
            if len(replicas) > 1
            else [],
            speculation=speculation_stats(every),
        )
    )


async def _metrics(replica: Replica, supervisor: Supervisor) -> tuple[list[Metric], str]:
    """An engine's metrics; or none, and the reason if it is stopped."""
    try:
        metrics, reason = await answer_or_reason(replica.get_metrics(), supervisor)
    except EngineDeadError:
        return [], ""
    return metrics or [], reason


def _values(metrics: Iterable[Metric]) -> dict[str, float]:
    return {metric.name: metric.value for metric in metrics}


def speculation_stats(metrics: Iterable[Metric]) -> SpeculationStats | None:
    """What an engine's metrics say about speculation; None: it has no drafts."""
    prefix = "quire:spec_decode_"
    named = {metric.name.removeprefix(prefix): metric for metric in metrics if metric.name.startswith(prefix)}
    if not named:
        return None
    values = _values(named.values())

    def value(name: str) -> float:
        return values.get(prefix + name, 0.0)

    def series(name: str) -> list[float]:
        return [part for _, part in named[name].series] if name in named else []

    draws, accepted = value("num_drafts"), value("num_accepted_tokens")
    without = {labels[0]: count for labels, count in named["decodes_without_drafts"].series}
    found = SpeculationStats(
        draws, value("num_draft_tokens"), accepted, 1 + accepted / draws if draws else 1.0,
        series("num_accepted_tokens_per_pos"), series("decodes"), without,
    )  # fmt: skip
    if "probes" in named:
        found.tuner = TunerStats(
            value("drafts_per_decode"), value("expected_tokens_per_decode"), series("acceptance_rate"),
            [1000 * seconds for seconds in series("step_seconds")], value("draft_cost"), value("proposal_cost"),
            value("probes"),
        )  # fmt: skip
    return found


async def memory(context: ServerContext, exchange: Exchange) -> None:
    """A map of blocks and their owners, on the device and in lower tiers; `quire inspect --url` draws it."""
    given = exchange.query.get("replica", "0")
    if not given.isdecimal():
        raise bad_request(f"replica must be a number, got {given[:40]!r}", "replica")
    number = int(given[:9])
    async with exchange.interruptible(), answering(exchange, context.supervisor.each[number : number + 1]):
        await exchange.reply(await context.llm.memory_map(number))


_REPLICA = {"type": "integer", "minimum": 0, "default": 0}

ROUTES = [
    Route("POST", "/admin/reset_prefix_cache", reset_prefix_cache, answer=ResetAnswer, errors=(503,), is_hubs=True),
    Route("POST", "/admin/rebalance_experts", rebalance_experts, answer=Rebalanced, errors=(400, 503), is_hubs=True),
    Route("POST", "/admin/reload", reload, answer=ReloadAnswer, errors=(503,), is_hubs=True),
    Route("GET", "/admin/memory", memory, answer=MemoryMap, errors=(503,), query={"replica": _REPLICA}, is_hubs=True),
    Route("GET", "/admin/stats", stats, answer=ServerStats, errors=(503,), is_hubs=True),
    *ADMIN_ROUTES,
]
