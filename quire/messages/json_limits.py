"""Limits on the shape of JSON text, checked over its bytes before any object is made.

A million empty lists take 3 MB to send and seconds to make, and the interpreter does nothing else meanwhile. Each step
here is a call that runs at the speed of memory over one piece of the text and takes a few milliseconds at most.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.errors import ValidationError

SMALL_BYTES = 1 << 16
"""A shorter text is not checked: it cannot hold enough values to matter."""
PIECE_BYTES = 1 << 20
_IGNORED = bytes(set(range(256)) - set(b'"\\,[]{}'))
_TURNS = np.zeros(256, np.int8)
_TURNS[list(b"[{")] = 1
_TURNS[list(b"]}")] = -1


class JsonLimits(NamedTuple):
    """The largest JSON that is read."""

    values: int
    """Numbers, texts, lists and objects together."""
    depth: int
    """Lists and objects inside one another."""

    @property
    def containers(self) -> int:
        """Lists and objects: they cost several times what other values cost."""
        return self.values // 8


class JsonShape:
    """What a text has outside its strings, read piece by piece."""

    def __init__(self) -> None:
        self.values = 1
        """At least as many as there are: an empty list counts for two."""
        self.containers = 0
        self.deepest = 0
        self.strings = 0.0
        """Half of the quotes so far: keys and texts."""
        self._depth = 0
        self._is_in_string = False

    def read(self, piece: bytes) -> None:
        """Read the next piece; it must not end between a backslash and what that escapes."""
        if b"\\" in piece:
            # Backslashes pair up from the left, so what remains before a quote escapes it.
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        marks = piece.translate(None, _IGNORED)
        self.strings += marks.count(b'"') / 2
        # Two quotes in a row change nothing for what follows. Every second part of the rest is inside a string.
        parts = marks.replace(b'""', b"").split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        self._is_in_string ^= len(parts) % 2 == 0
        opened = outside.count(b"[") + outside.count(b"{")
        self.containers += opened
        self.values += opened + outside.count(b",")
        if outside:
            levels = np.cumsum(_TURNS[np.frombuffer(outside, np.uint8)], dtype=np.int64)
            self.deepest = max(self.deepest, self._depth + int(levels.max()))
            self._depth += int(levels[-1])


def check_json(data: bytes, limits: JsonLimits, what: str, parameter: str | None = None) -> None:
    """Raise for a JSON text with too many values, or nested too deep. Whether it is valid is not checked: up to the
    first error, where a decoder stops, the count is right."""
    if len(data) < SMALL_BYTES:
        return
    shape, start = JsonShape(), 0
    while start < len(data):
        piece = next_piece(data, start)
        start += len(piece)
        shape.read(piece)
        if shape.values > limits.values or shape.strings > 2 * limits.values + 2:  # each string is a value or a key
            raise ValidationError(f"{what} holds more than {limits.values} values", parameter)
        if shape.containers > limits.containers:
            raise ValidationError(f"{what} holds more than {limits.containers} lists and objects", parameter)
        if shape.deepest > limits.depth:
            raise ValidationError(f"{what} is nested more than {limits.depth} levels deep", parameter)


def next_piece(data: bytes, start: int) -> bytes:
    """The piece that begins at `start`, which is not inside an escape; nor is the piece's end."""
    piece = data[start : start + PIECE_BYTES]
    is_cut = (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1
    return data[start : start + PIECE_BYTES + 1] if is_cut else piece
