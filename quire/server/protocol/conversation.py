"""Messages, tools and tool choices of a chat, as requests have them, in all their spellings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Union

import msgspec

from quire.api import chat_media, embeds_parts
from quire.api.embeds_parts import is_embeds
from quire.server.errors import bad_request
from quire.server.protocol.common import Body
from quire.server.protocol.fields import FieldReader
from quire.server.protocol.values import Hint, Name, Part

CUSTOM_INPUT = "input"
"""The parameter that a custom tool's text is."""
PART_FIELDS = frozenset({"type", "text", "refusal", "cache_control", "annotations", "logprobs"})
IMAGE_FIELDS = chat_media.FIELDS | {"type", "cache_control", "file_id"}
"""Fields of a content part that are read, or have no effect."""
_TEMPLATE_FIELDS = ("role", "content", "name", "tool_call_id")


class FunctionCall(Body):
    """The function of a tool call and its arguments."""

    name: str
    arguments: Union[str, dict[str, Any], None] = None
    """JSON, as text or as it is."""

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON text."""
        if isinstance(self.arguments, dict):
            return msgspec.json.encode(self.arguments).decode()
        return self.arguments or "{}"


class CustomCall(Body):
    """A call of a tool whose argument is one text."""

    name: str
    input: str | None = None


class MessageToolCall(Body):
    """A tool call in an assistant's message."""

    function: FunctionCall | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    index: int | None = None
    custom: CustomCall | None = None
    cache_control: Hint = None
    provider_specific_fields: Hint = None

    def as_dict(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = self.function
        if self.custom is not None:
            function = FunctionCall(name=self.custom.name, arguments={CUSTOM_INPUT: self.custom.input or ""})
        if function is None:
            raise bad_request("a tool call in messages has no function", "messages")
        called = {"name": function.name, "arguments": function.arguments_text}
        return {"id": self.id or "", "type": "function", "function": called}


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
    thinking_blocks: list[dict[str, Any]] | None = None
    """Another form of it."""
    function_call: FunctionCall | None = None
    """An older form of a single tool call."""
    refusal: Hint = None
    annotations: Hint = None
    cache_control: Hint = None
    provider_specific_fields: Hint = None
    reasoning_details: Hint = None
    id: Hint = None
    type: Hint = None
    status: Hint = None
    audio: None = None

    def as_dict(self) -> dict[str, Any]:
        """As chat templates expect it."""
        fields = {name: value for name in _TEMPLATE_FIELDS if (value := getattr(self, name)) is not None}
        if self.role == "function":  # the result of an older form of a tool call
            fields["role"] = "tool"
        if (reasoning := self._any_reasoning) is not None:
            fields["reasoning"] = reasoning
        calls = self.tool_calls
        if calls is None and self.function_call is not None:
            calls = [MessageToolCall(function=self.function_call)]
        if calls is not None:
            fields["tool_calls"] = [call.as_dict() for call in calls]
        return fields

    @property
    def _any_reasoning(self) -> str | None:
        given = self.reasoning if self.reasoning is not None else self.reasoning_content
        if given is not None or not self.thinking_blocks:
            return given
        thoughts = [block.get("thinking") for block in self.thinking_blocks]
        return "\n".join(thought for thought in thoughts if isinstance(thought, str)) or None

    @property
    def text(self) -> str:
        """The content's text."""
        if isinstance(self.content, list):
            texts = [part.get("text") for part in self.content]
            return "\n".join(text for text in texts if isinstance(text, str))
        return self.content or ""

    @property
    def has_media(self) -> bool:
        """Whether the content has images, videos or embeddings: parts that take long to read."""
        return isinstance(self.content, list) and any(
            chat_media.part_kind(part) or is_embeds(part) for part in self.content
        )

    def check_parts(self, fields: FieldReader, where: str, template: Callable[[], str]) -> None:
        """Apply the rule for fields to the parts of the content: the template may read any of them."""
        if not isinstance(self.content, list):
            return
        for index, part in enumerate(self.content):
            if chat_media.part_kind(part) is not None:
                fields.ignore_keys(part, IMAGE_FIELDS, f"{where}.content[{index}]")
            elif is_embeds(part):
                fields.ignore_keys(part, embeds_parts.FIELDS, f"{where}.content[{index}]")
            elif not part.keys() <= PART_FIELDS:
                read = frozenset(name for name in part if name in template())
                fields.ignore_keys(part, PART_FIELDS | read, f"{where}.content[{index}]")


class ChatFunction(Body):
    """A tool's name, description, and parameters as a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Hint = None


class CustomTool(Body):
    """A tool whose argument is one text."""

    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None
    """The form of that text; described to the model, not enforced."""
    cache_control: Hint = None

    @property
    def as_function(self) -> ChatFunction:
        """The same as a function with one parameter."""
        text = self.description or ""
        wanted = self.format.get("grammar", self.format) if self.format else {}
        if isinstance(wanted, dict) and isinstance(wanted.get("definition"), str):
            text = f"{text}\n\nThe input has this form:\n{wanted['definition']}".strip()
        parameters = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
        return ChatFunction(name=self.name, description=text or None, parameters=parameters)


def custom_input(arguments: str) -> str:
    """The text that a custom tool is called with: the one argument, or what the model wrote instead."""
    try:
        given = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = given.get(CUSTOM_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


class ChatTool(Body):
    """A tool the model may call."""

    function: ChatFunction = msgspec.field(default_factory=lambda: ChatFunction(name=""))
    type: Literal["function", "custom"] = "function"
    custom: CustomTool | None = None
    cache_control: Hint = None
    defer_loading: Hint = None

    def __post_init__(self) -> None:
        if self.custom is not None:
            self.function, self.type = self.custom.as_function, "custom"


class FunctionName(Body):
    name: str


class AllowedTools(Body):
    """The tools that may be called, of those that the request has."""

    tools: list[dict[str, Any]]
    mode: Literal["auto", "required"] = "auto"

    @property
    def names(self) -> list[str]:
        """Their names."""
        named = [tool if "name" in tool else tool.get(str(tool.get("type")), {}) for tool in self.tools]
        return [str(tool.get("name")) for tool in named if isinstance(tool, dict)]


class NamedTool(Body):
    """The tool that must be called, or the tools that may be."""

    function: FunctionName = msgspec.field(default_factory=lambda: FunctionName(name=""))
    type: Literal["function", "custom", "allowed_tools"] = "function"
    custom: FunctionName | None = None
    name: str | None = None
    """Another place of the name."""
    allowed_tools: AllowedTools | None = None

    def __post_init__(self) -> None:
        if self.custom is not None:
            self.function = self.custom
        elif self.name is not None:
            self.function = FunctionName(name=self.name)


class ThinkingSwitch(Body):
    """Whether the model reasons first."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Hint = None
    clear_thinking: Hint = None


class ReasoningSwitch(Body):
    """Whether and how much the model reasons first."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """True: leave the reasoning out of the response."""
    max_tokens: Hint = None
    summary: Hint = None
    generate_summary: Hint = None


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
