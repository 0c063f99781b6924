"""POST /v1/responses. Nothing is stored."""

from __future__ import annotations

import time
from contextlib import aclosing

from quire.server.chat_generation import AnswerPiece, ChatGeneration, prepare
from quire.server.context import ServerContext
from quire.server.dialects.responses_chat import as_chat
from quire.server.dialects.responses_tools import OfferedTools
from quire.server.dialects.responses_writer import ResponseWriter, new_response
from quire.server.errors import ApiError
from quire.server.http import Exchange, named_event
from quire.server.logprobs import chat_logprobs
from quire.server.protocol.chat import TokenLogprob
from quire.server.protocol.response_events import AnyResponseEvent, ResponseEvent
from quire.server.protocol.responses import ResponseObject, ResponsesRequest
from quire.server.routing import Route


async def create(context: ServerContext, exchange: Exchange) -> None:
    """Create a response, streamed or not."""
    request = await exchange.read_json(ResponsesRequest)
    async with exchange.interruptible(context.deadline(request.timeout)):
        generation, tools = await exchange.work(_prepare, context, exchange, request, is_long=request.tools is not None)
        model = request.model or context.names[0]
        writer = ResponseWriter(new_response(request, f"resp_{exchange.id}", int(time.time()), model), tools)
        if request.stream:
            await _stream(exchange, request, generation, writer)
        else:
            await _send(exchange, request, generation, writer)


def _prepare(
    context: ServerContext, exchange: Exchange, request: ResponsesRequest
) -> tuple[ChatGeneration, OfferedTools]:
    tools = OfferedTools(request.tools, exchange.fields)
    return prepare(context, exchange, as_chat(request, context.max_model_len, exchange.fields, tools)), tools


async def _send(
    exchange: Exchange, request: ResponsesRequest, generation: ChatGeneration, writer: ResponseWriter
) -> None:
    reason = None
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            writer.write(piece.deltas, _logprobs(request, piece))
            reason = piece.finish_reason
    writer.finish(reason, generation.counter.usage)
    await exchange.reply(writer.response)


async def _stream(
    exchange: Exchange, request: ResponsesRequest, generation: ChatGeneration, writer: ResponseWriter
) -> None:
    stream = exchange.events()
    generation.send_directly(stream, lambda deltas: [_encoded(events)] if (events := writer.write(deltas)) else [])

    def failure(error: ApiError) -> bytes:
        return _encoded(writer.fail(error))

    exchange.error_event = failure
    reason, is_first = None, True
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            events = writer.start() if is_first else []
            is_first = False
            events += writer.write(piece.deltas, _logprobs(request, piece))
            reason = piece.finish_reason
            if events:
                await stream.send_bytes(_encoded(events))
    await stream.close(_encoded(writer.finish(reason, generation.counter.usage)))


def _logprobs(request: ResponsesRequest, piece: AnswerPiece) -> list[TokenLogprob]:
    sequence = piece.sequence
    if not request.wants_logprobs or not sequence.token_ids:
        return []
    logprobs = chat_logprobs(sequence.token_ids, sequence.logprobs, request.top_logprobs or 0, False)
    return [] if logprobs is None else logprobs.content


def _encoded(events: list[ResponseEvent]) -> bytes:
    return b"".join(named_event(event.kind, event) for event in events)


ROUTES = [
    Route(
        "POST",
        "/v1/responses",
        create,
        body=ResponsesRequest,
        answer=ResponseObject,
        event=AnyResponseEvent,
        generates=True,
    )
]
