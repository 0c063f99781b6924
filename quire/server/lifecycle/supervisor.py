"""Keeps an engine alive, and tells the truth about it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from quire.api.async_llm import AsyncLLM
from quire.engine.engine_info import EngineInfo
from quire.errors import EngineDeadError
from quire.server.lifecycle.health_probe import IDLE_SECONDS, HealthProbe, HealthReporter

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 30.0
LOOK_SECONDS = 5.0
"""The pulse of a loop that has requests is felt so often."""


def pauses() -> Iterator[float]:
    """Seconds to wait before each try: none, then twice as long every time."""
    yield 0.0
    seconds = 1.0
    while True:
        yield min(seconds, LONGEST_PAUSE)
        seconds = min(2 * seconds, LONGEST_PAUSE)


@dataclass(frozen=True)
class Health:
    """Whether the engine does its work, in a word and in a sentence."""

    ok: bool
    message: str


class SupervisedEngine(HealthReporter, Protocol):
    """What is kept alive: `AsyncLLM`, or one of its replicas."""

    is_shut: bool

    @property
    def facts(self) -> EngineInfo: ...

    @property
    def errored(self) -> bool: ...

    @property
    def dead_error(self) -> EngineDeadError: ...

    async def wait_until_dead(self) -> str: ...

    async def restart(self, only_if_dead: bool = False) -> None: ...

    def kill_engine(self, reason: str) -> None: ...


class Supervisor:
    """Restarts an engine that died, kills one that hangs, and knows how things stand.

    Requests that were open when the engine died have failed by then: that is `AsyncLLM`'s own doing.
    """

    def __init__(
        self,
        llm: SupervisedEngine,
        stall_seconds: float = 20.0,
        hang_timeout: float = 0.0,
        settled_seconds: float = 10.0,
        place: str = "",
    ) -> None:
        """`stall_seconds`: so long a step may take before the engine counts as unhealthy. `hang_timeout`: so long
        before its process is killed; 0: never. `settled_seconds`: one that served so long is brought back at once.
        `place`: which of several it is, for the log.
        """
        self._llm = llm
        self._pulse = HealthProbe(llm, stall_seconds)
        self._hang_timeout = hang_timeout
        self._settled_seconds = settled_seconds
        self._at = f"{place}: " if place else ""
        self._pauses = pauses()
        self._ready_at = time.monotonic()
        self._cause = ""
        """Why the engine is down; empty while it is up."""
        self._remedy = ""
        """What is being done about it."""
        self._up_at = 0.0
        """When it may be up again, as far as one can tell."""
        self._start_seconds = llm.facts.start_seconds + 1.0
        self._tasks: list[asyncio.Task[None]] = []
        self.restarts = 0
        """Engines brought back so far."""

    @property
    def each(self) -> list[Supervisor]:
        """One for each engine: only this."""
        return [self]

    def start(self) -> None:
        """Watch, in the running event loop."""
        self._tasks = [asyncio.ensure_future(work) for work in (self._keep_alive(), self._watch_pulse())]

    async def stop(self) -> None:
        """Leave the engine to itself: what dies from now on stays dead."""
        self._pulse.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    # How things stand

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine to send requests to."""
        return not self._llm.errored

    @property
    def status(self) -> str:
        """The state of the engine in a sentence."""
        if self.is_serving:
            return "serving"
        cause = self._cause or str(self._llm.dead_error)
        return f"{cause}; {self._remedy}" if self._remedy else cause

    @property
    def retry_after(self) -> int:
        """Whole seconds, at least one, after which asking again makes sense."""
        return max(1, math.ceil(self._up_at - time.monotonic()))

    async def health(self) -> Health:
        """Asks the loop. Good only if steps end, or if there is nothing to do; known within a few seconds."""
        if self.is_serving:
            await self._pulse.feel(IDLE_SECONDS)
        if not self.is_serving:
            return Health(False, self.status)
        if self._pulse.silence >= self._pulse.limit:
            return Health(False, self._describe_silence())
        return Health(True, self.status)

    def _describe_silence(self) -> str:
        count = self._llm.num_open_requests
        what = f"{count} requests open" if count else "nothing to do"
        return f"the engine's loop has made no step for {self._pulse.silence:.0f} s, with {what}"

    # One that dies

    async def _keep_alive(self) -> None:
        while True:
            self._cause = await self._llm.wait_until_dead()
            if self._llm.is_shut:
                return
            logger.error("%s", self._cause)
            if time.monotonic() - self._ready_at >= self._settled_seconds:
                self._pauses = pauses()
            while self._llm.errored and not self._llm.is_shut:
                await self._bring_back(next(self._pauses))
            self._cause = self._remedy = ""

    async def _bring_back(self, pause: float) -> None:
        begin = time.monotonic()
        self._up_at = begin + pause + self._start_seconds
        if pause:
            self._remedy += f"{'; ' if self._remedy else ''}the next try comes in {pause:.0f} s"
            await asyncio.sleep(pause)
        self._remedy = "a new one is being started"
        try:
            await self._llm.restart(only_if_dead=True)
        except Exception as error:  # whatever it is, the next try may go better
            self._remedy = f"starting a new one failed: {error}"
            logger.error("%sthe engine could not be started again: %s", self._at, error)
            return
        self._ready_at = time.monotonic()
        self._start_seconds = self._ready_at - begin - pause
        self.restarts += 1
        logger.warning("%sa new engine serves, %.1f s after the last one died", self._at, self._ready_at - begin)

    # One that hangs

    async def _watch_pulse(self) -> None:
        """Where nobody waits for the engine nobody looks, and an idle server stays idle."""
        told = False
        while True:
            await asyncio.sleep(min(LOOK_SECONDS, self._hang_timeout / 4) if self._hang_timeout else LOOK_SECONDS)
            if self._llm.errored or not (self._llm.num_open_requests or self._pulse.is_waiting):
                continue
            await self._pulse.feel(0.0)
            silence = self._pulse.silence
            if silence >= self._pulse.limit and not told:
                logger.warning("%s%s", self._at, self._describe_silence())
            told = silence >= self._pulse.limit
            if self._hang_timeout and silence >= self._hang_timeout:
                self._llm.kill_engine(f"the engine was killed: {self._describe_silence()}")


