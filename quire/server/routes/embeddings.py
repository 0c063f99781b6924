"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.api.inputs import TokensPrompt
from quire.api.work_pool import check_abandoned
from quire.messages.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from quire.messages.pooling import PoolingParams
from quire.server.chat_generation import render
from quire.server.context import ServerContext
from quire.server.errors import bad_request, engine_failure
from quire.server.generation import START_AT_ONCE
from quire.server.http import Exchange
from quire.server.limits import QueueTicket
from quire.server.protocol.common import PromptTokensDetails, Usage, has_many_prompts, used_energy
from quire.server.protocol.embeddings import Embedding, EmbeddingRequest, EmbeddingResponse, VectorsMetadata
from quire.server.routing import Route
from quire.server.vector_encoding import as_base64, joined


async def create(context: ServerContext, exchange: Exchange) -> None:
    """Create an embedding of each input."""
    body = await exchange.read_json(EmbeddingRequest)
    async with exchange.interruptible(context.deadline(body.timeout)):
        context.check_serving()
        context.check_model(exchange, body.model)
        exchange.set_request_id(body.request_id)
        is_long = body.input is None or has_many_prompts(body.input)
        prompts = await exchange.work(tokenized, context, body, is_long=is_long)
        outputs = await vectors(context, exchange, body, prompts)
        name, made, model = f"embd-{exchange.id}", int(time.time()), body.model or context.names[0]
        if body.encoding_format in ("bytes", "bytes_only"):
            usage = context.shown(usage_of(outputs), is_whole=True)
            await reply_bytes(exchange, body, outputs, VectorsMetadata(name, made, model, [], usage))
            return
        response = EmbeddingResponse(
            id=name,
            created=made,
            model=model,
            data=[await _encoded(index, output, body) for index, output in enumerate(outputs)],
            usage=context.shown(usage_of(outputs), is_whole=True),
        )
        await exchange.reply(response)


def tokenized(context: ServerContext, body: EmbeddingRequest) -> list[list[int]]:
    """Each input as token ids."""
    body.check_fields()
    if body.messages is not None:
        if body.as_chat().has_media:
            raise bad_request("images and prompt_embeds are not embedded: send text", "messages")
        text, tokens, _ = render(context, body.as_chat())
        if body.add_special_tokens:  # beside those that the template wrote
            tokens = context.tokenize(text, True, field="messages")
        return [_truncated(context, body, tokens)]
    adds, keep = body.add_special_tokens is not False, body.truncate_prompt_tokens
    prompts: list[list[int]] = []
    for item in body.inputs:
        check_abandoned()
        if not isinstance(item, str):
            prompts.append(_truncated(context, body, item))
        elif keep is None:
            prompts.append(context.tokenize(item, adds, field="input"))
        elif body.truncation_side == "left":
            prompts.append(_truncated(context, body, context.tokenize(item, adds, keep, "input")))
        else:
            most = context.max_model_len if keep < 0 else keep
            prompts.append(context.texts.encode_start(item, most, "input", adds))
    return prompts


def _truncated(context: ServerContext, body: EmbeddingRequest, tokens: list[int]) -> list[int]:
    """The last tokens, if the beginning is to be left out; the engine truncates at the other end."""
    keep = body.truncate_prompt_tokens
    if keep is None or body.truncation_side != "left":
        return tokens
    return tokens[-(context.max_model_len if keep < 0 else max(1, keep)) :]


