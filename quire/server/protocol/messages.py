"""/v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Union

import msgspec

from quire.server.errors import ApiError, bad_request
from quire.server.protocol.common import HINTS, Body, UsedEnergy, check_conversation, check_free_form
from quire.server.protocol.sampling import structured_output_names, with_scalars
from quire.server.protocol.values import (
    NOT_EMPTY,
    Hint,
    ModelName,
    Name,
    OutputLimit,
    Priority,
    ProcessorSettings,
    RequestId,
    Seconds,
    Seed,
    StopList,
    TemplateVariables,
    schema,
)

# Requests

IMAGE_SOURCES = [
    {
        "properties": {"type": {"const": "base64"}, "media_type": {"type": "string"}, "data": {"type": "string"}},
        "required": ["type", "media_type", "data"],
    },
    {"properties": {"type": {"const": "url"}, "url": {"type": "string"}}, "required": ["type", "url"]},
]


class AnthropicTextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: Hint = None
    citations: Hint = None


class AnthropicImageBlock(Body):
    """An image, in base64 or by its URL."""

    type: Literal["image"]
    source: Annotated[Any, schema(anyOf=IMAGE_SOURCES)] = None
    cache_control: Hint = None


class AnthropicToolUseBlock(Body):
    """A tool call made by the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Hint = None
    caller: Hint = None


class AnthropicToolResultBlock(Body):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Union[str, list[dict[str, Any]], None] = None
    is_error: bool | None = None
    cache_control: Hint = None


class AnthropicThinkingBlock(Body):
    """Reasoning of the model."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


ANTHROPIC_BLOCKS: dict[str, type[Body]] = {
    "text": AnthropicTextBlock,
    "image": AnthropicImageBlock,
    "tool_use": AnthropicToolUseBlock,
    "tool_result": AnthropicToolResultBlock,
    "thinking": AnthropicThinkingBlock,
}


ContentBlock = Annotated[dict[str, Any], schema(anyOf="$content_blocks")]


class AnthropicInputMessage(Body):
    """A message of the conversation. A last message of the assistant is continued."""

    role: Literal["user", "assistant", "system"]
    content: Union[str, Annotated[list[ContentBlock], NOT_EMPTY]]


class AnthropicTool(Body):
    """A tool the model may call."""

    name: Name
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    """Without a schema: a tool that Anthropic's servers run, which is left out."""
    description: str | None = None
    strict: bool | None = None
    cache_control: Hint = None
    eager_input_streaming: Hint = None
    """Arguments are always streamed."""
    defer_loading: Hint = None
    input_examples: Hint = None
    allowed_callers: Hint = None
    max_uses: Hint = None
    allowed_domains: Hint = None
    blocked_domains: Hint = None
    user_location: Hint = None


class AnthropicToolChoice(Body):
    """Whether a tool must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(Body):
    """Whether the model reasons first, if its chat template has a variable for that."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """Part of max_tokens, which is the limit that is enforced."""
    display: Hint = None


class AnthropicOutputFormat(Body):
    """The JSON schema the answer must follow."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class AnthropicOutputConfig(Body):
    format: AnthropicOutputFormat | None = None
    effort: str | None = None
    """Passed to the chat template."""


class MessagesMetadata(Body):
    user_id: Hint = None


def _has_images(content: Any) -> bool:
    if not isinstance(content, list):
        return False
    blocks = (block for block in content if isinstance(block, dict))
    return any(block.get("type") == "image" or _has_images(block.get("content")) for block in blocks)


class CountTokensRequest(Body):
    """The body of /v1/messages/count_tokens."""

    hints: ClassVar[Mapping[str, str]] = {
        **HINTS,
        "mcp_servers": "the server does not call tools; give them in tools",
        "container": "the server runs no code",
        "n": "a response is one sequence",
        "stop": "use stop_sequences",
    }

    messages: Annotated[list[AnthropicInputMessage], NOT_EMPTY]
    model: ModelName | None = None
    system: Union[str, list[AnthropicTextBlock], None] = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: AnthropicOutputConfig | None = None
    cache_control: Hint = None
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: ProcessorSettings = None
    context_management: Hint = None
    """Ignored, and said: the model reads the messages as they are sent."""
    mcp_servers: None = None

    @property
    def has_media(self) -> bool:
        """Whether any message has images."""
        return any(_has_images(message.content) for message in self.messages)

    @property
    def client_names(self) -> Mapping[str, str]:
        is_form = self.output_config is not None and self.output_config.format is not None
        form = (
            structured_output_names("output_config.format", "output_config.format.schema")
            if is_form
            else structured_output_names("tools", "tools")
        )
        return {"stop": "stop_sequences", "prompt": "messages", **form}

    def check_fields(self) -> None:
        """Check what the types cannot express; raises 400."""
        self.check_neutral()
        if not self.messages:
            raise bad_request("messages is empty: at least one is needed", "messages")
        check_conversation("messages", *(message.content for message in self.messages))
        check_free_form("tools", *(tool.input_schema for tool in self.tools or ()))
        check_free_form("chat_template_kwargs", self.chat_template_kwargs)
        check_free_form("mm_processor_kwargs", self.mm_processor_kwargs)
        choice = self.tool_choice
        if choice is not None and choice.type == "tool" and not choice.name:
            raise bad_request("tool_choice of type tool needs a name", "tool_choice.name")


