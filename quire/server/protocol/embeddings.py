"""/v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from quire.messages.pooling import PoolingParams
from quire.server.errors import bad_request
from quire.server.protocol.common import HINTS, Body, Usage, check_scheduling, prompt_list
from quire.server.protocol.values import ModelName, Positive, Priority, Prompt, RequestId, Seconds, Truncation

MAX_INPUTS = 2048
"""OpenAI's limit."""


class EmbeddingRequest(Body):
    """The body of /v1/embeddings."""

    hints: ClassVar[Mapping[str, str]] = {
        **HINTS,
        "normalize": "use use_activation",
        "messages": "send the text as input",
        "truncation_side": "the beginning is always kept",
        "embed_dtype": "embeddings are float32",
        "endianness": "base64 holds little-endian float32",
    }

    input: Prompt
    """Text, token ids, or a list of either."""
    model: ModelName | None = None
    encoding_format: Literal["float", "base64"] | None = None
    """Encoding of the vectors; base64 holds little-endian float32."""
    dimensions: Positive | None = None
    """Keep this many first components, for models trained for it."""
    user: str | None = None
    """Accepted, without effect."""

    pooling: Literal["last", "mean"] | None = None
    """The last token's hidden state, or the mean of all; unset: the engine's setting."""
    use_activation: bool | None = None
    """False: do not normalize vectors to length 1."""
    truncate_prompt_tokens: Truncation | None = None
    """Keep this many first tokens of each input; -1: as many as the model allows."""
    add_special_tokens: bool | None = None
    """False: the tokenizer adds no special tokens."""
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
        """Check what the types cannot express; raises 400."""
        check_scheduling(self.timeout, self.priority)
        if len(self.inputs) > MAX_INPUTS:
            raise bad_request(f"input has {len(self.inputs)} entries; at most {MAX_INPUTS}", "input")

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs as a list."""
        return prompt_list(self.input, "input")

    @property
    def pooling_params(self) -> PoolingParams:
        """The engine's parameters. Raises `ValidationError` for values out of range."""
        return PoolingParams(
            use_activation=self.use_activation,
            dimensions=self.dimensions,
            pooling=self.pooling,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class Embedding(msgspec.Struct):
    """The vector of one input, as numbers or base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingResponse(msgspec.Struct):
    """The whole response."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
    object: str = "list"
