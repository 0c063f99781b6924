"""Outputs of one request on their way to its reader, and the order in which a step's outputs are delivered."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec

from quire.errors import QuireError
from quire.messages.outputs import CompletionOutput, Output, RequestOutput, StepOutputs
from quire.output.tracked import TextSink

if TYPE_CHECKING:
    from quire.api.replica import Replica
    from quire.engine.remote import EngineHandle
    from quire.messages.request import NewRequest


class OutputStream:
    """Holds at most one output: a slow reader's unread output is merged with the next.

    With a `sink` it is one too: while the reader waits, new text goes to the sink and the reader is not woken.
    """

    def __init__(self, request_id: str, key: str, sink: TextSink | None = None) -> None:
        self.sink = sink
        self.request_id = request_id
        """The caller's id of the request."""
        self.key = key
        """The engine's id."""
        self.request: NewRequest | None = None
        """The request, once it was sent…"""
        self.replica: Replica | None = None
        """…and where; None: it waits for an engine."""
        self.engine: EngineHandle | None = None
        """The engine that it was last sent to."""
        self.is_delta = False
        self.is_aborted = False
        """The caller has aborted it."""
        self.raises_refusals = True
        """If the engine refuses the request late, `take` raises; otherwise the last output reports the error, as for an
        engine in this process."""
        self.is_streamed = False
        """Its reader reads every output…"""
        self.awaits_first = False
        """…and none has come yet."""
        self.is_ended = False
        """Nothing more will come."""
        self.is_finished = False
        """The last output has been read."""
        self._output: Output | None = None
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        """Set when something has come, while the reader waits."""

    def put(self, output: Output) -> None:
        """Deliver an output."""
        if self.is_delta and isinstance(self._output, RequestOutput) and isinstance(output, RequestOutput):
            output = merged_deltas(self._output, output)
        self._output = output
        self.awaits_first = False
        self.is_ended = output.finished
        self._wake()

    def fail(self, error: QuireError) -> None:
        """Nothing more will come, because of this error. Earlier output can still be read."""
        if not self.is_ended:
            self._error = error
            self.is_ended = True
            self._wake()

    # As a `TextSink`

    def is_ready(self) -> bool:
        """Whether the reader waits, with nothing left to read, and the sink takes text."""
        reader = self._reader
        return reader is not None and not reader.done() and self.sink is not None and self.sink.is_ready()

    def put_text(self, text: str, tokens: int) -> None:
        """Pass text on. If the sink fails, the reader gets the error."""
        assert self.sink is not None
        try:
            self.sink.put_text(text, tokens)
        except Exception as error:
            self._error = error
            self._wake()

    # The reader

    async def take(self) -> Any:
        """Everything since the last call, as one output; waits until there is something."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        output, self._output = self._output, None
        self.is_finished = output.finished
        return output

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merged_deltas(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Two deltas as one. The first is consumed: its lists are extended instead of copied, so that a slow reader costs
    no more than a fast one."""
    pairs = zip(first.outputs, then.outputs, strict=True)
    prompt_logprobs = then.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs
    return dataclasses.replace(then, outputs=[_merged(a, b) for a, b in pairs], prompt_logprobs=prompt_logprobs)


def _merged(first: CompletionOutput, then: CompletionOutput) -> CompletionOutput:
    tokens = first.token_ids if isinstance(first.token_ids, list) else list(first.token_ids)
    tokens.extend(then.token_ids)
    if first.logprobs is not None and then.logprobs is not None:
        first.logprobs.extend(then.logprobs)
    logprobs = then.logprobs if first.logprobs is None else first.logprobs
    return dataclasses.replace(then, text=first.text + then.text, token_ids=tokens, logprobs=logprobs)


def split_outputs(outputs: StepOutputs, requests: Collection[str]) -> tuple[StepOutputs, StepOutputs]:
    """(a step's outputs of these requests, those of all others). For steps with one token a key."""
    first = _select(outputs, requests, True)
    return StepOutputs(**first), msgspec.structs.replace(outputs, **_select(outputs, requests, False))


def _select(outputs: StepOutputs, requests: Collection[str], inside: bool) -> dict[str, Any]:
    """Fields with the outputs of these requests, or with `inside` False of all others."""
    rows = [i for i, key in enumerate(outputs.keys) if (key[0] in requests) is inside]
    return {
        "keys": [outputs.keys[i] for i in rows],
        "tokens": [outputs.tokens[i] for i in rows],
        "logprobs": {new: outputs.logprobs[i] for new, i in enumerate(rows) if i in outputs.logprobs},
        "prompt_logprobs": [item for item in outputs.prompt_logprobs if (item[0][0] in requests) is inside],
        "started": [item for item in outputs.started if (item.key[0] in requests) is inside],
        "finished": [item for item in outputs.finished if (item.key[0] in requests) is inside],
    }
