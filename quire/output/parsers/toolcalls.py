"""tools and tool_choice of a request: their prompt, the constraint on the answer, and its parser."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from quire.messages.sampling import StructuredOutputsParams
from quire.output.parsers.deltas import CallArguments, CallEnd, CallStart, Content, Delta, ParsedAnswer, gather
from quire.output.parsers.tools.base import ToolParser, make_tool_parser, notation_of, openai_id
from quire.output.parsers.tools.json_scanner import JsonScanner

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

_CALLS = '[{"name": "a tool\'s name", "parameters": {"a parameter": "its value"}}]'

MARKS = (
    ("<|channel|>", "openai"),
    ("<function=", "qwen3_coder"),
    ("<tool_sep>", "hy_v3"),
    ("<arg_key>", "glm45"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<dots_function_call>", "dots"),
    ('<function name="', "minicpm5"),
    ("<|tools_prefix|>", "apertus"),
    ("<seed:tool_call>", "seed_oss"),
    ("｜DSML｜tool_calls", "deepseek_v4"),
    ("｜DSML｜", "deepseek_v32"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call>", "gemma4"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<function_calls>", "olmo3"),
    ("<|tool_list_start|>", "lfm2"),
    ("<|tool_call_start|>", "lfm2"),
    ("<steptml:invoke", "step3"),
    ("<|action_start|>", "internlm"),
    ("<longcat_tool_call>", "longcat"),
    ("<|function_call|>", "gigachat3"),
    ("functools", "phi4_mini_json"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
)
"""Markers that chat templates write around calls, and the parser of that notation; the first that is found counts."""
_TYPED = re.compile(r"function<｜tool▁sep｜>|\['type'\]\s*\+\s*'<｜tool▁sep｜>")


class OfferedFunction(Protocol):
    """A tool that the model may call."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str | None: ...

    @property
    def parameters(self) -> dict[str, Any] | None:
        """A JSON schema."""


def guess_parser(template: str | None) -> str:
    """The parser for the notation in a chat template; plain JSON where it has none."""
    found = next((parser for mark, parser in MARKS if mark in (template or "")), "json")
    # The older of DeepSeek's two notations, with the same marks, also has the tool's type.
    is_older = found == "deepseek_v31" and template is not None and _TYPED.search(template)
    return "deepseek_v3" if is_older else found


class NamedCallReader:
    """An answer that consists of the arguments of one call, whose name is known."""

    needs_special_tokens: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._scanner = JsonScanner()
        self._started = False

    def push(self, text: str) -> list[Delta]:
        """Add text of the answer; returns the deltas that are now certain."""
        deltas: list[Delta] = []
        if not self._started and text:
            self._started = True
            deltas.append(CallStart(0, openai_id(), self._name))
        if text and not self._scanner.done and not self._scanner.failed:
            self._scanner.feed(text, 0)
            if piece := self._scanner.take():
                deltas.append(CallArguments(0, piece))
        return deltas

    def finish(self) -> list[Delta]:
        """The answer has ended; returns the deltas held back."""
        if not self._started:
            return []
        rest = self._scanner.take_pending()
        ended: list[Delta] = [CallEnd(0, self._scanner.done)]
        return [CallArguments(0, rest), *ended] if rest else ended

    def parse(self, text: str) -> ParsedAnswer:
        """A whole answer, exactly as if pushed in pieces."""
        return gather(self.push(text) + self.finish())


class RequiredCallsReader:
    """An answer that a grammar makes a list of calls: what is no call is the beginning of one that was cut off."""

    needs_special_tokens: ClassVar[bool] = False

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Delta]:
        """Add text of the answer; returns the deltas that are now certain."""
        return _without_text(self._parser.push(text))

    def finish(self) -> list[Delta]:
        """The answer has ended; returns the deltas held back."""
        return _without_text(self._parser.finish())

    def parse(self, text: str) -> ParsedAnswer:
        """A whole answer, exactly as if pushed in pieces."""
        return gather(self.push(text) + self.finish())


def _without_text(deltas: list[Delta]) -> list[Delta]:
    return [delta for delta in deltas if not isinstance(delta, Content)]


