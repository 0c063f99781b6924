"""What has come for one request and was not read yet."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from quire.errors import QuireError
from quire.messages.outputs import CompletionOutput, Output, RequestOutput

if TYPE_CHECKING:
    from quire.api.replica import Replica
    from quire.messages.request import NewRequest


class OutputStream:
    """Holds one output at most: what a slow reader has not read is merged with what comes next."""

    def __init__(self, request_id: str, key: str) -> None:
        self.request_id = request_id
        """The caller's name for the request."""
        self.key = key
        """The engine's."""
        self.request: NewRequest | None = None
        """What was sent, once it was…"""
        self.replica: Replica | None = None
        """…and where."""
        self.moves = 0
        """How often it had to begin again elsewhere."""
        self.is_delta = False
        self.is_aborted = False
        """The caller wants it ended."""
        self.raises_own = True
        """What is wrong with the request itself, and only the engine could know, is raised; else it is told in the
        last output, as an engine in this process does."""
        self.is_streamed = False
        """Someone reads as it comes…"""
        self.awaits_first = False
        """…and nothing has come yet."""
        self.is_ended = False
        """Nothing more comes."""
        self.is_finished = False
        """The last output has been read."""
        self._output: Output | None = None
        self._error: QuireError | None = None
        self._reader: asyncio.Future[None] | None = None
        """Someone who waits for what comes."""

    @property
    def is_untouched(self) -> bool:
        """Nobody has seen anything of it: it can begin again."""
        return not self.is_ended and (self.awaits_first or not self.is_streamed)

    def put(self, output: Output) -> None:
        """Something new to read."""
        if self.is_delta and isinstance(self._output, RequestOutput) and isinstance(output, RequestOutput):
            output = merged(self._output, output)
        self._output = output
        self.awaits_first = False
        self.is_ended = output.finished
        self._wake()

    def fail(self, error: QuireError) -> None:
        """Nothing more comes, and this is why. What came before can still be read."""
        if not self.is_ended:
            self._error = error
            self.is_ended = True
            self._wake()

    async def take(self) -> Any:
        """Everything that came since this was asked last, as one output; waits until something has."""
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


def merged(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Two outputs that each hold what was new, as one. The first is used up: its lists grow instead of being copied,
    so that a reader who is far behind costs no more than one who is not.
    """
    pairs = zip(first.outputs, then.outputs, strict=True)
    prompt_logprobs = then.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs
    return dataclasses.replace(then, outputs=[_joined(a, b) for a, b in pairs], prompt_logprobs=prompt_logprobs)


def _joined(first: CompletionOutput, then: CompletionOutput) -> CompletionOutput:
    tokens = first.token_ids if isinstance(first.token_ids, list) else list(first.token_ids)
    tokens.extend(then.token_ids)
    if first.logprobs is not None and then.logprobs is not None:
        first.logprobs += then.logprobs
    logprobs = then.logprobs if first.logprobs is None else first.logprobs
    return dataclasses.replace(then, text=first.text + then.text, token_ids=tokens, logprobs=logprobs)
