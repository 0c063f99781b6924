"""A conversation with a model on an OpenAI-compatible server."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec

from quire.cli.bench.load.client import (
    DONE,
    EventReader,
    MalformedStreamError,
    StreamChunk,
    StreamedChoice,
    error_message,
    first_model,
    read_chunk,
)
from quire.cli.conversation import Reply
from quire.cli.images import with_images
from quire.cli.terminal import dim, table
from quire.errors import QuireError

CONNECT_SECONDS = 10.0
"""Limit for connecting; the first token may take any time."""


class RemoteError(QuireError):
    """The server is unreachable or returned an error."""


class RemoteConversation:
    """The messages so far. Each question sends all of them; stopping a reply closes its connection."""

    def __init__(
        self, url: str, model: str | None, api_key: str | None, fields: dict[str, Any], system: str | None = None
    ) -> None:
        self.system = system
        self.url = url.rstrip("/").removesuffix("/v1")
        self._fields = fields
        self._messages: list[dict[str, Any]] = []
        self.images: list[dict[str, Any]] = []
        """Parts of the next question."""
        self._replies: list[Reply] = []
        try:
            self._client = httpx.Client(
                base_url=self.url + "/v1",
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise RemoteError(f"{url!r} is not the URL of a server: {error}") from error
        self.model = model or self._first_model()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def reset(self) -> None:
        """Forget all messages; the system prompt stays."""
        self._messages, self.images = [], []

    def ask(self, question: str) -> Reply:
        """Print the reply as it arrives. A question without a reply is not kept."""
        message = {"role": "user", "content": with_images(question, self.images)}
        self.images = []
        opening = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*opening, *self._messages, message],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        stream = _StreamedReply()
        try:
            with self._transport_errors(), self._client.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise RemoteError(_http_error(response.status_code, response.read()))
                stream.follow(response)
        except KeyboardInterrupt:  # the connection is closed by now, which aborts the request
            stream.reply.note = "(stopped)"
        finally:
            stream.finish()
        reply = stream.reply
        if reply.text:
            self._messages += [message, {"role": "assistant", "content": reply.text}]
        self._replies.append(reply)
        return reply

    def engine_stats(self) -> str:
        """Token counts of this conversation, for `/stats`: the engine's metrics are on the server."""
        replies = self._replies
        return table(
            [
                ("server", self.url),
                ("model", self.model),
                ("replies", str(len(replies))),
                ("prompt tokens", f"{sum(reply.prompt_tokens for reply in replies)}"),
                ("cached", f"{sum(reply.cached_tokens for reply in replies)}"),
                ("generated", f"{sum(reply.tokens for reply in replies)}"),
            ]
        )

    def _first_model(self) -> str:
        with self._transport_errors():
            response = self._client.get("/models")
        if response.status_code != 200:
            raise RemoteError(_http_error(response.status_code, response.content))
        if (name := first_model(response.content)) is None:
            raise RemoteError(f"{self.url}/v1/models lists no model: give one with --model")
        return name

    @contextmanager
    def _transport_errors(self) -> Iterator[None]:
        """Turns transport errors into `RemoteError` with a readable message."""
        try:
            yield
        except httpx.ConnectError as error:
            raise RemoteError(f"cannot connect to {self.url}: {error}; is the server running?") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RemoteError(f"{self.url}: {error or type(error).__name__}") from error
        except MalformedStreamError as error:
            raise RemoteError(f"{self.url} sent a malformed event: {error}") from error


class _StreamedReply:
    """Prints one streamed reply and measures it."""

    def __init__(self) -> None:
        self.reply = Reply()
        self._begin = self._last = time.perf_counter()
        self._chunks = 0

    def follow(self, response: httpx.Response) -> None:
        """Print the reply as it arrives."""
        events, is_done = EventReader(), False
        for data in response.iter_bytes():
            for event in events.feed(data):
                if event == DONE:
                    is_done = True
                else:
                    self._take(read_chunk(event))
        if not is_done and self.reply.error is None:
            self._fail("the response was cut off")

    def finish(self) -> None:
        """End the line and compute the speed; called however the reply ended."""
        reply = self.reply
        if self._chunks:
            print(flush=True)
        reply.tokens = reply.tokens or self._chunks
        elapsed = self._last - self._begin - reply.seconds_to_first
        reply.tokens_per_second = (reply.tokens - 1) / elapsed if elapsed > 0 and reply.tokens > 1 else 0.0

    def _take(self, chunk: StreamChunk) -> None:
        if chunk.error is not None:
            self._fail(error_message(msgspec.json.encode(chunk.error)))
        for choice in chunk.choices or ():
            self._show(choice)
        if (usage := chunk.usage) is not None:
            self.reply.tokens = usage.completion_tokens or 0
            self.reply.prompt_tokens = usage.prompt_tokens or 0
            if usage.prompt_tokens_details is not None:
                self.reply.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0

    def _show(self, choice: StreamedChoice) -> None:
        """Print new text; reasoning is printed dim and not kept in the conversation."""
        if choice.finish_reason == "length" and self.reply.error is None:
            self.reply.note = "(cut at max_tokens, or at the end of the context)"
        if choice.delta is None or not choice.has_tokens:
            return
        self._chunks += 1
        self._last = time.perf_counter()
        if self._chunks == 1:
            self.reply.seconds_to_first = self._last - self._begin
        reasoning = choice.delta.reasoning_content or choice.delta.reasoning
        if reasoning and sys.stdout.isatty():
            print(dim(reasoning, sys.stdout), end="", flush=True)
        text = choice.delta.content if isinstance(choice.delta.content, str) else ""
        self.reply.text += text
        print(text, end="", flush=True)

    def _fail(self, why: str) -> None:
        self.reply.error = why
        self.reply.note = f"quire: error: {why}"


def _http_error(status: int, body: bytes) -> str:
    return f"the server returned HTTP {status}: {error_message(body)}"
