"""The engines behind an `AsyncLLM`: one, or several with a router in front.

A single engine gets every request. With several, the router chooses one for each request, and a session's turns go to
the replica that holds the session. When an engine dies, its requests go on at another (`RequestRecovery`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from quire.api.lockstep_group import LockstepGroup
from quire.api.output_stream import OutputStream
from quire.api.relay import Relay
from quire.api.replica import Replica, run_in_thread
from quire.api.request_recovery import RequestRecovery
from quire.api.router_feed import RouterFeed, as_routed
from quire.api.session_affinity import SessionAffinity
from quire.config import EngineConfig
from quire.engine import ipc
from quire.engine.device_split import replica_config, warn_of_orphans
from quire.engine.engine_info import EngineInfo
from quire.engine.remote import EngineHandle, RemoteEngine, error_of
from quire.engine.session_calls import REPEATABLE, SessionAnswer, SessionOp
from quire.engine.stats import Metric
from quire.engine.thread import ThreadEngine
from quire.errors import SHUT_DOWN, EngineDeadError
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.messages.experts import Rebalanced
from quire.messages.metric_table import SPECS
from quire.messages.request import NewRequest
from quire.output.processor import OutputProcessor
from quire.router import RoutedRequest, Router, make_routing_policy

logger = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.02
GRAMMAR_NEWS_SECONDS = 60.0
"""While requests with a grammar come, all engines are told so this often."""


class EngineGroup:
    """Starts the engines, sends requests to them, and tracks which are alive."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, model: ModelConfig, module: str, outputs: OutputProcessor
    ) -> None:
        self._config, self._files, self._model, self._module = config, files, model, module
        self._outputs = outputs
        size = config.data_parallel_size
        self.replicas = [Replica(number, partial(self.start_engine, number), outputs) for number in range(size)]
        self.router: Router | None = None
        """None for a single engine."""
        self.lockstep = LockstepGroup(self.replicas) if config.steps_together else None
        """If the engines step in lockstep: all of them run, or none."""
        self._restarting = asyncio.Lock()
        self._grammar_ends: list[int] = []
        """The end-of-sequence tokens, if a request had a grammar…"""
        self._grammars_told_at = -math.inf
        """…and when the engines were told."""
        self.affinity = SessionAffinity(self, config.kv_disk is not None)
        self.recovery = RequestRecovery(self, outputs, config.max_engine_restarts)
        self.relay = Relay(self, outputs)
        """Requests of other front processes."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called when a new engine has taken a replica's place."""
        policy = make_routing_policy(config.routing_policy)
        for replica in self.replicas:
            replica.on_ready, replica.recovery = self._on_ready, self.recovery
        if size > 1:
            self.router = Router(config.block_size, policy)
            for replica in self.replicas:
                replica.title = f"replica {replica.number} of {size}"
                replica.on_lost = self._on_lost
                if self.lockstep is not None:
                    replica.restart_all = self._restart_together

    # Starting

    def start(self) -> None:
        """Start all processes at once; does not wait for them."""
        warn_of_orphans(self._config)
        try:
            for replica in self.replicas:
                replica.start()
        except BaseException:
            self.kill()
            raise

    def start_engine(self, number: int) -> EngineHandle:
        """Start the process of one engine, or its thread."""
        if self._config.in_process:
            return ThreadEngine(self._config, self._files, self._model, self._grammar_ends)
        return RemoteEngine(
            replica_config(self._config, number), self._files, self._model, self._module, number, len(self.replicas),
            "" if self.lockstep is None else self.lockstep.rendezvous_file(number), self._grammar_ends,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Blocks until all engines are ready. If one fails, all are killed, and its error is raised."""
        try:
            if len(self.replicas) == 1:
                self.replicas[0].wait_until_ready()
            else:
                self._wait_for_all()
        except BaseException:
            self.kill()
            raise
        for replica in self.replicas:
            replica.adopt()

    def _wait_for_all(self) -> None:
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            waits = [pool.submit(replica.wait_until_ready) for replica in self.replicas]
            try:
                done, _ = wait(waits, return_when=FIRST_EXCEPTION)
                for one in done:
                    one.result()
            except BaseException:
                self.kill()  # also ends the waits in the threads
                raise

    def kill(self) -> None:
        """Kill every process that is being started."""
        for replica in self.replicas:
            if replica.starting is not None:
                replica.starting.kill()

    # State

    @property
    def alive(self) -> list[Replica]:
        """Replicas whose engine is not dead."""
        return [replica for replica in self.replicas if not replica.death]

    @property
    def errored(self) -> bool:
        """Whether all engines are dead."""
        return all(replica.death for replica in self.replicas)

    @property
    def dead_error(self) -> EngineDeadError:
        """The error of every call once all engines are dead."""
        if len(self.replicas) == 1:
            return self.replicas[0].dead_error
        return EngineDeadError("; ".join(str(replica.dead_error) for replica in self.replicas))

    @property
    def info(self) -> EngineInfo:
        """What the engines reported; if they differ, of the one with the smallest cache: what fits there fits all."""
        return min((replica.info for replica in self.replicas), key=lambda info: info.num_blocks)

    def check_hopeful(self) -> None:
        """As `attach`, but raises only if no engine is alive, nor will be."""
        if not self.errored:
            self.attach()
        elif self.recovery.is_hopeful:
            self.recovery.ensure_restarts()
        else:
            raise self.dead_error

    def attach(self) -> None:
        """Let the running event loop read messages of all engines; raises if none is alive."""
        if self.errored:
            raise self.dead_error
        for replica in self.replicas:
            replica.engine.attach()

    # Requests

    def choose(self, request: NewRequest) -> Replica:
        """The replica to send a request to; raises if it takes none now."""
        if self.router is None:
            chosen = self.replicas[0]
        elif request.session and self.affinity.known(request.session) is not None:
            chosen = self.affinity.replica_of(request.session)
        else:
            self.attach()
            chosen = self.replicas[int(self.router.choose(as_routed(request)))]
        chosen.check_open()
        return chosen

    def choose_for_session(self, tokens: list[int], salt: str) -> Replica:
        """The replica for a new session that starts with these tokens."""
        assert self.router is not None
        self.attach()
        keys = self.info.keys.of(tokens, salt) if self._config.enable_prefix_caching else []
        routed = RoutedRequest(keys, len(tokens))
        name = self.router.choose(routed)
        # Counts as work there, so that sessions created together are spread.
        self.router.finished(self.router.launched(routed, name))
        return self.replicas[int(name)]

    def submit(self, stream: OutputStream, request: NewRequest, message: bytes) -> None:
        """Send a new request to a replica, or let it wait for one; `message` is its encoded `Add`."""
        stream.request = request
        try:
            chosen = self.choose(request)
        except EngineDeadError:  # it may have died while the prompt was prepared
            if not self.recovery.can_wait(request):
                raise
            self.recovery.park(stream)
        else:
            self.launch(chosen, stream, request, message)

    def launch(self, replica: Replica, stream: OutputStream, request: NewRequest, message: bytes) -> None:
        """Send a request to the replica; `message` is its encoded `Add`. The only way a request reaches an engine."""
        if replica.router_feed is not None:
            replica.router_feed.launch(request)
        replica.add(stream, message)
        if request.params.structured_outputs is not None:
            self._tell_of_grammars(replica, request.eos_ids)
        if self.lockstep is not None:
            self.lockstep.wake_all()

    def _tell_of_grammars(self, replica: Replica, end_ids: list[int]) -> None:
        """The replica has got a request with a grammar: the others get ready to take it over."""
        self._grammar_ends = end_ids
        if time.monotonic() - self._grammars_told_at >= GRAMMAR_NEWS_SECONDS:
            self._grammars_told_at = time.monotonic()
            for other in self.alive:
                if other is not replica:
                    other.engine.send(ipc.PrepareGrammars(end_ids))

    def leave(self, stream: OutputStream) -> None:
        """The request's reader has left: abort it if it is unfinished."""
        (self.recovery if stream.replica is None else stream.replica).leave(stream)
        self.recovery.forget(stream)

    def abort(self, stream: OutputStream) -> None:
        """Abort a request; its reader gets a last output."""
        (self.recovery if stream.replica is None else stream.replica).abort(stream)

    # Engines start and die

    def _on_ready(self, replica: Replica) -> None:
        """An engine is ready, with an empty cache."""
        if self.router is not None:
            name, info = str(replica.number), replica.info
            self.router.add(name, info.num_blocks, info.max_num_seqs, adapter_slots=self._config.max_loras)
            replica.router_feed = RouterFeed(self.router, name, info.keys, self._outputs)
        self.on_ready()
        self.recovery.engine_ready(replica)

    def _on_lost(self, replica: Replica) -> None:
        """An engine is dead: send nothing to it any more. Its requests go elsewhere next."""
        assert self.router is not None
        self.router.remove(str(replica.number))
        replica.router_feed = None
        self.affinity.forget(replica)
        if self.lockstep is not None and not replica.is_shut:
            self.lockstep.end_others(replica)

    # Calls

    async def call_all(self, message: Callable[[int], ipc.Down]) -> list[Any]:
        """Replies of all engines that are alive, in order; raises if none replies."""
        self.attach()
        replies = await asyncio.gather(*(replica.call(message) for replica in self.alive), return_exceptions=True)
        good = [reply for reply in replies if not isinstance(reply, BaseException)]
        if not good:
            raise next(reply for reply in replies if isinstance(reply, BaseException))
        return good

    async def get_metrics(self) -> list[Metric]:
        """Counters and gauges of all engines together."""
        return merged_metrics([report.metrics for report in await self.call_all(ipc.GetStats)])

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks everywhere; False if running requests still hold some."""
        if self.router is not None:
            self.router.forget_blocks()
        return all(report.is_empty for report in await self.call_all(ipc.ResetPrefixCache))

    async def rebalance_experts(self) -> Rebalanced:
        """Move experts to balance their load; raises where they cannot move."""
        down = next((replica for replica in self.replicas if replica.death), None)
        if self.lockstep is not None and down is not None:
            raise down.dead_error  # the others would wait for it
        rebalance = 0 if self.lockstep is None else self.lockstep.next_rebalance()
        reports = await self.call_all(lambda number: ipc.RebalanceExperts(number, rebalance))
        if (error := reports[0].error) is not None:
            raise error_of(error)
        outcome: Rebalanced = reports[0].outcome
        return outcome

    async def call_sessions(self, op: SessionOp) -> SessionAnswer:
        """Run a session operation. Its changes are durable when this returns. It waits for an engine that is being
        restarted; one that was under way when its engine died is repeated only if that is the same as doing it once."""
        while True:
            try:
                return await (self.replicas[0] if self.router is None else self.affinity).call_sessions(op)
            except EngineDeadError as error:
                if (error.was_sent and not isinstance(op, REPEATABLE)) or not await self.recovery.next_engine():
                    raise

    def send_session_op(self, key: str, op: SessionOp) -> None:
        """The same for one session, without waiting for the reply."""
        replica = self.replicas[0] if self.router is None else self.affinity.known(key)
        if replica is not None:
            replica.send_session_op(op)

    async def wait_until_dead(self) -> str:
        """Waits until all engines are dead; returns the reason."""
        if len(self.replicas) == 1:
            return await self.replicas[0].wait_until_dead()
        while not self.errored:
            await asyncio.gather(*(replica.wait_until_dead() for replica in self.alive))
        return str(self.dead_error)

    # Restart and shutdown

    async def restart(self, only_if_dead: bool) -> None:
        """Replace dead engines by new ones, or all of them."""
        if all(replica.is_shut for replica in self.replicas):
            raise EngineDeadError(SHUT_DOWN)
        if self.lockstep is not None:
            await self._restart_together(only_if_dead)
        else:
            restarts = (replica.restart(only_if_dead) for replica in self.replicas)
            outcomes = await asyncio.gather(*restarts, return_exceptions=True)  # every restart runs to its end
            if (failed := next((one for one in outcomes if one is not None), None)) is not None:
                raise failed

    async def _restart_together(self, only_if_dead: bool) -> None:
        """All or none: an engine that waits for one that failed to start is killed."""
        async with self._restarting:
            if not only_if_dead or len(self.alive) < len(self.replicas):
                await self._restart_each(only_if_dead)
                assert self.lockstep is not None
                self.lockstep.wake_all()  # one may have got a request before the last was ready to be woken

    async def _restart_each(self, only_if_dead: bool) -> None:
        """Restart all engines at once; if one fails, kill all and raise its error."""
        restarts = [asyncio.ensure_future(replica.restart_alone(only_if_dead)) for replica in self.replicas]
        try:
            _, waiting = await asyncio.wait(restarts, return_when=asyncio.FIRST_EXCEPTION)
            while waiting:
                self.kill()
                _, waiting = await asyncio.wait(waiting, timeout=0.1)
        except asyncio.CancelledError:  # none of them may continue alone
            for each in restarts:
                each.cancel()
            await asyncio.gather(*restarts, return_exceptions=True)
            raise
        failed = next((error for each in restarts if (error := each.exception()) is not None), None)
        if failed is not None:
            self.end_engines(f"not all engines could be restarted: {failed}")
            raise failed

    async def reload(self, seconds: float) -> None:
        """Replace the engines by new ones, one replica after the other. Open requests have `seconds` to finish where
        they are, then they go on elsewhere; new ones go to other replicas, or wait."""
        turns = [self.replicas] if self.lockstep is not None else [[replica] for replica in self.replicas]
        for replicas in turns:
            try:
                await self._drain(replicas, seconds)
                await replicas[0].restart(only_if_dead=bool(replicas[0].death))
            finally:
                for replica in replicas:
                    if replica.is_draining:  # it was not restarted
                        replica.is_draining = False
                        self.recovery.engine_ready(replica)

    async def _drain(self, replicas: Sequence[Replica], seconds: float) -> None:
        """Send nothing new to these replicas, and wait until they are idle, `seconds` at most."""
        for replica in replicas:
            replica.is_draining = True
            if self.router is not None:
                self.router.close(str(replica.number))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(not one.death and not one.is_idle for one in replicas):
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    def end_engines(self, reason: str) -> None:
        """Kill all processes as if they had failed: their requests go on."""
        for replica in self.replicas:
            replica.end_engine(reason)

    def kill_engines(self, reason: str) -> None:
        """Kill all processes. Open requests fail with the reason."""
        for replica in self.replicas:
            replica.is_killed = True
        self.end_engines(reason)
        self.recovery.give_up(self.replicas[0])

    def shut(self) -> None:
        """Close all engines permanently; call `stop` next."""
        for replica in self.replicas:
            replica.is_shut = True
        for replica in self.replicas:
            replica.shut()
        if self.lockstep is not None:
            self.lockstep.close()

    def stop(self) -> None:
        """End the processes of engines that are shut, and wait for them. Blocks."""
        if len(self.replicas) == 1:
            self.replicas[0].engine.stop()
            return
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            list(pool.map(lambda replica: replica.engine.stop(), self.replicas))

    async def stop_in_thread(self) -> None:
        """The same, for an event loop."""
        await run_in_thread(self.stop)


def merged_metrics(engines: Sequence[Sequence[Metric]]) -> list[Metric]:
    """Metrics of several engines as those of one."""
    if len(engines) == 1:
        return list(engines[0])
    by_name: dict[str, list[Metric]] = {}
    for metrics in engines:
        for metric in metrics:
            by_name.setdefault(metric.name, []).append(metric)
    return [_merged_metric(same) for same in by_name.values()]


def _merged_metric(same: list[Metric]) -> Metric:
    """One metric of several engines: summed, averaged, or their maximum, as its spec defines."""
    first, values = same[0], [metric.value for metric in same]
    spec = SPECS.get(first.name.removeprefix("quire:"))
    merge = "sum" if spec is None else spec.merge
    divisor = len(same) if merge == "mean" else 1
    value = max(values) if merge == "max" else sum(values) / divisor
    series: dict[tuple[str, ...], float] = {}
    for metric in same:
        for labels, part in metric.series:
            series[labels] = series.get(labels, 0.0) + part / divisor
    counts = tuple(sum(column) for column in zip(*(metric.counts for metric in same), strict=True))
    return Metric(first.name, first.kind, value, first.bounds, counts, tuple(series.items()))
