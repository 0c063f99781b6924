"""Sends a request where its prompt is cached, unless waiting there takes longer than computing it elsewhere."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.errors import EngineDeadError, ValidationError
from quire.router.load import GroupRates, ReplicaLoad
from quire.router.request import Lost, RoutedFlight, RoutedRequest
from quire.router.sent import SentBlocks

EVENNESS = 0.6
"""Seconds of waiting that a second of work more than others, done lately, counts as. Queues alone even out only what
is overloaded; with this, replicas that share the load age alike."""
MAX_INDEX_BLOCKS = 1_000_000
"""Blocks remembered in all, about 170 bytes each."""
MAX_SESSIONS = 1_000_000
"""Sessions whose home is remembered."""


@dataclass(eq=False, slots=True)
class ReplicaState:
    """An engine, as the router knows it. One that comes back is a new one."""

    name: str
    capacity_blocks: int
    sent: SentBlocks
    load: ReplicaLoad
    is_alive: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
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
    """Chooses replicas and keeps their books. One thread's; starts no engines and talks to none."""

    def __init__(
        self,
        block_size: int,
        max_index_blocks: int = MAX_INDEX_BLOCKS,
        max_sessions: int = MAX_SESSIONS,
        evenness: float = EVENNESS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self._max_index_blocks, self._max_sessions = max_index_blocks, max_sessions
        self._evenness = evenness
        self._clock = clock
        self._fleet = GroupRates()
        self._replicas: dict[str, ReplicaState] = {}
        self._homes: OrderedDict[tuple[str, str], ReplicaState] = OrderedDict()
        """Where sessions live, by tenant and name; those of a replica that is gone move when they are next used."""

    # Replicas come and go

    def add(self, name: str, capacity_blocks: int, max_rows: int, prefill_speed: float | None = None) -> None:
        """A replica is there, with nothing cached. `prefill_speed`: prompt tokens a second, a guess to begin with."""
        if name in self._replicas:
            raise ValidationError(f"replica {name!r} is there already; remove it before it comes back", "name", name)
        if capacity_blocks < 1 or max_rows < 1:
            raise ValidationError(
                f"replica {name!r} needs room for a block and a row, got {capacity_blocks} blocks, {max_rows} rows"
            )
        load = ReplicaLoad(self._fleet, max_rows, capacity_blocks * self.block_size, prefill_speed)
        self._replicas[name] = ReplicaState(name, capacity_blocks, SentBlocks(0), load)
        self._share_index()

    def remove(self, name: str) -> Lost:
        """The replica is gone: nothing goes there any more, and what was there comes back."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            return Lost([], [])
        replica.is_alive = False
        flights = list(replica.load.flights)
        for flight in flights:
            flight.is_over = True
        replica.sent.limit = 0  # sessions that lived there know it still, and must not keep its memory alive
        replica.load.flights.clear()
        self._share_index()
        return Lost(
            unstarted=[flight.request for flight in flights if flight.started is None],
            started=[flight.request for flight in flights if flight.started is not None],
        )

    @property
    def alive(self) -> list[str]:
        """Replicas that requests may go to."""
        return list(self._replicas)

    def figures(self) -> list[ReplicaFigures]:
        """How busy each replica is."""
        now = self._clock()
        return [
            ReplicaFigures(
                replica.name, len(load.flights), load.rows, load.queued, load.kv_tokens, len(replica.sent),
                load.prefill_speed, load.wait(now),
            )
            for replica in self._replicas.values()
            for load in [replica.load]
        ]  # fmt: skip

    # Choosing

    def choose(self, request: RoutedRequest) -> str:
        """The replica that the request should go to. Changes nothing: `launched` does."""
        if request.session:
            home = self._homes.get((request.tenant, request.session))
            if home is not None and home.is_alive:
                return home.name
        now, best, least = self._clock(), None, math.inf
        for replica in self._replicas.values():
            load = replica.load
            tokens = self._uncached(request, replica) + self._evenness * load.work(now)
            cost = load.wait(now) + tokens / load.prefill_speed
            if cost < least:
                best, least = replica, cost
        if best is None:
            raise EngineDeadError("no replica is alive; one that comes back is used at once")
        return best.name

    # What becomes of requests

    def launched(self, request: RoutedRequest, name: str) -> RoutedFlight:
        """The request goes to the replica; what is known of it later is told of the flight that this returns."""
        replica = self._replicas.get(name)
        if replica is None:
            raise EngineDeadError(f"replica {name!r} is gone; choose again")
        now = self._clock()
        flight = RoutedFlight(request, name, self._uncached(request, replica), now)
        replica.load.launched(flight, now)
        self._touch(replica, request.keys)
        if request.session:
            self._settle((request.tenant, request.session), replica)
        return flight

    def progress(self, flight: RoutedFlight, generated: int, cached: int | None = None) -> None:
        """So many tokens have come by now, over all samples. `cached`: prompt tokens that the replica had."""
        if flight.is_over:
            return
        load, now = self._replicas[flight.replica].load, self._clock()
        if flight.started is None:
            load.started(flight, now, cached)
        load.generated_more(flight, generated - flight.generated, now)

    def finished(self, flight: RoutedFlight, keys: Sequence[bytes] = ()) -> None:
        """Nothing more comes, for whatever reason. `keys`: of all its full blocks, those of the output too."""
        if flight.is_over:
            return
        replica = self._replicas[flight.replica]
        replica.load.finished(flight, self._clock())
        if flight.started is not None:
            self._touch(replica, keys or flight.request.keys)

    def forget_blocks(self) -> None:
        """Nothing is cached any more: the replicas were told to forget."""
        for replica in self._replicas.values():
            replica.sent.trim(0)

    def forget_session(self, tenant: str, session: str) -> None:
        """The session is no more."""
        self._homes.pop((tenant, session), None)

    def home_of(self, tenant: str, session: str) -> str | None:
        """Where the session lives, if anywhere."""
        home = self._homes.get((tenant, session))
        return home.name if home is not None and home.is_alive else None

    # How it is done

    def _uncached(self, request: RoutedRequest, replica: ReplicaState) -> int:
        """Prompt tokens that the replica would compute: the last one at least, its logits are what is wanted."""
        return max(1, request.prompt_tokens - self.block_size * replica.sent.match(request.keys))

    def _touch(self, replica: ReplicaState, keys: Sequence[bytes]) -> None:
        replica.sent.touch(keys)
        # Outputs under way take blocks too, whose keys are known only when they end.
        replica.sent.trim(replica.capacity_blocks - replica.load.generated // self.block_size)

    def _settle(self, session: tuple[str, str], replica: ReplicaState) -> None:
        self._homes[session] = replica
        self._homes.move_to_end(session)
        if len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)

    def _share_index(self) -> None:
        """The bound on memory is for all replicas together."""
        for replica in self._replicas.values():
            replica.sent.limit = min(replica.capacity_blocks, self._max_index_blocks // len(self._replicas))
