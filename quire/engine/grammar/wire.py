"""The messages between the engine, the fork server and the matchers."""

from __future__ import annotations

import enum
import struct
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

DEAD_END = "no text has this form: there is no token that could come next"
"""The error of a sequence that the vocabulary cannot continue within its grammar."""
MESSAGE_BYTES = 1 << 18
"""Upper bound on a message. Forms may be longer: they go through shared memory."""


class ForkServerSpec(msgspec.Struct):
    """The first message to the fork server: tokenizer and limits."""

    tokenizer: str | None
    """A name or a folder; None: the model's own."""
    files: dict[str, str | None]
    """The fields of `ModelFiles`, paths as text."""
    trust_remote_code: bool
    revision: str | None
    vocab_size: int
    """The model's, which may be larger than the tokenizer's."""
    end_ids: list[int]
    rows: int
    """Slots in a matcher's shared memory: sequences that have masks at the same time."""
    memory_bytes: int
    """What a matcher may allocate after the fork."""
    places: int = 1
    """Masks in a slot: that of the next token, and with speculation one after each draft."""


READY = b"ready"
"""From the fork server. Anything else it sends is why it cannot start."""

COMMAND = struct.Struct("<cII")
"""To the fork server: START with a matcher's number and the length of its form, its socket and memory attached; or KILL
with a number; or STAY, which only starts its idle time anew."""
START = b"S"
KILL = b"K"
STAY = b"Y"


class Op(enum.IntEnum):
    """An operation for a matcher, with the arguments that follow it in the list."""

    SET_USERS = 0
    """[count]: requests that use the grammar; the matcher does not exit while there are any, however long it idles."""
    BEGIN = 1
    """[number, slot, min_tokens, stop ids]: a new sequence; write the mask of its first token to the slot."""
    ADVANCE = 2
    """[number, slot, tokens]: tokens were sampled; write the mask of the next."""
    FILL = 3
    """[number, slot, drafts]: write the mask of the next token, and one after each draft, up to the first that the
    grammar does not allow."""
    DROP = 4
    """[number]: the sequence has finished."""


class MatcherStatus(msgspec.Struct):
    """From a matcher, before it serves: the state of its grammar."""

    pid: int = 0
    """Compilation has started."""
    memory: int = 0
    """The grammar is compiled, and takes this many bytes."""
    refused: str = ""
    """Why it cannot be compiled."""


class MatcherReply(msgspec.Struct, array_like=True):
    """From a matcher, to a list of operations; everything is by sequence number."""

    failures: dict[int, str] = {}
    runs: dict[int, list[int]] = {}
    """With speculation: the tokens after each of which the sequence's slot has a mask…"""
    certain: dict[int, list[int]] = {}
    """…and those that the grammar leaves no choice about, if the operation had no drafts: masks follow these then."""


def allows(mask: NDArray[np.int32], token: int) -> bool:
    """Whether the token's bit is set in a mask."""
    return 0 <= token < mask.size * 32 and bool(mask[token >> 5] >> (token & 31) & 1)


_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)
