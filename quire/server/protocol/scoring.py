"""/pooling, /classify, /score and /rerank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Union

import msgspec

from quire.server.errors import bad_request
from quire.server.protocol.common import HINTS, Body
from quire.server.protocol.embeddings import MAX_INPUTS, EmbeddingRequest
from quire.server.protocol.values import Hint, ModelName, Priority, RequestId, Seconds, Truncation

Document = Union[str, dict[str, Any]]
Documents = Union[str, dict[str, Any], list[Document]]


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """The body of /pooling."""

    task: Literal["embed"] | None = None
    """What is returned: this server has embeddings only."""
    softmax: Hint = None


class PoolingFields(Body, kw_only=True):
    """Fields of /score and /rerank."""

    hints: ClassVar[Mapping[str, str]] = {**HINTS, "max_tokens_per_doc": "use truncate_prompt_tokens"}

    model: ModelName | None = None
    pooling: Literal["last", "mean"] | None = None
    """The last token's hidden state, or the mean of all; unset: the engine's setting."""
    truncate_prompt_tokens: Truncation | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None
    cache_salt: str | None = None
    request_id: RequestId | None = None
    user: Hint = None

    def embeddings_of(self, texts: list[str]) -> EmbeddingRequest:
        """The request for the embeddings of these texts."""
        if len(texts) > MAX_INPUTS:
            raise bad_request(f"{len(texts)} texts were given; at most {MAX_INPUTS}")
        return EmbeddingRequest(
            input=list(texts),
            pooling=self.pooling,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.priority,
            timeout=self.timeout,
            cache_salt=self.cache_salt,
        )


class ScoreRequest(PoolingFields, kw_only=True):
    """The body of /score: one text or several, each with one, or one with several. Names come in pairs."""

    text_1: Documents | None = None
    text_2: Documents | None = None
    data_1: Documents | None = None
    data_2: Documents | None = None
    queries: Documents | None = None
    documents: Documents | None = None
    items: Documents | None = None

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """The texts to compare, as many on both sides."""
        for left, right in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
            first, second = getattr(self, left), getattr(self, right)
            if first is not None and second is not None:
                ones, others = texts_of(first, left), texts_of(second, right)
                if len(ones) == 1:
                    ones = ones * len(others)
                if len(ones) != len(others):
                    raise bad_request(
                        f"{left} holds {len(ones)} texts and {right} {len(others)}: give one, or as many", right
                    )
                return ones, others
        raise bad_request("give text_1 and text_2", "text_1")


class RerankRequest(PoolingFields, kw_only=True):
    """The body of /rerank."""

    query: Document
    documents: list[Document]
    top_n: int | None = None
    """Return this many of the most similar documents; unset or 0: all."""
    return_documents: bool | None = None
    """False: leave the documents' texts out of the response."""


def texts_of(given: Documents, name: str) -> list[str]:
    """One or several texts as a list. A text may be an object that holds it."""
    texts = []
    for item in given if isinstance(given, list) else [given]:
        text = item.get("text", item.get("content")) if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise bad_request(f"{name} holds an item that is not text; this server reads text only", name)
        texts.append(text)
    if not texts:
        raise bad_request(f"{name} is empty", name)
    return texts


class ClassifyRequest(EmbeddingRequest, kw_only=True):
    """The body of /classify."""


# Responses


class PooledInput(msgspec.Struct):
    """The vector of one input."""

    index: int
    data: Union[list[float], str]
    object: str = "pooling"


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class PoolingResponse(msgspec.Struct):
    """The whole response of /pooling."""

    id: str
    created: int
    model: str
    data: list[PooledInput]
    usage: PoolingUsage
    object: str = "list"


class Score(msgspec.Struct):
    """How similar two texts are: the cosine of their embeddings."""

    index: int
    score: float
    object: str = "score"


class ScoreResponse(msgspec.Struct):
    """The whole response of /score."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
    object: str = "list"


class RankedDocument(msgspec.Struct):
    text: str


class RankedResult(msgspec.Struct):
    """A document, its place among the given ones, and how similar it is to the query."""

    index: int
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET


class RerankResponse(msgspec.Struct):
    """The whole response of /rerank: the most similar documents first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedResult]
