"""POST /v1/chat/completions/batch: several conversations in one request, one choice for each."""

from __future__ import annotations

import asyncio

import msgspec

from quire.server.chat_generation import AnswerPiece, ChatGeneration, prepare
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.generation import START_AT_ONCE
from quire.server.http import Exchange, encode
from quire.server.protocol.batch_chat import BatchChatRequest
from quire.server.protocol.chat import ChatResponse
from quire.server.protocol.common import PromptTokensDetails, Usage, UsedEnergy
from quire.server.routes.chat import ChatAnswer
from quire.server.routing import Route


async def create(context: ServerContext, exchange: Exchange) -> None:
    """Complete several chats; the choices are in their order."""
    request = await exchange.read_json(BatchChatRequest)
    async with exchange.interruptible(context.deadline(request.timeout)):
        _check_count(request, context.config.max_prompts)
        has_media = any(message.has_media for messages in request.messages for message in messages)
        answers = await exchange.work(_prepare, context, exchange, request, is_long=True, has_media=has_media)
        tasks: list[asyncio.Future[list[AnswerPiece]]] = []
        try:
            for index, answer in enumerate(answers):
                tasks.append(asyncio.ensure_future(_pieces(answer)))
                if index % START_AT_ONCE == 0:
                    await asyncio.sleep(0)  # there may be a thousand: other requests run in between
            # Not `gather`: when cancelled, it would wait for all tasks before raising.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for failed in (task for task in done if task.exception() is not None):
                failed.result()
            collected = [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await exchange.reply(await exchange.work(_whole, context, answers, collected, is_long=True))


def _check_count(request: BatchChatRequest, most: int) -> None:
    """Raise 400 for more conversations than `most`, before a request is made of each."""
    if len(request.messages) > most:
        count = len(request.messages)
        raise bad_request(f"messages holds {count} conversations; at most {most} (--max-prompts)", "messages")


def _prepare(context: ServerContext, exchange: Exchange, request: BatchChatRequest) -> list[ChatAnswer]:
    return [ChatAnswer(context, exchange, chat, prepare(context, exchange, chat)) for chat in request.chats]


async def _pieces(answer: ChatAnswer) -> list[AnswerPiece]:
    (pieces,) = await answer.collect()
    return pieces


def _whole(context: ServerContext, answers: list[ChatAnswer], collected: list[list[AnswerPiece]]) -> bytes:
    """The encoded response."""
    choices = [answer.choice(pieces) for answer, pieces in zip(answers, collected, strict=True)]
    for index, choice in enumerate(choices):
        choice.index = index
    usage = _usage([answer.generation for answer in answers])
    return encode(answers[0].response(choices, context.shown(usage, is_whole=True)))


def _usage(generations: list[ChatGeneration]) -> Usage:
    parts = [generation.counter.usage for generation in generations]
    details = [part.prompt_tokens_details for part in parts]
    return Usage(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        total_tokens=sum(part.total_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        prompt_tokens_details=PromptTokensDetails(
            sum(each.cached_tokens for each in details if each),
            sum(generation.counter.image_tokens for generation in generations) or msgspec.UNSET,
        ),
        energy=_energy(parts),
    )


def _energy(parts: list[Usage]) -> UsedEnergy | msgspec.UnsetType:
    known = [part.energy for part in parts if part.energy is not msgspec.UNSET]
    if not known:
        return msgspec.UNSET
    joules, tokens = sum(each.joules for each in known), sum(part.completion_tokens for part in parts)
    estimated = any(each.estimated for each in known)
    return UsedEnergy(round(joules, 6), round(joules / max(1, tokens), 9), estimated, known[-1].source)


ROUTES = [
    Route(
        "POST",
        "/v1/chat/completions/batch",
        create,
        body=BatchChatRequest,
        answer=ChatResponse,
        uses_sessions=True,
        generates=True,
    )
]
