"""Makes what the page shows: the view of an engine at one moment, and the users of one block.

A view is made only when a front asks for one. Its cost grows with held blocks and rows: about 30 ns a block.
"""

from __future__ import annotations

import itertools
import time

import numpy as np

from quire.engine.memory_map import disk_blocks, host_blocks, place_of, pressure_levels
from quire.engine.waiting import explain_waiting
from quire.errors import QuireError, ValidationError
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.manager import OffloadManager
from quire.messages.engine_view import (
    AdapterView,
    BlockDetail,
    BlockHolder,
    BlockUser,
    EngineView,
    HolderKind,
    Tier,
)
from quire.messages.memory_map import TransferCounts
from quire.messages.request import Request, RequestState
from quire.scheduler.scheduler import Scheduler
from quire.sessions.keeper import SessionKeeper
from quire.sessions.log import Session, name_of, owner_of
from quire.sessions.session_kv import ResidentSession

MOST_HOLDERS = 4096
MOST_STEPS = 64
MOST_ASLEEP = 100
"""Sleeping sessions that are shown, the latest ones…"""
MOST_ASLEEP_BLOCKS = 4096
"""…and about how many of their blocks."""
MOST_SLOTS = 1 << 17
"""A larger host tier is shown by its figures alone: looking at every slot would take too long."""

Holding = Request | ResidentSession


def view_engine(scheduler: Scheduler, compiling: int) -> EngineView:
    """The engine now. `compiling`: requests that wait for their grammar."""
    begin, worked = time.monotonic(), time.thread_time()
    table, tables, pool, tiers = scheduler.requests, scheduler.tables, scheduler.tables.pool, scheduler.tiers
    found = _holding(scheduler)
    pages = [tables.every_page(one) for one in found]
    holders = [_holder(one, len(held), scheduler) for one, held in zip(found, pages, strict=True)]
    if states := table.states.page_refs():
        holders.append(BlockHolder("states", "", "", "", -1, 0, 0, 0, 0, 0, len(states)))
        pages.append(states)
    moving = [] if tiers is None else [*tiers.saving_blocks, *tiers.loading_blocks]
    host_content, host_holders, host_slots = _in_host_memory(scheduler)
    first_tokens, token_times = table.timelines.latencies()
    stats = scheduler.stats
    return EngineView(
        at=begin,
        offset=time.time() - begin,
        block_size=tables.block_size,
        rows=table.rows.size,
        budget=scheduler.budget,
        counters={
            "steps": stats.steps, "prompt_tokens": stats.prompt_tokens, "generated_tokens": stats.generated_tokens,
            "cached_tokens": stats.cached_tokens, "queried_tokens": stats.queried_tokens,
            "preemptions": stats.preemptions, "swaps": stats.swaps, "finished": stats.finished,
            "running": table.rows.used, "evicted": pool.evicted,
        },
        steps=table.timelines.recent_steps(MOST_STEPS),
        holders=holders,
        queue=explain_waiting(scheduler),
        waiting=scheduler.waiting + table.adapters.num_waiting,
        loading=scheduler.loading,
        compiling=compiling,
        table=np.fromiter(itertools.chain.from_iterable(pages), np.int32).tobytes(),
        content=pool.content,
        moving=list(moving),
        is_one_table=_is_one_table(tables),
        first_tokens=first_tokens,
        token_times=token_times,
        transfers=TransferCounts() if tiers is None else TransferCounts(
            out=len(tiers.saving_blocks), back=len(tiers.loading_blocks), writes=tiers.num_writes
        ),
        pressure=pressure_levels(scheduler),
        host=None if tiers is None else host_blocks(tiers),
        disk=None if tiers is None or tiers.store is None else disk_blocks(tiers.store.stats()),
        host_content=host_content,
        host_holders=host_holders,
        host_table=np.array(host_slots, np.int32).tobytes(),
        adapters=_adapters(scheduler),
        seconds=time.thread_time() - worked,  # a busy machine's pauses are not its cost
    )  # fmt: skip


def _holding(scheduler: Scheduler) -> list[Holding]:
    """Requests and sessions that hold blocks, those with a row first."""
    table = scheduler.requests
    running: list[Holding] = list(table.rows.running())
    loading = [request for request in table.swapper.requests if request.row < 0]
    sessions = [live for live in scheduler.sessions.kv.on_device() if live.blocks]
    return [*running, *loading, *sessions][:MOST_HOLDERS]


def _holder(one: Holding, blocks: int, scheduler: Scheduler) -> BlockHolder:
    if isinstance(one, ResidentSession):
        name = name_of(one.name)
        return BlockHolder("session", name, owner_of(one.name), name, -1, 0, one.tokens, one.tokens, 0, 0, blocks)
    rows, source = scheduler.requests.rows, one.source
    computed = int(rows.computed[one.row]) if one.row >= 0 else 0
    return BlockHolder(
        _kind(one, scheduler), one.id, source.tenant, name_of(source.session), one.row, one.index, computed,
        one.known, len(one.prompt), source.limit, blocks, "+".join(use.name for use in source.adapters),
    )  # fmt: skip


def _kind(one: Holding, scheduler: Scheduler) -> HolderKind:
    if isinstance(one, ResidentSession):
        return "session"
    if one.state is RequestState.LOADING:
        return "loading"
    if one.row < 0:
        return "swapped"
    return "decode" if scheduler.requests.rows.decoding[one.row] else "prompt"


def _is_one_table(tables: BlockTables) -> bool:
    return tables.has_full and not tables.others


