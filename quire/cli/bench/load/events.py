"""A streamed answer of an OpenAI server: from bytes to events, from events to what matters in them."""

from __future__ import annotations

from typing import Any

import msgspec

LONGEST_EVENT = 16 << 20
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
        if b"\n" not in data and len(self._rest) + len(data) <= LONGEST_EVENT:
            self._rest += data
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_EVENT:
            raise MalformedStreamError(f"an event is longer than {LONGEST_EVENT >> 20} MiB")
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


class PromptDetails(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int | None = None


class StreamedUsage(msgspec.Struct):
    """Tokens, as the server counts them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


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
