"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Union

import msgspec
from msgspec import UNSET, UnsetType

from quire.errors import short_repr
from quire.server.errors import bad_request
from quire.server.protocol.common import HINTS, Body, RequestTimings, Usage, check_conversation, check_free_form
from quire.server.protocol.sampling import GenerationFields, structured_output_names
from quire.server.protocol.values import (
    NOT_EMPTY,
    Logprobs,
    Name,
    OutputLimit,
    Part,
    TemplateVariables,
    ToolChoice,
    schema,
)

MAX_TOOLS = 256


class FunctionCall(Body):
    """The function of a tool call and its arguments."""

    name: str
    arguments: str | None = None
    """JSON."""


class MessageToolCall(Body):
    """A tool call in an assistant's message."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class ChatMessage(Body):
    """One message of a conversation."""

    role: Name
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Another name of `reasoning`."""
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    def as_dict(self) -> dict[str, Any]:
        """As chat templates expect it."""
        fields = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        fields.pop("annotations", None)
        fields.pop("refusal", None)
        reasoning = fields.pop("reasoning_content", None)
        if reasoning is not None:
            fields.setdefault("reasoning", reasoning)
        if self.tool_calls is not None:
            fields["tool_calls"] = [
                {"id": call.id or "", "type": "function",
                 "function": {"name": call.function.name, "arguments": call.function.arguments or "{}"}}
                for call in self.tool_calls
            ]  # fmt: skip
        return fields


class ChatFunction(Body):
    """A tool's name, description, and parameters as a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Body):
    """A tool the model may call."""

    function: ChatFunction
    type: Literal["function"] = "function"


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """The tool that must be called."""

    function: FunctionName
    type: Literal["function"] = "function"


class Prediction(Body):
    """The answer as the client expects it to be."""

    content: str | list[Part]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        """All of it; raises 400 for a part that is not text."""
        if isinstance(self.content, str):
            return self.content
        texts = [part.get("text") for part in self.content]
        if any(not isinstance(text, str) for text in texts):
            raise bad_request("prediction.content holds a part that is not text", "prediction")
        return "".join(map(str, texts))


class ChatRequest(GenerationFields, kw_only=True):
    """The body of /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationFields.neutral,
        "modalities": (["text"],),
        "echo": (False,),
        "add_special_tokens": (False,),
    }

    messages: Annotated[list[ChatMessage], NOT_EMPTY]
    max_tokens: OutputLimit | None = None
    max_completion_tokens: OutputLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[ChatTool], schema(minItems=1, maxItems=MAX_TOOLS)] | None = None
    tool_choice: Union[ToolChoice, NamedTool, None] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """Passed to the chat template; "none" also sets enable_thinking to false."""
    include_reasoning: bool | None = None
    """False: leave the reasoning out of the response."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables | None = None
    documents: list[dict[str, Any]] | None = None
    prediction: Prediction | None = None
    """With speculative decoding, an answer that is like it comes faster. It changes no token."""

    modalities: list[str] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    verbosity: None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    web_search_options: None = None

    hints: ClassVar[Mapping[str, str]] = HINTS

    @property
    def client_names(self) -> Mapping[str, str]:
        named = {"max_tokens": self.token_limit[1], "logprobs": "top_logprobs", "prompt": "messages"}
        return {**named, **super().client_names}

    @property
    def _structured_output_names(self) -> Mapping[str, str]:
        of_tools = {} if self.structured_outputs is not None else structured_output_names("tools", "tools")
        return super()._structured_output_names or of_tools

    def check_fields(self) -> None:
        """Check what the types cannot express; raises 400."""
        super().check_fields()
        if not self.messages:
            raise bad_request("messages is empty: at least one is needed", "messages")
        if self.add_generation_prompt and self.continue_final_message:
            raise bad_request("add_generation_prompt and continue_final_message cannot be combined")
        limit, name = self.token_limit
        if limit is not None and limit < 1:
            raise bad_request(f"{name} must be an integer at least 1, got {limit}", name)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        if self.use_beam_search and self.top_logprobs:
            raise bad_request(
                "beam search returns logprobs of the chosen tokens only: top_logprobs must be 0", "top_logprobs"
            )
        check_free_form("chat_template_kwargs", self.chat_template_kwargs)
        check_conversation("documents", self.documents)
        self._check_tools()

    def _check_tools(self) -> None:
        choice = self.tool_choice
        if self.tools is None:
            if choice not in (None, "none", "auto"):
                raise bad_request("tool_choice needs tools", "tool_choice")
            return
        if not 0 < len(self.tools) <= MAX_TOOLS:
            raise bad_request(f"tools must have 1 to {MAX_TOOLS} entries, got {len(self.tools)}", "tools")
        check_free_form("tools", *(tool.function.parameters for tool in self.tools))
        names = [tool.function.name for tool in self.tools]
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise bad_request(
                f"tool_choice must be none, auto, required or a tool; got {short_repr(choice)}", "tool_choice"
            )
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise bad_request(
                f"tool_choice names {short_repr(choice.function.name)}, which is not among tools", "tool_choice"
            )
        if not all(names):
            raise bad_request("a tool has an empty name", "tools")

    @property
    def token_limit(self) -> tuple[int | None, str]:
        """The most tokens to generate, and the name of the field that sets it."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"


# Responses


class TopLogprob(msgspec.Struct):
    """An alternative token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """A generated token."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class AnsweredCall(msgspec.Struct):
    """A tool call in a response."""

    id: str
    function: CalledFunction
    type: str = "function"


class AnswerMessage(msgspec.Struct, omit_defaults=True):
    """The assistant's message."""

    role: str
    content: str | None
    refusal: None
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, omit_defaults=True):
    """One sequence."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, omit_defaults=True):
    """The whole response."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | UnsetType | None = UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: RequestTimings | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """A token of the prompt, or an alternative."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(msgspec.Struct, omit_defaults=True):
    """A part of a tool call."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class ChatMessageDelta(msgspec.Struct, omit_defaults=True):
    """A part of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, omit_defaults=True):
    """New output of one sequence."""

    index: int
    delta: ChatMessageDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, omit_defaults=True):
    """One event of a streamed response."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: RequestTimings | UnsetType = UNSET
