"""/v1/responses: create, stored or not, streamed or not, in the background or not; retrieve, cancel, delete."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from quire.api.chat_media import has_media as has_images
from quire.server.context import ServerContext
from quire.server.dialects.response_items import PAGE_QUERY, page
from quire.server.errors import ApiError, bad_request
from quire.server.http import SMALL_BODY, Exchange, encode, named_event
from quire.server.protocol.response_events import AnyResponseEvent, ResponseEvent
from quire.server.protocol.responses import ResponseDeleted, ResponseItemList, ResponseObject, ResponsesRequest
from quire.server.routing import Route
from quire.server.stored.background import BackgroundJob
from quire.server.stored.turns import ResponseAnswer, begin, prepare_response
from quire.sessions.log import owner_id


async def create(context: ServerContext, exchange: Exchange) -> None:
    """Create a response, streamed or not."""
    request = await exchange.read_json(ResponsesRequest)
    async with exchange.interruptible(context.deadline(request.timeout)):
        turn = await begin(context, exchange, request)
        is_handed_over = False
        try:
            is_long = request.tools is not None or turn.context.bytes > SMALL_BODY or turn.has_references
            has_media = has_images(request.input) or has_images(turn.context.items)
            made = await exchange.work(
                prepare_response, context, exchange, request, turn, is_long=is_long, has_media=has_media
            )
            answer = ResponseAnswer(context, request, *made, turn)
            if request.background:
                context.stored.background.check_room(turn.owner)
                is_handed_over = True
                await _start(context, exchange, request, answer)
            else:
                await (_stream(exchange, answer) if request.stream else _send(exchange, answer))
        finally:
            if not is_handed_over:
                turn.unlock()


async def _send(exchange: Exchange, answer: ResponseAnswer) -> None:
    async with aclosing(answer.events()) as batches:
        async for _ in batches:
            pass
    await exchange.reply(await exchange.call(answer.is_long, encode, answer.writer.response))


async def _stream(exchange: Exchange, answer: ResponseAnswer) -> None:
    stream = exchange.events()

    def failure(error: ApiError) -> bytes:
        return _encoded(answer.writer.fail(error))

    exchange.error_event = failure
    async with aclosing(answer.events()) as batches:
        async for events in batches:
            await stream.send_bytes(await exchange.call(answer.is_long, _encoded, events))
    await stream.close(b"")


def _encoded(events: list[ResponseEvent]) -> bytes:
    return b"".join(named_event(event.kind, event) for event in events)


# In the background


async def _start(context: ServerContext, exchange: Exchange, request: ResponsesRequest, answer: ResponseAnswer) -> None:
    job = await context.stored.background.start(answer, keeps_events=bool(request.stream))
    if (seconds := context.deadline(request.timeout)) is not None:
        late = ApiError(408, f"the response took longer than its {seconds:g} seconds")
        timer = asyncio.get_running_loop().call_later(seconds, job.interrupt, late)
        job.task.add_done_callback(lambda _: timer.cancel())
    if request.stream:
        await _follow(exchange, job, -1)
    else:
        await exchange.reply(job.answer.writer.response)


async def _follow(exchange: Exchange, job: BackgroundJob, after: int) -> None:
    """Send a background response's events. A client that leaves does not end it."""
    stream = exchange.events()
    async with aclosing(job.follow(after)) as batches:
        async for data in batches:
            await stream.send_bytes(data)
    await stream.close(b"")


async def cancel(context: ServerContext, exchange: Exchange) -> None:
    """Cancel a background response. One that has ended stays as it is."""
    await _end_job(context, exchange, cancels=True)
    store = context.stored.store

    def read(owner: str, name: str) -> bytes:
        found = store.response(owner, name)
        if not found["background"]:
            raise bad_request("only a response with background=true can be cancelled", "response_id")
        return encode(found)

    await exchange.reply(await context.stored.call(read, owner_id(exchange.tenant), _name(exchange)))


# Stored responses


