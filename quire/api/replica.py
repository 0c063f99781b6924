"""One engine as `AsyncLLM` sees it: its open requests, calls to it, its death and its restart."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from quire.api.output_stream import OutputStream, split_outputs
from quire.api.router_feed import RouterFeed
from quire.engine import ipc
from quire.engine.engine_info import EngineInfo
from quire.engine.remote import EngineHandle, error_of
from quire.engine.session_calls import SessionAnswer, SessionOp
from quire.engine.stats import Metric
from quire.errors import SHUT_DOWN, EngineDeadError, QuireError, ReplicaDownError
from quire.messages.engine_view import BlockDetail, EngineView, RequestTimeline, Tier
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import Finished, StepOutputs
from quire.output.processor import OutputProcessor

if TYPE_CHECKING:
    from quire.api.request_recovery import RequestRecovery

logger = logging.getLogger(__name__)

DEFERRED_OUTPUTS = 8
"""A step with at least this many other outputs delivers first tokens before them."""


class Replica:
    """A slot for an engine: when the engine dies, a new one can take its place. Requests are known by their keys."""

    def __init__(self, number: int, start: Callable[[], EngineHandle], outputs: OutputProcessor) -> None:
        """`start` starts a process and does not wait for it."""
        self.number = number
        self.title = ""
        """Its name in errors, if there are several."""
        self.engine: EngineHandle
        """The current engine, or the last one."""
        self.starting: EngineHandle | None = None
        """The engine that is being started."""
        self.streams: dict[str, OutputStream] = {}
        """Requests sent here, by the engine's key."""
        self.pass_on: Callable[[StepOutputs], None] | None = None
        """Sends outputs to other front processes, while those have open requests."""
        self.calls: dict[int, asyncio.Future[Any]] = {}
        """Calls to the engine that wait for their reply, by number."""
        self.router_feed: RouterFeed | None = None
        """Reports to the router, if there is one."""
        self.is_shut = False
        """Shut down for good: it cannot be restarted."""
        self.is_killed = False
        """Its engine was killed on request: it is restarted on request only."""
        self.is_supervised = False
        """A supervisor restarts its engine."""
        self.is_draining = False
        """It is about to be restarted, and gets no new requests."""
        self.failures = 0
        """How often its engine died or could not be started since it yielded a token."""
        self.trial: OutputStream | None = None
        """A request that may have killed engines, and runs here alone."""
        self.recovery: RequestRecovery
        """Takes over the requests of an engine that died."""
        self.on_ready: Callable[[Replica], None] = lambda replica: None
        """Called when an engine has taken its place."""
        self.on_lost: Callable[[Replica], None] = lambda replica: None
        """Called when the engine is dead, before its requests go elsewhere."""
        self.restart_all: Callable[[bool], Awaitable[None]] | None = None
        """Restarts all replicas, if none can be restarted alone."""
        self._start = start
        self._outputs = outputs
        self._deferred: StepOutputs | None = None
        """The rest of a step's outputs, until its first tokens are delivered."""
        self._numbers = itertools.count()
        self._unsent: list[SessionOp] = []
        """Session operations for the next engine: the last one died before it got them."""
        self._ready_at = 0.0
        self._session_calls = 0
        """Session calls under way."""
        self._restarting = asyncio.Lock()

    # The engine

    def start(self) -> None:
        """Start an engine's process; does not wait for it."""
        self.starting = self._start()

    def wait_until_ready(self) -> None:
        """Blocks until the engine that was started is ready; raises its error if it failed."""
        assert self.starting is not None
        self.starting.wait_until_ready()

    def adopt(self) -> None:
        """The engine that was started, and is ready, becomes the current one."""
        assert self.starting is not None
        self.engine, self.starting = self.starting, None
        self.engine.on_message, self.engine.on_death = self._receive, self._on_death
        self.is_killed = self.is_draining = False
        self._ready_at = time.monotonic()
        unsent, self._unsent = self._unsent, []
        for op in unsent:
            self.send_session_op(op)
        self.on_ready(self)

    @property
    def info(self) -> EngineInfo:
        """What the engine reported when it was ready."""
        return self.engine.info

    @property
    def pid(self) -> int:
        return self.engine.pid

    @property
    def death(self) -> str:
        """Why the engine is dead; empty while it lives."""
        return self.engine.death

    @property
    def errored(self) -> bool:
        """Whether the engine is dead, for whatever reason."""
        return bool(self.engine.death)

    @property
    def dead_error(self) -> EngineDeadError:
        """The error of every call once the engine is dead."""
        if not self.title:
            return EngineDeadError(self.engine.death)
        return ReplicaDownError(f"{self.title} is down: {self.engine.death}")

    @property
    def age(self) -> float:
        """Seconds since the engine was ready."""
        return time.monotonic() - self._ready_at

    @property
    def num_open_requests(self) -> int:
        return len(self.streams)

    @property
    def is_reloading(self) -> bool:
        """Whether it is being restarted on request."""
        return self.is_draining

    @property
    def is_hopeful(self) -> bool:
        """Whether it has an engine, or will have one."""
        return not self.death or self.recovery.awaits(self)

    @property
    def is_idle(self) -> bool:
        """Whether no request and no session call is under way."""
        return not self._session_calls and all(stream.is_ended for stream in self.streams.values())

    def check_open(self) -> None:
        """Raise unless it takes new requests now."""
        self.attach()
        if self.trial is not None or self.is_draining:
            what = "is being restarted" if self.is_draining else "runs a request alone that may have killed engines"
            raise ReplicaDownError(f"{self.title or 'the engine'} {what}")

    def attach(self) -> None:
        """Let the running event loop read the engine's messages; raises if the engine is dead."""
        if self.engine.death:
            raise self.dead_error
        self.engine.attach()

    # Requests

    def add(self, stream: OutputStream, message: bytes) -> None:
        """Send a request; `message` is its encoded `Add`."""
        stream.replica, stream.engine = self, self.engine
        self.streams[stream.key] = stream
        self.engine.send(message)
        if stream.is_aborted:
            self.engine.send(ipc.Abort(stream.key))

    def abort(self, stream: OutputStream) -> None:
        """Abort a request; its reader gets a last output."""
        if stream.key in self.streams:
            self.engine.send(ipc.Abort(stream.key))

    def leave(self, stream: OutputStream) -> None:
        """The request's reader has left: abort it if it is unfinished."""
        if self.streams.pop(stream.key, None) is not None:
            if self.router_feed is not None:
                self.router_feed.end(stream.key)
            self._outputs.forget(stream.key)
            if not stream.is_ended:
                self.engine.send(ipc.Abort(stream.key))

    # Calls

    async def call(self, message: Callable[[int], ipc.Down]) -> Any:
        """Send the message made with a new number, and wait for the reply with that number."""
        self.attach()
        number = next(self._numbers)
        self.engine.send(message(number))
        return await self._reply_to(number)

    async def call_sessions(self, op: SessionOp) -> SessionAnswer:
        """Run a session operation. Its changes are durable when this returns."""
        self._session_calls += 1
        try:
            reply: ipc.SessionReply = await self.call(lambda number: ipc.SessionCall(number, op))
        finally:
            self._session_calls -= 1
        if reply.refused is not None:
            raise error_of(reply.refused)
        assert reply.answer is not None
        return reply.answer

    def send_session_op(self, op: SessionOp) -> None:
        """The same without waiting for the reply. If the engine is dead, its successor gets the operation."""
        if self.engine.death:
            self._unsent.append(op)
        else:
            self.engine.send(ipc.SessionCall(next(self._numbers), op))

    async def report_health(self) -> ipc.HealthReport:
        """The engine's open requests and steps so far, as its loop reports them."""
        report: ipc.HealthReport = await self.call(ipc.Ping)
        return report

    async def memory_map(self) -> MemoryMap:
        """What holds which blocks now, on all tiers."""
        block_bytes = self.info.block_bytes
        report: ipc.MemoryReport = await self.call(lambda number: ipc.GetMemoryMap(number, block_bytes))
        if report.map is None:
            raise QuireError(f"the engine failed to report its memory map: {report.error}")
        return report.map

    async def view(self) -> EngineView:
        """What the page shows of the engine now."""
        found = await self._look(ipc.GetView)
        assert isinstance(found, EngineView)
        return found

    async def timeline(self, request_id: str) -> RequestTimeline | None:
        """What happened to a recent request; None: it is not known."""
        found = await self._look(lambda number: ipc.GetTimeline(number, request_id))
        assert found is None or isinstance(found, RequestTimeline)
        return found

    async def describe_block(self, block: int, tier: Tier = "device") -> BlockDetail:
        """What uses a block."""
        found = await self._look(lambda number: ipc.GetBlock(number, block, tier))
        assert isinstance(found, BlockDetail)
        return found

    async def _look(self, message: Callable[[int], ipc.Down]) -> EngineView | RequestTimeline | BlockDetail | None:
        report: ipc.ViewReport = await self.call(message)
        if report.refused is not None:
            raise error_of(report.refused)
        return report.answer

    async def get_metrics(self) -> list[Metric]:
        """Counters and gauges of the engine."""
        metrics: list[Metric] = (await self.call(ipc.GetStats)).metrics
        return metrics

    async def wait_until_dead(self) -> str:
        """Waits until the engine is dead; returns the reason."""
        try:
            self.attach()
            await self._reply_to(next(self._numbers))
        except EngineDeadError as error:
            return str(error)
        raise AssertionError("a reply came to a call that was not sent")

    async def _reply_to(self, number: int) -> Any:
        reply = self.calls[number] = asyncio.get_running_loop().create_future()
        try:
            return await reply
        finally:
            del self.calls[number]

    # Messages from the engine

    def _receive(self, message: ipc.Up) -> None:
        match message:
            case ipc.Outputs(outputs=outputs):
                self._take_outputs(outputs)
            case ipc.RequestRefused(id=key):
                self._fail(key, error_of(message))
            case (
                ipc.HealthReport()
                | ipc.StatsReport()
                | ipc.ResetReport()
                | ipc.SessionReply()
                | ipc.MemoryReport()
                | ipc.ViewReport()
                | ipc.RebalanceReport()
            ):
                reply = self.calls.get(message.question)
                if reply is not None and not reply.done():
                    reply.set_result(message)

    def _take_outputs(self, outputs: StepOutputs) -> None:
        """Deliver first tokens before those of running streams: users notice the time to first token."""
        self._deliver_deferred()
        if self.pass_on is not None:
            self.pass_on(outputs)
        streams = self.streams
        new = {key[0] for key in outputs.keys if (one := streams.get(key[0])) is not None and one.awaits_first}
        if not new or outputs.counts is not None or len(outputs.keys) - len(new) < DEFERRED_OUTPUTS:
            self._deliver(outputs)
            return
        first, self._deferred = split_outputs(outputs, new)
        self._deliver(first)
        asyncio.get_running_loop().call_soon(self._deliver_deferred)  # after the readers that were just woken

    def _deliver_deferred(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._deliver(deferred)

    def _deliver(self, outputs: StepOutputs) -> None:
        for end in outputs.finished:
            if end.error:
                self._refuse(end)
        try:
            views, stops = self._outputs.process(outputs)
        except Exception as error:  # readers must not wait for outputs that cannot be made
            logger.exception("the outputs of a step could not be processed")
            for request in {key[0] for key in (*outputs.keys, *(end.key for end in outputs.finished))}:
                self.engine.send(ipc.Abort(request))
                self._fail(request, QuireError(f"the output could not be processed: {type(error).__name__}: {error}"))
            return
        for key, at, string in stops:
            self.engine.send(ipc.Finish(key, at, string))
        for view in views:
            if (stream := self.streams.get(view.request_id)) is not None:
                view.request_id = stream.request_id
                stream.put(view)
        if self.router_feed is not None:
            self.router_feed.note(outputs)
        if outputs.keys or outputs.vectors or outputs.beams:
            self.failures = 0
        if self.trial is not None:
            self.recovery.on_output(self)

    def _refuse(self, end: Finished) -> None:
        """Fail a request that the engine refused after it had accepted it."""
        stream = self.streams.get(end.key[0])
        if stream is not None and stream.raises_refusals:
            refused = ipc.RequestRefused(stream.key, end.error, end.message or "", end.parameter)
            self._fail(stream.key, error_of(refused))

    def _fail(self, key: str, error: QuireError) -> None:
        if (stream := self.streams.get(key)) is not None:
            self._outputs.forget(key)
            stream.fail(error)

    # The end of the engine

    def _on_death(self, reason: str, is_planned: bool = False) -> None:
        """The engine is dead: its requests go on elsewhere, open calls fail."""
        self._deliver_deferred()
        self.on_lost(self)
        streams = [stream for stream in self.streams.values() if not stream.is_ended]
        for stream in streams:
            del self.streams[stream.key]
        self.recovery.engine_died(self, streams, is_planned)
        for reply in self.calls.values():
            if not reply.done():
                error = self.dead_error
                error.was_sent = True
                reply.set_exception(error)

    async def restart(self, only_if_dead: bool = False) -> None:
        """Replace the engine by a new one, where its requests go on."""
        await (self.restart_alone if self.restart_all is None else self.restart_all)(only_if_dead)

    async def restart_alone(self, only_if_dead: bool) -> None:
        """The same, for this engine only."""
        async with self._restarting:
            if self.is_shut:
                raise EngineDeadError(SHUT_DOWN)
            if only_if_dead and not self.errored:
                return  # another call has restarted it
            self.close("the engine is being restarted")
            await run_in_thread(self.engine.stop)
            try:
                await self._make_engine()
            except Exception:
                self.failures += 1
                self.recovery.attempt_failed(self)
                raise

    async def _make_engine(self) -> None:
        """Start a new engine and wait for it; it is killed if this replica is shut down meanwhile."""
        if self.is_shut:
            raise EngineDeadError(SHUT_DOWN)
        self.start()
        engine = self.starting
        assert engine is not None
        try:
            await run_in_thread(engine.wait_until_ready)
        except BaseException as error:
            self.starting = None
            engine.kill()  # also ends the wait in the thread
            if self.is_shut and isinstance(error, Exception):
                raise EngineDeadError(SHUT_DOWN) from error
            raise
        if self.is_shut:
            self.starting = None
            engine.kill()
            raise EngineDeadError(SHUT_DOWN)
        self.adopt()
        self.engine.attach()

    def end_engine(self, reason: str) -> None:
        """Kill the engine's process as if it had failed: its requests go on elsewhere."""
        self.engine.end(reason)

    def kill_engine(self, reason: str) -> None:
        """Kill the engine's process. Open requests fail with the reason, and only `restart` starts another."""
        self.is_killed = True
        self.engine.end(reason)

    def close(self, reason: str) -> None:
        """Stop sending and receiving; call `engine.stop` next."""
        self.engine.close(reason)
        self._on_death(self.engine.death, is_planned=True)

    def shut(self) -> None:
        """Close permanently, together with an engine that is being started."""
        self.is_shut = True
        if self.starting is not None:
            self.starting.kill()
        self.close(SHUT_DOWN)


async def run_in_thread(work: Callable[[], None]) -> None:
    """Run `work` in its own thread: those of the default pool may all be busy with prompts."""
    pool = ThreadPoolExecutor(1)
    try:
        await asyncio.get_running_loop().run_in_executor(pool, work)
    finally:
        pool.shutdown(wait=False)
