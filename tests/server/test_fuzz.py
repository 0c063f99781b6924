"""Bodies that are nearly right: what clients send, with any part of it replaced, added or left out. Each is answered or
refused; none is the server's fault."""

from __future__ import annotations

import collections
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.abuse.bodies import BASE, STATUSES
from tests.server.agent_bodies import aider, claude_code, codex, opencode
from tests.server.conftest import Live
from tests.server.scripted import Script, call

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TOO_LATE = 408
"""For a tiny timeout."""
FULL: list[tuple[str, dict[str, Any]]] = [
    *((path, body) for path, body in BASE.items() if "sessions" not in path),
    (MESSAGES, claude_code(2)),
    ("/v1/messages/count_tokens", claude_code(1)),
    (RESPONSES, codex(2)),
    (CHAT, opencode(2)),
    (CHAT, aider(1)),
    (CHAT, {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "abc"}], "name": "me"},
            {"role": "assistant", "function_call": {"name": "f"}, "thinking_blocks": [{"thinking": "a"}]},
            {"role": "function", "name": "f", "content": "5"},
        ],
        "functions": [{"name": "f", "parameters": {"type": "object"}}], "function_call": {"name": "f"},
        "logit_bias": {"5": 1.0}, "stop": ["a"], "response_format": {"type": "json_object", "schema": {}},
        "reasoning": {"effort": "low", "exclude": True}, "stream": True, "stream_options": {"include_usage": True},
        "documents": [{"title": "a", "text": "b"}], "chat_template_kwargs": {"a": 1}, "metadata": {"a": "b"},
    }),
    (CHAT, {
        "messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "custom", "custom": {"name": "p", "input": "x"}}]}],
        "tools": [{"type": "custom", "custom": {"name": "p", "format": {"grammar": {"definition": "x"}}}}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "custom", "name": "p"}]}},
        "thinking": {"type": "enabled"}, "echo": True, "continue_final_message": True, "add_generation_prompt": False,
        "logprobs": True, "top_logprobs": 2, "n": 2, "guided_regex": "a+", "structured_outputs": {"choice": ["a"]},
    }),
    ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "abc"}]] * 2, "max_tokens": 2}),
    ("/score", {"text_1": "a", "text_2": ["b", {"text": "c"}]}),
    ("/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/pooling", {"input": ["a", "b"], "truncate_prompt_tokens": 1}),
    ("/classify", {"input": "a"}),
    ("/invocations", {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 1}),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}], "truncation_side": "left"}),
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e300, 2**31, 2**63, 2**64, 10**40, "", "a", "0", "1", "true", "null",
    "-1", "1e5", "NaN", "\0", "\ud83d\ude00", "é" * 300, "x" * 5000, [], {}, [[]], [{}], [None], {"a": None}, {"": ""},
    {"type": "text"}, {"type": "function"}, {"type": "custom"}, {"type": "namespace", "name": "n", "tools": [{}]},
    [{"type": "text", "text": "a"}], [1, "a", None], {"name": "f"}, {"function": {"name": "f"}}, ["a"] * 40, [0] * 300,
    {"type": "json_schema", "schema": {"$ref": "#"}}, {"type": 5}, [["a"], 5], {"type": ["a"]}, {"name": {"a": 1}},
]  # fmt: skip
KEYS = [
    *("type", "name", "content", "messages", "tools", "tool_choice", "input", "prompt", "id", "arguments", "function"),
    *("custom", "namespace", "thinking", "reasoning", "n", "stream", "stop", "seed", "temperature", "max_tokens"),
    *("logprobs", "suffix", "response_format", "guided_json", "priority", "timeout", "request_id", "cache_salt"),
    *("truncate_prompt_tokens", "user", "a\r\nb", "", "__class__", "x" * 300),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key inside a value."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def mutated(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The body with one to three changes."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        found = list(places(body))
        if not found:
            break
        container, key = rng.choice(found)
        change = rng.randrange(5)
        if change == 0 and isinstance(container, dict):
            container[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
        elif change == 1:
            del container[key]
        elif change == 2:
            other, place = rng.choice(found)
            container[key] = copy.deepcopy(other[place]) if other is not container else None
        else:
            container[key] = copy.deepcopy(rng.choice(VALUES))
    return body


def fuzz(live: Live, seed: int, count: int) -> collections.Counter[int]:
    rng = random.Random(seed)
    statuses: collections.Counter[int] = collections.Counter()
    for _ in range(count):
        path, full = rng.choice(FULL)
        body = mutated(full, rng)
        sent = json.dumps(body).encode()
        answer = live.client.post(path, content=sent, headers={"content-type": "application/json"})
        assert answer.status_code in (*STATUSES, TOO_LATE), (path, body, answer.text[:500])
        assert '"code":500' not in answer.text, (path, body, answer.text[-500:])
        statuses[answer.status_code] += 1
    return statuses


def test_nearly_right_bodies_are_answered_or_refused(scripted: Live, script: Script) -> None:
    script.answer = lambda prompt: "ok " + call("f", a="x")
    statuses = fuzz(scripted, 20, 1000)
    assert statuses[200] > 200 and statuses[400] > 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_thousands_of_them(scripted: Live, script: Script) -> None:
    script.answer = lambda prompt: "ok " + call("f", a="x")
    print(fuzz(scripted, 21, 20_000))
