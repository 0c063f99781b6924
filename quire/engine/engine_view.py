"""Makes what the page shows: the view of an engine at one moment, and the users of one block.

A view is made only when a front asks for one. Its cost grows with held blocks and rows: about 30 ns a block.
"""

from __future__ import annotations

import itertools
import time

import numpy as np

from quire.engine.memory_map import disk_blocks, host_blocks, pressure_levels
from quire.engine.waiting import explain_waiting
from quire.errors import ValidationError
from quire.kvcache.block_tables import BlockTables
from quire.messages.engine_view import BlockDetail, BlockHolder, BlockUser, EngineView, HolderKind
from quire.messages.memory_map import TransferCounts
from quire.messages.request import Request, RequestState
from quire.scheduler.scheduler import Scheduler
from quire.sessions.log import name_of, owner_of
from quire.sessions.session_kv import ResidentSession

MOST_HOLDERS = 4096
MOST_STEPS = 64

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
        waiting=scheduler.waiting,
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
        one.known, len(one.prompt), source.limit, blocks,
    )  # fmt: skip


def _kind(one: Holding, scheduler: Scheduler) -> HolderKind:
    if isinstance(one, ResidentSession):
        return "session"
    if one.state is RequestState.LOADING:
        return "loading"
    return "decode" if one.row >= 0 and scheduler.requests.rows.decoding[one.row] else "prompt"


def _is_one_table(tables: BlockTables) -> bool:
    return tables.has_full and not tables.others


def describe_block(scheduler: Scheduler, block: int) -> BlockDetail:
    """What uses a block, and which tokens are in it."""
    tables, pool = scheduler.tables, scheduler.tables.pool
    if not 1 <= block < pool.num_blocks:
        raise ValidationError(
            f"there is no block {block}: they are numbered 1 to {pool.num_blocks - 1}", "block", block
        )
    users = []
    for one in _holding(scheduler):
        pages = tables.every_page(one)
        if block not in pages:
            continue
        start, tokens = -1, []
        if _is_one_table(tables):
            start = pages.index(block) * tables.block_size
            if isinstance(one, Request):
                tokens = one.tokens(start, min(start + tables.block_size, one.known))
        holder = _holder(one, len(pages), scheduler)
        users.append(
            BlockUser(
                name=holder.name,
                tenant=holder.tenant,
                kind=holder.kind,
                row=holder.row,
                first_token=start,
                tokens=tokens,
            )
        )
    return BlockDetail(block=block, references=pool.refs[block], is_cached=bool(pool.content[block]), users=users)
