"""/v1/responses: requests and responses; the events of a stream are in `response_events`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Union

import msgspec

from quire.server.errors import bad_request
from quire.server.protocol.chat import TokenLogprob
from quire.server.protocol.common import HINTS, Body, UsedEnergy, check_conversation, check_free_form
from quire.server.protocol.sampling import StructuredOutputs, structured_output_names, with_scalars
from quire.server.protocol.values import (
    NOT_EMPTY,
    AllowedTokens,
    Hint,
    LogitBias,
    Logprobs,
    Metadata,
    ModelName,
    Name,
    OutputLimit,
    Part,
    Priority,
    ProcessorSettings,
    RequestId,
    Seconds,
    Seed,
    StopStrings,
    TemplateVariables,
    TokenIds,
    ToolChoice,
    WithinContext,
    schema,
)

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
"""Accepted and not needed: reasoning is returned as plain text and can be sent back."""


# Requests


class ResponseInputMessage(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None
    phase: Hint = None
    internal_chat_message_metadata_passthrough: Hint = None


class ResponseInputCall(Body):
    """A tool call made by the model."""

    type: Literal["function_call"]
    name: str
    call_id: str
    arguments: str
    namespace: str | None = None
    id: Hint = None
    status: Hint = None
    caller: Hint = None


class ResponseInputCallOutput(Body):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    output: str | list[Part]
    call_id: str
    id: Hint = None
    status: Hint = None
    name: Hint = None
    caller: Hint = None


class ResponseInputCustomCall(Body):
    """A call of a custom tool made by the model."""

    type: Literal["custom_tool_call"]
    name: str
    call_id: str
    input: str
    namespace: str | None = None
    id: Hint = None
    status: Hint = None
    caller: Hint = None


class ResponseInputCustomOutput(Body):
    """The result of such a call."""

    type: Literal["custom_tool_call_output"]
    output: str | list[Part]
    call_id: str
    id: Hint = None
    status: Hint = None
    name: Hint = None
    caller: Hint = None


class ResponseReasoningText(Body):
    text: str
    type: str = "reasoning_text"


class ResponseInputReasoning(Body):
    """Reasoning of the model before the item that follows."""

    type: Literal["reasoning"]
    summary: list[ResponseReasoningText] | None = None
    content: list[ResponseReasoningText] | None = None
    encrypted_content: Hint = None
    """Of another server: it cannot be read."""
    id: Hint = None
    status: Hint = None


class ResponseItemReference(Body):
    """A stored item, by its id."""

    type: Literal["item_reference"]
    id: str


INPUT_ITEMS: dict[str, type[Body]] = {
    "message": ResponseInputMessage,
    "function_call": ResponseInputCall,
    "function_call_output": ResponseInputCallOutput,
    "reasoning": ResponseInputReasoning,
    "item_reference": ResponseItemReference,
    "custom_tool_call": ResponseInputCustomCall,
    "custom_tool_call_output": ResponseInputCustomOutput,
}


ResponseInputItem = Annotated[dict[str, Any], schema(anyOf="$input_items")]


class ResponseTool(Body):
    """A tool the model may call."""

    name: Name
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Hint = None
    output_schema: Hint = None


class ResponseCustomTool(Body):
    """A tool whose argument is one text."""

    name: Name
    type: Literal["custom"]
    description: str | None = None
    format: dict[str, Any] | None = None
    """The form of that text; described to the model, not enforced."""
    defer_loading: Hint = None


class ResponseNamespace(Body):
    """A group of tools, whose members are offered one by one."""

    name: Name
    type: Literal["namespace"]
    tools: list[dict[str, Any]]
    description: Hint = None


ResponseToolItem = Annotated[dict[str, Any], schema(properties={"type": {"type": "string"}})]
"""Read by `quire.server.dialects.responses_tools`."""


class ResponseToolChoice(Body):
    """The tool that must be called, or those that may be."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    name: str | None = None
    tools: list[dict[str, Any]] | None = None
    mode: Literal["auto", "required"] | None = None


class ResponseTextFormat(Body):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseTextOptions(Body):
    format: ResponseTextFormat | None = None
    verbosity: Hint = None


class ResponseReasoningOptions(Body):
    effort: str | None = None
    """Passed to the chat template."""
    summary: str | None = None
    """Accepted without effect: reasoning is returned as it is."""
    generate_summary: Hint = None


class ResponseConversation(Body):
    """A conversation, by its id."""

    id: str


class ResponseStreamOptions(Body):
    include_obfuscation: Hint = None


