"""POST /v1/responses: OpenAI's newer shape of a chat. Nothing is stored."""

from __future__ import annotations

import time
from contextlib import aclosing

from quire.server.chat_generation import AnswerPiece, ChatGeneration, prepare
from quire.server.context import ServerContext
from quire.server.dialects.responses_chat import as_chat
from quire.server.dialects.responses_writer import ResponseWriter, new_response
from quire.server.errors import ApiError
from quire.server.http import Exchange, named_event
from quire.server.logprobs import chat_logprobs
from quire.server.protocol.chat import TokenLogprob
from quire.server.protocol.response_events import AnyResponseEvent, ResponseEvent
from quire.server.protocol.responses import Response, ResponsesRequest
from quire.server.routing import Route


async def create(server: ServerContext, exchange: Exchange) -> None:
    """Answer a conversation, at once or as it is written."""
    request = await exchange.read_json(ResponsesRequest)
    async with exchange.watched(server.deadline(request.timeout)):
        turn = await prepare(server, exchange, as_chat(request, server.max_model_len))
        model = request.model or server.names[0]
        writer = ResponseWriter(new_response(request, f"resp_{exchange.id}", int(time.time()), model))
        if request.stream:
            await _stream(exchange, request, turn, writer)
        else:
            await _send(exchange, request, turn, writer)


async def _send(exchange: Exchange, request: ResponsesRequest, turn: ChatGeneration, writer: ResponseWriter) -> None:
    reason = None
    async with aclosing(turn.pieces()) as pieces:
        async for piece in pieces:
            writer.write(piece.deltas, _logprobs(request, piece))
            reason = piece.finish_reason
    writer.finish(reason, turn.counter.usage)
    await exchange.reply(writer.response)


async def _stream(exchange: Exchange, request: ResponsesRequest, turn: ChatGeneration, writer: ResponseWriter) -> None:
    events = exchange.events()

    def failure(error: ApiError) -> bytes:
        return _wire(writer.fail(error))

    exchange.error_event = failure
    reason, is_first = None, True
    async with aclosing(turn.pieces()) as pieces:
        async for piece in pieces:
            told = writer.start() if is_first else []
            is_first = False
            told += writer.write(piece.deltas, _logprobs(request, piece))
            reason = piece.finish_reason
            if told:
                await events.send_bytes(_wire(told))
    await events.close(_wire(writer.finish(reason, turn.counter.usage)))


def _logprobs(request: ResponsesRequest, piece: AnswerPiece) -> list[TokenLogprob]:
    sample = piece.sample
    if not request.wants_logprobs or not sample.token_ids:
        return []
    told = chat_logprobs(sample.token_ids, sample.logprobs, request.top_logprobs or 0, False)
    return [] if told is None else told.content


def _wire(events: list[ResponseEvent]) -> bytes:
    return b"".join(named_event(event.kind, event) for event in events)


ROUTES = [
    Route(
        "POST",
        "/v1/responses",
        create,
        body=ResponsesRequest,
        answer=Response,
        event=AnyResponseEvent,
        generates=True,
    )
]
