"""From an engine's view to the frames of the feed: what a viewer may see, as differences to the last frame."""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.messages.engine_view import AdapterView, BlockHolder, EngineView
from quire.messages.memory_map import DiskBlocks, HostBlocks, Pressure, TransferCounts, WaitingRequest
from quire.sessions.log import owner_id

EMPTY, CACHED, HELD, SHARED, MOVING, OTHER = range(6)
"""States of a block, in the low 3 bits of its cell. OTHER: another tenant holds it. The high 5 bits are the owner's
colour, 1 to 31; 0: none."""
STATES = ("empty", "cached", "held", "shared", "moving", "other")
COLOURS = 30
STATES_COLOUR = 31
"""Of recurrent states."""
MOST_CELLS = 1 << 17
"""Of a larger cache every second, third, … block is shown."""
MOST_ROWS = 2048
NEAR = 6
"""Changed cells this close are sent as one run: a run costs about so many characters."""

Cells = NDArray[np.uint8]
Counts = NDArray[np.int64]


class RowFigures(msgspec.Struct, array_like=True, frozen=True):
    """A request with a row, one that loads or was swapped out, or a session."""

    row: int
    colour: int
    kind: str
    name: str
    tenant: str
    session: str
    computed: int
    known: int
    prompt: int
    limit: int
    blocks: int
    """On the device; of one that was swapped out or sleeps, in host memory."""
    shared: int
    adapter: str
    place: str
    """Of a sleeping session: the highest tier with blocks of it, host or disk, or nowhere."""


class TenantFigures(msgspec.Struct, frozen=True):
    """What one tenant has."""

    name: str
    rows: int
    waiting: int
    blocks: int
    tokens: int


class CellChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """The map of blocks: whole, or the runs that changed."""

    size: int
    stride: int
    full: str = ""
    """One byte a cell, in base64."""
    runs: list[int] = []
    """Start and length of each run…"""
    data: str = ""
    """…and the cells of all of them."""


class LatencyFigures(msgspec.Struct, frozen=True):
    """Milliseconds, of recent requests; 0: there were none."""

    first_median: float
    first_p95: float
    token_median: float
    token_p95: float


class TierFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """Lower tiers."""

    pressure: Pressure
    transfers: TransferCounts
    host: HostBlocks | None = None
    disk: DiskBlocks | None = None


class ReplicaFigures(msgspec.Struct, frozen=True):
    """One of several engines."""

    status: str
    running: float
    waiting: float
    blocks_used: float
    generated_tokens: float


class ExpertMap(msgspec.Struct, frozen=True):
    """How often each expert of each layer was chosen."""

    layers: list[str]
    experts: int
    """Of a layer."""
    loads: str
    """A byte for each expert, layer after layer, in base64: 32 times its load over the layer's mean, at most 255."""


class RankFigures(msgspec.Struct, frozen=True):
    """How each engine's model is divided."""

    tensor: int
    pipeline: int
    experts: int
    """Ranks that experts are spread over; 1: each rank has all, or slices of all."""


class SlowFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """What changes slowly: sent once a second."""

    status: str
    restarts: int = 0
    replicas: list[ReplicaFigures] = []
    ranks: RankFigures | None = None
    """None: one rank."""
    speculation: dict[str, float] = {}
    acceptance: list[float] = []
    """Drafts that were accepted, by place."""
    experts: dict[str, float] = {}
    """By layer: load of the busiest expert over the mean."""
    expert_map: ExpertMap | None = None
    rank_skew: float = 0.0
    """Experts over ranks: load of the busiest rank over the mean, in the worst layer."""
    energy: dict[str, float] = {}
    """Where the engine measures it: joules so far, by kind too; watts now, the budget, and whether it is estimated."""
    adapters: dict[str, float] = {}
    """Loads and evictions so far."""
    sessions: dict[str, float] = {}


