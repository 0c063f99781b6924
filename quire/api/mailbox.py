"""What has come for one request and was not read yet."""

from __future__ import annotations

import asyncio
import dataclasses

from quire.errors import QuireError
from quire.messages.outputs import CompletionOutput, RequestOutput


class Mailbox:
    """Holds one output at most: what a slow reader has not read is merged with what comes next."""

    def __init__(self, request_id: str, key: str) -> None:
        self.request_id = request_id
        """The caller's name for the request."""
        self.key = key
        """The engine's."""
        self.is_delta = False
        self.is_aborted = False
        """The caller wants it ended."""
        self.is_ended = False
        """Nothing more comes."""
        self.is_finished = False
        """The last output has been read."""
        self._output: RequestOutput | None = None
        self._error: QuireError | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Something new to read."""
        if self._output is not None and self.is_delta:
            output = merged(self._output, output)
        self._output = output
        self.is_ended = output.finished
        self._news.set()

    def fail(self, error: QuireError) -> None:
        """Nothing more comes, and this is why. What came before can still be read."""
        if not self.is_ended:
            self._error = error
            self.is_ended = True
            self._news.set()

    async def take(self) -> RequestOutput:
        """Everything that came since this was asked last; waits until something has."""
        await self._news.wait()
        if self._output is None:
            assert self._error is not None
            raise self._error
        output, self._output = self._output, None
        self.is_finished = output.finished
        if self._error is None:
            self._news.clear()
        return output


def merged(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Two outputs that each hold what was new, as one."""
    pairs = zip(first.outputs, then.outputs, strict=True)
    prompt_logprobs = then.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs
    return dataclasses.replace(then, outputs=[_joined(a, b) for a, b in pairs], prompt_logprobs=prompt_logprobs)


def _joined(first: CompletionOutput, then: CompletionOutput) -> CompletionOutput:
    return dataclasses.replace(
        then,
        text=first.text + then.text,
        token_ids=[*first.token_ids, *then.token_ids],
        logprobs=None if then.logprobs is None else [*(first.logprobs or []), *then.logprobs],
    )
