"""One engine as `AsyncLLM` sees it: what is open there, what it is asked, its death and its successor."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.api.first_tokens import apart
from quire.api.output_stream import OutputStream
from quire.api.router_feed import RouterFeed
from quire.engine import ipc
from quire.engine.engine_info import EngineInfo
from quire.engine.remote import RemoteEngine, error_of
from quire.engine.session_calls import SessionAnswer, SessionOp
from quire.engine.stats import Metric
from quire.errors import SHUT, EngineDeadError, QuireError, ReplicaDownError
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import Finished, StepOutputs
from quire.output.processor import OutputProcessor

logger = logging.getLogger(__name__)

MANY = 8
"""Outputs that first tokens do not wait for."""


class Replica:
    """An engine's place: when the engine dies, another can take it. It knows requests by their keys."""

    def __init__(self, number: int, start: Callable[[], RemoteEngine], outputs: OutputProcessor) -> None:
        """`start` makes a process and waits for nothing."""
        self.number = number
        self.title = ""
        """What errors call it, where there are several."""
        self.engine: RemoteEngine
        """The one that is there, or was there last."""
        self.coming: RemoteEngine | None = None
        """The one that is being made."""
        self.boxes: dict[str, OutputStream] = {}
        """Requests sent here, by the key the engine knows them by."""
        self.questions: dict[int, asyncio.Future[Any]] = {}
        self.traffic: RouterFeed | None = None
        """Who tells the router, where there is one."""
        self.is_shut = False
        """Nothing brings it back."""
        self.on_ready: Callable[[Replica], None] = lambda replica: None
        """An engine has taken its place."""
        self.on_lost: Callable[[Replica], None] = lambda replica: None
        """The engine is dead; its requests are still here."""
        self.rescue: Callable[[OutputStream], bool] = lambda box: False
        """Takes a request elsewhere, if that can be."""
        self.restart_all: Callable[[bool], Awaitable[None]] | None = None
        """Where none can be started without the others: starts them all."""
        self._start = start
        self._outputs = outputs
        self._rest: StepOutputs | None = None
        """What came with first tokens, and waits until those are with their readers."""
        self._numbers = itertools.count()
        self._untold: list[SessionOp] = []
        """What the next engine is told about sessions first: the last one died before it could be."""
        self._restarting = asyncio.Lock()

    # Its engine

    def start(self) -> None:
        """Start an engine's process; nothing is waited for."""
        self.coming = self._start()

    def wait_until_ready(self) -> None:
        """Blocks until the engine that was started is made, or raises what kept it from that."""
        assert self.coming is not None
        self.coming.wait_until_ready()

    def adopt(self) -> None:
        """The engine that was started, and is ready, takes the place."""
        assert self.coming is not None
        self.engine, self.coming = self.coming, None
        self.engine.on_message, self.engine.on_death = self._take, self._lose_all
        untold, self._untold = self._untold, []
        for op in untold:
            self.tell_sessions(op)
        self.on_ready(self)

    @property
    def facts(self) -> EngineInfo:
        """What the engine turned out to be."""
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
        """What every call raises once the engine is dead."""
        if not self.title:
            return EngineDeadError(self.engine.death)
        return ReplicaDownError(f"{self.title} is down: {self.engine.death}")

    @property
    def num_open_requests(self) -> int:
        return len(self.boxes)

    def attach(self) -> None:
        """Whoever asks something must be able to get an answer."""
        if self.engine.death:
            raise self.dead_error
        self.engine.attach()

    # Requests

    def add(self, box: OutputStream, message: bytes) -> None:
        """Send a request; `message` is its `Add`. Its outputs are waited for already."""
        box.replica = self
        self.boxes[box.key] = box
        self.engine.send(message)
        if box.is_aborted:
            self.engine.send(ipc.Abort(box.key))

    def abort(self, box: OutputStream) -> None:
        """End a request; its reader is told when that has happened."""
        if box.key in self.boxes:
            self.engine.send(ipc.Abort(box.key))

    def leave(self, box: OutputStream) -> None:
        """Nobody reads this request any more."""
        if self.boxes.pop(box.key, None) is not None:
            if self.traffic is not None:
                self.traffic.end(box.key)
            self._outputs.forget(box.key)
            if not box.is_ended:
                self.engine.send(ipc.Abort(box.key))

    # Questions

    async def ask(self, question: Callable[[int], ipc.Down]) -> Any:
        """Ask the engine something, by the number that the answer will have."""
        self.attach()
        number = next(self._numbers)
        self.engine.send(question(number))
        return await self._answer_to(number)

    async def ask_sessions(self, op: SessionOp) -> SessionAnswer:
        """Ask something about sessions. What it changed is durable when this returns."""
        reply: ipc.SessionReply = await self.ask(lambda question: ipc.SessionCall(question, op))
        if reply.refused is not None:
            raise error_of(reply.refused)
        assert reply.answer is not None
        return reply.answer

    def tell_sessions(self, op: SessionOp) -> None:
        """The same, where nobody waits for what comes of it. If the engine is dead, the one that follows it is told."""
        if self.engine.death:
            self._untold.append(op)
        else:
            self.engine.send(ipc.SessionCall(next(self._numbers), op))

    async def report_health(self) -> ipc.HealthReport:
        """How far the engine's loop has come, in its own words."""
        report: ipc.HealthReport = await self.ask(ipc.Ping)
        return report

    async def memory_map(self) -> MemoryMap:
        """Who holds what now, on the device and in the tiers below."""
        block_bytes = self.facts.block_bytes
        report: ipc.MemoryReport = await self.ask(lambda question: ipc.GetMemoryMap(question, block_bytes))
        if report.map is None:
            raise QuireError(f"the engine's memory could not be mapped: {report.error}")
        return report.map

    async def get_metrics(self) -> list[Metric]:
        """Counters and gauges of the engine."""
        metrics: list[Metric] = (await self.ask(ipc.GetStats)).metrics
        return metrics

    async def wait_until_dead(self) -> str:
        """Returns once the engine is dead, with the reason. Until then it costs nothing."""
        try:
            self.attach()
            await self._answer_to(next(self._numbers))
        except EngineDeadError as error:
            return str(error)
        raise AssertionError("nobody answers what was not asked")

    async def _answer_to(self, number: int) -> Any:
        answer = self.questions[number] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            del self.questions[number]

    # What comes

    def _take(self, message: ipc.Up) -> None:
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
                | ipc.RebalanceReport()
            ):
                answer = self.questions.get(message.question)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _take_outputs(self, outputs: StepOutputs) -> None:
        self._show_rest()
        boxes = self.boxes
        new = {key[0] for key in outputs.keys if (box := boxes.get(key[0])) is not None and box.awaits_first}
        if not new or outputs.counts is not None or len(outputs.keys) - len(new) < MANY:
            self._show(outputs)
            return
        first, self._rest = apart(outputs, new)
        self._show(first)
        asyncio.get_running_loop().call_soon(self._show_rest)  # after the readers who have just been woken

    def _show_rest(self) -> None:
        """What a step told about all others, if that is still to be shown."""
        rest, self._rest = self._rest, None
        if rest is not None:
            self._show(rest)

    def _show(self, outputs: StepOutputs) -> None:
        for end in outputs.finished:
            if end.error:
                self._refuse(end)
        try:
            views, stops = self._outputs.process(outputs)
        except Exception as error:  # what cannot be shown must not be waited for
            logger.exception("the outputs of a step cannot be shown")
            for request in {key[0] for key in (*outputs.keys, *(end.key for end in outputs.finished))}:
                self.engine.send(ipc.Abort(request))
                self._fail(request, QuireError(f"the output cannot be shown: {type(error).__name__}: {error}"))
            return
        for key, at, string in stops:
            self.engine.send(ipc.Finish(key, at, string))
        for view in views:
            if (box := self.boxes.get(view.request_id)) is not None:
                view.request_id = box.request_id
                box.put(view)
        if self.traffic is not None:
            self.traffic.note(outputs)

    def _refuse(self, end: Finished) -> None:
        """The request is at fault, and only the engine could know."""
        box = self.boxes.get(end.key[0])
        if box is not None and box.raises_own:
            said = end.message or ""
            form = "structured_outputs"  # the one field that takes until here to be looked at
            refused = ipc.RequestRefused(box.key, end.error or "", said, form if said.startswith(f"{form}:") else None)
            self._fail(box.key, error_of(refused))

    def _fail(self, key: str, error: QuireError) -> None:
        if (box := self.boxes.get(key)) is not None:
            self._outputs.forget(key)
            box.fail(error)

    # Its end

    def _lose_all(self, reason: str) -> None:
        """The engine is dead: nobody waits for it any longer."""
        self._show_rest()
        self.on_lost(self)
        rescued = 0
        for box in list(self.boxes.values()):
            if not box.is_ended and self.rescue(box):
                rescued += 1
            else:
                self._fail(box.key, self.dead_error)
        if rescued:
            logger.warning("%s is down: %d requests begin again elsewhere", self.title, rescued)
        for answer in self.questions.values():
            if not answer.done():
                answer.set_exception(self.dead_error)

    async def restart(self, only_if_dead: bool = False) -> None:
        """Make a new engine in place of one that died, or of one that lives: then its requests fail."""
        await (self.restart_alone if self.restart_all is None else self.restart_all)(only_if_dead)

    async def restart_alone(self, only_if_dead: bool) -> None:
        """The same, of this engine and no other."""
        async with self._restarting:
            if self.is_shut:
                raise EngineDeadError(SHUT)
            if only_if_dead and not self.errored:
                return  # someone else was quicker
            self.close("the engine is being restarted")
            await aside(self.engine.stop)
            await self._make_engine()

    async def _make_engine(self) -> None:
        """A new one, ready. Nothing of it is left if nobody wants it any more."""
        if self.is_shut:
            raise EngineDeadError(SHUT)
        self.start()
        engine = self.coming
        assert engine is not None
        try:
            await aside(engine.wait_until_ready)
        except BaseException as error:
            self.coming = None
            engine.kill()  # also ends the thread's wait
            if self.is_shut and isinstance(error, Exception):
                raise EngineDeadError(SHUT) from error
            raise
        if self.is_shut:
            self.coming = None
            engine.kill()
            raise EngineDeadError(SHUT)
        self.adopt()

    def kill_engine(self, reason: str) -> None:
        """End the engine's process at once: it cannot be talked to. Open requests fail with the reason."""
        self.engine.end(reason)

    def close(self, reason: str) -> None:
        """Nothing is sent or received any more; `engine.stop` comes next."""
        self.engine.close(reason)
        self._lose_all(self.engine.death)

    def shut(self) -> None:
        """Close for good: an engine that is being made is not wanted either."""
        self.is_shut = True
        if self.coming is not None:
            self.coming.kill()
        self.close(SHUT)


async def aside(wait: Callable[[], None]) -> None:
    """In a thread of its own: those of the pool may all be busy with prompts."""
    pool = ThreadPoolExecutor(1)
    try:
        await asyncio.get_running_loop().run_in_executor(pool, wait)
    finally:
        pool.shutdown(wait=False)