class ReplicaSupervisor:
    """A supervisor for each engine, and what they know together."""

    def __init__(self, llm: AsyncLLM, stall_seconds: float = 20.0, hang_timeout: float = 0.0) -> None:
        """As `Supervisor`."""
        self.each = [
            Supervisor(replica, stall_seconds, hang_timeout, place=f"replica {replica.number}")
            for replica in llm.replicas
        ]

    def start(self) -> None:
        """Watch, in the running event loop."""
        for one in self.each:
            one.start()

    async def stop(self) -> None:
        """Leave the engines to themselves: what dies from now on stays dead."""
        await asyncio.gather(*(one.stop() for one in self.each))

    @property
    def restarts(self) -> int:
        """Engines brought back so far."""
        return sum(one.restarts for one in self.each)

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine to send requests to."""
        return any(one.is_serving for one in self.each)

    @property
    def status(self) -> str:
        """The state of the engines in a sentence."""
        return self._told([Health(one.is_serving, one.status) for one in self.each]).message

    @property
    def retry_after(self) -> int:
        """Whole seconds, at least one, until whoever is down may be back: the first of them, where none serves."""
        seconds = [one.retry_after for one in self.each if not one.is_serving]
        return (max if self.is_serving else min)(seconds, default=1)

    async def health(self) -> Health:
        """Asks the loops. Good as long as one of them does its work."""
        return self._told(await asyncio.gather(*(one.health() for one in self.each)))

    def _told(self, found: list[Health]) -> Health:
        good = sum(one.ok for one in found)
        if good == len(found):
            return Health(True, "serving")
        words = [f"{good} of {len(found)} replicas serve", *(one.message for one in found if not one.ok)]
        return Health(good > 0, "; ".join(words))


def supervise(llm: AsyncLLM, stall_seconds: float, hang_timeout: float) -> Supervisor | ReplicaSupervisor:
    """What keeps these engines alive."""
    kind = Supervisor if len(llm.replicas) == 1 else ReplicaSupervisor
    return kind(llm, stall_seconds, hang_timeout)
