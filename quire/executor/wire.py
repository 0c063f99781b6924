"""The messages between an engine and its ranks. Tagged structs in msgpack; nothing is pickled."""

from __future__ import annotations

from typing import Any, Union

import msgspec

from quire.errors import ValidationError
from quire.executor.child import RelayedLog, Surroundings
from quire.messages.frames import frame
from quire.messages.plan import MovesDone

LARGEST = 1 << 30
"""Bytes a message may have: far more than any has, and less than a machine."""

# Down: to a rank


class StartRank(Surroundings, tag=True):
    """The first message: which part of which model."""

    rank: int
    size: int
    rendezvous: str
    """Where ranks find each other: a file's path, or tcp://HOST:PORT."""
    threads: int
    neighbours: int
    """Ranks on the same machine, itself included: they share its memory."""
    own_device: bool
    """Whether the GPU it sees is its own."""
    max_model_len: int
    max_rows: int
    max_tokens: int


class HostShare(msgspec.Struct):
    """A rank's part of every slot in a memory of slots."""

    slots: int
    slot_bytes: int
    """Of all ranks together."""
    offset: int
    """Where this rank's part of a slot begins."""


class MakeCache(msgspec.Struct, tag=True):
    """All ranks are loaded; this is how many blocks each of them has room for."""

    num_blocks: int
    host: HostShare | None = None
    """Its part of host memory that all ranks and the engine share; None: it has its own, if any."""


class Step(msgspec.Struct, tag=True):
    """Run a plan. Answered by `Done` or `StepFailed`."""

    plan: bytes


class Supply(msgspec.Struct, tag=True):
    """Masks for a step that waits for them."""

    masks: bytes


class CountExperts(msgspec.Struct, tag=True):
    """Answered by `ExpertCounts`."""


class Shared(msgspec.Struct, tag=True):
    """A message that lies in the memory all ranks share."""

    at: int
    length: int


class PlaceExperts(msgspec.Struct, tag=True):
    """Hold other experts from the next step on. Answered by `Placed`."""

    placements: dict[int, list[list[int]]]
    """By layer, the experts of each rank."""


class ShutdownRank(msgspec.Struct, tag=True):
    """Leave."""


Down = Union[StartRank, MakeCache, Step, Supply, CountExperts, PlaceExperts, Shared, ShutdownRank]


# Up: from a rank


class WeightsLoaded(msgspec.Struct, tag=True):
    """The rank has its part of the model. What it takes, and what it leaves for the cache."""

    device: str
    dtype: str
    weight_bytes: int
    reads_groups: bool
    memory: dict[str, Any]
    """The fields of a `MemoryPlan`."""
    phases: dict[str, float]
    host_slots: int = 0
    """Blocks it has room for in host memory…"""
    slot_bytes: int = 0
    """…and what its part of one takes."""


class RankReady(msgspec.Struct, tag=True):
    """The rank takes plans."""

    host_slots: int = 0
    """Blocks of its tier in host memory."""
    slot_bytes: int = 0
    out_rate: float = 0.0
    """Bytes a second to there and back."""
    back_rate: float = 0.0


class Done(msgspec.Struct, tag=True):
    """A step is over."""

    step: int
    drawn: int
    """A checksum of its tokens: every rank of the last stage must have drawn the same."""
    moves_done: list[MovesDone]
    result: bytes = b""
    """From the first rank of the last stage alone."""


class StepFailed(msgspec.Struct, tag=True):
    """A step failed here."""

    step: int
    error: str
    """The error's class."""
    message: str
    collectives: int
    """How many this rank has begun. Where all ranks of a stage failed at the same one, they can go on together."""


class ExpertCounts(msgspec.Struct, tag=True):
    counts: dict[int, list[int]]


class Placed(msgspec.Struct, tag=True):
    """The experts are where they were to go."""


class StartRefused(msgspec.Struct, tag=True):
    """The rank could not start."""

    error: str
    message: str
    parameter: str | None = None


Up = Union[WeightsLoaded, RankReady, Done, StepFailed, ExpertCounts, Placed, StartRefused, RelayedLog]

_encoder = msgspec.msgpack.Encoder()
_down_decoder = msgspec.msgpack.Decoder(Down)
_up_decoder = msgspec.msgpack.Decoder(Up)


def encode(message: Down | Up) -> bytes:
    """A message as it goes over the socket. A setting that is no plain data raises."""
    try:
        return frame(_encoder.encode(message))
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise ValidationError(f"this cannot be sent to another process: {error}") from error


def decode_down(data: bytes) -> Down:
    return _down_decoder.decode(data)


def decode_up(data: bytes) -> Up:
    return _up_decoder.decode(data)
