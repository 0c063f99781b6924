"""Writes an answer as content blocks and events of /v1/messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.output.parsers.deltas import CallArguments, CallEnd, CallStart, Content, Delta, Reasoning
from quire.server.protocol.common import Usage
from quire.server.protocol.messages import (
    AnthropicAnswerBlock,
    AnthropicAnswerText,
    AnthropicAnswerThinking,
    AnthropicAnswerToolUse,
    AnthropicBlockDelta,
    AnthropicBlockStart,
    AnthropicBlockStop,
    AnthropicEvent,
    AnthropicInputDelta,
    AnthropicMessage,
    AnthropicMessageDelta,
    AnthropicMessageEnd,
    AnthropicMessageStart,
    AnthropicMessageStop,
    AnthropicPing,
    AnthropicSignatureDelta,
    AnthropicTextDelta,
    AnthropicThinkingDelta,
    MessagesUsage,
)


class MessageWriter:
    """Builds a message from deltas and returns the events of each change, which are ignored without streaming."""

    def __init__(self, message_id: str, model: str) -> None:
        self.message = AnthropicMessage(id=message_id, model=model, usage=MessagesUsage(0, 0))
        self._events: list[AnthropicEvent] = []
        self._open: AnthropicAnswerBlock | None = None
        self._index = -1
        self._text: list[str] = []
        self._calls = 0

    def start(self, usage: Usage) -> list[AnthropicEvent]:
        """Begin the answer."""
        empty = msgspec.structs.replace(self.message, content=[], usage=as_usage(usage))
        self._events += [AnthropicMessageStart(empty), AnthropicPing()]
        return self._take_events()

    def write(self, deltas: Sequence[Delta]) -> list[AnthropicEvent]:
        """Add to the answer."""
        for delta in deltas:
            if isinstance(delta, Content):
                self._ensure_block(AnthropicAnswerText, AnthropicAnswerText(""))
                self._add_delta(delta.text, AnthropicTextDelta(delta.text))
            elif isinstance(delta, Reasoning):
                self._ensure_block(AnthropicAnswerThinking, AnthropicAnswerThinking(""))
                self._add_delta(delta.text, AnthropicThinkingDelta(delta.text))
            elif isinstance(delta, CallStart):
                self._begin(AnthropicAnswerToolUse(as_tool_use_id(delta.id), delta.name, {}))
                self._calls += 1
            elif isinstance(delta, CallArguments):
                self._add_delta(delta.text, AnthropicInputDelta(delta.text))
            elif isinstance(delta, CallEnd):
                self._end()
        return self._take_events()

    def finish(self, reason: str | None, stop: int | str | None, usage: Usage) -> list[AnthropicEvent]:
        """End the answer, with OpenAI's finish reason and the stop string or token, if any."""
        self._end()
        message = self.message
        message.stop_sequence = stop if isinstance(stop, str) else None
        if reason == "length":
            message.stop_reason = "max_tokens"
        elif self._calls:
            message.stop_reason = "tool_use"
        else:
            message.stop_reason = "end_turn" if message.stop_sequence is None else "stop_sequence"
        message.usage = as_usage(usage)
        ending = AnthropicMessageEnd(message.stop_reason, message.stop_sequence)
        self._events += [AnthropicMessageDelta(ending, message.usage), AnthropicMessageStop()]
        return self._take_events()

    def _ensure_block(self, kind: type, fresh: AnthropicAnswerBlock) -> None:
        """Open a block of this kind unless one is open."""
        if not isinstance(self._open, kind):
            self._begin(fresh)

    def _begin(self, block: AnthropicAnswerBlock) -> None:
        self._end()
        self._open = block
        self._index += 1
        self._events.append(AnthropicBlockStart(self._index, msgspec.structs.replace(block)))

    def _add_delta(self, text: str, delta: Any) -> None:
        self._text.append(text)
        self._events.append(AnthropicBlockDelta(self._index, delta))

    def _end(self) -> None:
        block, text = self._open, "".join(self._text)
        if block is None:
            return
        self._open, self._text = None, []
        if isinstance(block, AnthropicAnswerText):
            block.text = text
        elif isinstance(block, AnthropicAnswerThinking):
            block.thinking = text
            self._events.append(AnthropicBlockDelta(self._index, AnthropicSignatureDelta("")))
        else:
            arguments = _parse_arguments(text)
            block = None if arguments is None else msgspec.structs.replace(block, input=arguments)
        if block is not None:  # a call with incomplete arguments must not be run
            self.message.content.append(block)
        self._events.append(AnthropicBlockStop(self._index))

    def _take_events(self) -> list[AnthropicEvent]:
        events, self._events = self._events, []
        return events


def as_usage(usage: Usage) -> MessagesUsage:
    """Usage in Anthropic's terms: cached tokens are counted separately."""
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details else 0
    return MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached, energy=usage.energy)


def as_tool_use_id(call_id: str) -> str:
    """A call's id in Anthropic's format; ids in a model's own format stay as they are."""
    return f"toolu_{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id


def _parse_arguments(arguments: str) -> dict[str, Any] | None:
    try:
        parsed = msgspec.json.decode(arguments) if arguments else {}
    except msgspec.DecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None
