"""Requests as agents on the terminal send them: the fields, types and order of recorded ones, with texts of our own.

Recorded from Claude Code 2.1.197, Codex CLI 0.169.0 and opencode 1.18.33, each with a prompt whose answer takes two
tool calls; aider's is written after its documentation. `turn` is the number of tool calls that have been answered.
"""

from __future__ import annotations

import json
from typing import Any

Body = dict[str, Any]


def _schema(*names: str) -> Body:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {name: {"type": "string", "description": f"The {name}."} for name in names},
        "required": [names[0]],
        "additionalProperties": False,
    }


def claude_code(turn: int) -> Body:
    """POST /v1/messages?beta=true."""
    ephemeral = {"type": "ephemeral"}
    messages: list[Body] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<reminder>Monday.</reminder>"}, {"type": "text", "text": "run it"}],
        },
        {"role": "system", "content": "Tools that are found later are named here."},
    ]  # fmt: skip
    for call in range(turn):
        use = {
            "type": "tool_use",
            "id": f"toolu_{call}",
            "name": "Bash",
            "input": {"command": f"echo {call}", "description": "say"},
        }
        messages.append(
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, use]}
        )
        result = {"tool_use_id": f"toolu_{call}", "type": "tool_result", "content": f"said {call}", "is_error": False}
        messages.append(
            {"role": "user", "content": [{**result, "cache_control": ephemeral} if call == turn - 1 else result]}
        )
    return {
        "model": "tiny",
        "messages": messages,
        "system": [
            {"type": "text", "text": "A header that names the program."},
            {"type": "text", "text": "You help with code.", "cache_control": ephemeral},
            {"type": "text", "text": "Be brief.", "cache_control": {**ephemeral, "ttl": "1h", "scope": "global"}},
        ],
        "tools": [
            {"name": "Bash", "description": "Runs a command.", "input_schema": _schema("command", "description")},
            {"name": "Read", "description": "Reads.", "input_schema": _schema("file_path"), "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
        "max_tokens": 4000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }  # fmt: skip


def codex(turn: int) -> Body:
    """POST /v1/responses."""

    def message(number: int, role: str, *texts: str) -> Body:
        parts = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "id": f"msg_{number}", "role": role, "content": parts}

    items = [
        message(0, "developer", "You help with code."),
        message(1, "developer", "<permissions>all</permissions>", "<skills>none</skills>"),
        message(2, "user", "<environment>a shell</environment>"),
        message(3, "user", "run it"),
    ]
    for call in range(turn):
        thought = [{"type": "reasoning_text", "text": "hm"}]
        items += [
            {"type": "reasoning", "id": f"rs_{call}", "summary": [], "content": thought, "encrypted_content": None},
            {"type": "function_call", "status": "completed", "id": f"fc_{call}", "name": "exec_command",
             "arguments": json.dumps({"cmd": f"echo {call}"}), "call_id": f"call_{call}"},
            {"type": "function_call_output", "id": f"fco_{call}", "call_id": f"call_{call}", "output": f"said {call}"},
        ]  # fmt: skip
    function = {"type": "function", "description": "Does it.", "strict": False}
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" /.+/'}
    return {
        "model": "tiny",
        "stream": True,
        "input": items,
        "tools": [
            {**function, "name": "exec_command", "parameters": _schema("cmd", "workdir")},
            {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": grammar},
            {"type": "namespace", "name": "agents", "description": "Other agents.",
             "tools": [{**function, "name": "close", "parameters": _schema("target")}]},
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "low"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a1",
        "client_metadata": {"turn_id": "01a1", "session_id": "01a1", "x-codex-window-id": "01a1:0"},
    }  # fmt: skip


def opencode(turn: int) -> Body:
    """POST /v1/chat/completions, through the AI SDK's provider for compatible servers."""
    messages: list[Body] = [
        {"role": "system", "content": "You help with code."},
        {"role": "user", "content": '"run it"'},
    ]
    for call in range(turn):
        arguments = json.dumps({"command": f"echo {call}", "description": "say"}, separators=(",", ":"))
        made = {"id": f"call_{call}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [made]})
        messages.append({"role": "tool", "tool_call_id": f"call_{call}", "content": f"said {call}\n"})
    function = {"name": "bash", "description": "Runs a command.", "parameters": _schema("command", "timeout")}
    return {
        "model": "tiny",
        "max_tokens": 200,
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def aider(turn: int) -> Body:
    """POST /v1/chat/completions, through LiteLLM: edits come as text, not as calls."""
    messages: list[Body] = [{"role": "system", "content": "Answer with edit blocks."}]
    for call in range(turn):
        messages.append({"role": "user", "content": f"edit {call}"})
        messages.append({
            "role": "assistant", "content": f"block {call}", "tool_calls": None, "function_call": None,
            "provider_specific_fields": {"refusal": None},
        })  # fmt: skip
    part = {"type": "text", "text": f"edit {turn}", "cache_control": {"type": "ephemeral"}}
    messages.append({"role": "user", "content": [part]})
    return {"model": "tiny", "messages": messages, "temperature": 0, "stream": True, "max_tokens": 200}
