"""The messages between an engine and its ranks: tagged structs in msgpack, nothing pickled."""

from __future__ import annotations

from typing import Any, Union

import msgspec

from quire.errors import ValidationError
from quire.executor.child import ChildContext, RelayedLog
from quire.messages.caches import FULL, CacheGroup
from quire.messages.frames import frame
from quire.messages.media import EncoderLimits
from quire.messages.memory_use import MemoryUse
from quire.messages.plan import AdapterLoaded, MovesDone
from quire.messages.speculation import DeviceDrafts

LARGEST = 1 << 30
"""Upper bound on a message's bytes: far above any real message, far below a machine's memory."""

# Down: to a rank


class StartRank(ChildContext, tag=True):
    """The first message: which part of which model to load."""

    rank: int
    size: int
    rendezvous: str
    """Where the process group is formed: a file's path, or tcp://HOST:PORT."""
    threads: int
    local_size: int
    """Ranks on the same machine, itself included: they share its memory."""
    owns_device: bool
    """Whether no other rank uses the GPU it sees."""
    max_model_len: int
    max_rows: int
    max_tokens: int


class HostShare(msgspec.Struct):
    """A rank's part of every slot of host memory shared by all ranks."""

    slots: int
    slot_bytes: int
    """Of all ranks together."""
    offset: int
    """Where this rank's part of a slot begins."""


class MakeCache(msgspec.Struct, tag=True):
    """All ranks have loaded: allocate this many blocks."""

    num_blocks: int
    host: HostShare | None = None
    """Its part of host memory shared with the engine; None: it allocates its own, if any."""


class Step(msgspec.Struct, tag=True):
    """Run a plan. Answered by `Done` or `StepFailed`."""

    plan: bytes


class Supply(msgspec.Struct, tag=True):
    """Token masks for a step that waits for them."""

    masks: bytes


class CountExperts(msgspec.Struct, tag=True):
    """Answered by `ExpertCounts`."""


class Shared(msgspec.Struct, tag=True):
    """A message is in the shared ring, at this position."""

    at: int
    length: int


class PlaceExperts(msgspec.Struct, tag=True):
    """Hold these experts from the next step on. Answered by `Placed`."""

    placements: dict[int, list[list[int]]]
    """By layer, the experts of each rank."""


class ShutdownRank(msgspec.Struct, tag=True):
    """Exit."""


Down = Union[StartRank, MakeCache, Step, Supply, CountExperts, PlaceExperts, Shared, ShutdownRank]


# Up: from a rank


class WeightsLoaded(msgspec.Struct, tag=True):
    """The rank has loaded its part of the model. What that takes, and what is left for the cache."""

    device: str
    dtype: str
    weight_bytes: int
    reads_groups: bool
    drafts: DeviceDrafts
    encoder: EncoderLimits
    memory: dict[str, Any]
    """The fields of a `MemoryPlan`."""
    phases: dict[str, float]
    host_slots: int = 0
    """Blocks that fit in its host memory…"""
    slot_bytes: int = 0
    """…and the bytes of its part of one."""
    groups: tuple[CacheGroup, ...] = (FULL,)
    """Cache groups: all ranks must have the same…"""
    layout: str = ""
    """…but may lay them out differently: each has its own layers, and its own bytes of them."""


class RankReady(msgspec.Struct, tag=True):
    """The rank accepts plans."""

    host_slots: int = 0
    """Blocks of its host tier."""
    slot_bytes: int = 0
    out_rate: float = 0.0
    """Bytes per second from device to host; `back_rate`: from host to device."""
    back_rate: float = 0.0


class Done(msgspec.Struct, tag=True):
    """A step has completed."""

    step: int
    tokens_crc: int
    """Checksum of its tokens: every rank of the last stage must have sampled the same."""
    moves_done: list[MovesDone]
    result: bytes = b""
    """Only from the first rank of the last stage."""
    memory: MemoryUse | None = None
    """Once a second."""
    adapters_done: list[AdapterLoaded] = []


class StepFailed(msgspec.Struct, tag=True):
    """A step failed on this rank."""

    step: int
    error: str
    """The error's class."""
    message: str
    collectives: int
    """Number of collectives this rank has started. If all ranks of a stage failed at the same one, they stay usable."""


class ExpertCounts(msgspec.Struct, tag=True):
    """Answers `CountExperts`: how often each expert was chosen, by layer."""

    counts: dict[int, list[int]]


class Placed(msgspec.Struct, tag=True):
    """The experts have been moved."""


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
    """A message as sent over the socket; raises if a setting is not plain data."""
    try:
        return frame(_encoder.encode(message))
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise ValidationError(f"a setting cannot be sent to another process: {error}") from error


def decode_down(data: bytes) -> Down:
    return _down_decoder.decode(data)


def decode_up(data: bytes) -> Up:
    return _up_decoder.decode(data)
