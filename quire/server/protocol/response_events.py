"""/v1/responses: the events of a stream."""

from __future__ import annotations

from typing import Union

import msgspec

from quire.server.protocol.chat import TokenLogprob
from quire.server.protocol.responses import (
    ResponseObject,
    ResponseOutputItem,
    ResponseOutputReasoningText,
    ResponseOutputText,
)


class ResponseEvent(msgspec.Struct, tag_field="type", kw_only=True):
    """An event of a stream, numbered from 0."""

    sequence_number: int = 0

    @property
    def kind(self) -> str:
        """The event's type, also its name."""
        tag = self.__struct_config__.tag
        return str(tag)


class ResponseCreated(ResponseEvent, tag="response.created", kw_only=True):
    response: ResponseObject


class ResponseQueued(ResponseEvent, tag="response.queued", kw_only=True):
    response: ResponseObject


class ResponseInProgress(ResponseEvent, tag="response.in_progress", kw_only=True):
    response: ResponseObject


class ResponseCompleted(ResponseEvent, tag="response.completed", kw_only=True):
    response: ResponseObject


class ResponseIncomplete(ResponseEvent, tag="response.incomplete", kw_only=True):
    response: ResponseObject


class ResponseFailed(ResponseEvent, tag="response.failed", kw_only=True):
    response: ResponseObject


class ResponseItemAdded(ResponseEvent, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: ResponseOutputItem


class ResponseItemDone(ResponseEvent, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: ResponseOutputItem


class _ItemEvent(ResponseEvent, kw_only=True):
    item_id: str
    output_index: int


class _PartEvent(_ItemEvent, kw_only=True):
    content_index: int = 0


class ResponsePartAdded(_PartEvent, tag="response.content_part.added", kw_only=True):
    part: Union[ResponseOutputText, ResponseOutputReasoningText]


class ResponsePartDone(_PartEvent, tag="response.content_part.done", kw_only=True):
    part: Union[ResponseOutputText, ResponseOutputReasoningText]


class ResponseTextDelta(_PartEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob]


class ResponseTextDone(_PartEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob]


class ResponseReasoningDelta(_PartEvent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ResponseReasoningDone(_PartEvent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ResponseArgumentsDelta(_ItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ResponseArgumentsDone(_ItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str


class ResponseCustomInputDelta(_ItemEvent, tag="response.custom_tool_call_input.delta", kw_only=True):
    delta: str


class ResponseCustomInputDone(_ItemEvent, tag="response.custom_tool_call_input.done", kw_only=True):
    input: str


AnyResponseEvent = Union[
    ResponseCreated,
    ResponseQueued,
    ResponseInProgress,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseFailed,
    ResponseItemAdded,
    ResponseItemDone,
    ResponsePartAdded,
    ResponsePartDone,
    ResponseTextDelta,
    ResponseTextDone,
    ResponseReasoningDelta,
    ResponseReasoningDone,
    ResponseArgumentsDelta,
    ResponseArgumentsDone,
    ResponseCustomInputDelta,
    ResponseCustomInputDone,
]
