"""The shape of JSON read from its bytes, against the parsed objects."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.errors import ValidationError
from quire.messages import json_limits
from quire.messages.json_limits import SMALL_BYTES, JsonLimits, JsonShape, check_json

LIMITS = JsonLimits(values=1 << 18, depth=64)


def shape_of(value: Any) -> tuple[int, int, int]:
    """(values, containers, depth) of a parsed value."""
    if not isinstance(value, (dict, list)):
        return 1, 0, 0
    inner = [shape_of(item) for item in (value.values() if isinstance(value, dict) else value)]
    depth = 1 + max((each[2] for each in inner), default=0)
    return 1 + sum(each[0] for each in inner), 1 + sum(each[1] for each in inner), depth


def random_json(rng: random.Random, depth: int) -> Any:
    def text() -> str:
        return "".join(rng.choice('a"\\,[]{}:\n/é😀') for _ in range(rng.randrange(6)))

    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return text() if rng.random() < 0.8 else rng.randrange(1000)
    if kind < 0.65:
        return [random_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {text(): random_json(rng, depth - 1) for _ in range(rng.randrange(4))}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1 << 20])
def test_the_shape_is_that_of_the_parsed_value_wherever_pieces_end(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(json_limits, "PIECE_BYTES", size)
    rng = random.Random(size)
    for _ in range(400):
        value = random_json(rng, 5)
        data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        shape, start = JsonShape(), 0
        while start < len(data):
            piece = json_limits.next_piece(data, start)
            shape.read(piece)
            start += len(piece)
        values, containers, depth = shape_of(value)
        assert (shape.containers, shape.deepest) == (containers, depth), data
        assert values <= shape.values <= values + containers, data


def test_structure_inside_strings_does_not_count() -> None:
    for text in ("[]," * 500_000, '\\"[,{' * 300_000, "\\" * 1_000_001 + '",[', "é[,\u2028" * 200_000):
        check_json(json.dumps({"prompt": text}).encode(), LIMITS, "the body")


@pytest.mark.parametrize(
    "data, message",
    [
        (b"[" + b"1," * 300_000 + b"1]", "more than 262144 values"),
        (b"[" + b'"",' * 300_000 + b"1]", "more than 262144 values"),
        (b"{" + b'"a":1,' * 300_000 + b"1]", "more than 262144 values"),
        (b"[" + b"[]," * 70_000 + b"1]", "more than 32768 lists and objects"),
        (b"[" + b"{}," * 70_000 + b"1]", "more than 32768 lists and objects"),
        (b"[" * 65 + b" " * SMALL_BYTES, "nested more than 64 levels deep"),
        (b'{"a":' * 65 + b" " * SMALL_BYTES, "nested more than 64 levels deep"),
        (b'"' * 2_000_000, "more than 262144 values"),
        # What would be a string for a reader that takes the escaped quote for its end:
        (b'["\\\\",' + b"[]," * 70_000, "more than 32768 lists and objects"),
        (b'["\\\\\\"",' + b"[]," * 70_000, "more than 32768 lists and objects"),
        (b'["' + b"\\\\" * 600_000 + b'",' + b"[]," * 70_000, "more than 32768 lists and objects"),
    ],
)  # fmt: skip
def test_too_much_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        check_json(data, LIMITS, "the body")


def test_what_is_just_within_the_limits_passes() -> None:
    check_json(b"[" + b"1," * 262_141 + b"1]", LIMITS, "the body")
    check_json(b"[" + b"[]," * 32_767 + b"1]", LIMITS, "the body")
    check_json(b"[" * 64 + b"]" * 64 + b" " * SMALL_BYTES, LIMITS, "the body")
