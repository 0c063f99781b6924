"""Writes an answer as output items and events of /v1/responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.output.parsers.deltas import CallArguments, CallEnd, CallStart, Content, Delta, Reasoning
from quire.server.dialects.responses_tools import OfferedTools
from quire.server.errors import ApiError
from quire.server.protocol.chat import TokenLogprob
from quire.server.protocol.common import Usage
from quire.server.protocol.conversation import custom_input
from quire.server.protocol.response_events import (
    ResponseArgumentsDelta,
    ResponseArgumentsDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseCustomInputDelta,
    ResponseCustomInputDone,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseItemAdded,
    ResponseItemDone,
    ResponsePartAdded,
    ResponsePartDone,
    ResponseQueued,
    ResponseReasoningDelta,
    ResponseReasoningDone,
    ResponseTextDelta,
    ResponseTextDone,
)
from quire.server.protocol.responses import (
    ResponseConversation,
    ResponseFailure,
    ResponseIncompleteDetails,
    ResponseInputTokensDetails,
    ResponseObject,
    ResponseOutputCall,
    ResponseOutputCustomCall,
    ResponseOutputItem,
    ResponseOutputMessage,
    ResponseOutputReasoning,
    ResponseOutputReasoningText,
    ResponseOutputText,
    ResponseOutputTokensDetails,
    ResponsesRequest,
    ResponseUsage,
)
from quire.server.protocol.sampling import given_scalars


def new_response(
    request: ResponsesRequest, response_id: str, created: int, model: str, store: bool = False
) -> ResponseObject:
    """An empty response, with the request's parameters."""
    conversation = request.conversation_id
    text = {"format": {"type": "text"}}
    if request.text is not None and request.text.format is not None:
        given = msgspec.structs.asdict(request.text.format)
        text = {"format": {name: value for name, value in given.items() if value is not None}}
    scalars = given_scalars(request)
    choice: Any = request.tool_choice or "auto"
    if not isinstance(choice, str):
        choice = {name: value for name, value in msgspec.to_builtins(choice).items() if value is not None}
    return ResponseObject(
        id=response_id,
        created_at=created,
        model=model,
        instructions=request.instructions,
        metadata=request.metadata or {},
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        conversation=None if conversation is None else ResponseConversation(id=conversation),
        reasoning=request.reasoning,
        store=store,
        background=bool(request.background),
        temperature=scalars.get("temperature"),
        text=text,
        tool_choice=choice,
        tools=[_as_returned(tool) for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        top_p=scalars.get("top_p"),
        truncation=request.truncation or "disabled",
        user=request.user,
    )


class ResponseWriter:
    """Builds a response from deltas and returns the events of each change, which are ignored without streaming."""

    def __init__(self, response: ResponseObject, tools: OfferedTools) -> None:
        self.response = response
        self._tools = tools
        self._events: list[ResponseEvent] = []
        self._sequence = 0
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._pending: list[TokenLogprob] = []
        """Logprobs of tokens whose text is held back."""
        self._is_open = False

    def queue(self) -> list[ResponseEvent]:
        """The answer is to be generated later."""
        self.response.status = "queued"
        self._emit(ResponseCreated(response=self._snapshot()), ResponseQueued(response=self._snapshot()))
        return self._take_events()

    def start(self) -> list[ResponseEvent]:
        """Begin the answer."""
        if self.response.status != "queued":
            self._emit(ResponseCreated(response=self._snapshot()))
        self.response.status = "in_progress"
        self._emit(ResponseInProgress(response=self._snapshot()))
        return self._take_events()

    def write(self, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprob] = ()) -> list[ResponseEvent]:
        """Add to the answer; `logprobs`: of the tokens that made these deltas."""
        self._pending += logprobs
        for delta in deltas:
            if isinstance(delta, Content):
                self._add_text(delta.text)
            elif isinstance(delta, Reasoning):
                self._add_reasoning(delta.text)
            elif isinstance(delta, CallStart):
                self._add_call(delta)
            elif isinstance(delta, CallArguments):
                self._text.append(delta.text)
                if isinstance(self._item, ResponseOutputCall):
                    self._emit(ResponseArgumentsDelta(**self._position, delta=delta.text))
            elif isinstance(delta, CallEnd):
                self._close("completed" if delta.complete else "incomplete")
        if deltas:
            self._pending.clear()  # only message text has logprobs
        return self._take_events()

    def finish(self, reason: str | None, usage: Usage) -> list[ResponseEvent]:
        """End the answer, with the finish reason of chat completions."""
        is_whole = reason != "length"
        self._close("completed" if is_whole else "incomplete")
        response = self.response
        if not response.output:
            self._open(ResponseOutputMessage(new_item_id("msg"), "in_progress", []))
            self._close("completed" if is_whole else "incomplete")
        response.usage = _usage(usage)
        if is_whole:
            response.status, response.completed_at = "completed", int(time.time())
            self._emit(ResponseCompleted(response=self._snapshot()))
        else:
            response.status = "incomplete"
            response.incomplete_details = ResponseIncompleteDetails("max_output_tokens")
            self._emit(ResponseIncomplete(response=self._snapshot()))
        return self._take_events()

    def cancel(self) -> list[ResponseEvent]:
        """End the answer because the client wants no more of it."""
        self._close("incomplete")
        self.response.status = "cancelled"
        return self._take_events()

    def fail(self, error: ApiError) -> list[ResponseEvent]:
        """End the answer with an error."""
        self.response.status = "failed"
        self.response.error = ResponseFailure(_error_code(error), error.message)
        self._emit(ResponseFailed(response=self._snapshot()))
        return self._take_events()

    # Items

    @property
    def _item(self) -> ResponseOutputItem:
        return self.response.output[-1]

    @property
    def _position(self) -> dict[str, Any]:
        """The position fields of an event."""
        return {"item_id": self._item.id, "output_index": len(self.response.output) - 1}

    def _add_text(self, text: str) -> None:
        if not (self._is_open and isinstance(self._item, ResponseOutputMessage)):
            self._open(ResponseOutputMessage(new_item_id("msg"), "in_progress", []))
        self._text.append(text)
        logprobs, self._pending = self._pending, []
        self._logprobs += logprobs
        self._emit(ResponseTextDelta(**self._position, delta=text, logprobs=logprobs))

    def _add_reasoning(self, text: str) -> None:
        if not (self._is_open and isinstance(self._item, ResponseOutputReasoning)):
            self._open(ResponseOutputReasoning(new_item_id("rs"), "in_progress", []))
        self._text.append(text)
        self._emit(ResponseReasoningDelta(**self._position, delta=text))

    def _add_call(self, start: CallStart) -> None:
        self._open(self._tools.item_of(start))

    def _open(self, item: ResponseOutputItem) -> None:
        self._close("completed")
        self._is_open = True
        self.response.output.append(item)
        self._emit(ResponseItemAdded(output_index=len(self.response.output) - 1, item=_copy(item)))
        if isinstance(item, ResponseOutputMessage):
            self._emit(ResponsePartAdded(**self._position, part=ResponseOutputText("", [], [])))
        elif isinstance(item, ResponseOutputReasoning):
            self._emit(ResponsePartAdded(**self._position, part=ResponseOutputReasoningText("")))

    def _close(self, status: str) -> None:
        if not self._is_open:
            return
        self._is_open = False
        item, text = self._item, "".join(self._text)
        if isinstance(item, ResponseOutputMessage):
            part = ResponseOutputText(text, [], self._logprobs)
            item.content.append(part)
            self._emit(
                ResponseTextDone(**self._position, text=text, logprobs=self._logprobs),
                ResponsePartDone(**self._position, part=part),
            )
        elif isinstance(item, ResponseOutputReasoning):
            reasoning = ResponseOutputReasoningText(text)
            item.content.append(reasoning)
            self._emit(
                ResponseReasoningDone(**self._position, text=text), ResponsePartDone(**self._position, part=reasoning)
            )
        elif isinstance(item, ResponseOutputCustomCall):
            item.input = custom_input(text)
            self._emit(
                ResponseCustomInputDelta(**self._position, delta=item.input),
                ResponseCustomInputDone(**self._position, input=item.input),
            )
        else:
            item.arguments = text
            self._emit(ResponseArgumentsDone(**self._position, name=item.name, arguments=text))
        item.status = status
        self._text, self._logprobs = [], []
        self._emit(ResponseItemDone(output_index=len(self.response.output) - 1, item=_copy(item)))

    # Events

    def _emit(self, *events: ResponseEvent) -> None:
        for event in events:
            event.sequence_number = self._sequence
            self._sequence += 1
            self._events.append(event)

    def _take_events(self) -> list[ResponseEvent]:
        events, self._events = self._events, []
        return events

    def _snapshot(self) -> ResponseObject:
        return msgspec.structs.replace(self.response, output=list(self.response.output))


def _copy(item: ResponseOutputItem) -> ResponseOutputItem:
    """A snapshot: events are encoded after the item may have changed."""
    if isinstance(item, ResponseOutputCall | ResponseOutputCustomCall):
        return msgspec.structs.replace(item)
    return msgspec.structs.replace(item, content=list(item.content))


def _as_returned(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as responses repeat it: a function with all of its fields."""
    if tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool}


def new_item_id(kind: str) -> str:
    """An id for an item of this kind."""
    return f"{kind}_{uuid.uuid4().hex}"


def _usage(usage: Usage) -> ResponseUsage:
    cached = usage.prompt_tokens_details
    reasoning = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=ResponseInputTokensDetails(cached.cached_tokens if cached else 0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ResponseOutputTokensDetails(
            0 if reasoning is msgspec.UNSET else reasoning.reasoning_tokens
        ),
        total_tokens=usage.total_tokens,
        energy=usage.energy,
    )


def _error_code(error: ApiError) -> str:
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"
