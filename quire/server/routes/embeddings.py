"""POST /v1/embeddings: vectors of texts."""

from __future__ import annotations

import asyncio
import base64
import itertools
import time
from collections.abc import Sequence
from contextlib import aclosing

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.api.inputs import TokensPrompt
from quire.messages.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from quire.messages.pooling import PoolingParams
from quire.server.context import ServerContext
from quire.server.errors import ApiError
from quire.server.http import Exchange
from quire.server.limits import QueueTicket
from quire.server.protocol.common import PromptTokensDetails, Usage
from quire.server.protocol.embeddings import Embedding, EmbeddingRequest, EmbeddingResponse
from quire.server.routing import Route

_numbers = itertools.count()


async def create(server: ServerContext, exchange: Exchange) -> None:
    """A vector for each input."""
    body = await exchange.read_json(EmbeddingRequest)
    async with exchange.watched(server.deadline(body.timeout)):
        server.check_serving()
        server.check_model(body.model)
        body.check_fields()
        exchange.name_request(body.request_id)
        prompts = await _tokenized(server, body)
        outputs = await _vectors(server, exchange, body, prompts)
        response = EmbeddingResponse(
            id=f"embd-{exchange.id}",
            created=int(time.time()),
            model=body.model or server.names[0],
            data=[await _written(index, output, body) for index, output in enumerate(outputs)],
            usage=_usage(outputs),
        )
        await exchange.reply(response)


async def _tokenized(server: ServerContext, body: EmbeddingRequest) -> list[list[int]]:
    """Each input as token ids. There may be thousands of them: streams go on between two."""
    adds = body.add_special_tokens is not False
    prompts: list[list[int]] = []
    for item in body.inputs:
        if isinstance(item, str) and body.truncate_prompt_tokens is None:
            server.check_text(item, "input")
        prompts.append(await server.tokenize(item, adds) if isinstance(item, str) else item)
        await asyncio.sleep(0)
    return prompts


async def _vectors(
    server: ServerContext, exchange: Exchange, body: EmbeddingRequest, prompts: Sequence[list[int]]
) -> list[PoolingRequestOutput]:
    """All of them, let in together or not at all. Leaving in any way ends the requests in the engine."""
    params, salt = body.pooling_params, body.cache_salt or ""
    places = server.admission.enter_all([(1, len(tokens)) for tokens in prompts])
    tasks: list[asyncio.Future[PoolingRequestOutput]] = []
    try:
        for tokens, place in zip(prompts, places, strict=True):
            prompt: TokensPrompt = {"prompt_token_ids": tokens, "cache_salt": salt}
            tasks.append(asyncio.ensure_future(_vector(server, exchange, prompt, params, body.priority or 0, place)))
        # Not `gather`: cancelled, it would wait for all of them before anybody could leave.
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for failed in (task for task in done if task.exception() is not None):
            failed.result()
        return [task.result() for task in tasks]
    finally:
        for place in places:
            place.leave()  # before anything is waited for: a hang-up may interrupt even this
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _vector(
    server: ServerContext,
    exchange: Exchange,
    prompt: TokensPrompt,
    params: PoolingParams,
    priority: int,
    place: QueueTicket,
) -> PoolingRequestOutput:
    """One input's, told to whoever watches."""
    request_id = f"{exchange.id}:{next(_numbers)}"
    seen = server.observer.on_submit(request_id, params, prompt["prompt_token_ids"])
    stream = server.llm.encode(prompt, params, request_id, priority=priority, tenant=exchange.tenant)
    try:
        async with aclosing(stream):
            async for output in stream:
                seen.on_output(_as_watched(output))
                if output.finish_reason != "stop":
                    why = output.error or "it was aborted"
                    raise ApiError(500, f"the engine could not go on with this request: {why}")
                return output
    except Exception:
        seen.on_finish("error")
        raise
    finally:
        seen.on_finish()
        place.leave()
    raise ApiError(500, "the engine ended the request without a vector")


def _as_watched(output: PoolingRequestOutput) -> RequestOutput:
    """For those who count: a request that wrote nothing."""
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


async def _written(index: int, output: PoolingRequestOutput, body: EmbeddingRequest) -> Embedding:
    """A vector as it goes into the answer. Millions of digits take their time: streams go on between two vectors."""
    await asyncio.sleep(0)
    vector = output.outputs.data
    if body.encoding_format == "base64":
        return Embedding(index, in_base64(vector))
    return Embedding(index, msgspec.Raw(msgspec.json.encode(vector.tolist())))  # type: ignore[arg-type]  # written out


def in_base64(vector: NDArray[np.float32]) -> str:
    """As OpenAI's clients read it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _usage(outputs: Sequence[PoolingRequestOutput]) -> Usage:
    read = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return Usage(
        prompt_tokens=read,
        total_tokens=read,
        completion_tokens=0,
        prompt_tokens_details=PromptTokensDetails(cached),
    )


ROUTES = [
    Route("POST", "/v1/embeddings", create, body=EmbeddingRequest, answer=EmbeddingResponse, generates=True),
]
