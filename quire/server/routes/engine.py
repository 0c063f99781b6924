"""What the page shows of the engine: the feed, a request's timeline, a block. With an admin key everything; with
another one, or on a server without keys, what the tenant's requests have."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec

from quire.errors import EngineDeadError
from quire.messages.engine_view import RequestTimeline
from quire.server.context import ServerContext
from quire.server.errors import bad_request, not_found
from quire.server.http import Exchange
from quire.server.lifecycle.answer_watch import answering
from quire.server.page.feed import DEFAULT_HZ, LEAST_HZ, MOST_HZ
from quire.server.page.frames import FeedFrame, Scope
from quire.server.page.perfetto import trace_of
from quire.server.routing import Handler, Route
from quire.sessions.log import owner_id

ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_", "embd-", "score-", "pool-", "rerank-")
"""What responses put before the id of their request."""
LONGEST_ID = 200


class BlockUse(msgspec.Struct):
    """A request or session that holds the block."""

    name: str
    kind: str
    row: int
    first_token: int
    """Of its tokens, the first in the block; -1: not known."""
    num_tokens: int
    text: str


class BlockAnswer(msgspec.Struct):
    """One block on the device or in host memory."""

    block: int
    references: int
    """Owners and transfers; of those that may be seen."""
    is_cached: bool
    users: list[BlockUse]


def _number(exchange: Exchange, name: str, default: int, least: int, most: int) -> int:
    given = exchange.query.get(name, str(default))
    if not given.isdecimal() or not least <= int(given[:9]) <= most:
        raise bad_request(f"{name} must be {least} to {most}, got {given[:40]!r}", name)
    return int(given[:9])


def _replica(context: ServerContext, exchange: Exchange) -> int:
    return _number(exchange, "replica", 0, 0, len(context.llm.replicas) - 1)


async def _feed(context: ServerContext, exchange: Exchange, scope: Scope) -> None:
    hz, replica = _number(exchange, "hz", DEFAULT_HZ, LEAST_HZ, MOST_HZ), _replica(context, exchange)
    endless = exchange.scope.get("http_version", "1.1") != "1.0"  # its events are sent at the end, all at once
    left = _number(exchange, "frames", 0 if endless else 1, 0 if endless else 1, 1_000_000)
    async with exchange.interruptible(), aclosing(context.feed.watch(scope, replica, hz)) as frames:
        events = exchange.events()
        async for frame in frames:
            await events.send_bytes(frame)
            if frame.startswith(b"data:"):
                left -= 1
                if not left:
                    break
        await events.close(b"")


async def _timeline(context: ServerContext, exchange: Exchange, scope: Scope) -> None:
    name = exchange.path_params["request"][:LONGEST_ID]
    form = exchange.query.get("format", "json")
    if form not in ("json", "perfetto"):
        raise bad_request(f"format must be json or perfetto, got {form[:40]!r}", "format")
    names = [name, *(name.removeprefix(prefix) for prefix in ID_PREFIXES if name.startswith(prefix))]
    async with exchange.interruptible(), answering(exchange, context.supervisor.each):
        asked = [replica.timeline(one) for replica in context.llm.replicas for one in names]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = [one for one in answers if isinstance(one, RequestTimeline) and scope.tenant in (None, one.tenant)]
        if not found:
            if all(isinstance(one, EngineDeadError) for one in answers):
                context.check_engine()
            raise not_found(f"no recent request has the id {name!a}: only the last 2,048 are kept", "request")
        latest = max(found, key=lambda one: one.arrival)
        if form == "json":
            await exchange.reply(latest)
        else:
            await exchange.reply(
                trace_of(latest), headers={"Content-Disposition": 'attachment; filename="request.json"'}
            )


async def _block(context: ServerContext, exchange: Exchange, scope: Scope) -> None:
    given = exchange.path_params["block"]
    if not given.isdecimal():
        raise bad_request(f"a block is a number, got {given[:40]!r}", "block")
    replica, tier = _replica(context, exchange), exchange.query.get("tier", "device")
    if tier not in ("device", "host"):
        raise bad_request(f"tier must be device or host, got {tier[:40]!r}", "tier")
    async with exchange.interruptible(), answering(exchange, context.supervisor.each[replica : replica + 1]):
        detail = await context.llm.replicas[replica].describe_block(
            int(given[:9]), "host" if tier == "host" else "device"
        )
    own = scope.tenant
    users = [
        BlockUse(user.name, user.kind, user.row, user.first_token, len(user.tokens), _text(context, user.tokens))
        for user in detail.users
        if own is None or user.tenant == (owner_id(own) if own and user.kind in ("session", "asleep") else own)
    ]
    references = detail.references if own is None else len(users)
    await exchange.reply(BlockAnswer(detail.block, references, detail.is_cached, users))


def _text(context: ServerContext, tokens: list[int]) -> str:
    return "" if context.tokenizer is None or not tokens else context.texts.decode(tokens)


def _of_tenant(handler: Any) -> Handler:
    async def call(context: ServerContext, exchange: Exchange) -> None:
        await handler(context, exchange, Scope(exchange.tenant))

    return call


def _of_all(handler: Any) -> Handler:
    async def call(context: ServerContext, exchange: Exchange) -> None:
        await handler(context, exchange, Scope(None))

    return call


_QUERY_REPLICA = {"type": "integer", "minimum": 0, "default": 0}
_TIER = {"enum": ["device", "host"], "default": "device"}
_HZ = {"type": "integer", "minimum": LEAST_HZ, "maximum": MOST_HZ, "default": DEFAULT_HZ}
_FRAMES = {"type": "integer", "minimum": 0, "maximum": 1_000_000, "default": 0}
_FORMAT = {"enum": ["json", "perfetto"], "default": "json"}


def _routes(prefix: str, requests: str, scoped: Any) -> list[Route]:
    feed, timeline, block = scoped(_feed), scoped(_timeline), scoped(_block)
    feed.__doc__ = "What the engine does, as events, several times a second; frames: how many, 0 without end."
    timeline.__doc__ = "What happened to a recent request: its states, and every step it was in."
    block.__doc__ = "What uses a block, and which text is in it."
    errors = (400, 403, 404, 503)
    query = {"hz": _HZ, "replica": _QUERY_REPLICA, "frames": _FRAMES}
    return [
        Route("GET", f"{prefix}/feed", feed, event=FeedFrame, query=query, errors=(*errors, 429), is_hubs=True),
        Route(
            "GET", f"{requests}/{{request:path}}/timeline", timeline, answer=(RequestTimeline, dict),
            query={"format": _FORMAT}, errors=errors, is_hubs=True,
        ),
        Route(
            "GET", f"{prefix}/blocks/{{block}}", block, answer=BlockAnswer,
            query={"replica": _QUERY_REPLICA, "tier": _TIER},
            errors=errors, is_hubs=True,
        ),
    ]  # fmt: skip


ROUTES = _routes("/v1/engine", "/v1/engine/requests", _of_tenant)
ADMIN_ROUTES = _routes("/admin", "/admin/requests", _of_all)
