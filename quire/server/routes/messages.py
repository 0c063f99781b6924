"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from contextlib import aclosing

import msgspec

from quire.server.chat_generation import AnswerPiece, ChatGeneration, prepare, render
from quire.server.context import ServerContext
from quire.server.dialects.messages_chat import as_chat
from quire.server.dialects.messages_writer import MessageWriter
from quire.server.errors import ApiError
from quire.server.http import Exchange, named_event
from quire.server.protocol.messages import (
    AnthropicError,
    AnthropicEvent,
    AnthropicMessage,
    AnyAnthropicEvent,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
    anthropic_error,
)
from quire.server.routing import ErrorStyle, Route


async def create(context: ServerContext, exchange: Exchange) -> None:
    """Create a message, streamed or not."""
    request = await exchange.read_json(MessagesRequest)
    async with exchange.interruptible(context.deadline(request.timeout)):
        generation = await exchange.work(
            _prepare, context, exchange, request, is_long=request.tools is not None, has_media=request.has_media
        )
        writer = MessageWriter(f"msg_{exchange.id}", request.model or context.names[0])
        await (_stream(exchange, generation, writer) if request.stream else _send(exchange, generation, writer))


def _prepare(context: ServerContext, exchange: Exchange, request: MessagesRequest) -> ChatGeneration:
    # Anthropic's clients ask for more tokens than are left at the end of a long conversation.
    return prepare(context, exchange, as_chat(request, exchange.fields), is_limit_soft=True)


async def _send(exchange: Exchange, generation: ChatGeneration, writer: MessageWriter) -> None:
    last: AnswerPiece | None = None
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            writer.write(piece.deltas)
            last = piece
    _finish(writer, last, generation)
    await exchange.reply(writer.message)


async def _stream(exchange: Exchange, generation: ChatGeneration, writer: MessageWriter) -> None:
    stream = exchange.events()
    generation.send_directly(stream, lambda deltas: [_encoded(events)] if (events := writer.write(deltas)) else [])
    last: AnswerPiece | None = None
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            events = writer.start(generation.counter.usage) if last is None else []
            events += writer.write(piece.deltas)
            last = piece
            if events:
                await stream.send_bytes(_encoded(events))
    await stream.close(_encoded(_finish(writer, last, generation)))


def _finish(writer: MessageWriter, last: AnswerPiece | None, generation: ChatGeneration) -> list[AnthropicEvent]:
    reason, stop = (None, None) if last is None else (last.finish_reason, last.sequence.stop_reason)
    return writer.finish(reason, stop, generation.counter.usage)


def _encoded(events: list[AnthropicEvent]) -> bytes:
    return b"".join(named_event(event.kind, event) for event in events)


async def count_tokens(context: ServerContext, exchange: Exchange) -> None:
    """Count the tokens of a conversation."""
    request = await exchange.read_json(CountTokensRequest)
    context.check_model(exchange, request.model)
    count = await exchange.work(
        _count, context, exchange, request, is_long=request.tools is not None, has_media=request.has_media
    )
    await exchange.reply(TokenCount(count))


def _count(context: ServerContext, exchange: Exchange, request: CountTokensRequest) -> int:
    chat = as_chat(request, exchange.fields)
    chat.check_fields()
    return len(render(context, chat)[1])


def _error_body(error: ApiError) -> bytes:
    return msgspec.json.encode(anthropic_error(error))


def _error_event(error: ApiError) -> bytes:
    return named_event("error", anthropic_error(error))


ANTHROPIC = ErrorStyle(AnthropicError, _error_body, _error_event)

ROUTES = [
    Route(
        "POST",
        "/v1/messages",
        create,
        body=MessagesRequest,
        answer=AnthropicMessage,
        event=AnyAnthropicEvent,
        generates=True,
        error_style=ANTHROPIC,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        body=CountTokensRequest,
        answer=TokenCount,
        error_style=ANTHROPIC,
    ),
]