async def retrieve(context: ServerContext, exchange: Exchange) -> None:
    """Retrieve a stored response; with stream=true, the events of one that was streamed in the background."""
    query = exchange.query
    job = context.stored.background.find(owner_id(exchange.tenant), _name(exchange))
    if _flag(query.get("stream", "false")):
        after = query.get("starting_after", "-1")
        if after != "-1" and not (after.isdecimal() and len(after) < 10):
            raise bad_request(f"starting_after must be the number of an event, got {after[:40]!r}", "starting_after")
        if job is None or not job.keeps_events:
            await _read(context, exchange)  # 404 if there is none
            raise bad_request(
                "only a response created with background=true and stream=true has events to read again, until a few "
                "minutes after its end: retrieve it without stream",
                "stream",
            )
        async with exchange.interruptible():
            await _follow(exchange, job, int(after))
    elif job is not None and job.is_open:
        await exchange.reply(job.answer.writer.response)
    else:
        await _end_job(context, exchange)
        await exchange.reply(await _read(context, exchange))


async def _end_job(context: ServerContext, exchange: Exchange, cancels: bool = False) -> None:
    """Wait until a background response that has ended, or is cancelled here, is stored."""
    job = context.stored.background.find(owner_id(exchange.tenant), _name(exchange))
    if job is not None and not job.ended:
        if cancels:
            job.interrupt()
        await asyncio.wait([job.task])


async def _read(context: ServerContext, exchange: Exchange) -> bytes:
    store = context.stored.store
    return await context.stored.call(lambda: encode(store.response(owner_id(exchange.tenant), _name(exchange))))


async def delete(context: ServerContext, exchange: Exchange) -> None:
    """Delete a stored response; one under way is cancelled. Responses that follow it keep its items."""
    await _end_job(context, exchange, cancels=True)
    await context.stored.call(context.stored.store.delete_response, owner_id(exchange.tenant), _name(exchange))
    context.stored.background.forget(owner_id(exchange.tenant), _name(exchange))
    await exchange.reply(ResponseDeleted(id=_name(exchange)))


async def list_input_items(context: ServerContext, exchange: Exchange) -> None:
    """List by page the items a stored response was generated from, with those of the responses before it."""
    store, query, owner = context.stored.store, exchange.query, owner_id(exchange.tenant)
    data = await context.stored.call(lambda: encode(page(store.input_items(owner, _name(exchange)), query)))
    await exchange.reply(data)


def _name(exchange: Exchange) -> str:
    name: str = exchange.path_params["response_id"]
    return name


def _flag(given: str) -> bool:
    if given.lower() not in ("true", "false"):
        raise bad_request(f"stream must be true or false, got {given[:40]!r}", "stream")
    return given.lower() == "true"


_ONE = "/v1/responses/{response_id}"
_ERRORS = (400, 404, 503, 507)
_EVENTS_QUERY = {
    "stream": {"type": "boolean", "default": False},
    "starting_after": {"type": "integer", "minimum": 0},
    "include": PAGE_QUERY["include"],
    "include_obfuscation": {"type": "boolean"},
}


def _route(method: str, path: str, handler: Any, **more: Any) -> Route:
    return Route(method, path, handler, errors=_ERRORS, is_hubs=True, **more)


ROUTES = [
    Route(
        "POST",
        "/v1/responses",
        create,
        body=ResponsesRequest,
        answer=ResponseObject,
        event=AnyResponseEvent,
        generates=True,
        errors=(409, 507),
        is_hubs=True,
    ),
    _route("GET", _ONE, retrieve, answer=ResponseObject, event=AnyResponseEvent, query=_EVENTS_QUERY),
    _route("DELETE", _ONE, delete, answer=ResponseDeleted),
    _route("POST", f"{_ONE}/cancel", cancel, answer=ResponseObject),
    _route("GET", f"{_ONE}/input_items", list_input_items, answer=ResponseItemList, query=PAGE_QUERY),
]
