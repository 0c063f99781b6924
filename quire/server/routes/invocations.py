"""POST /invocations, as Amazon SageMaker calls a server: the body says which route is meant."""

from __future__ import annotations

import msgspec

from quire.messages.json_limits import check_json
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.http import Exchange
from quire.server.protocol.chat import ChatChunk, ChatResponse
from quire.server.protocol.completions import CompletionResponse
from quire.server.protocol.embeddings import EmbeddingResponse
from quire.server.protocol.scoring import ClassifyResponse, RerankResponse, ScoreResponse
from quire.server.routes import chat, completions, embeddings, scoring
from quire.server.routing import Handler, Route


class InvocationRequest(msgspec.Struct):
    """A body of /v1/chat/completions, /v1/completions, /v1/embeddings, /rerank or /score; on a classifier of /classify,
    /rerank or /score."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    data_1: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()


_HANDLERS: dict[str, Handler] = {
    "messages": chat.create,
    "prompt": completions.create,
    "input": embeddings.create,
    "query": scoring.rerank,
    "text_1": scoring.score,
    "data_1": scoring.score,
    "queries": scoring.score,
}


async def invoke(context: ServerContext, exchange: Exchange) -> None:
    """Answer as the route that the body is for."""
    exchange.keeps_body = True
    data = await exchange.read_body()
    name = await exchange.work(_meant, context, data)
    if context.llm.info.model.class_head is not None and name in ("messages", "prompt", "input"):
        await scoring.classify(context, exchange)
    else:
        await _HANDLERS[name](context, exchange)


def _meant(context: ServerContext, data: bytes) -> str:
    """The field that tells the route."""
    check_json(data, context.limits.json, "the body")
    try:
        given = msgspec.json.decode(data, type=InvocationRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "messages"  # whose route says what is wrong with it
    found = next((name for name in _HANDLERS if bytes(getattr(given, name)) not in (b"", b"null")), None)
    if found is None:
        raise bad_request(f"the body has none of {', '.join(_HANDLERS)}, which say what it is for", "messages")
    return found


ROUTES = [
    Route(
        "POST",
        "/invocations",
        invoke,
        body=None,
        answer=(ChatResponse, CompletionResponse, EmbeddingResponse, RerankResponse, ScoreResponse, ClassifyResponse),
        event=(ChatChunk, CompletionResponse),
        last_data="[DONE]",
        errors=(400, 404, 408, 413, 415, 429),
        uses_sessions=True,
        generates=True,
    )
]
