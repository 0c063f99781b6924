"""Makes the map of an engine's memory. A request for it takes some milliseconds of the loop's time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.engine.waiting import explain_waiting
from quire.kvcache.block_pool import NULL_BLOCK, BlockPool
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.block_store import StoreStats
from quire.kvcache.offload.manager import OffloadManager
from quire.messages.memory_map import (
    CACHED,
    EMPTY,
    HELD,
    MOVING,
    SHARED,
    DeviceBlocks,
    DiskBlocks,
    ExpertLoad,
    GroupBlocks,
    HostBlocks,
    MemoryMap,
    Owner,
    OwnerKind,
    Owners,
    Place,
    Pressure,
    Sharing,
    Sleeping,
    SleepingSession,
    TransferCounts,
    WaitingRequest,
)
from quire.messages.request import Request, RequestState
from quire.scheduler.scheduler import Scheduler
from quire.sessions.keeper import SessionKeeper
from quire.sessions.log import Session, name_of, owner_of
from quire.sessions.session_kv import ResidentSession

MOST_CELLS = 65_536
"""Characters in the map of blocks. A larger cache is shown by every second, third, … block."""
MOST_NAMED = 200
"""Owners, and sleeping sessions, listed by name."""
MOST_LOOKED_UP = 20_000
"""Sleeping sessions whose tier is looked up; more would delay the loop."""

_Counts = NDArray[np.int64]


def map_memory(scheduler: Scheduler, experts: Mapping[int, Sequence[int]], block_bytes: int) -> MemoryMap:
    """The memory of this engine now. `experts`: how often each expert of each layer was chosen."""
    pool, tiers, sessions, table = scheduler.tables.pool, scheduler.tiers, scheduler.sessions, scheduler.requests
    requests = [request for request_id in table.ids() for request in table.sequences(request_id)]
    on_device = [live for live in sessions.kv.on_device() if live.blocks]
    every_page = scheduler.tables.every_page
    tables = [*map(every_page, requests), *map(every_page, on_device), table.states.page_refs()]
    held_by = _count(tables, pool.num_blocks)
    saving, loading = ([], []) if tiers is None else (tiers.saving_blocks, tiers.loading_blocks)
    cells = _cells(pool, held_by, [*saving, *loading])
    stride = -(-len(cells) // MOST_CELLS)
    owners = [
        *(_request_owner(one, held_by, scheduler.tables) for one in requests),
        *(_session_owner(one, held_by, scheduler.tables) for one in on_device),
    ]
    return MemoryMap(
        object="memory_map",
        taken=time.time(),
        device=_device(cells, scheduler.tables.block_size, block_bytes),
        blocks=cells[::stride].tobytes().decode("ascii"),
        stride=stride,
        sharing=_sharing(pool, held_by, [*saving, *loading]),
        owners=_owners([owner for owner in owners if owner is not None], len(requests), explain_waiting(scheduler)),
        transfers=TransferCounts(out=len(saving), back=len(loading), writes=0 if tiers is None else tiers.num_writes),
        pressure=pressure_levels(scheduler),
        host=None if tiers is None else host_blocks(tiers),
        disk=None if tiers is None or tiers.store is None else disk_blocks(tiers.store.stats()),
        sleeping=_sleeping(sessions, tiers) if isinstance(sessions, SessionKeeper) else None,
        experts=[ExpertLoad(layer=layer, chosen=list(chosen)) for layer, chosen in experts.items()],
        groups=_groups(scheduler.tables, [*requests, *on_device], table.states.page_refs()),
    )


# Blocks


def _count(tables: Iterable[Sequence[int]], num_blocks: int) -> _Counts:
    """How often each block occurs in these tables."""
    blocks = np.fromiter(itertools.chain.from_iterable(tables), np.int64)
    return np.bincount(blocks, minlength=num_blocks)


def _cells(pool: BlockPool, held_by: _Counts, moving: list[int]) -> NDArray[np.uint8]:
    """The state of each block, without the reserved one."""
    cells = np.full(pool.num_blocks, ord(EMPTY), np.uint8)
    cells[pool.oldest(pool.idle)] = ord(CACHED)
    cells[np.asarray(pool.refs) > 0] = ord(HELD)
    cells[held_by > 1] = ord(SHARED)
    cells[moving] = ord(MOVING)
    return cells[NULL_BLOCK + 1 :]


def _device(cells: NDArray[np.uint8], block_size: int, block_bytes: int) -> DeviceBlocks:
    counts = {state: int((cells == ord(state)).sum()) for state in (EMPTY, CACHED, HELD, SHARED, MOVING)}
    return DeviceBlocks(
        capacity=len(cells), block_size=block_size, block_bytes=block_bytes, empty=counts[EMPTY],
        cached=counts[CACHED], held=counts[HELD], shared=counts[SHARED], moving=counts[MOVING],
    )  # fmt: skip


def _groups(tables: BlockTables, owners: list[Request | ResidentSession], states: list[int]) -> list[GroupBlocks]:
    """Blocks by cache group; none if the model has only one."""
    if not tables.others:
        return []
    held: list[set[int]] = [set() for _ in tables.groups]
    for owner in owners:
        for number, pages in enumerate(_pages_by_group(owner, tables)):
            held[number].update(pages)
    state_group = next((number for number, group in enumerate(tables.groups) if group.kind == "state"), 0)
    held[state_group].update(states)
    cached = Counter(tables.group_of(block) for block in tables.pool.oldest(tables.pool.idle))
    return [
        GroupBlocks(
            kind=group.kind, layers=len(group.layers), window=group.window, state_blocks=group.pages,
            held=len(held[number]), cached=cached[number],
        )
        for number, group in enumerate(tables.groups)
    ]  # fmt: skip


def _pages_by_group(owner: Request | ResidentSession, tables: BlockTables) -> list[list[int]]:
    first = [owner.blocks] if tables.has_full else []
    return [*first, *(table.held for table in tables.tables_of(owner))] if tables.others else first


def _sharing(pool: BlockPool, held_by: _Counts, moving: list[int]) -> Sharing:
    known = held_by + _count([moving], pool.num_blocks)
    return Sharing(
        by_one=int((held_by == 1).sum()),
        by_two=int((held_by == 2).sum()),
        by_more=int((held_by > 2).sum()),
        most=int(held_by.max()),
        saved=int(np.maximum(held_by - 1, 0).sum()),
        unaccounted=int((known != pool.refs).sum()),
    )


# Owners


def _request_owner(request: Request, held_by: _Counts, tables: BlockTables) -> Owner | None:
    """The request as an owner, if it holds blocks."""
    source, kind, pages = request.source, _owner_kind(request), tables.every_page(request)
    if kind is None:
        return None
    return Owner(
        kind=kind,
        name=request.id if source.num_sequences == 1 else f"{request.id}/{request.index}",
        tenant=source.tenant,
        session=name_of(source.session),
        tokens=request.known,
        blocks=len(pages) or len(request.owned_keys),
        shared=_num_shared(pages, held_by),
        by_group=[len(own) for own in _pages_by_group(request, tables)] if tables.others and pages else [],
    )


def _owner_kind(request: Request) -> OwnerKind | None:
    if request.row >= 0:
        return "running"
    if request.state is RequestState.LOADING:
        return "loading"
    return "swapped" if request.owned_keys else None


def _session_owner(live: ResidentSession, held_by: _Counts, tables: BlockTables) -> Owner:
    pages = tables.every_page(live)
    return Owner(
        kind="session", name=name_of(live.name), tenant=owner_of(live.name), tokens=live.tokens,
        blocks=len(pages), shared=_num_shared(pages, held_by),
        by_group=[len(own) for own in _pages_by_group(live, tables)] if tables.others else [],
    )  # fmt: skip


def _num_shared(blocks: list[int], held_by: _Counts) -> int:
    return int((held_by[blocks] > 1).sum()) if blocks else 0


def _owners(owners: list[Owner], num_requests: int, queue: list[WaitingRequest]) -> Owners:
    kinds = Counter(owner.kind for owner in owners)
    return Owners(
        running=kinds["running"],
        loading=kinds["loading"],
        swapped=kinds["swapped"],
        sessions=kinds["session"],
        waiting=num_requests - kinds["running"] - kinds["loading"],
        largest=heapq.nlargest(MOST_NAMED, owners, key=lambda owner: owner.blocks),
        queue=queue,
    )


# Lower tiers


def pressure_levels(scheduler: Scheduler) -> Pressure:
    levels = scheduler.pressure
    levels.update(scheduler.tables.pool, scheduler.requests.swapper)  # an idle engine does not update them
    return Pressure(device=levels.device, host=levels.host, disk=levels.disk)


def host_blocks(tiers: OffloadManager) -> HostBlocks:
    host = tiers.host
    return HostBlocks(slots=host.num_slots, used=host.used, owned=host.num_pinned, block_bytes=tiers.costs.block_bytes)


def disk_blocks(stats: StoreStats) -> DiskBlocks:
    return DiskBlocks(
        blocks=stats.blocks, owned=stats.pinned_blocks, block_bytes=stats.block_bytes, disk_bytes=stats.used_bytes,
        capacity=stats.capacity, is_paused=stats.is_paused,
    )  # fmt: skip


def _sleeping(sessions: SessionKeeper, tiers: OffloadManager | None) -> Sleeping:
    saved, more = sessions.kv.offloaded(MOST_LOOKED_UP)
    places = [(name, place_of(key, tiers)) for name, key in saved]
    counts, count = Counter(place for _, place in places), len(sessions.store) - sessions.kv.num_on_device
    return Sleeping(
        count=count,
        in_host=counts["host"],
        on_disk=counts["disk"],
        nowhere=count - counts["host"] - counts["disk"] - more,
        unknown=more,
        latest=[_sleeping_session(sessions.store.get(name), place) for name, place in places[:MOST_NAMED]],
    )


def place_of(key: bytes, tiers: OffloadManager | None) -> Place:
    """The tier that has the block."""
    if tiers is None or not (found := tiers.find([key])):
        return "nowhere"
    return "host" if found[0] else "disk"


def _sleeping_session(session: Session, place: Place) -> SleepingSession:
    return SleepingSession(
        name=name_of(session.name), tenant=owner_of(session.name), tokens=session.num_tokens,
        kv_tokens=session.kv_tokens, place=place,
    )  # fmt: skip
