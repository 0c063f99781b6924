"""Types of fields with what the OpenAPI document tells of their values.

Nothing here is checked when a body is decoded: each value is checked where it is used, in words that say what to do.
A text that begins with `$` stands for a fact that only a running server knows; `quire.server.openapi` fills it in.
"""

from __future__ import annotations

from typing import Annotated, Any, Union

from msgspec import Meta

from quire.messages.beams import STEEPEST_PENALTY
from quire.messages.sampling import MAX_STOP_STRINGS


def told(**schema: Any) -> Meta:
    """What the document says of a value."""
    return Meta(extra_json_schema=schema)


INT32 = 2**31
NOT_EMPTY = told(minItems=1)

ModelName = Annotated[str, told(enum="$names")]
Name = Annotated[str, told(minLength=1)]
Positive = Annotated[int, told(minimum=1)]
Priority = Annotated[int, told(minimum=-INT32, maximum=INT32 - 1)]
Seconds = Annotated[float, told(exclusiveMinimum=0)]
RequestId = Annotated[str, told(pattern="^[!-~]{1,128}$")]
Truncation = Annotated[int, told(anyOf=[{"const": -1}, {"minimum": 1}])]
"""-1: as much as fits."""

SESSION_NAME = "^[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,127}$"
SessionName = Annotated[str, told(pattern=SESSION_NAME)]
"""Checked by `quire.sessions.log.state`."""

# How tokens are drawn

Samples = Annotated[int, told(minimum=1, maximum="$max_samples")]
OutputLimit = Annotated[int, told(minimum=1, maximum="$max_model_len")]
WithinContext = Annotated[int, told(minimum=0, maximum="$max_model_len")]
Power = Annotated[float, told(minimum=-STEEPEST_PENALTY, maximum=STEEPEST_PENALTY)]
Seed = Annotated[int, told(minimum=-(2**63), maximum=2**64 - 1)]
Logprobs = Annotated[int, told(minimum=0, maximum="$max_logprobs")]
PromptLogprobs = Annotated[int, told(minimum="$least_logprobs", maximum="$max_logprobs")]
StopList = Annotated[list[Name], told(maxItems=MAX_STOP_STRINGS)]
StopStrings = Union[Name, StopList]

# Tokens

TokenId = Annotated[int, told(minimum=0, maximum="$last_token")]
TokenIds = list[TokenId]
AllowedTokens = Annotated[list[TokenId], NOT_EMPTY]
LogitBias = Annotated[dict[int, float], told(propertyNames={"pattern": "^(0|[1-9][0-9]{0,8})$"})]
Prompt = Union[
    Name,
    Annotated[
        list[Union[Name, TokenId, Annotated[list[TokenId], NOT_EMPTY]]],
        told(minItems=1, anyOf=[{"items": {"type": kind}} for kind in ("string", "integer", "array")]),
    ],
]
"""Text, token ids, or a list of either."""

# Chats

Part = Annotated[
    dict[str, Any],
    told(
        anyOf=[
            {"properties": {"type": {"enum": kinds}, field: {"type": "string"}}, "required": ["type", field]}
            for kinds, field in ((["text", "input_text", "output_text"], "text"), (["refusal"], "refusal"))
        ]
    ),
]
"""Of a message's content."""
TemplateVariables = Annotated[dict[str, Any], told(propertyNames={"pattern": "^[A-Za-z][A-Za-z0-9_]*$"})]
ToolChoice = Annotated[str, told(enum=["none", "auto", "required"])]
