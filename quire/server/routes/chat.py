"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing

from msgspec import UNSET, UnsetType

from quire.output.parsers.deltas import CallArguments, CallEnd, CallStart, Content, Delta, Reasoning, gather
from quire.server.chat_generation import AnswerPiece, ChatGeneration, is_long, prepare
from quire.server.context import ServerContext
from quire.server.http import EventStream, EventTemplate, Exchange, encode, event_bytes
from quire.server.logprobs import chat_logprobs, prompt_logprobs, takes_long
from quire.server.protocol.chat import (
    AnsweredCall,
    AnswerMessage,
    CallDelta,
    CalledCustom,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatMessageDelta,
    ChatRequest,
    ChatResponse,
    ChoiceLogprobs,
    ChunkChoice,
    CustomDelta,
    FunctionDelta,
)
from quire.server.protocol.common import Usage, request_timings
from quire.server.protocol.conversation import custom_input
from quire.server.routing import Route


async def create(context: ServerContext, exchange: Exchange) -> None:
    """Create a chat completion, streamed or not."""
    request = await exchange.read_json(ChatRequest)
    async with exchange.interruptible(context.deadline(request.timeout)):
        generation = await exchange.work(
            prepare, context, exchange, request, is_long=is_long(request), has_media=request.has_media
        )
        answer = ChatAnswer(context, exchange, request, generation)
        await (answer.stream() if request.stream else answer.send())


