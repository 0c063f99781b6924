"""What the engine, the nursery and the guides say to each other."""

from __future__ import annotations

import enum
import struct
from typing import Any

import msgspec

DEAD_END = "no text has this form: there is no token that could come next"
"""What is said of a sequence whose form the vocabulary cannot write."""
MESSAGE_BYTES = 1 << 18
"""No message is longer: forms, which may be, go through shared memory."""


class Setup(msgspec.Struct):
    """To the nursery, first of all: whose tokens they are."""

    tokenizer: str | None
    """A name or a folder; None: the model's own."""
    files: dict[str, str | None]
    """The fields of `ModelFiles`, paths as text."""
    trust_remote_code: bool
    revision: str | None
    vocab_size: int
    """The model's: may be more than the tokenizer knows."""
    end_ids: list[int]
    rows: int
    memory_bytes: int
    """What a guide may have beyond what it began with."""


READY = b"ready"
"""From the nursery. Anything else it says is why it cannot be one."""

ORDER = struct.Struct("<cII")
"""To the nursery: START with a guide's number and the length of its form, its socket and its memory beside it; or KILL
with a number."""
START = b"S"
KILL = b"K"


class Op(enum.IntEnum):
    """What a guide is asked to do, with what follows in the list."""

    HOLD = 0
    """[count]: so many need the grammar; do not leave while there are some, however long nothing comes."""
    BEGIN = 1
    """[number, slot, min_tokens, stop ids]: a new sequence; put the mask of its first token there."""
    ADVANCE = 2
    """[number, slot, tokens]: tokens were drawn; put the mask of the next there."""
    FILL = 3
    """[number, slot]: put the mask of the next token there."""
    DROP = 4
    """[number]: the sequence is over."""


class Told(msgspec.Struct):
    """From a guide: where it is with its grammar."""

    pid: int = 0
    """It has begun."""
    memory: int = 0
    """It is compiled, and takes so many bytes."""
    refused: str = ""
    """It cannot be compiled, and why."""


class MatcherReply(msgspec.Struct, array_like=True):
    """From a guide, to a list of operations: what went wrong, by the sequence's number."""

    failures: dict[int, str] = {}


_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)
