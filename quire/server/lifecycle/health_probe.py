"""Probes from outside whether the engine's loop makes steps."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from quire.engine.ipc import HealthReport
from quire.errors import EngineDeadError

IDLE_SECONDS = 2.0
"""An idle loop answers at once; one that takes this long hangs."""


class HealthReporter(Protocol):
    """An engine that can be probed: `AsyncLLM`, or one of its replicas."""

    @property
    def num_open_requests(self) -> int: ...

    async def report_health(self) -> HealthReport: ...


class HealthProbe:
    """Sends the loop one ping at a time and measures how long it makes no progress.

    The loop answers between steps, so an answer means that steps end. Open requests while the number of steps stays
    the same mean that none begin.
    """

    def __init__(self, llm: HealthReporter, stall_seconds: float) -> None:
        self._llm = llm
        self._stall_seconds = stall_seconds
        self._ping: asyncio.Task[HealthReport] | None = None
        self._sent_at = 0.0
        self._steps = -1
        self._idle_since: float | None = None
        """Since when there have been open requests and no step."""

    async def probe(self, timeout: float) -> None:
        """Ping, unless a ping is open, and wait up to `timeout` seconds for the answer. A dead engine is no error."""
        if self._ping is None:
            self._sent_at = time.monotonic()
            self._ping = asyncio.ensure_future(self._llm.report_health())
            self._ping.add_done_callback(self._on_answer)
        await asyncio.wait({self._ping}, timeout=timeout)

    def _on_answer(self, ping: asyncio.Task[HealthReport]) -> None:
        self._ping = None
        if ping.cancelled() or isinstance(ping.exception(), EngineDeadError):
            self._idle_since = None  # the next engine starts from zero
            return
        report = ping.result()
        if not report.unfinished or report.steps != self._steps:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        self._steps = report.steps

    @property
    def stalled_seconds(self) -> float:
        """Seconds for which the loop has not answered, or has made no step despite open requests."""
        since = [self._sent_at] if self._ping is not None else []
        since += [self._idle_since] if self._idle_since is not None else []
        return time.monotonic() - min(since) if since else 0.0

    @property
    def is_suspect(self) -> bool:
        """Whether an answer or a step is due."""
        return self._ping is not None or self._idle_since is not None

    @property
    def stall_limit(self) -> float:
        """Seconds without progress that count as healthy: a step may take long, an idle loop may not."""
        return self._stall_seconds if self._llm.num_open_requests else min(IDLE_SECONDS, self._stall_seconds)

    def stop(self) -> None:
        """Cancel an open ping."""
        if self._ping is not None:
            self._ping.cancel()
