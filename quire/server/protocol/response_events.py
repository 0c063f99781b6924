"""/v1/responses: the events of a stream."""

from __future__ import annotations

from typing import Union

import msgspec

from quire.server.protocol.chat import TokenLogprob
from quire.server.protocol.responses import OutputItem, OutputReasoningText, OutputText, Response


class ResponseEvent(msgspec.Struct, tag_field="type", kw_only=True):
    """An event of a stream; they are numbered from 0."""

    sequence_number: int = 0

    @property
    def kind(self) -> str:
        """The event's type, which is its name too."""
        tag = self.__struct_config__.tag
        return str(tag)


class Created(ResponseEvent, tag="response.created", kw_only=True):
    response: Response


class InProgress(ResponseEvent, tag="response.in_progress", kw_only=True):
    response: Response


class Completed(ResponseEvent, tag="response.completed", kw_only=True):
    response: Response


class Incomplete(ResponseEvent, tag="response.incomplete", kw_only=True):
    response: Response


class ResponseFailed(ResponseEvent, tag="response.failed", kw_only=True):
    response: Response


class ItemAdded(ResponseEvent, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: OutputItem


class _ItemEvent(ResponseEvent, kw_only=True):
    item_id: str
    output_index: int


class _PartEvent(_ItemEvent, kw_only=True):
    content_index: int = 0


class PartAdded(_PartEvent, tag="response.content_part.added", kw_only=True):
    part: Union[OutputText, OutputReasoningText]


class PartDone(_PartEvent, tag="response.content_part.done", kw_only=True):
    part: Union[OutputText, OutputReasoningText]


class TextDelta(_PartEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_PartEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_PartEvent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(_PartEvent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ArgumentsDelta(_ItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(_ItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str


AnyResponseEvent = Union[
    Created, InProgress, Completed, Incomplete, ResponseFailed, ItemAdded, ItemDone, PartAdded, PartDone, TextDelta,
    TextDone, ReasoningDelta, ReasoningDone, ArgumentsDelta, ArgumentsDone,
]  # fmt: skip
