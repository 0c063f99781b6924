"""Swaps rows out to host memory ahead of a shortage, and loads blocks from lower tiers for waiting requests."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.kvcache.groups import Hit
from quire.kvcache.offload.costs import LEAST_TOKENS
from quire.kvcache.offload.manager import OffloadManager
from quire.kvcache.offload.page_keys import every_key, page_key, pages_to_continue
from quire.kvcache.offload.transfers import LoadTransfer, SaveTransfer
from quire.kvcache.prefix_cache import index_key
from quire.messages.plan import Moves, MovesDone
from quire.messages.request import Request

if TYPE_CHECKING:
    from quire.scheduler.request_table import RequestTable
    from quire.scheduler.step_builder import InFlightStep

LEAST_SWAP = 64
"""Tokens. A row with fewer is not swapped."""
MOVES_A_STEP = 128
"""Blocks each way that are copied with a step; more would delay its launch."""
MOVES_ALONE = 4096
"""Blocks each way with a step that computes nothing."""


@dataclass
class GroupPages:
    """What a group needs of a prefix."""

    first: int
    """Index in the table of the first page."""
    pages: list[int | None]
    """Those on the device; None: in a lower tier."""


@dataclass
class LowerTierHit:
    """Blocks of a request that are in a lower tier, after those on the device."""

    keys: list[bytes]
    tokens: int
    """Tokens that are computed once all of them are loaded."""
    tables: list[GroupPages] = field(default_factory=list)
    """In a model of several cache groups: the pages of each. `keys` are those of the missing ones, in order."""


@dataclass
class _Load:
    """The blocks that a request waits for."""

    fetch: LoadTransfer
    before: int
    """Blocks the request had on the device."""
    tokens: int
    """Tokens that are computed once all blocks are loaded."""


class NoSwapper:
    """There is no tier below the device: the methods of `Swapper`, doing nothing."""

    is_on = False
    tiers: OffloadManager | None = None
    requests: Collection[Request] = ()
    num_loading = 0
    host_room = disk_room = (0, 0)
    is_moving = is_busy = is_swapping_out = False

    def poll(self) -> None: ...

    def wait(self, seconds: float, wakes: Sequence[int]) -> None: ...

    def find(self, request: Request, hit: Hit) -> LowerTierHit | None:
        return None

    def load(self, request: Request, hit: Hit, lower: LowerTierHit, free: int) -> bool:
        return False

    def loaded(self) -> list[tuple[Request, int]]:
        return []

    def arriving(self) -> tuple[Request, int] | None:
        return None

    def end_load(self, request: Request) -> None: ...

    def cancel(self, request: Request) -> None: ...

    def cancel_all(self, but: Request | None = None) -> bool:
        return False

    def collect(self, step: InFlightStep, moves_done: list[MovesDone], now: float) -> None: ...

    def is_swappable(self, request: Request, tokens: int) -> bool:
        return False

    def swap_out(self, request: Request, tokens: int) -> None: ...

    def unpin(self, request: Request) -> None: ...

    def save_evictable(self, step_blocks: int) -> None: ...

    def take_moves(self, step: int, alone: bool, awaited: bool) -> Moves | None:
        return None

    def forget(self, keys: Sequence[bytes]) -> None: ...

    def reset(self) -> None: ...

    def close_transfers(self) -> None: ...

    def close_store(self) -> None: ...


class Swapper:
    """Swaps rows out before blocks run out, and loads blocks for requests that wait."""

    is_on = True

    def __init__(self, requests: RequestTable, tiers: OffloadManager) -> None:
        self.tiers = tiers
        self._requests = requests
        self._tables = requests.tables
        self.least_swap = LEAST_SWAP
        self._loads: dict[Request, _Load] = {}
        self._swap: SaveTransfer | None = None
        """Copies of the row that was swapped out last."""
        self._collected = -math.inf
        """When the last step was collected."""
        self._saved_at = 0
        """Evictions the pool had counted when evictable blocks were last saved."""

    @property
    def requests(self) -> Collection[Request]:
        """Requests whose blocks are being loaded."""
        return self._loads

    @property
    def num_loading(self) -> int:
        return len(self._loads)

    # Tiers

    @property
    def is_moving(self) -> bool:
        """Whether copies between device and host wait or are in flight."""
        return self.tiers.is_moving

    @property
    def is_busy(self) -> bool:
        """Whether any transfer between tiers is in progress."""
        return self.tiers.is_busy

    @property
    def host_room(self) -> tuple[int, int]:
        """Blocks of host memory that no request or session owns, and all blocks."""
        host = self.tiers.host
        return host.num_slots - host.num_pinned, host.num_slots

    @property
    def disk_room(self) -> tuple[int, int]:
        """The same of the disk tier; (0, 0) without one."""
        return (0, 0) if self.tiers.store is None else self.tiers.store.headroom

    def poll(self) -> None:
        """Advance transfers by what has completed since the last step."""
        self.tiers.poll()

    def wait(self, seconds: float, wakes: Sequence[int]) -> None:
        """Sleep until the disk has completed something, or one of the descriptors `wakes` is readable."""
        self.tiers.wait(seconds, wakes)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop these blocks from all tiers: they were computed from invalid state."""
        self.tiers.discard(every_key(self._tables, keys))

    # Loading

    def find(self, request: Request, on_device: Hit) -> LowerTierHit | None:
        """The request's blocks in lower tiers after those on the device; None if there are none or computing them is
        as fast."""
        if not request.source.reads_cache or not (self._tables.prefix_caching or request.saved):
            return None
        if self._tables.others:
            return self._find_grouped(request, len(on_device.blocks) * self._tables.block_size)
        size, most, hit = self._tables.block_size, request.known - 1, len(on_device.blocks)
        full = most // size
        keys = request.keys[hit:full]
        found = self.tiers.find(keys)
        tokens = self._requests.encoding.boundary(request, (hit + len(found)) * size, size)
        found = found[: max(0, tokens // size - hit)]
        tokens = (hit + len(found)) * size
        keys = keys[: len(found)]
        if len(keys) + hit == request.saved // size and request.saved > tokens and most > tokens:
            partial = self._requests.partial_key(request, request.saved)
            if where := self.tiers.find([partial]):
                found, keys, tokens = found + where, [*keys, partial], min(request.saved, most)
        if not keys:
            return None
        in_host = sum(found)
        worth = tokens - hit * size
        pays = self.tiers.costs.loading_pays(in_host, len(keys) - in_host, worth)
        return LowerTierHit(keys, tokens) if pays or self._requests.encoding.lacks_arrays(request.source) else None

    def _find_grouped(self, request: Request, on_device: int) -> LowerTierHit | None:
        """The longest prefix that every group has on the device or in a lower tier, if it is longer than the
        `on_device` tokens that every group has on the device."""
        tables, size, most = self._tables, self._tables.block_size, request.known - 1
        keys = request.keys[: most // size]
        reach = tables.reach(keys, self._has)
        end = tables.longest_prefix(keys, reach, self._has)
        while (allowed := self._requests.encoding.boundary(request, end * size, size)) < end * size:
            end = tables.longest_prefix(keys, allowed // size, self._has)
        tokens, end_key = end * size, keys[end - 1] if end else b""
        if request.saved % size and tokens < request.saved <= most:  # saved at its end, within a block
            partial = self._requests.partial_key(request, request.saved)
            if self._has_end(keys, reach, request.saved, partial):
                tokens, end_key = request.saved, partial
        if tokens <= on_device:
            return None
        hit = self._missing_pages(keys, tokens, end_key)
        in_host = sum(self.tiers.host.has(key) for key in hit.keys)
        pays = self.tiers.costs.loading_pays(in_host, len(hit.keys) - in_host, tokens - on_device)
        return hit if pays or self._requests.encoding.lacks_arrays(request.source) else None

    def _has(self, number: int, key: bytes) -> bool:
        """Whether the group's block, or snapshot, that ends with the key is on the device or in a lower tier."""
        if self._tables.is_cached(number, key):
            return True
        group = self._tables.groups[number]
        pages = group.pages if group.kind == "state" else 1
        return all(self.tiers.is_saved(page_key(key, number, i)) for i in range(pages))

    def _has_end(self, keys: Sequence[bytes], reach: int, tokens: int, end_key: bytes) -> bool:
        """Whether all groups have what it takes to continue after so many tokens, the last of them in a partial
        block."""
        tables, full = self._tables, tokens // self._tables.block_size
        if reach < full:
            return False
        window = [(n, key) for n, _ in tables.others for key in keys[tables.first_needed(n, tokens) : full]]
        is_there = all(self._has(n, key) for n, key in window if tables.groups[n].kind == "window")
        return is_there and all(self._has(n, end_key) for n in range(len(tables.groups)))

    def _missing_pages(self, keys: Sequence[bytes], tokens: int, end_key: bytes) -> LowerTierHit:
        """Where each group's pages of the first `tokens` tokens are."""
        tables, cache = self._tables, self._tables.prefix_cache
        hit = LowerTierHit([], tokens)
        full, is_partial = divmod(tokens, tables.block_size)
        for number, group in enumerate(tables.groups):
            if group.kind == "state":
                first, content = 0, [end_key]
                pages: list[int | None] = [*cache.blocks_of(index_key(end_key, number))] or [None] * group.pages
                names = [page_key(end_key, number, i) for i in range(group.pages)]
            else:
                first = tables.first_needed(number, tokens)
                content = [*keys[first:full], *([end_key] if is_partial else ())]
                pages = [cache.get(index_key(key, number)) for key in content]
                names = [page_key(key, number) for key in content]
            hit.tables.append(GroupPages(first, pages))
            hit.keys += [name for name, page in zip(names, pages, strict=True) if page is None]
        return hit

    def load(self, request: Request, hit: Hit, lower: LowerTierHit, free: int) -> bool:
        """The request waits for blocks in lower tiers, holding those on the device. False: `free` blocks are too
        few."""
        if self._tables.others:
            return self._load_grouped(request, lower, free)
        self._tables.adopt(request, hit)
        before = len(request.blocks)
        self._requests.start_loading(request)
        self._tables.grow(request, lower.tokens)
        size = self._tables.block_size
        tokens = np.zeros((len(lower.keys), size), np.int32)
        known = request.tokens(before * size, lower.tokens)
        tokens.reshape(-1)[: len(known)] = known
        fetch = self.tiers.load(lower.keys, request.blocks[before:], tokens)
        self._loads[request] = _Load(fetch, before, lower.tokens)
        return True

    def _load_grouped(self, request: Request, lower: LowerTierHit, free: int) -> bool:
        tables, pool, size = self._tables, self._tables.pool, self._tables.block_size
        here = [page for group in lower.tables for page in group.pages if page is not None]
        if len(lower.keys) + tables.cost_of_sharing(here) > free:
            return False
        pool.share(here)
        fresh, full = pool.allocate(len(lower.keys)), request.tokens(0, lower.tokens)
        tokens, at = np.zeros((len(fresh), size), np.int32), 0
        for number, group in enumerate(lower.tables):
            for i, page in enumerate(group.pages):
                if page is None:
                    group.pages[i] = fresh[at]
                    if number == 0 and tables.has_full:
                        held = full[(group.first + i) * size : (group.first + i + 1) * size]
                        tokens[at, : len(held)] = held
                    at += 1
        tables.start_with(request, [(group.first, group.pages) for group in lower.tables], lower.tokens)
        self._requests.start_loading(request)
        self._loads[request] = _Load(self.tiers.load(lower.keys, fresh, tokens), 0, lower.tokens)
        return True

    def loaded(self) -> list[tuple[Request, int]]:
        """Requests whose loads have ended, in success or not, and how many of their tokens are computed."""
        size, loaded = self._tables.block_size, []
        for request, load in self._loads.items():
            if load.fetch.is_done:
                if load.fetch.loaded == len(load.fetch.keys):
                    tokens = load.tokens
                elif self._tables.others:
                    tokens = 0  # what was loaded may lack a window or a state
                    self._tables.release(request)
                else:
                    tokens = (load.before + load.fetch.loaded) * size
                    tokens = self._requests.encoding.boundary(request, tokens, size)
                loaded.append((request, tokens))
        return loaded

    def arriving(self) -> tuple[Request, int] | None:
        """The request whose blocks are all in host memory, if it is the only one loading, and how many of its tokens
        are computed once the next plan has copied them."""
        if len(self._loads) != 1:
            return None
        request, load = next(iter(self._loads.items()))
        return (request, load.tokens) if self.tiers.can_carry(load.fetch, MOVES_ALONE) else None

    def end_load(self, request: Request) -> None:
        """The request is about to take a row."""
        del self._loads[request]
        self.unpin(request)

    def cancel(self, request: Request) -> None:
        """The request does not wait for its blocks any more. Blocks in flight are held until their copies are done."""
        if (load := self._loads.pop(request, None)) is not None:
            load.fetch.is_cancelled = True
            self._tables.release(request)

    def cancel_all(self, but: Request | None = None) -> bool:
        """Return all loading requests to the queue, because another needs their blocks. False if there is none."""
        loading = [request for request in self._loads if request is not but]
        for request in loading:
            self.cancel(request)
            self._requests.stop_loading(request)
        return bool(loading)

    # Swapping out

    @property
    def is_swapping_out(self) -> bool:
        """Whether a row is being copied out: the next waits until its blocks are free."""
        return self._swap is not None and not self._swap.is_done

    def is_swappable(self, request: Request, tokens: int) -> bool:
        """Whether swapping the row's first `tokens` tokens is cheaper than computing them again."""
        if not request.source.reads_cache or request.beam is not None or tokens < self.least_swap:
            return False
        pairs = self._pairs(request, tokens)
        missing = sum(not self.tiers.is_saved(key) for key, _ in pairs)
        if missing > self.host_room[0]:
            return False
        return self.tiers.costs.swapping_pays(missing, len(pairs), tokens)

    def swap_out(self, request: Request, tokens: int) -> None:
        """Copy the row's first `tokens` tokens out; their blocks are held until that is done."""
        pairs = self._pairs(request, tokens)
        self.unpin(request)
        request.pin_saved([key for key, _ in pairs], tokens)
        self.tiers.host.pin(request.owned_keys)
        self._swap = self.tiers.save(pairs)

    def unpin(self, request: Request) -> None:
        """The request's blocks in host memory may be evicted like any others."""
        if request.owned_keys:
            self.tiers.host.unpin(request.unpin_saved())

    def _pairs(self, request: Request, tokens: int) -> list[tuple[bytes, int]]:
        """(key, block) of the request's first `tokens` tokens, a partial last block included."""
        self._requests.extend_keys(request)
        end_key = self._requests.end_key(request, tokens)
        return pages_to_continue(self._tables, request, request.keys, tokens, end_key)

    def save_evictable(self, step_blocks: int) -> None:
        """Save the cached blocks that will be evicted soon. `step_blocks`: the most a step allocates."""
        pool = self._tables.pool
        if pool.empty >= step_blocks or not pool.idle:
            return
        # Scanning them costs time: done after a quarter of a step's blocks was evicted, not at every step.
        if pool.evicted - self._saved_at >= max(1, step_blocks // 4) or not self._saved_at:
            self._saved_at = max(1, pool.evicted)
            self.tiers.save_idle(step_blocks)

    # Steps

    def take_moves(self, step: int, alone: bool, awaited: bool) -> Moves | None:
        """Copies that go with the plan of this step. `alone`: it computes nothing; `awaited`: its rows read them."""
        moves = self.tiers.take(step, MOVES_ALONE if alone or awaited else MOVES_A_STEP)
        if moves is not None:
            moves.awaited = awaited
        return moves

    def collect(self, step: InFlightStep, moves_done: list[MovesDone], now: float) -> None:
        """A step is collected: measure what prompt tokens cost, and end the transfers that are done."""
        seconds = now - max(step.launched, self._collected)
        self._collected = now
        is_prompt = step.prompt_tokens >= LEAST_TOKENS and step.prompt_tokens >= 4 * step.num_decodes
        if is_prompt and not step.awaits_moves:
            self.tiers.costs.prefill.note(step.prompt_tokens, seconds)
        for done in moves_done:
            self.tiers.finish_copies(done)

    def reset(self) -> None:
        """A step failed: drop its transfers, and return loading requests to the queue."""
        self.tiers.reset()
        self.cancel_all()

    def close_transfers(self) -> None:
        """Give up transfers, except those to disk, which complete."""
        self.tiers.reset()
        self.tiers.close()

    def close_store(self) -> None:
        """Close the disk tier's files; sessions use them until they are closed."""
        if self.tiers.store is not None:
            self.tiers.store.close()