class ChatAnswer:
    """Sends a chat generation as OpenAI's chat completions."""

    def __init__(
        self, context: ServerContext, exchange: Exchange, request: ChatRequest, generation: ChatGeneration
    ) -> None:
        self._context = context
        self._exchange = exchange
        self._request = request
        self.generation = generation
        self._id = f"chatcmpl-{exchange.id}"
        self._created = int(time.time())
        self._model = request.model or context.names[0]
        self._top = -1 if request.logprob_token_ids else request.top_logprobs or 0
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._wants_ids = bool(request.return_token_ids)
        self._wants_timings = bool(request.return_metrics) or context.config.enable_per_request_metrics
        self._custom_tools = request.custom_tools
        self._custom_arguments: dict[tuple[int, int], list[str]] = {}
        """Pieces of the arguments of custom tools so far, by choice and call."""

    # Not streamed

    async def send(self) -> None:
        """Send the whole response."""
        pieces = await self.collect()
        tokens = sum(len(piece.sequence.token_ids) for mine in pieces for piece in mine)
        prompt = pieces[0][0].output.prompt_logprobs or ()
        is_long = takes_long(tokens, self._details_each) or takes_long(len(prompt), self._request.prompt_logprobs)
        await self._exchange.reply(await self._exchange.call(is_long, self._whole, pieces))

    async def collect(self) -> list[list[AnswerPiece]]:
        """The pieces of each sequence."""
        pieces: list[list[AnswerPiece]] = [[] for _ in self.generation.choices]
        async with aclosing(self.generation.pieces()) as coming:
            async for piece in coming:
                pieces[piece.sequence.index].append(piece)
        return pieces

    def response(self, choices: list[ChatChoice], usage: Usage) -> ChatResponse:
        """The response with these choices."""
        return ChatResponse(self._id, "chat.completion", self._created, self._model, choices, usage)

    def _usage(self, is_whole: bool = False) -> Usage:
        return self._context.shown(self.generation.counter.usage, is_whole)

    def _whole(self, pieces: list[list[AnswerPiece]]) -> bytes:
        """The encoded response."""
        generation = self.generation
        output = pieces[0][-1].output
        first = pieces[0][0].output
        response = self.response([self.choice(mine) for mine in pieces], self._usage(is_whole=True))
        if first.prompt_logprobs is not None:
            response.prompt_logprobs = prompt_logprobs(first.prompt_logprobs)
        if self._wants_ids:
            response.prompt_token_ids = output.prompt_token_ids
        if self._request.return_prompt_text:
            response.prompt_text = generation.job.text
        if self._wants_timings:
            response.metrics = request_timings(output)
        return encode(response)

    def choice(self, pieces: list[AnswerPiece]) -> ChatChoice:
        """One sequence of a whole response."""
        answer = gather([delta for piece in pieces for delta in piece.deltas])
        message = AnswerMessage(role=self._request.answer_role, content=self._request.echoed + answer.content)
        if self.generation.splits_reasoning:
            message.reasoning = answer.reasoning or None
        if answer.calls:
            message.content = message.content or ("" if self._request.forces_calls else None)
            called = [CalledFunction(call.name, call.arguments) for call in answer.calls]
            if self._request.functions:
                message.function_call = called[0]
            else:
                message.tool_calls = [
                    self._call(call.id, function) for call, function in zip(answer.calls, called, strict=True)
                ]
        tokens = [token for piece in pieces for token in piece.sequence.token_ids]
        logprobs = None
        if self._request.logprobs:
            positions = [entry for piece in pieces for entry in piece.sequence.logprobs or []]
            logprobs = chat_logprobs(tokens, positions, self._top, self._as_ids)
        last = pieces[-1]
        return ChatChoice(
            index=last.sequence.index,
            message=message,
            logprobs=logprobs,
            finish_reason=self._finish_reason(last.finish_reason),
            stop_reason=last.sequence.stop_reason,
            token_ids=tokens if self._wants_ids else None,
        )

    def _call(self, call_id: str, function: CalledFunction) -> AnsweredCall:
        if function.name not in self._custom_tools:
            return AnsweredCall(call_id, function)
        return AnsweredCall(
            call_id, type="custom", custom=CalledCustom(function.name, custom_input(function.arguments))
        )

    def _finish_reason(self, reason: str | None) -> str | None:
        return "function_call" if self._request.functions and reason == "tool_calls" else reason

    # Streamed

    async def stream(self) -> None:
        """Send events: the role, new output and the end of each sequence, usage."""
        generation, request = self.generation, self._request
        forced = self._context.config.enable_force_include_usage
        continuous = request.continuous_usage or forced
        started = [False] * len(generation.choices)
        events = self._exchange.events()
        if not (continuous or self._wants_ids):
            generation.send_directly(events, self._delta_encoder())
        last: AnswerPiece | None = None
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                last = piece
                if not started[piece.sequence.index]:
                    started[piece.sequence.index] = True
                    await self._open(events, piece, continuous)
                usage = self._usage() if continuous else None
                # All that was generated while a client did not read comes at once.
                tokens = len(piece.sequence.token_ids) * len(started)
                is_long = takes_long(tokens, self._details_each)
                for data in await self._exchange.call(is_long, self._events, piece, usage):
                    await events.send_bytes(data)
        if last is not None and (request.include_usage or forced or self._wants_timings):
            closing = self._chunk([])
            if request.include_usage or forced:
                closing.usage = self._usage()
            if self._wants_timings:
                closing.metrics = request_timings(last.output)
            await events.send(closing)
        await events.close()

    async def _open(self, events: EventStream, piece: AnswerPiece, continuous: bool) -> None:
        chunk = self._chunk(
            [
                ChunkChoice(
                    piece.sequence.index, ChatMessageDelta(role=self._request.answer_role, content=""), None, None
                )
            ]
        )
        chunk.prompt_token_ids = piece.output.prompt_token_ids if self._wants_ids else None
        if self._request.return_prompt_text:
            chunk.prompt_text = self.generation.job.text or ""
        usage = self.generation.counter.first_usage if continuous else UNSET
        chunk.usage = usage
        await events.send(chunk)
        if echoed := self._request.echoed:
            chunk = self._chunk([ChunkChoice(piece.sequence.index, ChatMessageDelta(content=echoed), None, None)])
            chunk.usage = usage
            await events.send(chunk)

    def _delta_encoder(self) -> Callable[[list[Delta]], list[bytes]]:
        """Encodes deltas of the only choice as `_chunks` would, without logprobs and token ids."""

        def chunk(message: ChatMessageDelta) -> ChatChunk:
            return self._chunk([ChunkChoice(0, message, None, None)])

        fill = EventTemplate(chunk(ChatMessageDelta(content=EventTemplate.TEXT))).fill

        def encoded(deltas: list[Delta]) -> list[bytes]:
            if len(deltas) == 1 and isinstance(deltas[0], Content):
                return [fill(deltas[0].text)]
            messages = [message for delta in deltas if (message := _message_delta(delta)) is not None]
            return [b"data: " + encode(chunk(message)) + b"\n\n" for message in messages]

        return encoded

    @property
    def _details_each(self) -> int | None:
        """Logprobs beside each token's own; None: there are none."""
        if not self._request.logprobs:
            return None
        return len(self._request.logprob_token_ids or ()) or self._top

    def _events(self, piece: AnswerPiece, usage: Usage | None) -> list[bytes]:
        """A piece as encoded events."""
        chunks = self._chunks(piece)
        if usage is not None:
            for chunk in chunks:
                chunk.usage = usage
        return [event_bytes(chunk) for chunk in chunks]

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(self._id, "chat.completion.chunk", self._created, self._model, choices)

    def _chunks(self, piece: AnswerPiece) -> list[ChatChunk]:
        """A piece as chunks, one per delta; logprobs and token ids go with the first, the end with the last."""
        choice = piece.sequence.index
        deltas = [message for delta in piece.deltas if (message := self._message_delta(choice, delta)) is not None]
        logprobs, tokens = self._details(piece)
        if not deltas and (logprobs is not None or tokens is not UNSET or piece.finish_reason is not None):
            deltas.append(ChatMessageDelta(content=""))
        choices = [ChunkChoice(piece.sequence.index, delta, None, None) for delta in deltas]
        if choices:
            choices[0].logprobs, choices[0].token_ids = logprobs, tokens
        if piece.finish_reason is not None:
            choices[-1].finish_reason = self._finish_reason(piece.finish_reason)
            choices[-1].stop_reason = piece.sequence.stop_reason
        return [self._chunk([choice]) for choice in choices]

    def _message_delta(self, choice: int, delta: Delta) -> ChatMessageDelta | None:
        if self._request.functions and isinstance(delta, CallStart | CallArguments | CallEnd):
            return _function_delta(delta)
        if self._custom_tools:
            if isinstance(delta, CallStart) and delta.name in self._custom_tools:
                self._custom_arguments[choice, delta.index] = []
                call = CallDelta(delta.index, delta.id, "custom", custom=CustomDelta(delta.name, ""))
                return ChatMessageDelta(tool_calls=[call])
            if isinstance(delta, CallArguments) and (choice, delta.index) in self._custom_arguments:
                self._custom_arguments[choice, delta.index].append(delta.text)
                return None  # the text is known when the arguments are whole
            if isinstance(delta, CallEnd) and (choice, delta.index) in self._custom_arguments:
                text = custom_input("".join(self._custom_arguments.pop((choice, delta.index))))
                return ChatMessageDelta(tool_calls=[CallDelta(delta.index, custom=CustomDelta(input=text))])
        return _message_delta(delta)

    def _details(self, piece: AnswerPiece) -> tuple[ChoiceLogprobs | None, list[int] | UnsetType]:
        sequence = piece.sequence
        logprobs = None
        if self._request.logprobs and sequence.token_ids:
            logprobs = chat_logprobs(sequence.token_ids, sequence.logprobs, self._top, self._as_ids)
        return logprobs, list(sequence.token_ids) if self._wants_ids and sequence.token_ids else UNSET


def _function_delta(delta: CallStart | CallArguments | CallEnd) -> ChatMessageDelta | None:
    """The first call in OpenAI's older format, which has only one."""
    if delta.index or isinstance(delta, CallEnd):
        return None
    if isinstance(delta, CallStart):
        return ChatMessageDelta(function_call=FunctionDelta(name=delta.name, arguments=""))
    return ChatMessageDelta(function_call=FunctionDelta(arguments=delta.text))


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
    return None  # OpenAI's format has no event for the end of a call


ROUTES = [
    Route(
        "POST",
        "/v1/chat/completions",
        create,
        body=ChatRequest,
        answer=ChatResponse,
        event=ChatChunk,
        last_data="[DONE]",
        uses_sessions=True,
        generates=True,
    )
]