class FeedFrame(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One event of the feed."""

    frame: int
    is_whole: bool = False
    """The first one, or the first after some were missed: `cells` is the whole map."""
    scope: str
    """admin: everything; tenant: what this key's requests have."""
    at: float
    """Milliseconds since 1970."""
    status: str = ""
    """Why there is no view; the other fields are then missing."""
    replica: int = 0
    block_size: int = 0
    block_bytes: int = 0
    row_count: int = 0
    budget: int = 0
    counters: dict[str, float] = {}
    waiting: int = 0
    loading: int = 0
    compiling: int = 0
    steps: list[tuple[int, float, float, int, int, int, int]] = []
    """New ones: number, when, milliseconds, decodes, prompts, prompt tokens, drafts."""
    rows: list[RowFigures] = []
    hidden: int = 0
    """Rows of other tenants."""
    queue: list[WaitingRequest] = []
    cells: CellChange | None = None
    counts: dict[str, int] = {}
    """Blocks by state."""
    host_cells: CellChange | None = None
    """Slots of host memory, like `cells`…"""
    host_counts: dict[str, int] = {}
    """…and by state."""
    adapters: AdapterView | None = None
    tenants: list[TenantFigures] = []
    latency: LatencyFigures | None = None
    tiers: TierFigures | None = None
    slow: SlowFigures | None = None
    cost_ms: float = 0.0
    """What making the view took of the engine's time."""


@dataclass
class Scope:
    """Whose requests are shown; `tenant` None: all."""

    tenant: str | None

    @property
    def name(self) -> str:
        return "admin" if self.tenant is None else "tenant"

    def shows(self, holder: BlockHolder) -> bool:
        """Whether the holder is one of the tenant's."""
        if self.tenant is None:
            return True
        if holder.kind == "states":
            return False
        is_session = holder.kind in ("session", "asleep")
        owner = owner_id(self.tenant) if is_session and self.tenant else self.tenant
        return holder.tenant == owner


class FrameWriter:
    """Writes the frames of one channel: all its viewers see the same."""

    def __init__(self, scope: Scope, replica: int, block_bytes: int = 0) -> None:
        self._scope = scope
        self._replica = replica
        self._block_bytes = block_bytes
        self._number = 0
        self._cells: Cells | None = None
        self._host: Cells | None = None
        self._last_step = -1

    def failed(self, at: float, status: str) -> FeedFrame:
        """There is no view."""
        self._number += 1
        self._cells = self._host = None
        return FeedFrame(frame=self._number, scope=self._scope.name, at=1000 * at, status=status, replica=self._replica)

    def write(self, view: EngineView, slow: SlowFigures | None) -> FeedFrame:
        """The next frame, as differences."""
        self._number += 1
        cells, shared = draw_cells(view, self._scope)
        shown, change = _next_cells(self._cells, cells)
        self._cells = shown
        host_cells, host_shared = draw_host_cells(view, self._scope)
        host_change = None
        if len(host_cells):
            self._host, host_change = _next_cells(self._host, host_cells)
        visible = [self._scope.shows(holder) for holder in view.holders]
        steps = [step for step in view.steps if step[0] > self._last_step]
        if view.steps:
            self._last_step = view.steps[-1][0]
        rows = [
            _row(holder, shared[at])
            for at, holder in enumerate(view.holders)
            if visible[at] and holder.kind != "states"
        ][:MOST_ROWS]
        rows += [
            _row(holder, host_shared[at]) for at, holder in enumerate(view.host_holders) if self._scope.shows(holder)
        ][: MOST_ROWS - len(rows)]
        hidden = sum(holder.row >= 0 for at, holder in enumerate(view.holders) if not visible[at])
        queue = [one for one in view.queue if self._scope.tenant in (None, one.tenant)]
        return FeedFrame(
            frame=self._number,
            scope=self._scope.name,
            at=1000 * (view.at + view.offset),
            replica=self._replica,
            block_size=view.block_size,
            block_bytes=self._block_bytes,
            row_count=view.rows,
            budget=view.budget,
            counters=view.counters,
            waiting=view.waiting,
            loading=view.loading,
            compiling=view.compiling,
            steps=[
                (number, round(1000 * (start + view.offset), 1), round(1000 * (end - start), 3), a, b, c, d)
                for number, start, end, a, b, c, d in steps
            ],
            rows=rows,
            hidden=hidden,
            queue=queue,
            cells=change,
            counts=_by_state(cells),
            host_cells=host_change,
            host_counts=_by_state(host_cells),
            adapters=_adapters(view, self._scope),
            tenants=_tenants(view) if self._scope.tenant is None else [],
            latency=_latency(view),
            tiers=TierFigures(view.pressure, view.transfers, view.host, view.disk),
            slow=slow,
            cost_ms=round(1000 * view.seconds, 3),
        )

    def whole(self, frame: FeedFrame) -> FeedFrame:
        """The last frame for a viewer that has none before it."""
        return msgspec.structs.replace(
            frame, is_whole=True, cells=_all_cells(self._cells, frame.cells),
            host_cells=_all_cells(self._host, frame.host_cells),
        )  # fmt: skip


def draw_cells(view: EngineView, scope: Scope) -> tuple[Cells, list[int]]:
    """A byte for each block but the reserved one, and how many blocks each holder shares."""
    cells = np.frombuffer(view.content, np.uint8).copy()  # EMPTY or CACHED
    shared, held_by = _draw_holders(cells, view.table, view.holders, scope)
    moving = np.array([block for block in view.moving if scope.tenant is None or held_by[block]], np.int64)
    cells[moving] = MOVING | (cells[moving] & ~np.uint8(7))
    return cells[1:], shared


def draw_host_cells(view: EngineView, scope: Scope) -> tuple[Cells, list[int]]:
    """The same for the slots of host memory."""
    pinned = HELD if scope.tenant is None else OTHER
    cells = np.array([EMPTY, CACHED, pinned, MOVING], np.uint8)[np.frombuffer(view.host_content, np.uint8)]
    arriving = cells == MOVING
    shared, _ = _draw_holders(cells, view.host_table, view.host_holders, scope)
    cells[arriving] = MOVING
    return cells, shared


def _draw_holders(cells: Cells, blocks: bytes, holders: list[BlockHolder], scope: Scope) -> tuple[list[int], Counts]:
    """Draw what these holders have; returns how many blocks each shares, and how many of the scope hold each block."""
    table = np.frombuffer(blocks, np.int32)
    counts = np.array([holder.blocks for holder in holders], np.int64)
    is_own = np.repeat(np.array([scope.shows(holder) for holder in holders], np.bool_), counts)
    colours = np.repeat(np.array([colour_of(holder) for holder in holders], np.uint8), counts)
    cells[table[~is_own]] = OTHER
    own = table[is_own]
    held_by = np.bincount(own, minlength=len(cells))
    cells[own] = HELD
    cells[held_by > 1] = SHARED
    cells[own] |= colours[is_own] << 3
    starts = np.concatenate([[0], np.cumsum(counts)])
    is_shared = np.concatenate([[0], np.cumsum(held_by[table] > 1)])
    return (is_shared[starts[1:]] - is_shared[starts[:-1]]).tolist(), held_by


def _next_cells(before: Cells | None, cells: Cells) -> tuple[Cells, CellChange]:
    """The cells that are shown, and their differences to those before."""
    stride = -(-len(cells) // MOST_CELLS) or 1
    shown = cells[::stride]
    return shown, changed_cells(before, shown, stride)


def _all_cells(cells: Cells | None, change: CellChange | None) -> CellChange | None:
    return change if cells is None or change is None else changed_cells(None, cells, change.stride)


def _by_state(cells: Cells) -> dict[str, int]:
    states = np.bincount(cells & 7, minlength=len(STATES)).tolist()
    return {state: count for state, count in zip(STATES, states, strict=True) if count}


def _adapters(view: EngineView, scope: Scope) -> AdapterView | None:
    """Who uses them is shown to the operator only; their names are those of `/v1/models`."""
    if view.adapters is None or scope.tenant is None:
        return view.adapters
    return AdapterView(view.adapters.slots, view.adapters.loaded, [], [])


def colour_of(holder: BlockHolder) -> int:
    """1 to 31: neighbouring rows differ."""
    if holder.kind == "states":
        return STATES_COLOUR
    number = holder.row if holder.row >= 0 else zlib.crc32(holder.name.encode())
    return 1 + number % COLOURS


def changed_cells(before: Cells | None, now: Cells, stride: int) -> CellChange:
    """The map as differences to `before`, or whole if that is shorter."""
    if before is None or len(before) != len(now):
        return CellChange(len(now), stride, full=_text(now))
    changed = np.flatnonzero(before != now)
    if 3 * len(changed) > len(now):
        return CellChange(len(now), stride, full=_text(now))
    if not len(changed):
        return CellChange(len(now), stride)
    breaks = np.flatnonzero(np.diff(changed) > NEAR)
    starts = changed[np.concatenate([[0], breaks + 1])]
    ends = changed[np.concatenate([breaks, [len(changed) - 1]])] + 1
    data = np.concatenate([now[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])
    runs = np.stack([starts, ends - starts], 1).ravel().tolist()
    return CellChange(len(now), stride, runs=runs, data=_text(data))


def _text(cells: Cells) -> str:
    return base64.b64encode(cells.tobytes()).decode("ascii")


def _row(holder: BlockHolder, shared: int) -> RowFigures:
    name = holder.name if not holder.sequence else f"{holder.name}/{holder.sequence}"
    return RowFigures(
        holder.row, colour_of(holder), holder.kind, name, holder.tenant, holder.session, holder.computed, holder.known,
        holder.prompt, holder.limit, holder.blocks, shared, holder.adapter, holder.place,
    )  # fmt: skip


def _tenants(view: EngineView) -> list[TenantFigures]:
    """Tenants with requests; sessions between turns are not counted."""
    rows: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for holder in view.holders:
        if holder.kind not in ("session", "states"):
            rows[holder.tenant] += 1
            blocks[holder.tenant] += holder.blocks
            tokens[holder.tenant] += holder.known
    waiting = Counter(one.tenant for one in view.queue)
    names = sorted(rows.keys() | waiting.keys(), key=lambda name: (-rows[name] - waiting[name], name))
    return [TenantFigures(name, rows[name], waiting[name], blocks[name], tokens[name]) for name in names[:100]]


def _latency(view: EngineView) -> LatencyFigures:
    def at(values: list[float], share: float) -> float:
        ordered = sorted(values)
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else 0.0

    first, token = view.first_tokens, view.token_times
    return LatencyFigures(at(first, 0.5), at(first, 0.95), at(token, 0.5), at(token, 0.95))
