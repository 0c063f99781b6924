"""Converts /v1/messages requests to chat requests."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.server.errors import bad_request
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.conversation import (
    ChatFunction,
    ChatMessage,
    ChatTool,
    FunctionCall,
    FunctionName,
    MessageToolCall,
    NamedTool,
)
from quire.server.protocol.fields import FieldReader
from quire.server.protocol.messages import (
    ANTHROPIC_BLOCKS,
    AnthropicImageBlock,
    AnthropicInputMessage,
    AnthropicTextBlock,
    AnthropicThinkingBlock,
    AnthropicToolResultBlock,
    AnthropicToolUseBlock,
    CountTokensRequest,
    MessagesRequest,
)
from quire.server.protocol.sampling import SCALAR_NAMES, JsonSchemaFormat, ResponseFormat

_SAME_FIELDS = (
    *SCALAR_NAMES, "seed", "priority", "timeout", "cache_salt", "request_id", "stream",
)  # fmt: skip
"""Fields with the same meaning in both."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(request: CountTokensRequest, fields: FieldReader) -> ChatRequest:
    """The same request in the form of /v1/chat/completions; `fields`: notes what has no effect."""
    request.check_fields()
    if request.context_management is not None:
        fields.ignore("context_management")
    messages = _messages(request, fields)
    continues = messages[-1].role == "assistant"
    if continues and messages[-1].tool_calls:
        raise bad_request("messages ends with a tool_use: its tool_result must follow", "messages")
    chat = ChatRequest(
        messages=messages,
        model=request.model,
        continue_final_message=continues or None,
        tools=_tools(request, fields),
        tool_choice=_tool_choice(request),
        chat_template_kwargs=_template_kwargs(request),
        mm_processor_kwargs=request.mm_processor_kwargs,
    )
    if request.output_config is not None:
        chat.reasoning_effort = request.output_config.effort
        wanted = request.output_config.format
        if wanted is not None:
            schema = JsonSchemaFormat(name="answer", schema=wanted.schema)
            chat.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    if isinstance(request, MessagesRequest):
        chat.max_tokens = request.max_tokens
        chat.stop = request.stop_sequences
        for name in _SAME_FIELDS:
            setattr(chat, name, getattr(request, name))
    return chat


def _messages(request: CountTokensRequest, fields: FieldReader) -> list[ChatMessage]:
    messages = []
    system = request.system
    if isinstance(system, list):
        system = "\n\n".join(block.text for block in system)
    if system:
        messages.append(ChatMessage(role="system", content=system))
    for index, message in enumerate(request.messages):
        where = f"messages[{index}].content"
        blocks = _blocks(message, where, fields)
        if message.role == "assistant":
            messages.append(_assistant(blocks, where))
            continue
        # Many templates accept a system message only at the beginning: later ones are read as the user's text.
        role = "user" if messages else message.role
        for each in _user_messages(role, blocks, where, fields):
            if message.role == "system" and messages and messages[-1].role == each.role == "user":
                messages[-1].content = _joined(messages[-1].content, each.content)
            else:
                messages.append(each)
    return messages


def _blocks(message: AnthropicInputMessage, where: str, fields: FieldReader) -> list[Any]:
    if isinstance(message.content, str):
        return [AnthropicTextBlock(type="text", text=message.content)]
    if not message.content:
        raise bad_request(f"{where} is empty", where)
    return [_block(block, f"{where}[{index}]", fields) for index, block in enumerate(message.content)]


def _block(block: dict[str, Any], where: str, fields: FieldReader) -> Any:
    name = block.get("type")
    if name == "redacted_thinking":
        return None  # encrypted, cannot be used
    kind = ANTHROPIC_BLOCKS.get(name) if isinstance(name, str) else None
    if kind is None:
        known = ", ".join(ANTHROPIC_BLOCKS)
        raise bad_request(f"{where} is a block of type {str(name)[:80]!r}; supported: {known}", where)
    return fields.convert(block, kind, where)


