"""Converts /v1/responses requests to chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.api.chat_media import part_kind
from quire.server.dialects.responses_tools import OfferedTools, qualified
from quire.server.errors import bad_request
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.conversation import (
    AllowedTools,
    ChatMessage,
    CustomCall,
    FunctionCall,
    FunctionName,
    MessageToolCall,
    NamedTool,
)
from quire.server.protocol.fields import FieldReader
from quire.server.protocol.responses import (
    ENCRYPTED_REASONING,
    INPUT_ITEMS,
    LOGPROBS,
    ResponseInputCall,
    ResponseInputCallOutput,
    ResponseInputCustomCall,
    ResponseInputCustomOutput,
    ResponseInputMessage,
    ResponseInputReasoning,
    ResponseItemReference,
    ResponsesRequest,
    ResponseToolChoice,
)
from quire.server.protocol.sampling import SCALAR_NAMES, JsonSchemaFormat, ResponseFormat

_SAME_FIELDS = (
    *SCALAR_NAMES, "model", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens", "structured_outputs", "include_reasoning",
    "chat_template_kwargs", "mm_processor_kwargs", "priority", "timeout", "cache_salt", "request_id", "vllm_xargs",
    "stream", "parallel_tool_calls",
)  # fmt: skip
"""Fields with the same meaning in both."""
STORED = "a stored item"
"""Where an item is that is not in the request, for errors."""


def as_chat(
    request: ResponsesRequest,
    max_model_len: int,
    fields: FieldReader,
    tools: OfferedTools,
    history: Sequence[dict[str, Any]] = (),
) -> ChatRequest:
    """The same request in the form of /v1/chat/completions; `fields`: notes what has no effect. `history`: stored items
    that come before its input."""
    request.check_fields()
    _note_ignored(request, fields)
    chat = ChatRequest(
        messages=_messages(request, fields, history),
        max_completion_tokens=request.max_output_tokens,
        response_format=_response_format(request),
        tools=tools.tools,
        tool_choice=_tool_choice(request),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        **{name: value for name in _SAME_FIELDS if (value := getattr(request, name)) is not None},
    )
    if request.background:
        chat.stream = True  # its status says whether it has begun
    if request.wants_logprobs:
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs or 0
    if request.truncation == "auto":
        # Leave room for the answer: max_output_tokens, or else a quarter of the context.
        room = request.max_output_tokens or max_model_len // 4
        chat.truncate_prompt_tokens = max(1, max_model_len - room)
    return chat


def _note_ignored(request: ResponsesRequest, fields: FieldReader) -> None:
    if request.context_management is not None:
        fields.ignore("context_management")
    for wanted in request.include or ():
        if wanted not in (LOGPROBS, ENCRYPTED_REASONING):
            fields.ignore(f"include.{wanted}")  # details of tools that other servers run


def _messages(request: ResponsesRequest, fields: FieldReader, history: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    conversation = _Conversation()
    if request.instructions is not None:
        conversation.add_text("system", request.instructions)
    for item in history:
        conversation.add(_read_item(item, STORED, FieldReader()), STORED)  # what it has was said when it was stored
    if isinstance(request.input, str):
        conversation.add_text("user", request.input)
        return conversation.messages
    if not request.input:
        raise bad_request("input is empty: at least one item is needed", "input")
    for index, item in enumerate(request.input):
        where = f"input[{index}]"
        conversation.add(_read_item(item, where, fields), where)
    if not conversation.messages:
        raise bad_request("input has only reasoning: at least one message is needed", "input")
    return conversation.messages


def _read_item(item: dict[str, Any], where: str, fields: FieldReader) -> Any:
    name = item.get("type") or "message"
    kind = INPUT_ITEMS.get(name) if isinstance(name, str) else None
    if kind is None:
        known = ", ".join(INPUT_ITEMS)
        raise bad_request(f"{where} is of type {str(name)[:80]!r}; supported: {known}", where)
    return fields.convert(item, kind, where)


def check_item(item: dict[str, Any], where: str, fields: FieldReader) -> None:
    """Raise 400 unless it is an item that a conversation can have."""
    _Conversation().add(_read_item(item, where, fields), where)


class _Conversation:
    """Builds messages from items: consecutive reasoning, text and calls of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._reasoning: list[str] = []

    def add(self, item: Any, where: str) -> None:
        if isinstance(item, ResponseInputReasoning):
            self._reasoning += [part.text for part in item.content or item.summary or ()]
        elif isinstance(item, ResponseInputCall):
            function = FunctionCall(name=qualified(item.namespace, item.name), arguments=item.arguments)
            self._add_call(MessageToolCall(function=function, id=item.call_id))
        elif isinstance(item, ResponseInputCustomCall):
            custom = CustomCall(name=qualified(item.namespace, item.name), input=item.input)
            self._add_call(MessageToolCall(custom=custom, id=item.call_id))
        elif isinstance(item, ResponseInputCallOutput | ResponseInputCustomOutput):
            content = _content(item.output, f"{where}.output")
            self.messages.append(ChatMessage(role="tool", content=content, tool_call_id=item.call_id))
        elif isinstance(item, ResponseItemReference):
            raise bad_request(f"{where} refers to a stored item: it must be replaced by the item", where)
        elif isinstance(item, ResponseInputMessage):
            content = _content(item.content, f"{where}.content")
            if isinstance(content, str):
                self.add_text(item.role, content)
            elif item.role != "user":
                raise bad_request(f"{where} of role {item.role} has an image; only a user's message may", where)
            else:
                self._reasoning.clear()  # reasoning without an answer
                self.messages.append(ChatMessage(role=item.role, content=content))

    def _add_call(self, call: MessageToolCall) -> None:
        message = self._assistant()
        message.tool_calls = [*(message.tool_calls or ()), call]

    def add_text(self, role: str, text: str) -> None:
        """Add a text message."""
        if role == "assistant":
            message = self._assistant()
            message.content = text if message.content is None else f"{message.content}{text}"
            return
        self._reasoning.clear()  # reasoning without an answer
        role = "system" if role == "developer" else role  # the role that templates support
        last = self.messages[-1] if self.messages else None
        if role == "system" and last is not None and last.role == "system":
            last.content = f"{last.content}\n\n{text}"  # many templates accept only one, at the beginning
            return
        self.messages.append(ChatMessage(role=role, content=text))

    def _assistant(self) -> ChatMessage:
        """The assistant's message being built."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or self._reasoning:
            last = ChatMessage(role="assistant", reasoning="\n".join(self._reasoning) or None)
            self._reasoning.clear()
            self.messages.append(last)
        return last


def _content(content: str | list[dict[str, Any]], where: str) -> str | list[dict[str, Any]]:
    """The content of an item: text, or a list of parts if it has images."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        kind = part.get("type")
        if part_kind(part) is not None:
            parts.append(part)
            continue
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise bad_request(
                f"{where}[{index}] is of type {str(kind)[:80]!r}; this server supports text and images only",
                f"{where}[{index}]",
            )
        if not isinstance(text, str):
            raise bad_request(f"{where}[{index}] has no text", f"{where}[{index}].text")
        parts.append({"type": "text", "text": text})
    if all(part.get("type") == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if request.text is None else request.text.format
    if wanted is None or wanted.type == "text":
        return None
    if request.structured_outputs is not None:
        raise bad_request("text.format and structured_outputs cannot be combined", "structured_outputs")
    if wanted.type == "json_object":
        return ResponseFormat(type="json_object")
    if wanted.schema is None:
        raise bad_request("text.format of type json_schema needs a schema", "text.format.schema")
    schema = JsonSchemaFormat(name=wanted.name or "answer", schema=wanted.schema, strict=wanted.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)


def _tool_choice(request: ResponsesRequest) -> str | NamedTool | None:
    choice = request.tool_choice
    if not isinstance(choice, ResponseToolChoice):
        return None if choice == "auto" else choice
    if choice.type == "allowed_tools":
        allowed = AllowedTools(tools=choice.tools or [], mode=choice.mode or "auto")
        return NamedTool(type="allowed_tools", allowed_tools=allowed)
    if not choice.name:
        raise bad_request(f"tool_choice of type {choice.type} needs a name", "tool_choice.name")
    return NamedTool(function=FunctionName(name=choice.name))
