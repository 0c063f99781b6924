"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Union

import msgspec
from msgspec import UNSET, UnsetType

from quire.errors import short_repr
from quire.server.errors import bad_request
from quire.server.protocol.common import RequestTimings, Usage, check_conversation, check_free_form
from quire.server.protocol.conversation import (
    AllowedTools,
    ChatFunction,
    ChatMessage,
    ChatTool,
    FunctionName,
    NamedTool,
    Prediction,
    ReasoningSwitch,
    ThinkingSwitch,
)
from quire.server.protocol.sampling import GenerationFields, structured_output_names
from quire.server.protocol.values import (
    NOT_EMPTY,
    Hint,
    Logprobs,
    OutputLimit,
    ProcessorSettings,
    TemplateVariables,
    ToolChoice,
    schema,
)

MAX_TOOLS = 256


class ChatRequest(GenerationFields, kw_only=True):
    """The body of /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationFields.neutral,
        "modalities": (["text"],),
    }

    messages: Annotated[list[ChatMessage], NOT_EMPTY]
    max_tokens: OutputLimit | None = None
    max_completion_tokens: OutputLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[ChatTool], schema(maxItems=MAX_TOOLS)] | None = None
    tool_choice: Union[ToolChoice, NamedTool, None] = None
    functions: Annotated[list[ChatFunction], schema(maxItems=MAX_TOOLS)] | None = None
    """An older form of `tools`."""
    function_call: Union[ToolChoice, FunctionName, None] = None
    """An older form of `tool_choice`."""
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """Passed to the chat template; "none" also sets enable_thinking to false, and all others set it to true."""
    thinking: Union[bool, ThinkingSwitch, None] = None
    """Other forms of the same switch, as are the next two."""
    enable_thinking: bool | None = None
    reasoning: ReasoningSwitch | None = None
    include_reasoning: bool | None = None
    """False: leave the reasoning out of the response."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: ProcessorSettings = None
    """Settings of the model's image processor; refused unless the server trusts them."""
    documents: list[dict[str, Any]] | None = None
    prediction: Prediction | None = None
    """With speculative decoding, an answer that is like it comes faster. It changes no token."""

    echo: bool | None = None
    """Begin the answer with the last message, if it has the role of the answer."""
    return_prompt_text: bool | None = None
    """Return the text that the chat template made."""

    modalities: list[str] | None = None
    add_special_tokens: bool | None = None
    verbosity: Hint = None
    audio: None = None
    web_search_options: None = None

    def __post_init__(self) -> None:
        """Turn other spellings into the usual one."""
        if self.tool_choice == "auto" and self.tools is None and self.functions is None:
            raise bad_request("tool_choice needs tools", "tool_choice")
        if self.functions and not self.tools:
            self.tools = [ChatTool(function=function) for function in self.functions]
        if isinstance(self.function_call, FunctionName):
            self.tool_choice = NamedTool(function=self.function_call)
        elif self.function_call is not None and self.tool_choice is None:
            self.tool_choice = self.function_call
        self.tools = self.tools or None
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.type == "allowed_tools":
            self._keep_allowed(self.tool_choice.allowed_tools)

    def _keep_allowed(self, allowed: AllowedTools | None) -> None:
        if allowed is None or not allowed.tools:
            raise bad_request("tool_choice of type allowed_tools needs allowed_tools.tools", "tool_choice")
        names, offered = allowed.names, {tool.function.name: tool for tool in self.tools or ()}
        if missing := next((name for name in names if name not in offered), None):
            raise bad_request(f"tool_choice allows {short_repr(missing)}, which is not among tools", "tool_choice")
        self.tools = [tool for name, tool in offered.items() if name in names]
        self.tool_choice = allowed.mode

    @property
    def thinks(self) -> bool | None:
        """Whether the model is asked to reason first, in whatever form; None: not said."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if isinstance(self.thinking, bool):
            return self.thinking
        if isinstance(self.thinking, ThinkingSwitch) and self.thinking.type in ("enabled", "disabled"):
            return self.thinking.type == "enabled"
        if self.reasoning is not None and self.reasoning.enabled is not None:
            return self.reasoning.enabled
        effort = self.effort
        return None if effort is None else effort != "none"

    @property
    def effort(self) -> str | None:
        """How much the model is asked to reason; None: not said."""
        if self.reasoning_effort is not None or self.reasoning is None:
            return self.reasoning_effort
        return self.reasoning.effort

    @property
    def keeps_reasoning(self) -> bool:
        """Whether the response has the reasoning."""
        is_excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is not False and not is_excluded

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
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise bad_request("logprob_token_ids needs logprobs=true", "logprob_token_ids")
        if self.use_beam_search and self.top_logprobs:
            raise bad_request(
                "beam search returns logprobs of the chosen tokens only: top_logprobs must be 0", "top_logprobs"
            )
        check_free_form("chat_template_kwargs", self.chat_template_kwargs)
        check_free_form("mm_processor_kwargs", self.mm_processor_kwargs)
        check_conversation("documents", self.documents)
        calls = (call for message in self.messages for call in message.tool_calls or ())
        check_conversation("messages", *(call.function.arguments for call in calls if call.function is not None))
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
    def forces_calls(self) -> bool:
        """Whether the answer is calls, whatever the model thinks of it."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def has_media(self) -> bool:
        """Whether any message has images or videos."""
        return any(message.has_media for message in self.messages)

    @property
    def answer_role(self) -> str:
        """The role of the answer: the assistant's, or that of the last message if the answer continues it."""
        is_new = not self.continue_final_message and self.add_generation_prompt is not False
        return "assistant" if is_new else self.messages[-1].role

    @property
    def echoed(self) -> str:
        """The text that the answer begins with."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == self.answer_role else ""

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of tools whose argument is one text."""
        return frozenset(tool.function.name for tool in self.tools or () if tool.type == "custom")

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


class CalledCustom(msgspec.Struct):
    name: str
    input: str


class AnsweredCall(msgspec.Struct):
    """A tool call in a response."""

    id: str
    function: CalledFunction | UnsetType = UNSET
    type: str = "function"
    custom: CalledCustom | UnsetType = UNSET


class AnswerMessage(msgspec.Struct):
    """The assistant's message."""

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: CalledFunction | None = None
    """The call, if the request has `functions`."""
    tool_calls: list[AnsweredCall] | UnsetType = UNSET
    reasoning: str | None = None


class ChatChoice(msgspec.Struct):
    """One sequence."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatResponse(msgspec.Struct):
    """The whole response."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: None = None
    metrics: RequestTimings | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """A token of the prompt, or an alternative."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CustomDelta(msgspec.Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class CallDelta(msgspec.Struct, omit_defaults=True):
    """A part of a tool call."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChatMessageDelta(msgspec.Struct, omit_defaults=True):
    """A part of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


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
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_text: str | UnsetType = UNSET
    metrics: RequestTimings | UnsetType = UNSET
