"""Field types with the JSON schema keywords that the OpenAPI document shows for them.

Decoding a body does not check them: each value is checked where it is used, with an error that says what to do. A text
that begins with `$` is a placeholder for a value of the running server; `quire.server.openapi` fills it in.
"""

from __future__ import annotations

from typing import Annotated, Any, Union

from msgspec import Meta

from quire.messages.beams import STEEPEST_PENALTY
from quire.messages.sampling import MAX_STOP_STRINGS


def schema(**schema: Any) -> Meta:
    """JSON schema keywords of a type."""
    return Meta(extra_json_schema=schema)


Hint = Annotated[Any, Meta(description="Accepted without effect")]
"""A hint, or a client's bookkeeping: changes nothing about the answer."""

INT32 = 2**31
NOT_EMPTY = schema(minItems=1)

ModelName = Annotated[str, schema(enum="$names")]
AdapterWeights = Annotated[dict[str, float], schema(propertyNames={"enum": "$adapters"}, maxProperties="$max_adapters")]
Name = Annotated[str, schema(minLength=1)]
Positive = Annotated[int, schema(minimum=1)]
TokenCount = Annotated[int, schema(minimum=0, exclusiveMaximum="$max_model_len")]
Priority = Annotated[int, schema(minimum=-INT32, maximum=INT32 - 1)]
Seconds = Annotated[float, schema(exclusiveMinimum=0)]
RequestId = Annotated[str, schema(pattern="^[!-~]{1,128}$")]
Truncation = Annotated[int, schema(anyOf=[{"const": -1}, {"minimum": 1}])]
"""-1: as many as fit."""

SESSION_NAME = "^[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,127}$"
SessionName = Annotated[str, schema(pattern=SESSION_NAME)]
"""Checked by `quire.sessions.log.state`."""

Metadata = Annotated[dict[str, str], schema(maxProperties=64)]
"""Checked by `Body.check_sizes`."""

# Sampling

Samples = Annotated[int, schema(minimum=1, maximum="$max_samples")]
OutputLimit = Annotated[int, schema(minimum=1, maximum="$max_model_len")]
WithinContext = Annotated[int, schema(minimum=0, maximum="$max_model_len")]
Power = Annotated[float, schema(minimum=-STEEPEST_PENALTY, maximum=STEEPEST_PENALTY)]
LARGEST_SEED = 2**63 - 1
Seed = Annotated[int, schema(minimum=-LARGEST_SEED - 1, maximum=LARGEST_SEED)]
Logprobs = Annotated[int, schema(minimum=0, maximum="$max_logprobs")]
PromptLogprobs = Annotated[int, schema(minimum="$least_logprobs", maximum="$max_logprobs")]
StopList = Annotated[list[Name], schema(maxItems=MAX_STOP_STRINGS)]
StopStrings = Union[Name, StopList]

# Tokens

TokenId = Annotated[int, schema(minimum=0, maximum="$last_token")]
TokenIds = list[TokenId]
AllowedTokens = Annotated[list[TokenId], NOT_EMPTY]
LogitBias = Annotated[dict[int, float], schema(propertyNames={"pattern": "^(0|[1-9][0-9]{0,8})$"})]
Prompt = Union[
    Name,
    Annotated[
        list[Union[Name, TokenId, Annotated[list[TokenId], NOT_EMPTY]]],
        schema(minItems=1, anyOf=[{"items": {"type": kind}} for kind in ("string", "integer", "array")]),
    ],
]
"""Text, token ids, or a list of either."""
PromptEmbeds = Annotated[Union[str, list[str]], schema(anyOf="$prompt_embeds")]
"""Of a server that takes them."""

# Chats

TEXT_PARTS = [
    {"properties": {"type": {"enum": kinds}, field: {"type": "string"}}, "required": ["type", field]}
    for kinds, field in ((["text", "input_text", "output_text"], "text"), (["refusal"], "refusal"))
]
_URL = {"anyOf": [{"type": "string"}, {"properties": {"url": {"type": "string"}}, "required": ["url"]}]}
IMAGE_PARTS = [
    {"properties": {"type": {"enum": kinds}, field: _URL}, "required": ["type", field]}
    for kinds, field in ((["image_url", "input_image"], "image_url"), (["video_url"], "video_url"))
]
"""Of models that take images."""
Part = Annotated[dict[str, Any], schema(anyOf="$parts")]
"""A part of a message's content."""
TemplateVariables = Annotated[dict[str, Any], schema(propertyNames={"pattern": "^[A-Za-z][A-Za-z0-9_]*$"})]
ProcessorSettings = Annotated[Any, schema(anyOf="$processor_settings")]
"""Settings of an image processor: an object, on a server that trusts them."""
ToolChoice = Annotated[str, schema(enum=["none", "auto", "required"])]
