"""Converts messages as clients send them to what chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ValidationError, short_repr
from quire.messages.json_limits import JsonLimits, check_json

Message = dict[str, Any]
MAX_MESSAGES = 16_384
MAX_NESTING = 64
ARGUMENTS = JsonLimits(values=1 << 16, depth=MAX_NESTING)
"""Of one tool call."""
MAX_ARGUMENT_MARKS = 1 << 18
"""Commas and brackets in the arguments of all tool calls: there are not more values to make."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Fields that may hold a message's reasoning; templates read the first or the second."""


def plain(value: Any, parameter: str, level: int = 0) -> Any:
    """A copy made of JSON types only: a template must not reach methods of other objects."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if level > MAX_NESTING:
        raise ValidationError(f"{parameter} is nested deeper than {MAX_NESTING} levels", parameter)
    if isinstance(value, Mapping):
        return {_plain_key(key, parameter): plain(item, parameter, level + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, parameter, level + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if callable(getattr(value, "model_dump", None)):  # messages of the openai client
        return plain(value.model_dump(exclude_none=True), parameter, level + 1)
    raise ValidationError(f"{parameter} holds a {type(value).__name__}, which is not JSON", parameter)


def normalized(
    messages: Sequence[Any],
    *,
    parts: bool,
    wrap_text: bool,
    keep_none: bool,
    placeholders: Mapping[str, str] | None = None,
) -> list[Message]:
    """Checked copies of the messages.

    `parts`: the template loops over content parts; otherwise they are joined to one text. `wrap_text`: it accepts parts
    only, so a text becomes one part. `keep_none`: it handles a content of None; otherwise "" replaces it.
    `placeholders`: texts that stand for parts of other types, such as images, where parts are joined; parts of types
    that it lacks are refused.
    """
    if not messages:
        raise ValidationError("a conversation is empty: it needs at least one message", "messages", [])
    if len(messages) > MAX_MESSAGES:
        raise ValidationError(
            f"a conversation has {len(messages)} messages; at most {MAX_MESSAGES}", "messages", len(messages)
        )
    normal = []
    marks = 0
    for index, message in enumerate(messages):
        marks += _argument_marks(message)
        if marks > MAX_ARGUMENT_MARKS:
            raise ValidationError(
                f"the arguments of all tool calls hold more than {MAX_ARGUMENT_MARKS} values", f"messages[{index}]"
            )
        normal.append(_normalize(message, f"messages[{index}]", parts, wrap_text, keep_none, placeholders or {}))
    return normal


def _argument_marks(message: Any) -> int:
    """Commas and brackets in the arguments of a message's tool calls that are JSON text."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    texts = [function.get("arguments") for function in functions if isinstance(function, dict)]
    return sum(text.count(mark) for text in texts if isinstance(text, str) for mark in ",[{")


def _normalize(
    given: Any, where: str, parts: bool, wrap_text: bool, keep_none: bool, placeholders: Mapping[str, str]
) -> Message:
    message = plain(given, where)
    if not isinstance(message, dict):
        raise ValidationError(f"{where} is a {type(given).__name__}; a message is an object", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValidationError(f"{where} needs a role, such as 'user'; got {short_repr(role)}", f"{where}.role", role)
    calls = message.get("tool_calls")
    if calls is None:
        message.pop("tool_calls", None)
    else:
        message["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    content = _content(message.get("content"), f"{where}.content", parts, placeholders)
    if content is None and role != "assistant" and not calls:
        raise ValidationError(f"{where} of role {short_repr(role)} has no content", f"{where}.content")
    if content is None and not keep_none:
        content = ""
    if wrap_text and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    message["content"] = content
    return _with_reasoning(message)


def _content(content: Any, where: str, parts: bool, placeholders: Mapping[str, str]) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError(f"{where} is text or a list of parts, not {short_repr(content)}", where)
    if not parts:
        return "\n".join(
            _placeholder(part, placeholders) or _part_text(part, f"{where}[{index}]")
            for index, part in enumerate(content)
        )
    read = []
    for index, part in enumerate(content):
        if _placeholder(part, placeholders) is not None:
            read.append({"type": part["type"]})
            continue
        text = _part_text(part, f"{where}[{index}]")
        # A template may read further fields of a part, such as the languages of a translation.
        read.append({**(part if isinstance(part, dict) else {}), "type": "text", "text": text})
    return read


def _placeholder(part: Any, placeholders: Mapping[str, str]) -> str | None:
    """The text that stands for an image or the like; None: it is none."""
    kind = part.get("type") if isinstance(part, dict) and len(part) == 1 else None
    return placeholders.get(kind) if isinstance(kind, str) else None


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise ValidationError(
            f"{where} is a content part of type {short_repr(kind)}; this server reads text parts only", where, kind
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ValidationError(f"{where} is a text part whose text is {short_repr(text)}", where)
    return text


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise ValidationError(f"{where} is a list of calls, not {short_repr(calls)}", where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> Any:
    """A call with its arguments as an object: clients send JSON text, templates write the arguments themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValidationError(f"{where} needs a function with a name and arguments", where)
    if not isinstance(function.get("name"), str):
        raise ValidationError(f"{where}.function.name is {short_repr(function.get('name'))}, not a name", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}.function.arguments")
    if not isinstance(arguments, dict | None):
        raise ValidationError(f"{where}.function.arguments is {short_repr(arguments)}, not a JSON object", where)
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _parsed(arguments: str, where: str) -> Any:
    if not arguments.strip():
        return {}
    try:
        check_json(arguments.encode("utf-8", "surrogatepass"), ARGUMENTS, where, where)
        return plain(json.loads(arguments), where)
    except ValidationError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"{where} is not the text of a JSON object: {error}", where) from None


def _with_reasoning(message: Message) -> Message:
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain_key(key: Any, parameter: str) -> Any:
    if key is None or isinstance(key, (str, bool, int, float)):
        return plain(key, parameter)
    raise ValidationError(f"{parameter} holds a key of type {type(key).__name__}", parameter)
