"""Replicas under load, over a virtual clock: real engines and the real router, and events in the order of their times.

A replica is always at the end of its last step. What happens to others in the meantime is handled first, because events
are taken in order; a request that arrives during a step is seen by the engine after it, as in the real loop.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from quire.adapters.slots import AdapterSlots
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.errors import ValidationError
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.costs import Costs
from quire.kvcache.offload.host_tier import HostTier
from quire.kvcache.offload.manager import OffloadManager
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.adapter_use import adapter_identity
from quire.messages.media import EncoderLimits
from quire.messages.outputs import StepOutputs
from quire.messages.request import NewRequest
from quire.messages.sampling import SamplingParams
from quire.messages.speculation import DeviceDrafts
from quire.router import OpenRequest, RoutedRequest, Router
from quire.router.policies.base import make_routing_policy
from quire.scheduler.drafting import Drafting
from quire.scheduler.pacing import STREAM_STRETCH, Pacer
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.prefix_groups import PrefixGroups
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.timelines import Timelines
from quire.simulation.costs import CostModel
from quire.simulation.device import TOKEN, DraftModel, HostLink, SimulatedDevice, SimulatedStep, VirtualClock
from quire.simulation.disk import SimulatedIO, SimulatedStore
from quire.simulation.load import Conversation, OpenConversation, adapter_uses
from quire.simulation.measurements import SimulationResult
from quire.simulation.timeline import SlowestRequests

REPORT_STEPS = 32
"""Steps between reports of a request's progress to the router, as in a real front."""
MOST_EMPTY_STEPS = 1000
"""Steps in a row that compute nothing and take no time: more would mean that the engine waits for nothing."""


MOST_ROWS, MOST_BLOCKS = 1 << 16, 1 << 26
"""Of a replica: larger ones would take the memory of this machine…"""
MOST_REPLICAS = 10_000
"""…and so would more of them."""


@dataclass(frozen=True)
class FleetOptions:
    """The replicas, and their settings; None: what the cost model or the engine has."""

    replicas: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_blocks: int | None = None
    scheduling_policy: str = "fcfs"
    routing_policy: str = "prefix"
    max_step_stretch: float = STREAM_STRETCH
    """Infinite: prompts are not paced."""
    prefix_caching: bool = True
    concurrency: int | None = None
    """At most so many open requests: a closed loop."""
    kills: tuple[tuple[int, float], ...] = ()
    """(replica, second): it dies then, and its requests start again elsewhere."""
    restart_seconds: float = 30.0
    """A replica that died is back after so long."""
    drafts: DraftModel | None = None
    """Speculative decoding; None: none."""
    tunes_drafts: bool = True
    """Whether the scheduler chooses how many drafts pay; otherwise decodes verify all that there are."""
    host_blocks: int = 0
    """Blocks of host memory below the device's cache…"""
    link: HostLink | None = None
    """…and how fast they are moved; needed if there are some."""
    disk_blocks: int = 0
    """Blocks on disk below host memory…"""
    disk_rate: float = 2e9
    """…and bytes a second to and from it."""
    adapter_slots: int = 8
    """LoRA adapters that the device of a replica has room for at a time…"""
    adapter_seconds: float = 0.1
    """…and what it takes to load one, beside steps."""
    encoder_rows: int = EngineConfig.encoder_cache_tokens
    """Tokens of encoded images that a device keeps…"""
    image_seconds: float = 0.02
    """…and what it takes to encode one, in the step that reads it first."""
    lockstep: int = 1
    """So many replicas each share their experts: a step lasts until the longest one of them is done."""


@dataclass
class FleetRequest:
    """A request somewhere in the fleet."""

    conversation: OpenConversation
    request: NewRequest
    arrival: float
    replica: int = -1
    opened: OpenRequest | None = None
    first: float = 0.0
    last: float = 0.0
    generated: int = 0
    retries: int = 0


