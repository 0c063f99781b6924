"""POST /pooling, /score, /rerank and /classify, for what the model can do: a classifier classifies, and scores pairs if
it has one class; of any other model the score of two texts is the cosine of their embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quire.api.chat import template_text
from quire.api.pairs import PairEncoder, cosine
from quire.api.text_encoding import check_truncation
from quire.api.work_pool import check_abandoned
from quire.messages.outputs import PoolingRequestOutput
from quire.server.context import ServerContext
from quire.server.errors import bad_request, not_served
from quire.server.http import Exchange, encode
from quire.server.protocol.embeddings import MAX_INPUTS, EmbeddingRequest, VectorsMetadata
from quire.server.protocol.scoring import (
    Classified,
    ClassifyRequest,
    ClassifyResponse,
    PooledInput,
    PoolingFields,
    PoolingRequest,
    PoolingResponse,
    PoolingUsage,
    RankedDocument,
    RankedResult,
    RerankRequest,
    RerankResponse,
    RerankUsage,
    Score,
    ScoreRequest,
    ScoreResponse,
    texts_of,
)
from quire.server.routes.embeddings import base64_of, reply_bytes, tokenized, vectors
from quire.server.routing import Route


async def pool(context: ServerContext, exchange: Exchange) -> None:
    """The vector of each input."""
    request = await exchange.read_json(PoolingRequest)
    async with exchange.interruptible(context.deadline(request.timeout)):
        outputs = await _outputs(context, exchange, request, request.model, request.request_id)
        name, made, model = f"pool-{exchange.id}", int(time.time()), request.model or context.names[0]
        if request.encoding_format in ("bytes", "bytes_only"):
            await reply_bytes(exchange, request, outputs, VectorsMetadata(name, made, model, [], _usage(outputs)))
            return
        is_text = request.encoding_format == "base64"
        data = [
            PooledInput(index, base64_of(output.outputs.data, request) if is_text else output.outputs.data.tolist())
            for index, output in enumerate(outputs)
        ]
        await exchange.reply(PoolingResponse(name, made, model, data, _usage(outputs)))


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
        ranked = RerankUsage(usage.prompt_tokens, usage.total_tokens)
        answer = RerankResponse(f"rerank-{exchange.id}", model, ranked, results[: request.top_n or len(results)])
        await exchange.reply(await exchange.work(encode, answer))  # with the documents, it may be as long as the body


async def classify(context: ServerContext, exchange: Exchange) -> None:
    """The likeliest class of each input, and the probabilities of all."""
    request = await exchange.read_json(ClassifyRequest)
    async with exchange.interruptible(context.deadline(request.timeout)):
        head = context.llm.info.model.class_head
        if head is None:
            context.check_model(exchange, request.model)
            raise not_served(
                f"{context.names[0]} does not classify: it has no head for classes; /v1/embeddings has its vectors"
            )
        outputs = await _outputs(context, exchange, request, request.model, request.request_id)
        data = []
        for index, output in enumerate(outputs):
            probs = output.outputs.data
            label = head.labels[int(probs.argmax())]
            data.append(Classified(index, label, probs.tolist(), len(probs)))
        model, usage = request.model or context.names[0], _usage(outputs)
        await exchange.reply(ClassifyResponse(f"classify-{exchange.id}", int(time.time()), model, data, usage))


async def _scores(
    context: ServerContext, exchange: Exchange, request: PoolingFields, ones: Sequence[str], others: Sequence[str]
) -> tuple[list[float], PoolingUsage]:
    """The score of each pair, and what it took."""
    model = context.llm.info.model
    if model.class_head is not None:
        if not model.class_head.scores_pairs:
            raise not_served(
                f"{context.names[0]} has {model.class_head.count} classes, and scores no pairs: /classify has their "
                "probabilities"
            )
        return await _classified(context, exchange, request, ones, others)
    request.check_fields(context.max_model_len)
    if request.max_tokens_per_query or request.max_tokens_per_doc:
        ones, others = await exchange.work(_shortened, context, request, ones, others, is_long=True)
    # A text that occurs several times is computed once.
    texts = list(dict.fromkeys([*ones, *others]))
    outputs: list[PoolingRequestOutput] = []
    for begin in range(0, len(texts), MAX_INPUTS):  # both sides together may have twice as many
        body = request.vectors_of(texts[begin : begin + MAX_INPUTS])
        outputs += await _outputs(context, exchange, body, request.model, request.request_id)
    by_text = dict(zip(texts, outputs, strict=True))
    pairs = [(by_text[one], by_text[other]) for one, other in zip(ones, others, strict=True)]
    read = sum(len(output.prompt_token_ids) for pair in pairs for output in pair)
    return await exchange.work(_cosines, pairs, is_long=True), PoolingUsage(read, read)


def _cosines(pairs: Sequence[tuple[PoolingRequestOutput, PoolingRequestOutput]]) -> list[float]:
    return [cosine(one.outputs.data, other.outputs.data) for one, other in pairs]


async def _classified(
    context: ServerContext, exchange: Exchange, request: PoolingFields, ones: Sequence[str], others: Sequence[str]
) -> tuple[list[float], PoolingUsage]:
    """What a classifier of pairs answers for each."""
    request.check_fields(context.max_model_len)
    prompts = await exchange.work(_joined, context, request, ones, others, is_long=True)
    body = request.vectors_of(prompts, "classify")
    outputs = await _outputs(context, exchange, body, request.model, request.request_id)
    return [float(output.outputs.data[0]) for output in outputs], _usage(outputs)


def _joined(
    context: ServerContext, request: PoolingFields, ones: Sequence[str], others: Sequence[str]
) -> list[list[int]]:
    """A prompt for each pair."""
    head, keep = context.llm.info.model.class_head, request.truncate_prompt_tokens
    assert head is not None
    check_truncation(keep, context.max_model_len)
    encoder = PairEncoder(
        context.llm.inputs, head, lambda: context.llm.renderer, template_text(context.llm.config.chat_template)
    )
    keep = context.max_model_len if keep is not None and keep < 0 else keep
    prompts = []
    for one, other in zip(*_shortened(context, request, ones, others), strict=True):
        check_abandoned()
        prompts.append(encoder.encode(one, other, keep))
    return prompts


def _shortened(
    context: ServerContext, request: PoolingFields, ones: Sequence[str], others: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The texts, cut where the request says after how many tokens."""
    return (
        _first_tokens(context, ones, request.max_tokens_per_query or 0),
        _first_tokens(context, others, request.max_tokens_per_doc or 0),
    )


def _first_tokens(context: ServerContext, texts: Sequence[str], most: int) -> list[str]:
    if not most:
        return list(texts)
    cut = {}
    for text in dict.fromkeys(texts):
        check_abandoned()
        tokens = context.tokenize(text, add_special_tokens=False, keep=most, from_start=True)
        cut[text] = context.texts.decode(tokens)
    return [cut[text] for text in texts]


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
    Route("POST", "/pooling", pool, body=PoolingRequest, answer=PoolingResponse, generates=True, is_binary=True),
    Route("POST", "/classify", classify, body=ClassifyRequest, answer=ClassifyResponse, generates=True),
    *(
        Route("POST", path, score, body=ScoreRequest, answer=ScoreResponse, generates=True)
        for path in ("/score", "/v1/score")
    ),
    *(
        Route("POST", path, rerank, body=RerankRequest, answer=RerankResponse, generates=True)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
]
