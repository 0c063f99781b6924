"""POST /pooling, /score, /rerank and /classify, for what a model with embeddings can do: the score of two texts is the
cosine of their embeddings. Classifying needs a model with a head for it, and is refused."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.messages.outputs import PoolingRequestOutput
from quire.server.context import ServerContext
from quire.server.errors import bad_request, not_found
from quire.server.http import Exchange
from quire.server.protocol.embeddings import EmbeddingRequest
from quire.server.protocol.scoring import (
    ClassifyRequest,
    PooledInput,
    PoolingFields,
    PoolingRequest,
    PoolingResponse,
    PoolingUsage,
    RankedDocument,
    RankedResult,
    RerankRequest,
    RerankResponse,
    Score,
    ScoreRequest,
    ScoreResponse,
    texts_of,
)
from quire.server.routes.embeddings import as_base64, tokenized, vectors
from quire.server.routing import Route


async def pool(context: ServerContext, exchange: Exchange) -> None:
    """The vector of each input."""
    request = await exchange.read_json(PoolingRequest)
    async with exchange.interruptible(context.deadline(request.timeout)):
        outputs = await _outputs(context, exchange, request, request.model, request.request_id)
        is_text = request.encoding_format == "base64"
        data = [
            PooledInput(index, as_base64(output.outputs.data) if is_text else output.outputs.data.tolist())
            for index, output in enumerate(outputs)
        ]
        model = request.model or context.names[0]
        await exchange.reply(PoolingResponse(f"pool-{exchange.id}", int(time.time()), model, data, _usage(outputs)))


async def score(context: ServerContext, exchange: Exchange) -> None:
    """How similar pairs of texts are."""
    request = await exchange.read_json(ScoreRequest)
    async with exchange.interruptible(context.deadline(request.timeout)):
        ones, others = request.pairs
        scores, usage = await _scores(context, exchange, request, ones, others)
        data = [Score(index, value) for index, value in enumerate(scores)]
        model = request.model or context.names[0]
        await exchange.reply(ScoreResponse(f"score-{exchange.id}", int(time.time()), model, data, usage))


async def rerank(context: ServerContext, exchange: Exchange) -> None:
    """Documents, the most similar to the query first."""
    request = await exchange.read_json(RerankRequest)
    async with exchange.interruptible(context.deadline(request.timeout)):
        if request.top_n is not None and request.top_n < 0:
            raise bad_request(f"top_n must be at least 0, got {request.top_n}", "top_n")
        (query,) = texts_of(request.query, "query")
        documents = texts_of(request.documents, "documents")
        scores, usage = await _scores(context, exchange, request, [query] * len(documents), documents)
        results = [RankedResult(index, value) for index, value in enumerate(scores)]
        if request.return_documents is not False:
            for result in results:
                result.document = RankedDocument(documents[result.index])
        results.sort(key=lambda result: -result.relevance_score)
        model = request.model or context.names[0]
        await exchange.reply(
            RerankResponse(f"rerank-{exchange.id}", model, usage, results[: request.top_n or len(results)])
        )


async def classify(context: ServerContext, exchange: Exchange) -> None:
    """Refused: classes need a model that was trained for them."""
    request = await exchange.read_json(ClassifyRequest)
    context.check_model(exchange, request.model)
    raise not_found(f"{context.names[0]} does not classify: it has no head for classes; /v1/embeddings has its vectors")


async def _scores(
    context: ServerContext, exchange: Exchange, request: PoolingFields, ones: Sequence[str], others: Sequence[str]
) -> tuple[list[float], PoolingUsage]:
    """The cosine of each pair, and what it took. A text that occurs several times is computed once."""
    texts = list(dict.fromkeys([*ones, *others]))
    outputs = await _outputs(context, exchange, request.embeddings_of(texts), request.model, request.request_id)
    by_text = {text: _unit(output.outputs.data) for text, output in zip(texts, outputs, strict=True)}
    return [float(by_text[one] @ by_text[other]) for one, other in zip(ones, others, strict=True)], _usage(outputs)


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = vector.astype(np.float64)
    return wide / (np.linalg.norm(wide) or 1.0)


async def _outputs(
    context: ServerContext, exchange: Exchange, body: EmbeddingRequest, model: str | None, request_id: str | None
) -> list[PoolingRequestOutput]:
    context.check_serving()
    context.check_model(exchange, model)
    exchange.set_request_id(request_id)
    prompts = await exchange.work(tokenized, context, body, is_long=True)
    return await vectors(context, exchange, body, prompts)


def _usage(outputs: Sequence[PoolingRequestOutput]) -> PoolingUsage:
    read = sum(len(output.prompt_token_ids) for output in outputs)
    return PoolingUsage(read, read)


ROUTES = [
    Route("POST", "/pooling", pool, body=PoolingRequest, answer=PoolingResponse, generates=True),
    Route("POST", "/classify", classify, body=ClassifyRequest),
    *(
        Route("POST", path, score, body=ScoreRequest, answer=ScoreResponse, generates=True)
        for path in ("/score", "/v1/score")
    ),
    *(
        Route("POST", path, rerank, body=RerankRequest, answer=RerankResponse, generates=True)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
]
