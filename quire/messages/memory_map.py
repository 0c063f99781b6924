"""The engine's memory at one moment: how full each tier is, who holds what, what is shared, what sleeps where."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from quire.errors import ValidationError

EMPTY, CACHED, HELD, SHARED, MOVING = ".c1s>"
"""What the map of blocks says of each. A block on its way is MOVING, whoever else holds it."""

OwnerKind = Literal["running", "loading", "put by", "session"]
Place = Literal["host", "disk", "nowhere"]


class DeviceBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks on the device. Every block is one of empty, cached, held, shared and moving."""

    capacity: int
    """Blocks that can be handed out."""
    block_size: int
    """Tokens a block holds."""
    block_bytes: int
    empty: int
    cached: int
    """Held by nobody; their content can still be found."""
    held: int
    """By one owner."""
    shared: int
    """By several."""
    moving: int
    """On their way to or from another tier."""

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.held + self.shared + self.moving


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """How many owners blocks have, and what that saves."""

    by_one: int
    by_two: int
    by_more: int
    most: int
    """Owners of the block that has most of them."""
    saved: int
    """Blocks there would be in addition, had each owner its own."""
    unaccounted: int
    """Blocks that are held, and by nobody who is known: there are none, unless one was lost."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds blocks."""

    kind: OwnerKind
    """A request with a row, one whose blocks are coming, one that was put by in host memory, or a session between its
    turns."""
    name: str
    """The request's id and sample, or the session's name."""
    tenant: str = ""
    """Of a session: what its tenant goes by in the store."""
    session: str = ""
    """Whose turn the request is."""
    tokens: int
    """The request has, or of a session those with KV on the device."""
    blocks: int
    """On the device; of a request put by, in host memory."""
    shared: int
    """How many of them others hold too."""


class Owners(msgspec.Struct, frozen=True, kw_only=True):
    """All of them in figures, and the largest by name."""

    running: int
    loading: int
    put_by: int
    sessions: int
    waiting: int
    """Requests that hold no block on the device yet, or none any more, those put by among them."""
    largest: list[Owner]


class Journeys(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks on their way."""

    out: int = 0
    """From the device to host memory."""
    back: int = 0
    """To the device, from host memory or disk."""
    writes: int = 0
    """From host memory to disk."""


class HostBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks in host memory."""

    slots: int
    used: int
    owned: int
    """By sessions, or by requests that were put by."""
    block_bytes: int


class DiskBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks on disk."""

    blocks: int
    owned: int
    """By sessions."""
    block_bytes: int
    disk_bytes: int
    """What its files take."""
    capacity: int
    """…of so many bytes."""
    is_resting: bool
    """Nothing is written for a while: the disk is full, or fails."""


class Sleeper(msgspec.Struct, frozen=True, kw_only=True):
    """A session that holds no device block."""

    name: str
    tenant: str = ""
    tokens: int
    kv_tokens: int
    """Tokens whose KV was put by."""
    place: Place
    """Where its last block is; nowhere: it is computed again when the session wakes."""


class Sleeping(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions that hold no device block."""

    count: int
    in_host: int
    on_disk: int
    nowhere: int
    """Tokens alone: never run, or their blocks are gone."""
    unknown: int
    """Too many to look up."""
    latest: list[Sleeper]
    """Those that fell asleep last."""


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """Watermarks each tier is past: 0, 1 or 2."""

    device: int = 0
    host: int = 0
    disk: int = 0


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How often each expert of a layer was chosen."""

    layer: int
    chosen: list[int]

    @property
    def max_over_mean(self) -> float:
        """1 is perfectly even, the number of experts is everything to one."""
        return max(self.chosen) * len(self.chosen) / total if (total := sum(self.chosen)) else 0.0

    def hottest(self, count: int) -> list[tuple[int, float]]:
        """The experts chosen most, each with its share of all choices."""
        total = sum(self.chosen) or 1
        order = sorted(range(len(self.chosen)), key=lambda expert: -self.chosen[expert])
        return [(expert, self.chosen[expert] / total) for expert in order[:count] if self.chosen[expert]]


class MemoryMap(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's memory at one moment."""

    object: Literal["memory_map"]
    taken: Annotated[float, msgspec.Meta(ge=0, lt=253_402_300_800)]
    """Seconds since 1970."""
    device: DeviceBlocks
    blocks: str
    """A character for each block in order: `.` empty, `c` cached, `1` held once, `s` shared, `>` moving…"""
    stride: int
    """…or, of a large cache, for each so many-th."""
    sharing: Sharing
    owners: Owners
    journeys: Journeys
    pressure: Pressure
    host: HostBlocks | None = None
    disk: DiskBlocks | None = None
    sleeping: Sleeping | None = None
    """None as long as no session was asked for."""
    experts: list[ExpertLoad] = []

    def to_json(self) -> bytes:
        """As a file keeps it."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str, where: str) -> MemoryMap:
        """What `to_json` gave; raises if it is something else. `where`: how to call it then."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValidationError(f"{where} is no memory map: {error}", "snapshot") from error