@dataclass
class SimulatedReplica:
    """An engine, its clock and its device."""

    number: int
    clock: VirtualClock
    core: EngineCore
    device: SimulatedDevice
    tiers: OffloadManager | None = None
    open: dict[str, FleetRequest] = field(default_factory=dict)
    is_scheduled: bool = False
    """Whether its next step is among the events."""
    is_alive: bool = True
    steps: int = 0
    empty_steps: int = 0

    @property
    def name(self) -> str:
        return str(self.number)


class Fleet:
    """Replicas with a router before them. `run` takes a load to its end."""

    def __init__(
        self,
        costs: CostModel,
        options: FleetOptions = FleetOptions(),
        on_step: Callable[[int, SimulatedStep], object] | None = None,
        slowest: SlowestRequests | None = None,
    ) -> None:
        """`on_step`: called for every step of every replica. `slowest`: gets the timelines of some requests."""
        if not 1 <= options.replicas <= MOST_REPLICAS:
            raise ValidationError(f"a fleet has from 1 to {MOST_REPLICAS} replicas, got {options.replicas}")
        if any(not 0 <= number < options.replicas for number, _ in options.kills):
            raise ValidationError(f"--kill names a replica that is not among the {options.replicas}")
        if options.host_blocks and options.link is None:
            raise ValidationError("host memory needs a link to it: how fast blocks are moved")
        if not 0 <= options.restart_seconds < math.inf:
            raise ValidationError(f"a replica is back after at least 0 seconds, got {options.restart_seconds:g}")
        if options.disk_blocks and not options.host_blocks:
            raise ValidationError("blocks reach the disk through host memory: give some host blocks too")
        if not options.disk_rate > 0 or not 0 <= options.image_seconds < math.inf or options.encoder_rows < 1:
            raise ValidationError(
                "the disk's rate and the encoder's tokens must be above 0, seconds of an image from 0"
            )
        if options.lockstep < 1 or options.replicas % options.lockstep or (options.lockstep > 1 and options.kills):
            raise ValidationError(
                f"{options.replicas} replicas cannot share experts in groups of {options.lockstep}"
                + (" of which one dies: the others would end with it" if options.kills else ": give a multiple")
            )
        if options.adapter_slots < 1 or not 0 <= options.adapter_seconds < math.inf:
            raise ValidationError(
                "a device needs at least one adapter slot, and a number of seconds to load one: got "
                f"{options.adapter_slots} slots, {options.adapter_seconds:g} s"
            )
        self.costs = costs
        self.options = options
        most = options.max_num_batched_tokens or costs.max_num_seqs  # as the engine: a step has room for every row
        self.rows = options.max_num_seqs or min(costs.max_num_seqs, most)
        self.budget = options.max_num_batched_tokens or max(costs.max_num_batched_tokens, self.rows)
        self.num_blocks = options.num_blocks or costs.num_blocks
        if self.rows > MOST_ROWS or max(self.num_blocks, options.host_blocks) > MOST_BLOCKS:
            raise ValidationError(
                f"a replica of {self.rows} rows, {self.num_blocks} blocks and {options.host_blocks} in host memory is "
                f"more than is simulated: {MOST_ROWS} rows, {MOST_BLOCKS} blocks"
            )
        if self.budget < self.rows:
            raise ValidationError(
                f"a step of {self.budget} tokens has no room for {self.rows} rows: raise max_num_batched_tokens, or "
                "lower max_num_seqs"
            )
        self._keys = ContentKeys(costs.block_size, b"simulation")
        self._clock = VirtualClock()
        self._on_step = on_step
        self._slowest = slowest
        self._router = Router(costs.block_size, make_routing_policy(options.routing_policy), clock=self._clock)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.replicas = [self._start(number) for number in range(options.replicas)]
        self._waiting: list[FleetRequest] = []
        """Arrived while the closed loop was full or no replica was alive, the latest first."""
        self._num_open = 0
        self._ids = itertools.count()

    def run(self, load: Sequence[Conversation], seed: int = 0) -> SimulationResult:
        """Serve these conversations; returns when all are done."""
        longest = max((conversation.length for conversation in load), default=0)
        room = self.num_blocks * self.costs.block_size
        if longest > room:
            raise ValidationError(
                f"a conversation reaches {longest} tokens, and the cache of a replica holds {room}: "
                "shorten it, or give more blocks"
            )
        self.result = SimulationResult(self.costs, self.options.replicas)
        self.result.has_adapters = any(conversation.adapter for conversation in load)
        self.result.image_seconds = self.options.image_seconds
        for number, source in enumerate(load):
            opened = OpenConversation(source, number, seed)
            self._at(source.at, lambda opened=opened: self._arrive(opened))  # type: ignore[misc]
        for victim, second in self.options.kills:
            self._at(second, lambda victim=victim: self._kill(victim))  # type: ignore[misc]
        while self._events:
            self._clock.now, _, action = heapq.heappop(self._events)
            action()
        self.result.finish(self._clock.now, [replica.device.busy for replica in self.replicas])
        for replica in self.replicas:
            stats = replica.core.scheduler.stats
            self.result.drafts += stats.drafts.tokens
            self.result.accepted_drafts += stats.drafts.accepted
            slots = replica.core.scheduler.requests.adapters.stats
            self.result.adapter_loads += slots.loads
            self.result.adapter_evictions += slots.evictions
            encoding = replica.core.scheduler.requests.encoding.stats
            self.result.images_encoded += encoding.encoded
            self.result.images_cached += encoding.hits
            if (tiers := replica.tiers) is not None:
                self.result.saved_blocks += tiers.saved
                self.result.loaded_blocks += tiers.loaded
                if isinstance(tiers.store, SimulatedStore):
                    self.result.disk_writes += tiers.store.written
                    self.result.disk_reads += tiers.store.hits
        return self.result

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    # Replicas

    def _start(self, number: int) -> SimulatedReplica:
        options, costs = self.options, self.costs
        clock = VirtualClock(self._clock.now)
        config = EngineConfig(model="simulation", scheduling_policy=options.scheduling_policy)
        tables = BlockTables(self.num_blocks + 1, costs.block_size, options.prefix_caching)
        tiers = self._make_tiers(tables, clock)
        scheduler = Scheduler(
            tables, make_policy(config.scheduling_policy, config), self._keys, self.rows, self.budget, clock=clock,
            groups=PrefixGroups(costs.block_size),
            pacer=Pacer(options.max_step_stretch) if math.isfinite(options.max_step_stretch) else None,
            tiers=tiers, drafting=self._make_drafting(),
            microbatches=None if costs.stages == 1 else costs.pipeline_depth + 1,
            adapters=AdapterSlots(options.adapter_slots, clock),
            encoder=EncoderLimits(options.encoder_rows, has_encoder=True),
        )  # fmt: skip

        def note(step: SimulatedStep) -> None:
            self.result.note_step(step)
            if self._on_step is not None:
                self._on_step(number, step)

        device = SimulatedDevice(
            costs, self.rows, clock, note, options.drafts, options.link, options.adapter_seconds, options.image_seconds
        )
        if self._slowest is not None:
            scheduler.requests.timelines = Timelines(clock)
        core = EngineCore(scheduler, device, costs.pipeline_depth, log_stats=False)
        self._router.add(str(number), self.num_blocks, self.rows, adapter_slots=options.adapter_slots)
        return SimulatedReplica(number, clock, core, device, tiers)

    def _make_tiers(self, tables: BlockTables, clock: VirtualClock) -> OffloadManager | None:
        options, link = self.options, self.options.link
        if not options.host_blocks or link is None:
            return None
        costs = Costs(link.block_bytes, link.out_rate, link.back_rate)
        if not options.disk_blocks:
            return OffloadManager(tables, HostTier(options.host_blocks), costs)
        store = SimulatedStore(options.disk_blocks)
        io = SimulatedIO(store, clock, link.block_bytes / options.disk_rate, self._next_event)
        host = HostTier(options.host_blocks, is_backed=store.has)
        return OffloadManager(tables, host, costs, io, lambda slot: _NOTHING)

    def _next_event(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def _make_drafting(self) -> Drafting | None:
        drafts = self.options.drafts
        if drafts is None:
            return None
        return Drafting(len(drafts.rates), device=DeviceDrafts(proposes=True), tunes=self.options.tunes_drafts)

    def _kill(self, number: int) -> None:
        """The replica dies now; its requests start over elsewhere."""
        replica = self.replicas[number]
        if not replica.is_alive:
            return
        replica.is_alive = False
        self._router.remove(replica.name)
        self.result.deaths += 1
        for request in list(replica.open.values()):
            request.retries += 1
            self._num_open -= 1
            self._admit(request)
        replica.open.clear()

        def restart() -> None:
            old = self.replicas[number]
            self.replicas[number] = self._start(number)
            self.replicas[number].device.busy = old.device.busy
            self._admit_waiting()

        self._at(self._clock.now + self.options.restart_seconds, restart)

    # Requests

    def _arrive(self, conversation: OpenConversation) -> None:
        """The next turn of a conversation begins."""
        prompt = conversation.prompt()
        turn, source = conversation.source.turns[conversation.turn], conversation.source
        request = NewRequest(
            str(next(self._ids)), prompt, _PARAMS, limit=len(prompt) + turn.output, tenant=source.tenant,
            priority=source.priority, arrival=self._clock.now, adapters=adapter_uses(source.adapter),
            media=list(conversation.media), spans=list(conversation.spans),
        )  # fmt: skip
        request.keys = self._keys_of(request)
        self._admit(FleetRequest(conversation, request, self._clock.now))

    def _keys_of(self, request: NewRequest) -> list[bytes]:
        return self._keys.of(request.prompt, spans=request.key_spans, adapters=request.kv_identity)

    def _admit(self, request: FleetRequest) -> None:
        """Send a request to a replica, or let it wait for one."""
        limit = self.options.concurrency
        if not self._router.alive or (limit is not None and self._num_open >= limit):
            self._waiting.insert(0, request)
            return
        if limit is not None and not request.retries:
            request.arrival = self._clock.now  # a closed loop sends a request when another has ended
        source = request.request
        routed = RoutedRequest(source.keys, len(source.prompt), 1, source.tenant, adapter_identity(source.adapters))
        name = self._router.choose(routed) if self.options.replicas > 1 else self._router.alive[0]
        request.opened = self._router.launched(routed, name)
        replica = self.replicas[int(name)]
        request.replica = replica.number
        self._num_open += 1
        replica.open[source.id] = request
        if not replica.is_scheduled:
            replica.clock.now = self._clock.now
        replica.core.add(self._with_output(request))
        self._schedule(replica)

    def _with_output(self, request: FleetRequest) -> NewRequest:
        """A request that was interrupted goes on from the tokens it has."""
        source = request.request
        if not request.generated:
            return source
        longer = msgspec.structs.replace(source, prompt=source.prompt + [TOKEN] * request.generated)
        longer.keys = self._keys_of(longer)
        return longer

    def _admit_waiting(self) -> None:
        limit = self.options.concurrency
        while self._waiting and self._router.alive and (limit is None or self._num_open < limit):
            self._admit(self._waiting.pop())

    # Steps

    def _schedule(self, replica: SimulatedReplica) -> None:
        if replica.is_scheduled or not replica.is_alive or not replica.core.has_work:
            return
        group = self._group_of(replica)
        begin = max(self._clock.now, *(each.clock.now for each in group))
        if len(group) == 1:
            replica.is_scheduled = True
            self._at(begin, lambda: self._step([replica]))
        elif not any(each.is_scheduled for each in group):  # else the next round takes it in
            for each in group:
                each.is_scheduled = True
            self._at(begin, lambda: self._step(group))

    def _group_of(self, replica: SimulatedReplica) -> list[SimulatedReplica]:
        """The replicas that step together."""
        size = self.options.lockstep
        first = replica.number - replica.number % size
        return self.replicas[first : first + size]

    def _step(self, group: Sequence[SimulatedReplica]) -> None:
        """One step of every replica of the group that has work. What they yield is seen when the last is done."""
        for replica in group:
            replica.clock.now = max(replica.clock.now, self._clock.now)
        stepped = [(replica, self._advance(replica)) for replica in group if replica.is_alive and replica.core.has_work]
        end = max((replica.clock.now for replica, _ in stepped), default=self._clock.now)
        free = max(replica.device.free_at for replica in group)

        def done() -> None:
            for replica in group:
                replica.is_scheduled = False
            for replica, outputs in stepped:
                if replica.is_alive:  # else it died during the step
                    self._take(replica, outputs)
            for replica in group:
                self._schedule(replica)

        if len(group) > 1:
            for replica in group:
                replica.clock.now, replica.device.free_at = end, free
        self._at(end, done)

    def _advance(self, replica: SimulatedReplica) -> StepOutputs:
        """One step of the replica's loop. Sets its clock to the end."""
        if not self.costs.pipeline_depth:
            replica.clock.now += self.costs.host_seconds
        before = replica.clock.now
        outputs = replica.core.step()
        replica.steps += 1
        replica.empty_steps = 0 if replica.clock.now > before or not outputs.is_empty else replica.empty_steps + 1
        if replica.empty_steps > MOST_EMPTY_STEPS:
            raise RuntimeError(
                f"replica {replica.name} makes no progress: {replica.core.scheduler.unfinished} unfinished"
            )
        return outputs

    def _take(self, replica: SimulatedReplica, outputs: StepOutputs) -> None:
        now, result, requests = self._clock.now, self.result, replica.open
        for started in outputs.started:
            result.cached_tokens += started.num_cached
        result.preemptions += len(outputs.preempted)
        gaps: dict[float, int] = {}
        """Most rows had their last token at the same time."""
        for i, (key, _) in enumerate(outputs.keys):
            request, count = requests[key], 1 if outputs.counts is None else outputs.counts[i]
            if request.generated:
                gap = now - request.last
                gaps[gap] = gaps.get(gap, 0) + 1
            else:
                request.first = now
                assert request.opened is not None
                self._router.progress(request.opened, 1)
            request.generated += count
            request.last = now
        for gap, count in gaps.items():
            result.gaps.add(gap, count)
        if replica.steps % REPORT_STEPS == 0 and self.options.replicas > 1:
            for request in requests.values():
                if request.generated and request.opened is not None:
                    self._router.progress(request.opened, request.generated)
        for end in outputs.finished:
            self._finish(replica, requests.pop(end.key[0]), end.reason)
        if outputs.finished:
            self._admit_waiting()

    def _finish(self, replica: SimulatedReplica, request: FleetRequest, reason: str) -> None:
        assert request.opened is not None
        self._num_open -= 1
        self._router.finished(request.opened)
        source, front = request.request, self.costs.front_seconds
        self.result.note_request(
            source.tenant, len(source.prompt), request.generated, request.arrival, request.first + front,
            request.last + front, request.retries, reason,
        )  # fmt: skip
        if self._slowest is not None:
            timelines = replica.core.scheduler.requests.timelines
            self._slowest.note(request.last - request.arrival, lambda: timelines.of(source.id))
        pause = request.conversation.end_turn([TOKEN] * request.generated)
        if pause is not None:
            conversation = request.conversation
            self._at(self._clock.now + pause, lambda: self._arrive(conversation))


_NOTHING = memoryview(b"")
_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)
