"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from contextlib import aclosing

from msgspec import UNSET, UnsetType

from quire.output.parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning, gather
from quire.server.chat_generation import AnswerPiece, ChatGeneration, prepare
from quire.server.context import ServerContext
from quire.server.http import EventStream, Exchange
from quire.server.logprobs import chat_logprobs, prompt_logprobs
from quire.server.protocol.chat import (
    AnsweredCall,
    AnswerMessage,
    CallDelta,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatMessageDelta,
    ChatRequest,
    ChatResponse,
    ChoiceLogprobs,
    ChunkChoice,
    FunctionDelta,
)
from quire.server.protocol.common import figures_of
from quire.server.routing import Route


async def create(server: ServerContext, exchange: Exchange) -> None:
    """Answer a conversation, at once or as it is written."""
    request = await exchange.read_json(ChatRequest)
    async with exchange.watched(server.deadline(request.timeout)):
        turn = await prepare(server, exchange, request)
        answer = ChatAnswer(server, exchange, request, turn)
        await (answer.stream() if request.stream else answer.send())


class ChatAnswer:
    """Writes a turn's pieces as OpenAI's chat completions."""

    def __init__(self, server: ServerContext, exchange: Exchange, request: ChatRequest, turn: ChatGeneration) -> None:
        self._server = server
        self._exchange = exchange
        self._request = request
        self._turn = turn
        self._id = f"chatcmpl-{exchange.id}"
        self._created = int(time.time())
        self._model = request.model or server.names[0]
        self._top = request.top_logprobs or 0
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._wants_ids = bool(request.return_token_ids)
        self._wants_figures = bool(request.return_metrics) or server.config.enable_per_request_metrics

    # At once

    async def send(self) -> None:
        """The whole answer."""
        turn = self._turn
        pieces: list[list[AnswerPiece]] = [[] for _ in turn.choices]
        async with aclosing(turn.pieces()) as coming:
            async for piece in coming:
                pieces[piece.index].append(piece)
        output = pieces[0][-1].output
        first = pieces[0][0].output
        response = ChatResponse(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[self._choice(mine) for mine in pieces],
            usage=turn.counter.usage,
        )
        if first.prompt_logprobs is not None:
            response.prompt_logprobs = prompt_logprobs(first.prompt_logprobs)
        if self._wants_ids:
            response.prompt_token_ids = output.prompt_token_ids
        if self._wants_figures:
            response.metrics = figures_of(output)
        await self._exchange.reply(response)

    def _choice(self, pieces: list[AnswerPiece]) -> ChatChoice:
        answer = gather([delta for piece in pieces for delta in piece.deltas])
        message = AnswerMessage(role="assistant", content=answer.content, refusal=None)
        if self._turn.splits:
            message.reasoning = answer.reasoning or None
        if answer.calls:
            message.content = answer.content or None
            message.tool_calls = [
                AnsweredCall(call.id, CalledFunction(call.name, call.arguments)) for call in answer.calls
            ]
        tokens = [token for piece in pieces for token in piece.sample.token_ids]
        logprobs = None
        if self._request.logprobs:
            positions = [entry for piece in pieces for entry in piece.sample.logprobs or []]
            logprobs = chat_logprobs(tokens, positions, self._top, self._as_ids)
        last = pieces[-1]
        return ChatChoice(
            index=last.index,
            message=message,
            logprobs=logprobs,
            finish_reason=last.finish_reason,
            stop_reason=last.sample.stop_reason,
            token_ids=tokens if self._wants_ids else UNSET,
        )

    # As it is written

    async def stream(self) -> None:
        """Events: the role, what is new, the end of each sample, usage."""
        turn, request = self._turn, self._request
        forced = self._server.config.enable_force_include_usage
        continuous = request.continuous_usage or forced
        started = [False] * len(turn.choices)
        events = self._exchange.events()
        last: AnswerPiece | None = None
        async with aclosing(turn.pieces()) as pieces:
            async for piece in pieces:
                last = piece
                if not started[piece.index]:
                    started[piece.index] = True
                    await self._open(events, piece, continuous)
                for chunk in self._chunks(piece):
                    if continuous:
                        chunk.usage = turn.counter.usage
                    await events.send(chunk)
        if last is not None and (request.include_usage or forced or self._wants_figures):
            closing = self._chunk([])
            if request.include_usage or forced:
                closing.usage = turn.counter.usage
            if self._wants_figures:
                closing.metrics = figures_of(last.output)
            await events.send(closing)
        await events.close()

    async def _open(self, events: EventStream, piece: AnswerPiece, continuous: bool) -> None:
        chunk = self._chunk([ChunkChoice(piece.index, ChatMessageDelta(role="assistant", content=""), None, None)])
        if self._wants_ids:
            chunk.prompt_token_ids = piece.output.prompt_token_ids
        if continuous:
            chunk.usage = self._turn.counter.usage
        await events.send(chunk)

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(self._id, "chat.completion.chunk", self._created, self._model, choices)

    def _chunks(self, piece: AnswerPiece) -> list[ChatChunk]:
        """A piece as chunks, one a delta; what is told of its tokens goes with the first."""
        deltas = [shown for delta in piece.deltas if (shown := _message_delta(delta)) is not None]
        logprobs, tokens = self._details(piece)
        if not deltas and (logprobs is not None or tokens is not UNSET):
            deltas.append(ChatMessageDelta(content=""))
        choices = [ChunkChoice(piece.index, delta, None, None) for delta in deltas]
        if choices:
            choices[0].logprobs, choices[0].token_ids = logprobs, tokens
        if piece.finish_reason is not None:
            choices.append(
                ChunkChoice(piece.index, ChatMessageDelta(), None, piece.finish_reason, piece.sample.stop_reason)
            )
        return [self._chunk([choice]) for choice in choices]

    def _details(self, piece: AnswerPiece) -> tuple[ChoiceLogprobs | None, list[int] | UnsetType]:
        sample = piece.sample
        logprobs = None
        if self._request.logprobs and sample.token_ids:
            logprobs = chat_logprobs(sample.token_ids, sample.logprobs, self._top, self._as_ids)
        return logprobs, list(sample.token_ids) if self._wants_ids and sample.token_ids else UNSET


def _message_delta(delta: Delta) -> ChatMessageDelta | None:
    if isinstance(delta, Content):
        return ChatMessageDelta(content=delta.text)
    if isinstance(delta, Reasoning):
        return ChatMessageDelta(reasoning=delta.text)
    if isinstance(delta, CallStart):
        function = FunctionDelta(name=delta.name, arguments="")
        return ChatMessageDelta(tool_calls=[CallDelta(delta.index, delta.id, "function", function)])
    if isinstance(delta, CallArguments):
        return ChatMessageDelta(tool_calls=[CallDelta(delta.index, function=FunctionDelta(arguments=delta.text))])
    return None  # the end of a call shows in what follows


ROUTES = [
    Route(
        "POST",
        "/v1/chat/completions",
        create,
        body=ChatRequest,
        answer=ChatResponse,
        event=ChatChunk,
        last_data="[DONE]",
        takes_sessions=True,
        generates=True,
    )
]
