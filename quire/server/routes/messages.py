"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them."""

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
    AnthropicMessage,
    AnyMessageEvent,
    CountTokensRequest,
    MessageEvent,
    MessagesRequest,
    TokenCount,
    anthropic_error,
)
from quire.server.routing import ErrorStyle, Route


async def create(server: ServerContext, exchange: Exchange) -> None:
    """Answer a conversation, at once or as it is written."""
    request = await exchange.read_json(MessagesRequest)
    async with exchange.watched(server.deadline(request.timeout)):
        turn = await prepare(server, exchange, as_chat(request))
        writer = MessageWriter(f"msg_{exchange.id}", request.model or server.names[0])
        await (_stream(exchange, turn, writer) if request.stream else _send(exchange, turn, writer))


async def _send(exchange: Exchange, turn: ChatGeneration, writer: MessageWriter) -> None:
    last: AnswerPiece | None = None
    async with aclosing(turn.pieces()) as pieces:
        async for piece in pieces:
            writer.write(piece.deltas)
            last = piece
    _finish(writer, last, turn)
    await exchange.reply(writer.message)


async def _stream(exchange: Exchange, turn: ChatGeneration, writer: MessageWriter) -> None:
    events = exchange.events()
    last: AnswerPiece | None = None
    async with aclosing(turn.pieces()) as pieces:
        async for piece in pieces:
            told = writer.start(turn.counter.usage) if last is None else []
            told += writer.write(piece.deltas)
            last = piece
            if told:
                await events.send_bytes(_wire(told))
    await events.close(_wire(_finish(writer, last, turn)))


def _finish(writer: MessageWriter, last: AnswerPiece | None, turn: ChatGeneration) -> list[MessageEvent]:
    reason, stop = (None, None) if last is None else (last.finish_reason, last.sample.stop_reason)
    return writer.finish(reason, stop, turn.counter.usage)


def _wire(events: list[MessageEvent]) -> bytes:
    return b"".join(named_event(event.kind, event) for event in events)


async def count_tokens(server: ServerContext, exchange: Exchange) -> None:
    """How many tokens a conversation is."""
    request = await exchange.read_json(CountTokensRequest)
    server.check_model(request.model)
    chat = as_chat(request)
    chat.check_fields()
    _, tokens = await render(server, chat)
    await exchange.reply(TokenCount(len(tokens)))


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
        event=AnyMessageEvent,
        generates=True,
        failing=ANTHROPIC,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        body=CountTokensRequest,
        answer=TokenCount,
        failing=ANTHROPIC,
    ),
]
