"""Restarts engines that died or hang, and reports their health."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from typing import Protocol

from quire.api.async_llm import AsyncLLM
from quire.api.request_recovery import pauses
from quire.engine.engine_info import EngineInfo
from quire.errors import EngineDeadError
from quire.server.lifecycle.health_probe import IDLE_SECONDS, HealthProbe, HealthReporter

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""How often an engine with open requests is probed."""
RELOAD_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Health:
    """Whether the engine is healthy, and a sentence that says why."""

    ok: bool
    message: str


class SupervisedEngine(HealthReporter, Protocol):
    """A supervised engine: `AsyncLLM`, or one of its replicas."""

    is_shut: bool
    is_supervised: bool

    @property
    def is_reloading(self) -> bool: ...

    @property
    def is_hopeful(self) -> bool: ...

    @property
    def info(self) -> EngineInfo: ...

    @property
    def errored(self) -> bool: ...

    @property
    def dead_error(self) -> EngineDeadError: ...

    async def wait_until_dead(self) -> str: ...

    async def restart(self, only_if_dead: bool = False) -> None: ...

    def end_engine(self, reason: str) -> None: ...


class Supervisor:
    """Restarts an engine that died, kills one that hangs, and reports its state.

    `AsyncLLM` keeps the requests that were open when the engine died, and sends them to its successor.
    """

    def __init__(
        self,
        llm: SupervisedEngine,
        stall_seconds: float = 20.0,
        hang_timeout: float = 0.0,
        settled_seconds: float = 10.0,
        place: str = "",
    ) -> None:
        """`stall_seconds`: a step may take this long before the engine counts as unhealthy. `hang_timeout`: and this
        long before its process is killed; 0: never. `settled_seconds`: an engine that served this long, or whose
        requests still wait for the next one, is restarted without a pause. `place`: which of several engines it is, for
        the log.
        """
        self._llm = llm
        self._probe = HealthProbe(llm, stall_seconds)
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
        """Estimated monotonic time at which it is up again."""
        self._start_seconds = llm.info.start_seconds + 1.0
        self._tasks: list[asyncio.Task[None]] = []
        self.restarts = 0
        """Restarts so far."""

    @property
    def each(self) -> list[Supervisor]:
        """The supervisors of each engine: only this one."""
        return [self]

    def start(self) -> None:
        """Start supervising, in the running event loop."""
        self._llm.is_supervised = True
        self._tasks = [asyncio.ensure_future(work) for work in (self._restart_when_dead(), self._watch_for_hangs())]

    async def stop(self) -> None:
        """Stop supervising: an engine that dies from now on is not restarted by this object."""
        self._probe.stop()
        self._llm.is_supervised = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    # State

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine to send requests to."""
        return not self._llm.errored

    @property
    def status(self) -> str:
        """The state of the engine, as a sentence."""
        if self.is_serving:
            return "serving"
        if self._llm.is_reloading:
            return "the engine is being reloaded"
        cause = self._cause or str(self._llm.dead_error)
        return f"{cause}; {self._remedy}" if self._remedy else cause

    @property
    def retry_after(self) -> int:
        """Whole seconds, at least one, after which a client should retry."""
        return max(1, math.ceil(self._up_at - time.monotonic()))

    async def health(self) -> Health:
        """Probe the loop; takes a few seconds at most. Healthy if steps complete, or if there is nothing to do."""
        if self.is_serving:
            await self._probe.probe(IDLE_SECONDS)
        if not self.is_serving:
            return Health(self._llm.is_reloading, self.status)
        if self._probe.stalled_seconds >= self._probe.stall_limit:
            return Health(False, self._describe_stall())
        return Health(True, self.status)

    def _describe_stall(self) -> str:
        count = self._llm.num_open_requests
        what = f"{count} requests open" if count else "nothing to do"
        return f"the engine's loop has made no step for {self._probe.stalled_seconds:.0f} s, with {what}"

    # An engine that dies

    async def _restart_when_dead(self) -> None:
        while True:
            self._cause = await self._llm.wait_until_dead()
            if self._llm.is_shut:
                return
            while self._llm.is_reloading:
                await asyncio.sleep(RELOAD_POLL_SECONDS)
            if not self._llm.errored:
                self._cause = ""
                continue
            logger.error("%s", self._cause)
            if time.monotonic() - self._ready_at >= self._settled_seconds or self._llm.is_hopeful:
                self._pauses = pauses()
            while self._llm.errored and not self._llm.is_shut:
                await self._restart(next(self._pauses))
            self._cause = self._remedy = ""

    async def _restart(self, pause: float) -> None:
        begin = time.monotonic()
        self._up_at = begin + pause + self._start_seconds
        if pause:
            self._remedy += f"{'; ' if self._remedy else ''}the next attempt is in {pause:.0f} s"
            await asyncio.sleep(pause)
        self._remedy = "it is being restarted"
        try:
            await self._llm.restart(only_if_dead=True)
        except Exception as error:  # the next attempt may succeed
            self._remedy = f"restarting it failed: {error}"
            logger.error("%sthe engine could not be restarted: %s", self._at, error)
            return
        self._ready_at = time.monotonic()
        self._start_seconds = self._ready_at - begin - pause
        self.restarts += 1
        logger.warning("%sa new engine is serving, %.1f s after the last one died", self._at, self._ready_at - begin)

    # An engine that hangs

    async def _watch_for_hangs(self) -> None:
        """Probe the engine while it has open requests; an idle server is not probed."""
        is_reported = False
        while True:
            await asyncio.sleep(min(PROBE_SECONDS, self._hang_timeout / 4) if self._hang_timeout else PROBE_SECONDS)
            if self._llm.errored or not (self._llm.num_open_requests or self._probe.is_suspect):
                continue
            await self._probe.probe(0.0)
            stalled = self._probe.stalled_seconds
            if stalled >= self._probe.stall_limit and not is_reported:
                logger.warning("%s%s", self._at, self._describe_stall())
            is_reported = stalled >= self._probe.stall_limit
            if self._hang_timeout and stalled >= self._hang_timeout:
                self._llm.end_engine(f"the engine was killed: {self._describe_stall()}")


class ReplicaSupervisor:
    """A supervisor for each engine, and their combined state: while one engine restarts, the others serve."""

    def __init__(self, llm: AsyncLLM, stall_seconds: float = 20.0, hang_timeout: float = 0.0) -> None:
        """As `Supervisor`."""
        self.each = [
            Supervisor(replica, stall_seconds, hang_timeout, place=f"replica {replica.number}")
            for replica in llm.replicas
        ]

    def start(self) -> None:
        """Start supervising, in the running event loop."""
        for one in self.each:
            one.start()

    async def stop(self) -> None:
        """Stop supervising: an engine that dies from now on is not restarted."""
        await asyncio.gather(*(one.stop() for one in self.each))

    @property
    def restarts(self) -> int:
        """Restarts so far."""
        return sum(one.restarts for one in self.each)

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine to send requests to."""
        return any(one.is_serving for one in self.each)

    @property
    def status(self) -> str:
        """The state of the engines, as a sentence."""
        return self._combined([Health(one.is_serving, one.status) for one in self.each]).message

    @property
    def retry_after(self) -> int:
        """Whole seconds, at least one, until the engines that are down may be up: if none serves, until the first."""
        seconds = [one.retry_after for one in self.each if not one.is_serving]
        return (max if self.is_serving else min)(seconds, default=1)

    async def health(self) -> Health:
        """Probe all loops. Healthy if at least one is."""
        return self._combined(await asyncio.gather(*(one.health() for one in self.each)))

    def _combined(self, found: list[Health]) -> Health:
        good = sum(one.ok for one in found)
        if good == len(found):
            return Health(True, "serving")
        parts = [f"{good} of {len(found)} replicas serve", *(one.message for one in found if not one.ok)]
        return Health(good > 0, "; ".join(parts))


def supervise(llm: AsyncLLM, stall_seconds: float, hang_timeout: float) -> Supervisor | ReplicaSupervisor:
    """The supervisor of these engines."""
    kind = Supervisor if len(llm.replicas) == 1 else ReplicaSupervisor
    return kind(llm, stall_seconds, hang_timeout)
