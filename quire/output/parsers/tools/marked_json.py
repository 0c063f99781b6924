"""Granite, Phi-4-mini, Jamba, InternLM, GigaChat, Apertus, Cohere: a mark, then call objects in JSON."""

from __future__ import annotations

from typing import ClassVar

from quire.output.parsers.incremental import Reads
from quire.output.parsers.tools.base import CallParser


class MarkedJsonParser(CallParser):
    """A mark, then a list of `{"name": "f", "arguments": {…}}` or one such object, and perhaps a closing mark."""

    closing: ClassVar[str] = ""

    def _calls(self, opener: str) -> Reads[None]:
        start = yield from self._take_next("{[")
        if not start or not (yield from self._objects(start, is_marked=True)):
            return
        yield from self._skip_spaces()
        if self.closing and (yield from self._take_word(self.closing)):
            self._held.clear()


class GraniteParser(MarkedJsonParser):
    """Granite 3: `<|tool_call|>[{"name": "f", "arguments": {…}}, …]`, since 3.1 `<tool_call>`."""

    tags = ("<|tool_call|>", "<tool_call>")
    needs_special_tokens = True
    notation = (
        "To call tools, answer with a list of their names and arguments in JSON:\n"
        '<tool_call>[{"name": "a tool\'s name", "arguments": {"a parameter": "its value"}}]\n'
        "Where no tool helps, answer in plain words."
    )


class Granite20bParser(MarkedJsonParser):
    """Granite 20B for function calling: `<function_call> {"name": "f", "arguments": {…}}`, once for each call."""

    tags = ("<function_call>",)
    needs_special_tokens = True
    notation = (
        "To call one, answer with its name and arguments in JSON after this mark, once for each call:\n"
        '<function_call> {"name": "a tool\'s name", "arguments": {"a parameter": "its value"}}\n'
        "Where no tool helps, answer in plain words."
    )


class InternLmParser(MarkedJsonParser):
    """InternLM 2 and 3: `<|action_start|><|plugin|>{"name": "f", "parameters": {…}}<|action_end|>`."""

    tags = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    closing = "<|action_end|>"
    needs_special_tokens = True
    notation = (
        "To call one, answer with its name and parameters in JSON between these marks:\n"
        '<|action_start|><|plugin|>{"name": "a tool\'s name", "parameters": {"a parameter": "its value"}}'
        "<|action_end|>\n"
        "Where no tool helps, answer in plain words."
    )


class GigaChat3Parser(MarkedJsonParser):
    """GigaChat 3.1: `<|function_call|>{"name": "f", "arguments": {…}}`; in GigaChat 3 a message `function call`."""

    tags = ("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n")
    closing = "</s>"
    needs_special_tokens = True
    notation = (
        "To call one, answer with its name and arguments in JSON after this mark:\n"
        '<|function_call|>{"name": "a tool\'s name", "arguments": {"a parameter": "its value"}}\n'
        "Where no tool helps, answer in plain words."
    )


class Phi4MiniParser(MarkedJsonParser):
    """Phi-4-mini: `functools[{"name": "f", "arguments": {…}}, …]`, or the same list between `<|tool_call|>` marks."""

    tags = ("functools", "<|tool_call|>")
    closing = "<|/tool_call|>"
    needs_special_tokens = True
    notation = (
        "To call tools, answer with a list of their names and arguments in JSON:\n"
        'functools[{"name": "a tool\'s name", "arguments": {"a parameter": "its value"}}]\n'
        "Where no tool helps, answer in plain words."
    )


class JambaParser(MarkedJsonParser):
    """Jamba: `<tool_calls>[{"name": "f", "arguments": {…}}, …]</tool_calls>`."""

    tags = ("<tool_calls>",)
    closing = "</tool_calls>"
    needs_special_tokens = True
    notation = (
        "To call tools, answer with a list of their names and arguments in JSON:\n"
        '<tool_calls>[{"name": "a tool\'s name", "arguments": {"a parameter": "its value"}}]</tool_calls>\n'
        "Where no tool helps, answer in plain words."
    )


class ApertusParser(CallParser):
    """Apertus: `<|tools_prefix|>[{"f": {…}}, …]<|tools_suffix|>`, where each key is a tool's name."""

    tags = ("<|tools_prefix|>",)
    needs_special_tokens = True
    notation = (
        "To call tools, answer with a list of objects in JSON, each with a name and its arguments:\n"
        '<|tools_prefix|>[{"tool_name": {"a parameter": "its value"}}]<|tools_suffix|>\n'
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        separator = yield from self._take_next("[")
        while separator and separator in "[,":
            if not (yield from self._take_next("{")):
                return
            yield from self._skip_spaces()
            name = yield from self._read_string()
            if name is None or not (yield from self._take_next(":")) or not self._accepts(name, is_marked=True):
                return
            if (yield from self._skip_spaces()) != "{" or not (yield from self._stream_arguments(name)):
                return
            if not (yield from self._take_next("}")):
                return
            self._held.clear()
            separator = yield from self._take_next(",]")
        if separator == "]":
            self._held.clear()
            yield from self._skip_spaces()
            if (yield from self._take_word("<|tools_suffix|>")):
                self._held.clear()


class CohereCommandParser(MarkedJsonParser):
    """Command A and R7B: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {…}}]<|END_ACTION|>`.

    The marks around the answer are dropped.
    """

    tags = ("<|START_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
    closing = "<|END_ACTION|>"
    name_keys = ("tool_name", "name")
    needs_special_tokens = True
    notation = (
        "To call tools, answer with a list of their names and parameters in JSON:\n"
        '<|START_ACTION|>[{"tool_name": "a tool\'s name", "parameters": {"a parameter": "its value"}}]<|END_ACTION|>\n'
        "Where no tool helps, answer in plain words."
    )

    def _calls(self, opener: str) -> Reads[None]:
        if opener == "<|START_ACTION|>":
            yield from super()._calls(opener)
        else:
            self._held.clear()
