"""Chooses a replica for each request, and keeps track of what was sent where."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.errors import EngineDeadError, ValidationError
from quire.router.load import INITIAL_PREFILL_SPEED, OpenRequest, Rate, ReplicaLoad, RoutedRequest
from quire.router.policies.base import RoutingPolicy
from quire.router.policies.prefix import PrefixAware
from quire.router.replica_state import ReplicaState

MAX_INDEX_BLOCKS = 1_000_000
"""Blocks remembered, over all replicas; about 170 bytes each."""


@dataclass(frozen=True, slots=True)
class ReplicaLoadStats:
    """A replica's load now."""

    name: str
    open_requests: int
    rows: int
    queued_tokens: int
    kv_tokens: int
    known_blocks: int
    prefill_speed: float
    wait_seconds: float


class Router:
    """Chooses replicas by a policy's cost, and tracks their load. Not thread-safe; starts no engines and sends nothing
    to them."""

    def __init__(
        self,
        block_size: int,
        policy: RoutingPolicy | None = None,
        max_index_blocks: int = MAX_INDEX_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self._policy = PrefixAware() if policy is None else policy
        self._max_index_blocks = max_index_blocks
        self._clock = clock
        self._group_speed: Rate | None = None
        self._replicas: dict[str, ReplicaState] = {}
        self._closed: set[str] = set()
        """Replicas that get no new requests."""

    # Replicas

    def add(
        self,
        name: str,
        capacity_blocks: int,
        max_rows: int,
        prefill_speed: float = INITIAL_PREFILL_SPEED,
        adapter_slots: int = 1,
    ) -> None:
        """Add a replica with an empty cache. `prefill_speed`: prompt tokens a second, a first guess. `adapter_slots`:
        LoRA adapters that it has room for."""
        if name in self._replicas:
            raise ValidationError(f"replica {name!r} exists already; remove it before it is added again", "name", name)
        if capacity_blocks < 1 or max_rows < 1:
            raise ValidationError(
                f"replica {name!r} needs room for a block and a row, got {capacity_blocks} blocks, {max_rows} rows"
            )
        self._group_speed = self._group_speed or Rate(prefill_speed, span=200)
        load = ReplicaLoad(self._group_speed, max_rows, capacity_blocks * self.block_size, prefill_speed)
        self._replicas[name] = ReplicaState(name, self.block_size, capacity_blocks, load, adapter_slots)
        self._share_index()

    def remove(self, name: str) -> None:
        """Remove a replica that is down: send nothing to it any more, and end its open requests."""
        replica = self._replicas.pop(name, None)
        self._closed.discard(name)
        if replica is not None:
            for opened in replica.load.requests:
                opened.is_over = True
            self._share_index()

    def close(self, name: str) -> None:
        """Choose the replica for no further request; its open ones go on."""
        self._closed.add(name)

    def reopen(self, name: str) -> None:
        """The replica may be chosen again."""
        self._closed.discard(name)

    @property
    def alive(self) -> list[str]:
        """Replicas that requests may be sent to."""
        return list(self._replicas)

    def stats(self) -> list[ReplicaLoadStats]:
        """How busy each replica is."""
        now = self._clock()
        return [
            ReplicaLoadStats(
                replica.name, len(load.requests), load.rows, load.queued, load.kv_tokens, len(replica.sent),
                load.prefill_speed, load.wait(now),
            )
            for replica in self._replicas.values()
            for load in [replica.load]
        ]  # fmt: skip

    # Requests

    def choose(self, request: RoutedRequest) -> str:
        """The replica to send the request to. Changes nothing: `launched` does."""
        now, cost_at = self._clock(), self._policy.cost
        best, lowest = None, math.inf
        for replica in self._replicas.values():
            if replica.name in self._closed:
                continue
            cost = cost_at(request, replica, now)
            if best is None or cost < lowest:
                best, lowest = replica, cost
        if best is None:
            raise EngineDeadError("no replica is running; requests are accepted again as soon as one is")
        return best.name

    def launched(self, request: RoutedRequest, name: str) -> OpenRequest:
        """The request was sent to the replica. Later events name the object that this returns."""
        replica = self._replicas.get(name)
        if replica is None:
            raise EngineDeadError(f"replica {name!r} is gone; choose again")
        now = self._clock()
        opened = OpenRequest(request, name, replica.uncached_tokens(request), now)
        replica.load.launched(opened, now)
        replica.touch(request.keys)
        if request.adapters:
            replica.adapters.touch(request.adapters)
        return opened

    def progress(self, opened: OpenRequest, generated: int, cached: int | None = None) -> None:
        """`generated`: tokens so far, over all sequences. `cached`: prompt tokens that the replica found in its
        cache."""
        if opened.is_over:
            return
        load, now = self._replicas[opened.replica].load, self._clock()
        if opened.started is None:
            load.started(opened, now, cached)
        load.generated_more(opened, generated - opened.generated, now)

    def finished(self, opened: OpenRequest, keys: Sequence[bytes] = ()) -> None:
        """The request has ended, for whatever reason. `keys`: of all its full blocks, including those of the output."""
        if opened.is_over:
            return
        replica = self._replicas[opened.replica]
        replica.load.finished(opened, self._clock())
        if opened.started is not None:
            replica.touch(keys or opened.request.keys)

    def forget_blocks(self) -> None:
        """The replicas' prefix caches were reset."""
        for replica in self._replicas.values():
            replica.sent.trim(0)

    def _share_index(self) -> None:
        """Split the bound on memory between the replicas."""
        for replica in self._replicas.values():
            replica.sent.limit = min(replica.capacity_blocks, self._max_index_blocks // len(self._replicas))
