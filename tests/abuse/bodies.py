"""Bodies that are cheap to send and were expensive to read: every free-form or repeated field, filled with many values,
deep nesting, long texts and strings that look like structure."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EMBED = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
SESSIONS = "/v1/sessions"
BATCH = "/v1/chat/completions/batch"
CONVERSATIONS = "/v1/conversations"
POOLING = "/pooling"
CLASSIFY = "/classify"
SCORE = "/score"
RERANK = "/rerank"
INVOCATIONS = "/invocations"
USER = [{"role": "user", "content": "abc"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 2},
    TEXT: {"prompt": "abc", "max_tokens": 2},
    EMBED: {"input": "abc"},
    RESPONSES: {"input": "abc", "max_output_tokens": 16},
    MESSAGES: {"messages": USER, "max_tokens": 2},
    COUNT: {"messages": USER},
    TOKENIZE: {"prompt": "abc"},
    DETOKENIZE: {"tokens": [5]},
    SESSIONS: {"input": "abc", "ttl": 1},
    BATCH: {"messages": [USER], "max_tokens": 2},
    CONVERSATIONS: {},
    POOLING: {"input": "abc"},
    CLASSIFY: {"input": "abc"},
    SCORE: {"text_1": "abc", "text_2": "abc"},
    RERANK: {"query": "abc", "documents": ["abc"]},
    INVOCATIONS: {"max_tokens": 2},
}
STATUSES = (200, 400, 404, 413, 429)
"""What any body may get: never a 500, never nothing."""

FIELDS: dict[str, tuple[str, ...]] = {
    CHAT: (
        "messages", "metadata", "vllm_xargs", "chat_template_kwargs", "documents", "tools", "stop", "bad_words",
        "logit_bias", "stop_token_ids", "allowed_token_ids", "structured_outputs", "response_format", "model", "user",
        "service_tier", "cache_salt", "request_id", "session_id", "tool_choice", "reasoning_effort", "unknown",
    ),
    TEXT: (
        "prompt", "metadata", "vllm_xargs", "stop", "bad_words", "logit_bias", "stop_token_ids", "allowed_token_ids",
        "structured_outputs", "response_format", "model", "user", "unknown",
    ),
    EMBED: ("input", "model", "user", "unknown"),
    RESPONSES: (
        "input", "instructions", "metadata", "vllm_xargs", "chat_template_kwargs", "tools", "include", "text",
        "reasoning", "tool_choice", "model", "unknown",
    ),
    MESSAGES: (
        "messages", "system", "tools", "metadata", "chat_template_kwargs", "output_config", "stop_sequences", "unknown",
    ),
    COUNT: ("messages", "system", "tools"),
    TOKENIZE: ("prompt", "messages", "tools", "chat_template_kwargs", "model"),
    DETOKENIZE: ("tokens", "model"),
    SESSIONS: ("input", "tools", "chat_template_kwargs", "metadata", "id"),
    BATCH: ("messages", "metadata", "chat_template_kwargs", "stop", "response_format", "unknown"),
    CONVERSATIONS: ("items", "metadata", "unknown"),
    POOLING: ("input", "messages", "chat_template_kwargs"),
    CLASSIFY: ("input", "messages", "unknown"),
    SCORE: ("text_1", "text_2", "queries", "documents", "unknown"),
    RERANK: ("query", "documents", "top_n", "unknown"),
    INVOCATIONS: ("messages", "prompt", "input", "query", "text_1", "unknown"),
}  # fmt: skip

CONTAINERS: dict[str, str] = {
    "messages": '[{{"role":"user","content":{}}}]',
    "tools": '[{{"type":"function","function":{{"name":"f","parameters":{{"a":{}}}}}}}]',
    "metadata": '{{"a":{}}}',
    "vllm_xargs": '{{"a":{}}}',
    "chat_template_kwargs": '{{"a":{}}}',
    "documents": '[{{"a":{}}}]',
    "structured_outputs": '{{"json":{{"a":{}}}}}',
    "response_format": '{{"type":"json_schema","json_schema":{{"schema":{{"enum":{}}}}}}}',
    "text": '{{"format":{{"type":"json_schema","schema":{{"enum":{}}}}}}}',
    "output_config": '{{"format":{{"type":"json_schema","schema":{{"enum":{}}}}}}}',
}
"""How a value is put where the field takes anything."""


class Attack(NamedTuple):
    """One request."""

    name: str
    path: str
    body: bytes


def shapes(size: int) -> dict[str, str]:
    """Values of about `size` bytes, as JSON."""
    return {
        "empty lists": "[" + "[]," * (size // 3) + "1]",
        "empty objects": "[" + "{}," * (size // 3) + "1]",
        "numbers": "[" + "1," * (size // 2) + "1]",
        "floats": "[" + "1.0," * (size // 4) + "1]",
        "texts": "[" + '"",' * (size // 3) + '""]',
        "lists of numbers": "[" + "[5]," * (size // 4) + "[5]]",
        "objects": "[" + '{"role":"user","content":"a"},' * (size // 29) + '{"role":"user","content":"a"}]',
        "items": "[" + '{"type":"message","role":"user","content":"a"},' * (size // 47) + "1]",
        "keys": "{" + ",".join(f'"{i}":1' for i in range(size // 10)) + "}",
        "deep lists": "[" * (size // 2) + "]" * (size // 2),
        "deep objects": '{"a":' * (size // 6) + "1" + "}" * (size // 6),
        "a text": '"' + "a b," * (size // 4) + '"',
        "a text of other letters": '"' + "é" * (size // 2) + '😀"',
        "escapes": '"' + '\\"[,{' * (size // 5) + '"',
        "backslashes": '"' + "\\\\" * (size // 2) + '"',
        "control characters": '"' + "\\u0000" * (size // 6) + '"',
        "JSON as text": json.dumps("[" + "[]," * (size // 3) + "[]]"),
        "digits": "1" * size,
        "spaces": " " * size + "1",
    }


def attacks(size: int, rng: random.Random | None = None, count: int | None = None) -> Iterator[Attack]:
    """Every shape in every field, or `count` of them by chance."""
    values = shapes(size)
    combined = [(path, field, shape) for path, fields in FIELDS.items() for field in fields for shape in values]
    if rng is not None and count is not None:
        combined = rng.sample(combined, count)
    for path, field, shape in combined:
        for form in ("{}", *([CONTAINERS[field]] if field in CONTAINERS else [])):
            base = json.dumps({name: given for name, given in BASE[path].items() if name != field})[:-1]
            joint = ", " if len(base) > 1 else ""
            body = f'{base}{joint}"{field}": {form.format(values[shape])}}}'.encode()
            yield Attack(f"{path} {field} {shape}{' inside' if form != '{}' else ''}", path, body)
    yield Attack("a name of megabytes", TEXT, b'{"prompt": "a", "' + b"a - at `" * (size // 8) + b'": 1}')
    calls = json.dumps([{"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 30_000}}] * 3)
    messages = f'{{"role": "assistant", "tool_calls": {calls}}},' * (size // 100_000)
    yield Attack("JSON in tool calls", CHAT, f'{{"messages": [{messages} {{"role": "user"}}]}}'.encode())
