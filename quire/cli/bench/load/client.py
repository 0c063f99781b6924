"""One request to an OpenAI server, streamed and timed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.cli.bench.load.http import Host, LostConnectionError


@dataclass(slots=True)
class RequestTiming:
    """What became of one request. Times are those of `time.perf_counter`."""

    sent: float
    late: float = 0.0
    """Seconds this process sent it after its time."""
    first: float = 0.0
    """When the first token came; 0 if none did."""
    last: float = 0.0
    """When the last token, or the end of the stream, came."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between events that brought tokens."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    is_counted_by_server: bool = False
    """Otherwise every event with text is taken for a token."""
    finish_reason: str | None = None
    failure: str | None = None
    """A few words to count it under, such as `HTTP 429`."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.first - self.sent

    @property
    def latency(self) -> float:
        """Seconds from sending to the end."""
        return self.last - self.sent

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 if there was one token only."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    def fail(self, kind: str, detail: str) -> None:
        """Count it as failed; the first reason stays."""
        if self.failure is None:
            self.failure, self.detail = kind, detail


@dataclass(slots=True)
class RunCounters:
    """Totals while a run is on its way, for whoever watches."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    """Events with tokens."""
    latest_ttft: float = 0.0

    @property
    def open(self) -> int:
        """Requests on their way."""
        return self.sent - self.done


class StreamHandler:
    """Reads one stream and notes when each of its tokens came."""

    def __init__(self, outcome: RequestTiming, tally: RunCounters) -> None:
        self.outcome = outcome
        self._tally = tally
        self._status = 0
        self._events = EventReader()
        self._error_body = bytearray()
        self._latest = 0.0
        self._seen = 0
        self.is_done = False

    def begin(self, status: int) -> None:
        self._status = status

    def feed(self, body: bytes, at: float) -> None:
        if self._status != 200:
            self._error_body += body[: 1 << 16]
            return
        for event in self._events.feed(body):
            self._take(event, at)

    def finish(self) -> None:
        """The answer is here: was it a whole one?"""
        outcome = self.outcome
        if self._status != 200:
            outcome.fail(f"HTTP {self._status}", error_message(bytes(self._error_body)))
            return
        for event in self._events.finish():
            self._take(event, time.perf_counter())
        if not self._seen and not self.is_done:
            outcome.fail("no stream", "the answer holds no events: does this route stream?")
        elif not self.is_done and outcome.finish_reason is None:
            outcome.fail("cut off", "the stream ended without [DONE] or a finish_reason")
        elif not outcome.first:
            outcome.fail("no tokens", f"the stream was empty (finish_reason {outcome.finish_reason})")

    def _take(self, event: bytes, at: float) -> None:
        if event == DONE:
            self.is_done = True
            return
        self._seen += 1
        chunk = read_chunk(event)
        if chunk.error is not None:
            self.outcome.fail("error event", error_message(event))
        if chunk.choices:
            self._take_choice(chunk.choices[0].has_tokens, chunk.choices[0].finish_reason, at)
        if (usage := chunk.usage) is not None:
            if usage.completion_tokens is not None:
                self.outcome.output_tokens, self.outcome.is_counted_by_server = usage.completion_tokens, True
            self.outcome.prompt_tokens = usage.prompt_tokens or 0
            if usage.prompt_tokens_details is not None:
                self.outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0

    def _take_choice(self, has_tokens: bool, finish_reason: str | None, at: float) -> None:
        outcome = self.outcome
        if has_tokens:
            self._tally.tokens += 1
            if outcome.first:
                outcome.gaps.append(at - self._latest)
            else:
                outcome.first = at
                self._tally.latest_ttft = at - outcome.sent
            self._latest = outcome.last = at
            if not outcome.is_counted_by_server:
                outcome.output_tokens += 1
        if finish_reason is not None:  # brings the end token, which has no text, or comes with the last piece
            outcome.finish_reason = finish_reason
            outcome.last = at


class WholeBodyHandler:
    """Reads an answer that comes at once: a vector has no tokens that could be timed."""

    def __init__(self, outcome: RequestTiming, tally: RunCounters) -> None:
        self.outcome = outcome
        self._status = 0
        self._body = bytearray()
        self._at = 0.0
        self.is_done = False

    def begin(self, status: int) -> None:
        self._status = status

    def feed(self, body: bytes, at: float) -> None:
        self._body += body
        self._at = at

    def finish(self) -> None:
        """The answer is here: what does it say it read?"""
        outcome = self.outcome
        if self._status != 200:
            outcome.fail(f"HTTP {self._status}", error_message(bytes(self._body)))
            return
        usage = read_chunk(bytes(self._body)).usage
        outcome.first = outcome.last = self._at
        if usage is not None:
            outcome.prompt_tokens, outcome.is_counted_by_server = usage.prompt_tokens or 0, True
            if usage.prompt_tokens_details is not None:
                outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


class Client:
    """Sends requests to one route of a server."""

    def __init__(self, host: Host, path: str, timeout: float | None = None, is_streamed: bool = True) -> None:
        self.host = host
        self.path = path
        self.tally = RunCounters()
        self._timeout = timeout
        self._is_streamed = is_streamed

    async def send(self, body: bytes, late: float = 0.0) -> RequestTiming:
        """One request, to its end. A failure is an outcome too: nothing but cancelling raises."""
        outcome = RequestTiming(sent=time.perf_counter(), late=late)
        answer = StreamHandler(outcome, self.tally) if self._is_streamed else WholeBodyHandler(outcome, self.tally)
        self.tally.sent += 1
        try:
            await asyncio.wait_for(self.host.post(self.path, body, answer), self._timeout)
            answer.finish()
        except LostConnectionError as error:
            if answer.is_done:  # only the frame around the answer was cut
                answer.finish()
            else:
                outcome.fail(error.kind, f"{error}")
        except MalformedStreamError as error:
            outcome.fail("malformed event", f"{error}")
        except asyncio.TimeoutError:  # the built-in one only since Python 3.11
            outcome.fail("timeout", f"no end after {self._timeout:g} s")
        except asyncio.CancelledError:
            outcome.fail("interrupted", "the run was stopped")
        finally:
            outcome.last = outcome.last if outcome.ok else time.perf_counter()
            self.tally.done += 1
            self.tally.failed += not outcome.ok
        return outcome


MAX_EVENT_BYTES = 16 << 20
"""Bytes. A line that goes on for longer is no event stream."""
DONE = b"[DONE]"


class MalformedStreamError(Exception):
    """What came is not an event stream of JSON objects."""


class EventReader:
    """Bytes in, the data of server-sent events out, however the bytes are cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete with this."""
        if b"\n" not in data and len(self._rest) + len(data) <= MAX_EVENT_BYTES:
            self._rest += data
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise MalformedStreamError(f"an event is longer than {MAX_EVENT_BYTES >> 20} MiB")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                if content := line[5:].strip():  # an empty one only keeps the connection alive
                    self._data.append(content)
            elif self._data and line in (b"", b"\r"):
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def finish(self) -> list[bytes]:
        """The event that lacked only its blank line when the stream ended."""
        return self.feed(b"\n\n")


class Delta(msgspec.Struct):
    """What is new in a chat answer. Names of the thinking differ between servers."""

    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class StreamedChoice(msgspec.Struct):
    """One choice of an event."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether a reader would see anything new."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class StreamedPromptDetails(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int | None = None


class StreamedUsage(msgspec.Struct):
    """Tokens, as the server counts them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: StreamedPromptDetails | None = None


class StreamChunk(msgspec.Struct):
    """The part of an event that is looked at; everything else is skipped undecoded."""

    choices: list[StreamedChoice] | None = None
    usage: StreamedUsage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(StreamChunk).decode


def read_chunk(event: bytes) -> StreamChunk:
    """One event, decoded."""
    try:
        return _decode(event)
    except msgspec.MsgspecError as error:
        raise MalformedStreamError(f"{error}: {excerpt(event)}") from None


def first_model(body: bytes) -> str | None:
    """The first model that an answer of /v1/models names."""
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return None


def error_message(body: bytes) -> str:
    """What an error body says: the message of the OpenAI shape, or its beginning."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return excerpt(body)
    found = found.get("error", found) if isinstance(found, dict) else found
    message = found.get("message") if isinstance(found, dict) else found
    return message if isinstance(message, str) else excerpt(body)


def excerpt(data: bytes, length: int = 160) -> str:
    """The beginning of it, on one line."""
    text = " ".join(bytes(data[: 4 * length]).decode(errors="replace").split())
    return text if len(text) <= length else text[: length - 1] + "…"