async def vectors(
    context: ServerContext, exchange: Exchange, body: EmbeddingRequest, prompts: Sequence[list[int]]
) -> list[PoolingRequestOutput]:
    """The vectors of all inputs, admitted all or none. Leaving in any way ends the requests in the engine."""
    params, salt = body.pooling_params, body.cache_salt or ""
    tickets = context.admission.enter([(1, len(tokens)) for tokens in prompts])
    tasks: list[asyncio.Future[PoolingRequestOutput]] = []
    try:
        for index, (tokens, ticket) in enumerate(zip(prompts, tickets, strict=True)):
            prompt: TokensPrompt = {"prompt_token_ids": tokens, "cache_salt": salt}
            tasks.append(asyncio.ensure_future(_vector(context, exchange, prompt, params, body.priority or 0, ticket)))
            if index % START_AT_ONCE == 0:
                await asyncio.sleep(0)  # there may be thousands: other requests run in between
        # Not `gather`: when cancelled, it would wait for all tasks before raising.
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for failed in (task for task in done if task.exception() is not None):
            failed.result()
        return [task.result() for task in tasks]
    finally:
        for ticket in tickets:
            ticket.leave()  # before any await: a disconnect may interrupt even this block
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _vector(
    context: ServerContext,
    exchange: Exchange,
    prompt: TokensPrompt,
    params: PoolingParams,
    priority: int,
    ticket: QueueTicket,
) -> PoolingRequestOutput:
    """The vector of one input, recorded in metrics and logs."""
    llm, record = context.llm, context.observer.on_submit(exchange.id, params, prompt["prompt_token_ids"])
    try:
        stream = await llm.submit(
            prompt, params, exchange.id, priority, exchange.tenant, shares_id=True, adapters=exchange.adapters
        )
        try:
            output: PoolingRequestOutput = await stream.take()
        finally:
            llm.leave(stream)
        record.on_output(_as_generation(output))
        if output.finish_reason != "stop":
            raise engine_failure(output.error)
        return output
    except Exception:
        record.on_finish("error")
        raise
    finally:
        record.on_finish()
        ticket.leave()


def _as_generation(output: PoolingRequestOutput) -> RequestOutput:
    """The output in the form that metrics and logs read: a request that generated no tokens."""
    return RequestOutput(
        request_id=output.request_id,
        prompt=None,
        prompt_token_ids=output.prompt_token_ids,
        outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason=output.finish_reason)],
        finished=output.finished,
        metrics=output.metrics,
        num_cached_tokens=output.num_cached_tokens,
        error=output.error,
    )


async def _encoded(index: int, output: PoolingRequestOutput, body: EmbeddingRequest) -> Embedding:
    """A vector as JSON or base64. Encoding many takes long: other requests run in between."""
    await asyncio.sleep(0)
    vector = output.outputs.data
    if body.encoding_format == "base64":
        return Embedding(index, base64_of(vector, body))
    return Embedding(index, msgspec.Raw(msgspec.json.encode(vector.tolist())))  # type: ignore[arg-type]  # already encoded


def base64_of(vector: NDArray[np.float32], body: EmbeddingRequest) -> str:
    """The vector as the request wants it in base64."""
    return as_base64(vector, body.embed_dtype or "float32", body.endianness or "native")


async def reply_bytes(
    exchange: Exchange, body: EmbeddingRequest, outputs: Sequence[PoolingRequestOutput], metadata: VectorsMetadata
) -> None:
    """Send the vectors' numbers alone. `metadata`: the header, which says where each is."""
    found = [output.outputs.data for output in outputs]
    data, metadata.data = await exchange.work(
        joined, found, body.embed_dtype or "float32", body.endianness or "native", is_long=True
    )
    told = body.encoding_format == "bytes"
    headers = {"metadata": json.dumps(msgspec.to_builtins(metadata))} if told else {}  # in ASCII, as headers are
    await exchange.reply(data, headers=headers, content_type=b"application/octet-stream")


def usage_of(outputs: Sequence[PoolingRequestOutput]) -> Usage:
    read = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return Usage(
        prompt_tokens=read,
        total_tokens=read,
        completion_tokens=0,
        prompt_tokens_details=PromptTokensDetails(cached),
        energy=used_energy((output.metrics for output in outputs), read),
    )


ROUTES = [
    Route(
        "POST",
        "/v1/embeddings",
        create,
        body=EmbeddingRequest,
        answer=EmbeddingResponse,
        generates=True,
        is_binary=True,
    ),
]