def _assistant(blocks: list[Any], where: str) -> ChatMessage:
    """Reasoning, text and calls as one message."""
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        if isinstance(block, AnthropicTextBlock):
            texts.append(block.text)
        elif isinstance(block, AnthropicThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, AnthropicToolUseBlock):
            arguments = msgspec.json.encode(block.input).decode()
            calls.append(MessageToolCall(function=FunctionCall(name=block.name, arguments=arguments), id=block.id))
        elif block is not None:
            raise bad_request(
                f"{where}[{index}] is of type {block.type}, which only a user message may have", f"{where}[{index}]"
            )
    return ChatMessage(
        role="assistant",
        content="".join(texts) if texts or not calls else None,
        reasoning="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _user_messages(role: str, blocks: list[Any], where: str, fields: FieldReader) -> list[ChatMessage]:
    """Tool results, text and images as messages, in order."""
    messages: list[ChatMessage] = []
    for index, block in enumerate(blocks):
        if isinstance(block, AnthropicToolResultBlock):
            content = _result_content(block, f"{where}[{index}].content", fields)
            messages.append(ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id))
        elif isinstance(block, AnthropicTextBlock | AnthropicImageBlock):
            content = _content(block, f"{where}[{index}]")
            if messages and messages[-1].role == role:
                messages[-1].content = _joined(messages[-1].content, content)
            else:
                messages.append(ChatMessage(role=role, content=content))
        elif block is not None:
            raise bad_request(f"{where}[{index}] is a {block.type}, which only an assistant message may have", where)
    return messages or [ChatMessage(role=role, content="")]


def _content(block: AnthropicTextBlock | AnthropicImageBlock, where: str) -> str | list[dict[str, Any]]:
    if isinstance(block, AnthropicTextBlock):
        return block.text
    if not isinstance(block.source, dict) or block.source.get("type") not in ("base64", "url"):
        raise bad_request(f"{where} is an image whose source is not of type base64 or url", f"{where}.source")
    return [{"type": "image", "source": block.source}]


def _joined(
    first: str | list[dict[str, Any]] | None, second: str | list[dict[str, Any]] | None
) -> str | list[dict[str, Any]]:
    """The content of two blocks: text, or a list of parts if there is an image."""
    if isinstance(first, list) or isinstance(second, list):
        return [*_parts(first), *_parts(second)]
    return f"{first}\n{second}"


def _parts(content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _result_content(block: AnthropicToolResultBlock, where: str, fields: FieldReader) -> str | list[dict[str, Any]]:
    content: str | list[dict[str, Any]] | None = None
    if block.content is None or isinstance(block.content, str):
        content = block.content or ""
    else:
        for index, part in enumerate(block.content):
            read = _block(part, f"{where}[{index}]", fields)
            if not isinstance(read, AnthropicTextBlock | AnthropicImageBlock):
                raise bad_request(f"{where}[{index}] is not text; this server supports text and images only", where)
            part_content = _content(read, f"{where}[{index}]")
            content = part_content if content is None else _joined(content, part_content)
    content = content or ""
    if not block.is_error:
        return content
    return _joined("Error:", content) if isinstance(content, list) else f"Error: {content}"


def _tools(request: CountTokensRequest, fields: FieldReader) -> list[ChatTool] | None:
    """The client's tools. Tools that Anthropic's own servers run are left out."""
    tools = []
    for index, tool in enumerate(request.tools or ()):
        if tool.input_schema is None and tool.type not in (None, "custom"):
            fields.ignore(f"tools[{index}].{tool.type}")
            continue
        function = ChatFunction(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        tools.append(ChatTool(function=function))
    return tools or None


def _tool_choice(request: CountTokensRequest) -> str | NamedTool | None:
    choice = request.tool_choice
    if choice is None or (choice.type in ("auto", "none") and not request.tools):
        return None
    if choice.type == "tool":
        return NamedTool(function=FunctionName(name=choice.name or ""))
    return _CHOICES[choice.type]


def _template_kwargs(request: CountTokensRequest) -> dict[str, Any] | None:
    given = dict(request.chat_template_kwargs or {})
    if request.thinking is not None and request.thinking.type != "adaptive":
        given.setdefault("enable_thinking", request.thinking.type == "enabled")
    return given or None