class ToolPlan:
    """Tools and tool_choice of one request."""

    def __init__(
        self,
        functions: Sequence[OfferedFunction],
        choice: str | None = None,
        *,
        named: str | None = None,
        is_parallel: bool = True,
        parser: str = "json",
        is_auto_on: bool = True,
    ) -> None:
        """`choice` is none, auto (the same as no choice) or required; `named` is the one tool that must be called."""
        self._functions = list(functions)
        self._parser = parser
        self.is_parallel = is_parallel
        self.named = named
        """The tool that must be called, where one is named."""
        self.required = named is None and choice == "required"
        is_auto = choice in (None, "auto") and is_auto_on
        self.is_active = bool(self._functions) and (is_auto or self.required or named is not None)
        """Whether the answer may hold calls."""

    def make_parser(self) -> ToolParser | None:
        """A fresh parser for one answer."""
        if not self.is_active:
            return None
        if self.named is not None:
            return NamedCallReader(self.named)
        offered = {function.name: function.parameters for function in self._functions}
        # A constrained answer is plain JSON, whatever the model's own notation is.
        if self.required:
            return RequiredCallsReader(make_tool_parser("json", offered))
        return make_tool_parser(self._parser, offered)

    def constraint(self) -> StructuredOutputsParams | None:
        """The structured output that enforces required calls. On one line: weak models emit endless line breaks."""
        schema: dict[str, Any] | None = None
        if self.named is not None:
            schema = next(each for each in self._functions if each.name == self.named).parameters or NO_PARAMETERS
        elif self.is_active and self.required:
            schema = _calls_schema(self._functions, self.is_parallel)
        return None if schema is None else StructuredOutputsParams(json=schema, disable_any_whitespace=True)

    def preamble(self) -> str | None:
        """Instructions for a model whose chat template does not support tools; None where it must not call any."""
        if not self.is_active:
            return None
        if self.named is not None:
            how = f"Call {self.named} now: answer with its arguments alone, a JSON object."
        elif self.required:
            how = f"Call now what the task needs: answer with nothing but a JSON list of calls, such as {_CALLS}"
        else:
            how = notation_of(self._parser)
        return tool_preamble(self._functions, how)

    def finish_reason(self, reason: str, calls: int) -> str:
        """The finish reason in OpenAI's terms: "tool_calls" after calls, unless the call was required by name."""
        return "tool_calls" if calls and reason == "stop" and self.named is None else reason


def _calls_schema(functions: list[OfferedFunction], parallel: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls of these functions."""
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = dict(function.parameters or NO_PARAMETERS)
        if isinstance(parameters.get("$defs"), dict):  # references in a schema are looked up from the outermost one
            definitions |= parameters.pop("$defs")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [function.name]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})


def tool_preamble(functions: Sequence[OfferedFunction], how: str) -> str:
    """The part of a system message about tools: each as a line of JSON, then `how` they are called."""
    lines = "\n".join(json.dumps(_describe(function), ensure_ascii=False) for function in functions)
    intro = "You have tools: functions that you can call. Here they are in JSON, one a line."
    return f"{intro}\n<tools>\n{lines}\n</tools>\n{how}"


def with_preamble(messages: Sequence[dict[str, Any]], preamble: str, role: str) -> list[dict[str, Any]]:
    """The conversation with the preamble in its first message of this role, or in a new first message.

    It is appended to a system message and prepended to a user message.
    """
    extended = [dict(message) for message in messages]
    at = next((index for index, message in enumerate(extended) if message.get("role") == role), None)
    if at is None or (role == "system" and at > 0):
        return [{"role": role, "content": preamble}, *extended]
    content = extended[at].get("content") or ""
    if isinstance(content, str):
        pair = (content, preamble) if role == "system" else (preamble, content)
        extended[at]["content"] = "\n\n".join(text for text in pair if text)
    else:
        part = {"type": "text", "text": preamble}
        extended[at]["content"] = [*content, part] if role == "system" else [part, *content]
    return extended


def _describe(function: OfferedFunction) -> dict[str, Any]:
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in fields.items() if value is not None}