@with_scalars
class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: OutputLimit
    stop_sequences: StopList | None = None
    stream: bool | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Hint = None
    inference_geo: Hint = None
    speed: Hint = None

    seed: Seed | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None
    cache_salt: Name | None = None
    request_id: RequestId | None = None

    container: None = None

    def check_fields(self) -> None:
        """Check what the types cannot express; raises 400."""
        super().check_fields()
        if self.max_tokens < 1:
            raise bad_request(f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise bad_request(
                f"thinking.budget_tokens is {budget}, and must be below max_tokens, which is {self.max_tokens}",
                "thinking.budget_tokens",
            )


# Responses


class AnthropicAnswerText(msgspec.Struct, tag="text"):
    """Text of the answer."""

    text: str


class AnthropicAnswerThinking(msgspec.Struct, tag="thinking"):
    """Reasoning of the model."""

    thinking: str
    signature: str = ""


class AnthropicAnswerToolUse(msgspec.Struct, tag="tool_use"):
    """A tool call for the client to run."""

    id: str
    name: str
    input: dict[str, Any]


AnthropicAnswerBlock = Union[AnthropicAnswerText, AnthropicAnswerThinking, AnthropicAnswerToolUse]


class MessagesUsage(msgspec.Struct):
    """Token counts. Cached tokens are not part of `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    energy: UsedEnergy | msgspec.UnsetType = msgspec.UNSET


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """The whole response."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnthropicAnswerBlock] = msgspec.field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(msgspec.Struct):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicEvent(msgspec.Struct, tag_field="type"):
    """An event of a stream."""

    @property
    def kind(self) -> str:
        """The event's type, also its name."""
        return str(self.__struct_config__.tag)


class AnthropicMessageStart(AnthropicEvent, tag="message_start"):
    message: AnthropicMessage


class AnthropicPing(AnthropicEvent, tag="ping"):
    pass


class AnthropicBlockStart(AnthropicEvent, tag="content_block_start"):
    index: int
    content_block: AnthropicAnswerBlock


class AnthropicTextDelta(msgspec.Struct, tag="text_delta"):
    text: str


class AnthropicThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    thinking: str


class AnthropicSignatureDelta(msgspec.Struct, tag="signature_delta"):
    signature: str


class AnthropicInputDelta(msgspec.Struct, tag="input_json_delta"):
    partial_json: str


class AnthropicBlockDelta(AnthropicEvent, tag="content_block_delta"):
    index: int
    delta: Union[AnthropicTextDelta, AnthropicThinkingDelta, AnthropicSignatureDelta, AnthropicInputDelta]


class AnthropicBlockStop(AnthropicEvent, tag="content_block_stop"):
    index: int


class AnthropicMessageEnd(msgspec.Struct):
    stop_reason: str | None
    stop_sequence: str | None


class AnthropicMessageDelta(AnthropicEvent, tag="message_delta"):
    delta: AnthropicMessageEnd
    usage: MessagesUsage


class AnthropicMessageStop(AnthropicEvent, tag="message_stop"):
    pass


class AnthropicErrorDetail(msgspec.Struct):
    """What is wrong with the request."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    """The body of every error response, and the last event of a stream that failed."""

    error: AnthropicErrorDetail


AnyAnthropicEvent = Union[
    AnthropicMessageStart,
    AnthropicPing,
    AnthropicBlockStart,
    AnthropicBlockDelta,
    AnthropicBlockStop,
    AnthropicMessageDelta,
    AnthropicMessageStop,
    AnthropicError,
]

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError) -> AnthropicError:
    """An error in Anthropic's format."""
    otherwise = "api_error" if error.status >= 500 else "invalid_request_error"
    return AnthropicError(AnthropicErrorDetail(_ERROR_TYPES.get(error.status, otherwise), error.message))
