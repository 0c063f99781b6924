"""The engine's memory at one moment: how full each tier is, the owners of blocks, sharing, and sleeping sessions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quire.errors import ValidationError

EMPTY, CACHED, HELD, SHARED, MOVING = ".c1s>"
"""States of a block in the map. A block in transfer is MOVING, also if a request or session holds it."""

OwnerKind = Literal["running", "loading", "swapped", "session"]
Place = Literal["host", "disk", "nowhere"]


class DeviceBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks on the device, each in one of the states empty, cached, held, shared and moving."""

    capacity: int
    """Blocks that can be allocated."""
    block_size: int
    """Tokens a block holds."""
    block_bytes: int
    empty: int
    cached: int
    """In the prefix cache, without an owner."""
    held: int
    """With one owner."""
    shared: int
    """With several owners."""
    moving: int
    """In transfer to or from another tier."""

    @property
    def used(self) -> int:
        """Blocks with an owner or in transfer."""
        return self.held + self.shared + self.moving


class GroupBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one cache group: of the layers whose caches have the same lifetime."""

    kind: Literal["full", "window", "state"]
    layers: int
    window: int = 0
    """Window groups: tokens that are kept."""
    state_blocks: int = 0
    """State groups: blocks of one recurrent state, or of a snapshot of one."""
    held: int
    """With owners."""
    cached: int
    """In the prefix cache, without an owner."""


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """How many owners blocks have, and what that saves."""

    by_one: int
    by_two: int
    by_more: int
    most: int
    """Owners of the block that has most of them."""
    saved: int
    """Blocks that would be needed in addition if each owner had its own."""
    unaccounted: int
    """Blocks whose reference count does not match their owners: 0, unless a block leaked."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A request or session that holds blocks."""

    kind: OwnerKind
    """A request with a row, one whose blocks are being loaded, one that was swapped out to host memory, or a session
    between its turns."""
    name: str
    """The request's id and sequence number, or the session's name."""
    tenant: str = ""
    """Of a session: its tenant's key in the store."""
    session: str = ""
    """The session that the request is a turn of."""
    tokens: int
    """Of a request: all its tokens. Of a session: those with KV on the device."""
    blocks: int
    """On the device; of a swapped request, in host memory."""
    shared: int
    """Blocks that have other owners too."""
    by_group: list[int] = []
    """Blocks on the device by cache group, if the model has several."""


WaitReason = Literal[
    "grammar", "adapter", "quarantine", "draws", "share", "rows", "blocks", "memory", "encoder", "budget", "order"
]


class WaitingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request without a row, and why it has none."""

    name: str
    tenant: str = ""
    tokens: int
    preemptions: int
    seconds: float
    """Since it arrived."""
    reason: WaitReason
    """Its grammar is compiled; its adapter is loaded; requests run one at a time after a failed step; its last draws
    are not collected; its tenant has its share; rows, blocks, bytes, the encoder's cache or the tokens of a step are
    used up; or others come first."""
    detail: str
    """The reason with its numbers."""


class Owners(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of owners, and the largest ones by name."""

    running: int
    loading: int
    swapped: int
    sessions: int
    waiting: int
    """Requests without blocks on the device, the swapped ones included."""
    largest: list[Owner]
    queue: list[WaitingRequest] = []
    """The first of the waiting requests, in the order in which they are admitted."""


class TransferCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks in transfer between tiers."""

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
    """Blocks of sessions and swapped requests."""
    block_bytes: int


class DiskBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks on disk."""

    blocks: int
    owned: int
    """Blocks of sessions."""
    block_bytes: int
    disk_bytes: int
    """Size of its files."""
    capacity: int
    """Most bytes its files may take."""
    is_paused: bool
    """Nothing is written for a while: the disk is full or fails."""


class SleepingSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that holds no device block."""

    name: str
    tenant: str = ""
    tokens: int
    kv_tokens: int
    """Tokens whose KV was saved."""
    place: Place
    """The tier of its last block; nowhere: the KV is computed again when the session wakes."""


class Sleeping(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions that hold no device block."""

    count: int
    in_host: int
    on_disk: int
    nowhere: int
    """Sessions without KV: they never ran, or their blocks were dropped."""
    unknown: int
    """Sessions that were not looked up because there are too many."""
    latest: list[SleepingSession]
    """The sessions that fell asleep last."""


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """Number of watermarks each tier is past: 0, 1 or 2."""

    device: int = 0
    host: int = 0
    disk: int = 0


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How often each expert of a layer was chosen."""

    layer: int
    chosen: list[int]

    @property
    def max_over_mean(self) -> float:
        """1 is perfectly even; the number of experts means that one expert gets all tokens."""
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
    """A character for every `stride`-th block: `.` empty, `c` cached, `1` held once, `s` shared, `>` moving."""
    stride: int
    """1, unless the cache is large."""
    sharing: Sharing
    owners: Owners
    transfers: TransferCounts
    pressure: Pressure
    host: HostBlocks | None = None
    disk: DiskBlocks | None = None
    sleeping: Sleeping | None = None
    """None before the first session is used."""
    experts: list[ExpertLoad] = []
    groups: list[GroupBlocks] = []
    """Cache groups, if the model has several."""

    def to_json(self) -> bytes:
        """The map as a file holds it."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str, where: str) -> MemoryMap:
        """Read what `to_json` wrote; raises if it is something else. `where`: its name in the error."""
        try:
            return msgspec.convert(_upgrade(msgspec.json.decode(data)), cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValidationError(f"{where} is no memory map: {error}", "snapshot") from error


OLD_NAMES = {"journeys": "transfers", "put_by": "swapped", "is_resting": "is_paused"}


def _upgrade(value: Any) -> Any:
    """The decoded map with current names: files saved by earlier versions have OLD_NAMES, and a kind "put by"."""
    if isinstance(value, list):
        return [_upgrade(item) for item in value]
    if not isinstance(value, dict):
        return value
    upgraded = {OLD_NAMES.get(name, name): _upgrade(item) for name, item in value.items()}
    if upgraded.get("kind") == "put by":
        upgraded["kind"] = "swapped"
    return upgraded
