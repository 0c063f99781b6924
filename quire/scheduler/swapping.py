"""Rows and prefixes that move between tiers: who is put by instead of computed again, and who waits for what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.kvcache.offload.costs import LEAST_TOKENS
from quire.kvcache.offload.manager import OffloadManager
from quire.kvcache.offload.transfers import LoadTransfer, SaveTransfer
from quire.messages.plan import Moves
from quire.messages.request import Request, RequestState
from quire.scheduler.draft import InFlightStep
from quire.scheduler.request_table import RequestTable

AHEAD_STEPS = 8
"""Rows that need a block within so many steps count as in need of it now: a copy takes its time."""
LEAST_SWAP = 64
"""Tokens a row has at least to be worth a copy."""
MOVES_A_STEP = 128
"""Blocks each way that go with a step; more would keep it from being launched."""
MOVES_ALONE = 4096
"""…and with one that has nothing else to do."""


@dataclass
class Arrival:
    """Blocks of a request that lie in a tier below, after those on the device."""

    keys: list[bytes]
    tokens: int
    """Tokens that are computed once all of them are there."""


@dataclass
class _Load:
    fetch: LoadTransfer
    before: int
    """Blocks the request had on the device."""
    tokens: int


class Swapper:
    """Swaps rows out ahead of need, and brings blocks back for requests that wait."""

    def __init__(self, ledger: RequestTable, tiers: OffloadManager) -> None:
        self.tiers = tiers
        self._ledger = ledger
        self._tables = ledger.tables
        self.least_swap = LEAST_SWAP
        self._loads: dict[Request, _Load] = {}
        self._leaving: SaveTransfer | None = None
        """The row that is being put by."""
        self._collected = -math.inf
        self._taken = 0
        """Blocks taken from the pool when idle ones were last saved."""

    @property
    def requests(self) -> Iterable[Request]:
        """Requests whose blocks are coming."""
        return self._loads

    @property
    def num_loading(self) -> int:
        """How many there are."""
        return len(self._loads)

    # Coming back

    def find(self, request: Request, hit: int) -> Arrival | None:
        """What the tiers below have of the request, after its first `hit` blocks; None where computing is as fast."""
        if not request.source.reads_cache or not (self._tables.prefix_caching or request.saved):
            return None
        size, most = self._tables.block_size, request.known - 1
        full = most // size
        keys = request.keys[hit:full]
        found = self.tiers.find(keys)
        tokens = (hit + len(found)) * size
        keys = keys[: len(found)]
        if len(keys) + hit == request.saved // size and request.saved > tokens and most > tokens:
            partial = self._ledger.partial_key(request, request.saved)
            if where := self.tiers.find([partial]):
                found, keys, tokens = found + where, [*keys, partial], min(request.saved, most)
        if not keys:
            return None
        in_host = sum(found)
        worth = tokens - hit * size
        return Arrival(keys, tokens) if self.tiers.costs.loading_pays(in_host, len(keys) - in_host, worth) else None

    def load(self, request: Request, arrival: Arrival) -> None:
        """The request, which holds what the device has of it, waits for the rest."""
        before = len(request.blocks)
        self._ledger.policy.remove(request)
        request.move(RequestState.LOADING)
        self._tables.grow(request, arrival.tokens)
        size = self._tables.block_size
        tokens = np.zeros((len(arrival.keys), size), np.int32)
        known = request.tokens(before * size, arrival.tokens)
        tokens.reshape(-1)[: len(known)] = known
        fetch = self.tiers.load(arrival.keys, request.blocks[before:], tokens)
        self._loads[request] = _Load(fetch, before, arrival.tokens)

    def landed(self) -> list[tuple[Request, int]]:
        """Requests whose blocks are there, or never will be, and how many of their tokens are computed."""
        size, landed = self._tables.block_size, []
        for request, load in self._loads.items():
            if load.fetch.is_done:
                whole = load.fetch.loaded == len(load.fetch.keys)
                landed.append((request, load.tokens if whole else (load.before + load.fetch.loaded) * size))
        return landed

    def coming(self) -> tuple[Request, int] | None:
        """The one request whose blocks are all in host memory, if nobody else waits for any, and how many of its
        tokens are computed once the next plan has brought them."""
        if len(self._loads) != 1:
            return None
        request, load = next(iter(self._loads.items()))
        return (request, load.tokens) if self.tiers.can_carry(load.fetch, MOVES_ALONE) else None

    def board(self, request: Request) -> None:
        """The request has a row: it waits for nothing any more."""
        del self._loads[request]
        self.disown(request)

    def give_up(self, request: Request) -> None:
        """The request ends, or is to wait like others again. Blocks on their way are held until they have come."""
        if (load := self._loads.pop(request, None)) is not None:
            load.fetch.is_cancelled = True
            self._tables.release(request)

    def give_up_all(self, but: Request | None = None) -> bool:
        """Requests whose blocks are coming wait like others again: another one needs the room. False if none is."""
        waiting = [request for request in self._loads if request is not but]
        for request in waiting:
            self.give_up(request)
            request.move(RequestState.WAITING)
            self._ledger.policy.add(request)
        return bool(waiting)

    # Going out

    @property
    def is_putting_by(self) -> bool:
        """Whether a row is on its way out: the next waits until its blocks are free."""
        return self._leaving is not None and not self._leaving.is_done

    def collected(self, flight: InFlightStep, now: float) -> None:
        """A step has come back: learn what prompt tokens cost."""
        seconds = now - max(flight.launched, self._collected)
        self._collected = now
        if flight.awaits_moves:
            return
        if flight.prompt_tokens >= LEAST_TOKENS and flight.prompt_tokens >= 4 * flight.num_decodes:
            self.tiers.costs.prefill.note(flight.prompt_tokens, seconds)

    def is_swappable(self, request: Request, tokens: int) -> bool:
        """Whether the row's first `tokens` tokens are better put by than computed again."""
        if not request.source.reads_cache or request.beam is not None or tokens < self.least_swap:
            return False
        pairs = self._pairs(request, tokens)
        missing = sum(not self.tiers.is_saved(key) for key, _ in pairs)
        host = self.tiers.host
        if missing > host.num_slots - host.num_pinned:
            return False
        return self.tiers.costs.swapping_pays(missing, len(pairs), tokens)

    def put_by(self, request: Request, tokens: int) -> None:
        """Copy the row's first `tokens` tokens out; the blocks are held until that is done, whoever lets go of them."""
        pairs = self._pairs(request, tokens)
        self.disown(request)
        request.owned_keys = [key for key, _ in pairs]
        self.tiers.host.pin(request.owned_keys)
        self._leaving = self.tiers.save(pairs)
        request.saved = tokens

    def disown(self, request: Request) -> None:
        """What was put by for the request is nobody's in particular."""
        if request.owned_keys:
            self.tiers.host.unpin(request.owned_keys)
            request.owned_keys = []

    def _pairs(self, request: Request, tokens: int) -> list[tuple[bytes, int]]:
        return pairs_of(self._ledger, request, request.blocks, tokens)

    def save_idle(self, step_blocks: int) -> None:
        """Cached blocks that will be evicted soon are saved before. `step_blocks`: the most a step takes."""
        pool = self._tables.pool
        if pool.empty >= step_blocks or not pool.idle:
            return
        # They are looked through when the pool has moved on a bit, not at every step.
        if pool.evicted - self._taken >= max(1, step_blocks // 4) or not self._taken:
            self._taken = max(1, pool.evicted)
            self.tiers.save_idle(step_blocks)

    def take(self, step: int, alone: bool, awaited: bool) -> Moves | None:
        """Copies that go with the plan of this step; `alone`: it has nothing else to do; `awaited`: before they are
        done."""
        moves = self.tiers.take(step, MOVES_ALONE if alone or awaited else MOVES_A_STEP)
        if moves is not None:
            moves.awaited = awaited
        return moves

    def reset(self) -> None:
        """A step failed: nothing that was on its way is sure to have arrived."""
        self.tiers.reset()
        self.give_up_all()


def pairs_of(ledger: RequestTable, request: Request, blocks: Sequence[int], tokens: int) -> list[tuple[bytes, int]]:
    """(content key, block) of the request's first `tokens` tokens, the last block perhaps in part."""
    ledger.extend_keys(request)
    full = tokens // ledger.tables.block_size
    pairs = list(zip(request.keys[:full], blocks[:full], strict=True))
    if tokens % ledger.tables.block_size:
        pairs.append((ledger.partial_key(request, tokens), blocks[full]))
    return pairs
