"""/pooling, /classify, /score and /rerank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Union

import msgspec

from quire.server.errors import bad_request
from quire.server.protocol.common import HINTS, Body, check_salt
from quire.server.protocol.embeddings import MAX_INPUTS, EmbeddingRequest
from quire.server.protocol.values import Hint, ModelName, Name, Priority, RequestId, Seconds, TokenCount, Truncation

Document = Union[str, dict[str, Any]]
Documents = Union[str, dict[str, Any], list[Document]]


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """The body of /pooling."""

    task: Literal["embed", "classify"] | None = None
    """What is returned; unset: what the model does."""
    softmax: Hint = None

    @property
    def pooling_task(self) -> str | None:
        return self.task


class PoolingFields(Body, kw_only=True):
    """Fields of /score and /rerank."""

    hints: ClassVar[Mapping[str, str]] = HINTS

    model: ModelName | None = None
    pooling: Literal["last", "mean"] | None = None
    """The last token's hidden state, or the mean of all; unset: the engine's setting."""
    truncate_prompt_tokens: Truncation | None = None
    use_activation: bool | None = None
    """False: what a classifier of pairs computes, and not the probability that it stands for."""
    max_tokens_per_query: TokenCount | None = None
    max_tokens_per_doc: TokenCount | None = None
    """Keep this many first tokens of each document; 0: all."""
    priority: Priority | None = None
    timeout: Seconds | None = None
    cache_salt: Name | None = None
    request_id: RequestId | None = None
    user: Hint = None

    def check_fields(self, longest: int) -> None:
        """Check what the types cannot express; raises 400. `longest`: the model's maximum length."""
        check_salt(self.cache_salt)
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            if (value := getattr(self, name) or 0) and not 0 < value < longest:
                raise bad_request(f"{name} must be from 0 to {longest - 1}, got {value}", name)

    def vectors_of(self, inputs: Sequence[str | list[int]], task: str = "embed") -> PoolingRequest:
        """The request for the vectors of these texts, or of these tokens, which are truncated already."""
        return PoolingRequest(
            task=task,  # type: ignore[arg-type]
            input=list(inputs),
            pooling=self.pooling,
            use_activation=self.use_activation if task == "classify" else None,
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
    documents: Documents
    top_n: int | None = None
    """Return this many of the most similar documents; unset or 0: all."""
    return_documents: bool | None = None
    """False: leave the documents' texts out of the response."""


def texts_of(given: Documents, name: str) -> list[str]:
    """One or several texts as a list. A text may be an object that holds it."""
    if isinstance(given, list) and len(given) > MAX_INPUTS:
        raise bad_request(f"{name} holds {len(given)} texts; at most {MAX_INPUTS}", name)
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

    @property
    def pooling_task(self) -> str | None:
        return "classify"


# Responses


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class RerankUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Classified(msgspec.Struct):
    """The likeliest class of one input, and the probabilities of all."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct):
    """The whole response of /classify."""

    id: str
    created: int
    model: str
    data: list[Classified]
    usage: PoolingUsage
    object: str = "list"


class PooledInput(msgspec.Struct):
    """The vector of one input."""

    index: int
    data: Union[list[float], str]
    object: str = "pooling"


class PoolingResponse(msgspec.Struct):
    """The whole response of /pooling."""

    id: str
    created: int
    model: str
    data: list[PooledInput]
    usage: PoolingUsage
    object: str = "list"


class Score(msgspec.Struct):
    """How similar two texts are: the cosine of their embeddings, or what a classifier of pairs answers."""

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
    multi_modal: None = None


class RankedResult(msgspec.Struct):
    """A document, its place among the given ones, and how similar it is to the query."""

    index: int
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET


class RerankResponse(msgspec.Struct):
    """The whole response of /rerank: the most similar documents first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RankedResult]