@with_scalars
class ResponsesRequest(Body):
    """The body of /v1/responses."""

    hints: ClassVar[Mapping[str, str]] = {
        **HINTS,
        "prompt": "prompts are not stored; send instructions and input",
        "n": "a response is one sequence",
        "max_tokens": "use max_output_tokens",
        "response_format": "use text.format",
        "messages": "use input",
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    input: Union[str, Annotated[list[ResponseInputItem], NOT_EMPTY]]
    """Text, or items: messages, reasoning, function calls and their outputs."""
    model: ModelName | None = None
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: OutputLimit | None = None
    top_logprobs: Logprobs | None = None
    include: list[str] | None = None
    tools: list[ResponseToolItem] | None = None
    tool_choice: Union[ToolChoice, ResponseToolChoice, None] = None
    parallel_tool_calls: bool | None = None
    text: ResponseTextOptions | None = None
    reasoning: ResponseReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """"auto" truncates the beginning of a conversation that is too long."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = None
    """Returned in the response."""

    seed: Seed | None = None
    stop: StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: WithinContext | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: list[Name] | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    include_reasoning: bool | None = None
    """False: leave the reasoning out of the response."""
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: ProcessorSettings = None
    priority: Priority | None = None
    timeout: Seconds | None = None
    cache_salt: Name | None = None
    request_id: RequestId | None = None
    vllm_xargs: dict[str, Any] | None = None

    user: str | None = None
    """Returned in the response; without effect, as are the following."""
    max_tool_calls: int | None = None
    """A limit on tools that the server runs itself, of which there are none."""
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    client_metadata: Hint = None
    service_tier: Hint = None
    store: bool | None = None
    """Whether the response can be retrieved and followed up; unset: yes, if the server stores any."""
    context_management: Hint = None
    """Ignored, and said: the model reads the input as it is sent."""

    background: bool | None = None
    """True: answer at once, with a response that is queued and can be retrieved until it is finished."""
    previous_response_id: str | None = None
    """The stored response that this one follows: its context and its output come before the input."""
    conversation: Union[str, ResponseConversation, None] = None
    """The conversation whose items come before the input, and to which input and output are added."""
    prompt: None = None
    moderation: None = None

    @property
    def client_names(self) -> Mapping[str, str]:
        limit = dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens")
        given = dict.fromkeys(("prompt", "messages"), "input")
        return {**limit, **given, "logprobs": "top_logprobs", **self._structured_output_names}

    @property
    def _structured_output_names(self) -> Mapping[str, str]:
        if self.text is not None and self.text.format is not None and self.text.format.type != "text":
            return structured_output_names("text.format", "text.format.schema")
        return {} if self.structured_outputs is not None else structured_output_names("tools", "tools")

    def check_fields(self) -> None:
        """Check what the types cannot express; raises 400."""
        self.check_neutral()
        check_conversation("input", self.input)
        check_free_form("chat_template_kwargs", self.chat_template_kwargs)
        check_free_form("tools", self.tools)
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise bad_request(f"top_logprobs must be 0 or more, got {self.top_logprobs}", "top_logprobs")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise bad_request(
                f"max_output_tokens must be at least 1, got {self.max_output_tokens}", "max_output_tokens"
            )
        if isinstance(self.tool_choice, str) and self.tool_choice not in ("none", "auto", "required"):
            raise bad_request(
                f"tool_choice must be none, auto, required or a function; got {self.tool_choice[:80]!r}", "tool_choice"
            )

    def check_references(self) -> None:
        """Check what it refers to and whether it is stored; raises 400."""
        if self.previous_response_id is not None and self.conversation is not None:
            raise bad_request(
                "previous_response_id and conversation cannot be combined: both say what comes before the input",
                "previous_response_id",
            )
        if self.background and self.store is False:
            raise bad_request("background needs store: a response that is not stored could not be retrieved", "store")

    @property
    def conversation_id(self) -> str | None:
        """The conversation's id, however it is given."""
        return self.conversation.id if isinstance(self.conversation, ResponseConversation) else self.conversation

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


# Responses


class ResponseOutputText(msgspec.Struct, tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ResponseOutputMessage(msgspec.Struct, tag="message"):
    """Text of the answer."""

    id: str
    status: str
    content: list[ResponseOutputText]
    role: str = "assistant"


class ResponseOutputReasoningText(msgspec.Struct, tag="reasoning_text"):
    text: str


class ResponseOutputReasoning(msgspec.Struct, tag="reasoning"):
    """Reasoning of the model."""

    id: str
    status: str
    content: list[ResponseOutputReasoningText]
    summary: list[Any] = msgspec.field(default_factory=list)


class ResponseOutputCall(msgspec.Struct, tag="function_call"):
    """A tool call for the client to run."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class ResponseOutputCustomCall(msgspec.Struct, tag="custom_tool_call"):
    """A call of a custom tool for the client to run."""

    id: str
    status: str
    call_id: str
    name: str
    input: str


ResponseOutputItem = Union[ResponseOutputMessage, ResponseOutputReasoning, ResponseOutputCall, ResponseOutputCustomCall]


class ResponseInputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseOutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: ResponseInputTokensDetails
    output_tokens: int
    output_tokens_details: ResponseOutputTokensDetails
    total_tokens: int
    energy: UsedEnergy | msgspec.UnsetType = msgspec.UNSET


class ResponseFailure(msgspec.Struct):
    code: str
    message: str


class ResponseIncompleteDetails(msgspec.Struct):
    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """The response, whole or so far."""

    id: str
    object: str = "response"
    created_at: int
    model: str
    status: str = "in_progress"
    error: ResponseFailure | None = None
    incomplete_details: ResponseIncompleteDetails | None = None
    output: list[ResponseOutputItem] = msgspec.field(default_factory=list)
    usage: ResponseUsage | None = None
    instructions: str | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    conversation: ResponseConversation | None = None
    completed_at: int | None = None
    reasoning: ResponseReasoningOptions | None = None
    service_tier: str = "default"
    store: bool = False
    background: bool = False
    temperature: float | None = None
    text: dict[str, Any] = msgspec.field(default_factory=dict)
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    user: str | None = None


class ResponseDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True


class ResponseItemList(msgspec.Struct, kw_only=True):
    """A page of items. Pass `last_id` as `after` for the next page."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
