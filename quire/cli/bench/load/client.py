"""Sends requests to an OpenAI-compatible server, reads the event stream, and times every token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.cli.bench.load.http import Host, LostConnectionError


@dataclass(slots=True)
class RequestResult:
    """The result of one request. Times are in seconds of `time.perf_counter`."""

    sent: float
    send_delay: float = 0.0
    """Seconds between the planned time and the actual sending."""
    first: float = 0.0
    """Time of the first token; 0 if there was none."""
    last: float = 0.0
    """Time of the last token or the end of the stream."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between events with tokens."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    is_counted_by_server: bool = False
    """Whether token counts are the server's; otherwise every event with text counts as one token."""
    energy: StreamedEnergy | None = None
    """If the server meters it."""
    finish_reason: str | None = None
    failure: str | None = None
    """Category of the failure, such as `HTTP 429`."""
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
        """Seconds per token after the first; 0 with a single token."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    def fail(self, kind: str, detail: str) -> None:
        """Mark it as failed; only the first failure is kept."""
        if self.failure is None:
            self.failure, self.detail = kind, detail


@dataclass(slots=True)
class RunCounters:
    """Totals of a run so far, for the progress display."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    """Events with tokens."""
    latest_ttft: float = 0.0

    @property
    def open(self) -> int:
        """Requests sent and not done."""
        return self.sent - self.done


class StreamHandler:
    """Reads one event stream and records the time of each token."""

    def __init__(self, result: RequestResult, counters: RunCounters) -> None:
        self.result = result
        self._counters = counters
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
        """Called at the end of the response: fails the request if the response is incomplete."""
        result = self.result
        if self._status != 200:
            result.fail(f"HTTP {self._status}", error_message(bytes(self._error_body)))
            return
        for event in self._events.finish():
            self._take(event, time.perf_counter())
        if not self._seen and not self.is_done:
            result.fail("no stream", "the response has no events: does this route stream?")
        elif not self.is_done and result.finish_reason is None:
            result.fail("cut off", "the stream ended without [DONE] or a finish_reason")
        elif not result.first:
            result.fail("no tokens", f"the stream was empty (finish_reason {result.finish_reason})")

    def _take(self, event: bytes, at: float) -> None:
        if event == DONE:
            self.is_done = True
            return
        self._seen += 1
        chunk = read_chunk(event)
        if chunk.error is not None:
            self.result.fail("error event", error_message(event))
        if chunk.choices:
            self._take_choice(chunk.choices[0].has_tokens, chunk.choices[0].finish_reason, at)
        if (usage := chunk.usage) is not None:
            if usage.completion_tokens is not None:
                self.result.output_tokens, self.result.is_counted_by_server = usage.completion_tokens, True
            self.result.prompt_tokens = usage.prompt_tokens or 0
            if usage.prompt_tokens_details is not None:
                self.result.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
            self.result.energy = usage.energy

    def _take_choice(self, has_tokens: bool, finish_reason: str | None, at: float) -> None:
        result = self.result
        if has_tokens:
            self._counters.tokens += 1
            if result.first:
                result.gaps.append(at - self._latest)
            else:
                result.first = at
                self._counters.latest_ttft = at - result.sent
            self._latest = result.last = at
            if not result.is_counted_by_server:
                result.output_tokens += 1
        if finish_reason is not None:  # comes with the end token, which has no text, or with the last text
            result.finish_reason = finish_reason
            result.last = at


class WholeBodyHandler:
    """Reads a response that is not streamed, such as an embedding: only its end is timed."""

    def __init__(self, result: RequestResult, counters: RunCounters) -> None:
        self.result = result
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
        """Called at the end of the response: reads the token counts."""
        result = self.result
        if self._status != 200:
            result.fail(f"HTTP {self._status}", error_message(bytes(self._body)))
            return
        usage = read_chunk(bytes(self._body)).usage
        result.first = result.last = self._at
        if usage is not None:
            result.prompt_tokens, result.is_counted_by_server = usage.prompt_tokens or 0, True
            if usage.prompt_tokens_details is not None:
                result.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
            result.energy = usage.energy


class Client:
    """Sends requests to one route of a server."""

    def __init__(self, host: Host, path: str, timeout: float | None = None, is_streamed: bool = True) -> None:
        self.host = host
        self.path = path
        self.counters = RunCounters()
        self._timeout = timeout
        self._is_streamed = is_streamed

    async def send(self, body: bytes, send_delay: float = 0.0) -> RequestResult:
        """One request, to its end. A failure is a result too: nothing is raised."""
        result = RequestResult(sent=time.perf_counter(), send_delay=send_delay)
        answer = StreamHandler(result, self.counters) if self._is_streamed else WholeBodyHandler(result, self.counters)
        self.counters.sent += 1
        try:
            await asyncio.wait_for(self.host.post(self.path, body, answer), self._timeout)
            answer.finish()
        except LostConnectionError as error:
            if answer.is_done:  # the response was complete except for its framing
                answer.finish()
            else:
                result.fail(error.kind, f"{error}")
        except MalformedStreamError as error:
            result.fail("malformed event", f"{error}")
        except asyncio.TimeoutError:  # the built-in one only since Python 3.11
            result.fail("timeout", f"no end after {self._timeout:g} s")
        except asyncio.CancelledError:
            result.fail("interrupted", "the run was stopped")
        finally:
            result.last = result.last if result.ok else time.perf_counter()
            self.counters.done += 1
            self.counters.failed += not result.ok
        return result


MAX_EVENT_BYTES = 16 << 20
"""A longer line is not an event stream."""
DONE = b"[DONE]"


class MalformedStreamError(Exception):
    """The response is not an event stream of JSON objects."""


class EventReader:
    """Parses server-sent events from bytes, wherever the chunks are split."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; returns the events they complete."""
        if b"\n" not in data and len(self._rest) + len(data) <= MAX_EVENT_BYTES:
            self._rest += data
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise MalformedStreamError(f"an event is longer than {MAX_EVENT_BYTES >> 20} MiB")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                if content := line[5:].strip():  # an empty one is a keep-alive
                    self._data.append(content)
            elif self._data and line in (b"", b"\r"):
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def finish(self) -> list[bytes]:
        """The last event, if the stream ended without its blank line."""
        return self.feed(b"\n\n")


class Delta(msgspec.Struct):
    """New content of a chat response. The field of reasoning has different names on different servers."""

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
        """Whether it has new text, reasoning or tool calls."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class StreamedPromptDetails(msgspec.Struct):
    """Details of the prompt's token count."""

    cached_tokens: int | None = None


class StreamedEnergy(msgspec.Struct):
    """Energy of a request, of a server that meters it."""

    joules: float = 0.0
    estimated: bool = False
    source: str = ""


class StreamedUsage(msgspec.Struct):
    """Token counts of the server."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: StreamedPromptDetails | None = None
    energy: StreamedEnergy | None = None


class StreamChunk(msgspec.Struct):
    """The fields of an event that are read; all others are skipped without decoding."""

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
    """The first model of a /v1/models response."""
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return None


def error_message(body: bytes) -> str:
    """The message of an OpenAI-style error body, or the beginning of any other body."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return excerpt(body)
    found = found.get("error", found) if isinstance(found, dict) else found
    message = found.get("message") if isinstance(found, dict) else found
    return message if isinstance(message, str) else excerpt(body)


def excerpt(data: bytes, length: int = 160) -> str:
    """The beginning of `data`, on one line."""
    text = " ".join(bytes(data[: 4 * length]).decode(errors="replace").split())
    return text if len(text) <= length else text[: length - 1] + "…"
