"""Parsing of event streams and error bodies."""

from __future__ import annotations

import pytest

from quire.cli.bench.load import client
from quire.cli.bench.load.client import EventReader, MalformedStreamError, error_message, read_chunk

STREAM = b': a comment\r\ndata: {"a":1}\r\n\r\nevent: x\ndata:{"b":\ndata: 2}\n\nid: 3\n\ndata:\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b'{"b":\n2}', b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_where_the_bytes_are_split(size):
    reader = EventReader()
    found = [event for i in range(0, len(STREAM), size) for event in reader.feed(STREAM[i : i + size])]
    assert found + reader.finish() == EVENTS


def test_a_last_event_without_its_blank_line_counts():
    reader = EventReader()
    assert reader.feed(b"data: [DONE]") == []
    assert reader.finish() == [b"[DONE]"]


def test_a_line_that_is_too_long_is_an_error(monkeypatch):
    monkeypatch.setattr(client, "MAX_EVENT_BYTES", 1000)
    reader = EventReader()
    with pytest.raises(MalformedStreamError):
        for _ in range(200):
            reader.feed(b"data: " + b"x" * 10)


@pytest.mark.parametrize("event", [b"", b"{", b"[]", b'{"choices": 3}', b'{"choices": [{"text": 5}]}', b"\xff"])
def test_an_invalid_chunk_is_malformed(event):
    with pytest.raises(MalformedStreamError):
        read_chunk(event)


@pytest.mark.parametrize(
    ("event", "has_tokens"),
    [
        (b'{"choices": [{"text": "x", "extra": {"y": [1]}}]}', True),
        (b'{"choices": [{"text": ""}]}', False),
        (b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', False),
        (b'{"choices": [{"delta": {"content": "x"}}]}', True),
        (b'{"choices": [{"delta": {"reasoning_content": "x"}}]}', True),
        (b'{"choices": [{"delta": {"reasoning": "x"}}]}', True),
        (b'{"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}', True),
    ],
)
def test_text_reasoning_and_tool_calls_count_as_tokens(event, has_tokens):
    assert read_chunk(event).choices[0].has_tokens is has_tokens


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"error": "gone"}', "gone"),
        (b'{"message": "old shape"}', "old shape"),
        (b'{"detail": "else"}', '{"detail": "else"}'),
        (b"<html>\n  Bad gateway", "<html> Bad gateway"),
        (b"", ""),
    ],
)
def test_error_bodies_of_any_form_give_a_message(body, message):
    assert error_message(body) == message