# Host memory


def _in_host_memory(scheduler: Scheduler) -> tuple[bytes, list[BlockHolder], list[int]]:
    """The content of its slots, what holds some, and their slots, in the order of holders."""
    tiers = scheduler.tiers
    if tiers is None or tiers.host.num_slots > MOST_SLOTS:
        return b"", [], []
    holders: list[BlockHolder] = []
    found: list[int] = []
    for request in _swapped(scheduler):
        slots = _slots(tiers, request.owned_keys)
        holders.append(_holder(request, len(slots), scheduler))
        found += slots
    for session, keys in _asleep(scheduler):
        slots = _slots(tiers, keys)
        holders.append(_sleeper(session, len(slots), "host" if slots else place_of(keys[0], tiers)))
        found += slots
    return tiers.host.content, holders, found


def _swapped(scheduler: Scheduler) -> list[Request]:
    table = scheduler.requests
    every = [one for request_id in table.ids() for one in table.sequences(request_id)]
    return [one for one in every if one.row < 0 and one.owned_keys and one.state is not RequestState.LOADING]


def _asleep(scheduler: Scheduler) -> list[tuple[Session, list[bytes]]]:
    """The sessions that fell asleep last, with the keys of their blocks."""
    sessions = scheduler.sessions
    found: list[tuple[Session, list[bytes]]] = []
    if isinstance(sessions, SessionKeeper):
        left = MOST_ASLEEP_BLOCKS
        for name, _ in sessions.kv.offloaded(MOST_ASLEEP)[0]:
            if left > 0 and (keys := sessions.kv.offloaded_pages(name)):
                found.append((sessions.store.get(name), keys))
                left -= len(keys)
    return found


def _sleeper(session: Session, blocks: int, place: str = "") -> BlockHolder:
    name, owner = name_of(session.name), owner_of(session.name)
    tokens = session.kv_tokens, session.num_tokens
    return BlockHolder("asleep", name, owner, name, -1, 0, *tokens, 0, 0, blocks, place=place)


def _slots(tiers: OffloadManager, keys: list[bytes]) -> list[int]:
    """Where those of the blocks are that host memory has."""
    return [slot for slot in map(tiers.host.slot_of, keys) if slot is not None]


def _adapters(scheduler: Scheduler) -> AdapterView | None:
    adapters = scheduler.requests.adapters
    if not adapters.is_on:
        return None
    held, awaited = adapters.active()
    return AdapterView(adapters.num_slots, ["+".join(names) for names in adapters.loaded()], held, awaited)


# One block


def describe_block(scheduler: Scheduler, block: int, tier: Tier = "device") -> BlockDetail:
    """What uses a block, and which tokens are in it. In host memory: block n is slot n - 1."""
    return _describe_slot(scheduler, block) if tier == "host" else _describe_block(scheduler, block)


def _describe_block(scheduler: Scheduler, block: int) -> BlockDetail:
    tables, pool = scheduler.tables, scheduler.tables.pool
    _check_number(block, pool.num_blocks - 1)
    users = []
    for one in _holding(scheduler):
        pages = tables.every_page(one)
        if block in pages:
            holder = _holder(one, len(pages), scheduler)
            users.append(_user(scheduler, holder, pages.index(block), one))
    return BlockDetail(block=block, references=pool.refs[block], is_cached=bool(pool.content[block]), users=users)


def _describe_slot(scheduler: Scheduler, block: int) -> BlockDetail:
    tiers = scheduler.tiers
    _check_number(block, 0 if tiers is None else tiers.host.num_slots)
    assert tiers is not None
    key = tiers.host.key_at(block - 1)
    users = []
    if key is not None:
        for request in _swapped(scheduler):
            if key in request.owned_keys:
                holder = _holder(request, len(request.owned_keys), scheduler)
                users.append(_user(scheduler, holder, request.owned_keys.index(key), request))
        for session, keys in _asleep(scheduler):
            if key in keys:
                users.append(_user(scheduler, _sleeper(session, len(keys)), keys.index(key), session.name))
    return BlockDetail(block=block, references=len(users), is_cached=key is not None, users=users)


def _check_number(block: int, most: int) -> None:
    if not 1 <= block <= most:
        known = f"they are numbered 1 to {most}" if most else "the engine has no such tier"
        raise ValidationError(f"there is no block {block}: {known}", "block", block)


def _user(scheduler: Scheduler, holder: BlockHolder, place: int, one: Holding | str) -> BlockUser:
    """`place`: the block is the holder's n-th; `one`: a request, or a session or its name."""
    start, tokens = -1, list[int]()
    if _is_one_table(scheduler.tables):
        size = scheduler.tables.block_size
        start = place * size
        if isinstance(one, Request):
            tokens = one.tokens(start, min(start + size, one.known))
        else:
            tokens = _session_tokens(scheduler, one if isinstance(one, str) else one.name, start, start + size)
    return BlockUser(
        name=holder.name, tenant=holder.tenant, kind=holder.kind, row=holder.row, first_token=start, tokens=tokens
    )


def _session_tokens(scheduler: Scheduler, name: str, start: int, stop: int) -> list[int]:
    if not isinstance(scheduler.sessions, SessionKeeper):
        return []
    store = scheduler.sessions.store
    try:
        stop = min(stop, store.get(name).num_tokens)
        return [int(token) for token in store.tokens(name, start, max(start, stop))]
    except QuireError:  # it was just deleted, or its log is damaged
        return []
