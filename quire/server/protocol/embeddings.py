"""/v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from quire.messages.pooling import PoolingParams
from quire.server.errors import bad_request
from quire.server.protocol.common import HINTS, Body, Usage
from quire.server.protocol.values import ModelName, Positive, Priority, Prompt, RequestId, Seconds, Truncation

MOST_INPUTS = 2048
"""OpenAI's own bound."""


class EmbeddingRequest(Body):
    """The body of /v1/embeddings."""

    hints: ClassVar[Mapping[str, str]] = {
        **HINTS,
        "normalize": "use use_activation",
        "messages": "send the text as input",
        "truncation_side": "the beginning is kept",
        "embed_dtype": "numbers are float32",
        "endianness": "base64 holds little-endian float32",
    }

    input: Prompt
    """Text, token ids, or a list of either."""
    model: ModelName | None = None
    encoding_format: Literal["float", "base64"] | None = None
    """How vectors are written; base64: of float32, little-endian."""
    dimensions: Positive | None = None
    """Keep the first so many numbers, of models trained for it."""
    user: str | None = None
    """Accepted, and without effect."""

    pooling: Literal["last", "mean"] | None = None
    """The last token's hidden state, or the mean of all; as the engine is set up if unset."""
    use_activation: bool | None = None
    """False: vectors are not scaled to length 1."""
    truncate_prompt_tokens: Truncation | None = None
    """Keep the first so many tokens of each input; -1: as many as the model takes."""
    add_special_tokens: bool | None = None
    """False: the tokenizer adds no tokens of its own to texts."""
    priority: Priority | None = None
    """Lower runs first, under the priority policy."""
    timeout: Seconds | None = None
    """Seconds the request may take, queued and running."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    request_id: RequestId | None = None

    @property
    def client_names(self) -> Mapping[str, str]:
        return {"prompt": "input", "prompt_token_ids": "input"}

    def check_fields(self) -> None:
        """What the types alone cannot say."""
        if self.timeout is not None and self.timeout <= 0:
            raise bad_request(f"timeout must be above 0 seconds, got {self.timeout}", "timeout")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise bad_request("priority must fit in 32 bits", "priority")
        if len(self.inputs) > MOST_INPUTS:
            raise bad_request(f"input holds {len(self.inputs)} texts; at most {MOST_INPUTS}", "input")

    @property
    def inputs(self) -> list[str | list[int]]:
        """Each input by itself."""
        given = self.input
        if isinstance(given, str):
            return [given]
        if not given:
            raise bad_request("input is an empty list", "input")
        if all(isinstance(item, int) for item in given):
            return [given]  # type: ignore[list-item]
        if all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given):
            return given  # type: ignore[return-value]
        raise bad_request("input must be text, token ids, or a list of one of the two", "input")

    @property
    def pooling_params(self) -> PoolingParams:
        """What is asked of the engine. Raises `ValidationError` for values out of range."""
        return PoolingParams(
            use_activation=self.use_activation,
            dimensions=self.dimensions,
            pooling=self.pooling,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class Embedding(msgspec.Struct):
    """The vector of one input: numbers, or base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingResponse(msgspec.Struct):
    """The whole answer."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
    object: str = "list"
