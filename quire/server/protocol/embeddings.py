"""/v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from quire.messages.pooling import PoolingParams
from quire.server.errors import bad_request
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import HINTS, Body, Usage, check_salt, check_scheduling, prompt_list
from quire.server.protocol.conversation import ChatMessage
from quire.server.protocol.values import (
    Hint,
    ModelName,
    Name,
    Positive,
    Priority,
    Prompt,
    RequestId,
    Seconds,
    TemplateVariables,
    Truncation,
)
from quire.server.vector_encoding import ByteOrder, NumberFormat, VectorPlace

MAX_INPUTS = 2048
"""OpenAI's limit."""
MAX_PLACES = 256
"""Vectors that a header describes: clients do not read headers of any length."""


class EmbeddingRequest(Body):
    """The body of /v1/embeddings."""

    hints: ClassVar[Mapping[str, str]] = {**HINTS, "normalize": "use use_activation"}

    input: Prompt | None = None
    """Text, token ids, or a list of either."""
    messages: list[ChatMessage] | None = None
    """In place of `input`: a conversation, rendered with the chat template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables | None = None
    model: ModelName | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    """Encoding of the vectors. bytes: the response is their numbers alone, and its header `metadata` says where each
    is; bytes_only: without that header."""
    embed_dtype: NumberFormat | None = None
    """Number format in base64 and bytes; unset: float32."""
    endianness: ByteOrder | None = None
    """Byte order in base64 and bytes; unset: the server's own."""
    dimensions: Positive | None = None
    """Keep this many first components, for models trained for it."""
    user: Hint = None

    pooling: Literal["last", "mean"] | None = None
    """The last token's hidden state, or the mean of all; unset: the engine's setting."""
    use_activation: bool | None = None
    """False: do not normalize vectors to length 1."""
    truncate_prompt_tokens: Truncation | None = None
    """Keep this many tokens of each input; -1: as many as the model allows."""
    truncation_side: Literal["left", "right"] | None = None
    """Which end is left out; unset: right, so that the first tokens are kept."""
    add_special_tokens: bool | None = None
    """False: the tokenizer adds no special tokens."""
    priority: Priority | None = None
    """Lower runs first, under the priority policy."""
    timeout: Seconds | None = None
    """Seconds the request may take, queued and running."""
    cache_salt: Name | None = None
    """Only requests with the same salt share cached prefixes."""
    request_id: RequestId | None = None

    @property
    def pooling_task(self) -> str | None:
        """What the vectors are for; None: what the model does."""
        return "embed"

    @property
    def client_names(self) -> Mapping[str, str]:
        return {"prompt": "input", "prompt_token_ids": "input"}

    def check_fields(self) -> None:
        """Check what the types cannot express; raises 400."""
        check_scheduling(self.timeout, self.priority)
        check_salt(self.cache_salt)
        if self.input is None and self.messages is None:
            raise bad_request("input is missing: give text, token ids, or messages in its place", "input")
        if self.input is not None and self.messages is not None:
            raise bad_request("give either input or messages", "input")
        if self.messages is not None:
            self.as_chat().check_fields()
            return
        if self.encoding_format == "bytes" and len(self.inputs) > MAX_PLACES:
            raise bad_request(
                f"encoding_format bytes describes each vector in a header: at most {MAX_PLACES} inputs, got "
                f"{len(self.inputs)}; bytes_only has no such header", "encoding_format",
            )  # fmt: skip
        if len(self.inputs) > MAX_INPUTS:
            raise bad_request(f"input has {len(self.inputs)} entries; at most {MAX_INPUTS}", "input")

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs as a list."""
        return [] if self.input is None else prompt_list(self.input, "input")

    def as_chat(self) -> ChatRequest:
        """The messages as a chat, to be rendered."""
        return ChatRequest(
            messages=self.messages or [],
            add_generation_prompt=bool(self.add_generation_prompt),
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    @property
    def pooling_params(self) -> PoolingParams:
        """The engine's parameters. Raises `ValidationError` for values out of range."""
        return PoolingParams(
            task=self.pooling_task,
            use_activation=self.use_activation,
            dimensions=self.dimensions,
            pooling=self.pooling,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class VectorsMetadata(msgspec.Struct):
    """The header `metadata` of a binary response."""

    id: str
    created: int
    model: str
    data: list[VectorPlace]
    usage: Any


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
