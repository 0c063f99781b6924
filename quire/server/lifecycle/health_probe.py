"""Whether the engine's loop goes round, as seen from outside."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from quire.engine.ipc import HealthReport
from quire.errors import EngineDeadError

IDLE_SECONDS = 2.0
"""With nothing to do the loop answers at once; so late an answer means that it hangs."""


class HealthReporter(Protocol):
    """What has a pulse."""

    @property
    def num_open_requests(self) -> int: ...

    async def report_health(self) -> HealthReport: ...


class HealthProbe:
    """Asks the loop one question at a time and notes what stands still.

    The loop answers between steps, so an answer says that steps end. Requests that are open while the number of steps
    stays the same say that they do not even begin.
    """

    def __init__(self, llm: HealthReporter, stall_seconds: float) -> None:
        self._llm = llm
        self._stall_seconds = stall_seconds
        self._question: asyncio.Task[HealthReport] | None = None
        self._asked_at = 0.0
        self._steps = -1
        self._idle_since: float | None = None
        """When open requests were first seen without a step since."""

    async def feel(self, wait: float) -> None:
        """Ask, unless a question is open, and give the answer so much time. An engine's death is no error here."""
        if self._question is None:
            self._asked_at = time.monotonic()
            self._question = asyncio.ensure_future(self._llm.report_health())
            self._question.add_done_callback(self._note)
        await asyncio.wait({self._question}, timeout=wait)

    def _note(self, question: asyncio.Task[HealthReport]) -> None:
        self._question = None
        if question.cancelled() or isinstance(question.exception(), EngineDeadError):
            self._idle_since = None  # the next engine begins anew
            return
        report = question.result()
        if not report.unfinished or report.steps != self._steps:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        self._steps = report.steps

    @property
    def silence(self) -> float:
        """Seconds for which the loop has not answered, or has made no step for requests that are open."""
        since = [self._asked_at] if self._question is not None else []
        since += [self._idle_since] if self._idle_since is not None else []
        return time.monotonic() - min(since) if since else 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether something may be wrong: an answer is due, or a step."""
        return self._question is not None or self._idle_since is not None

    @property
    def limit(self) -> float:
        """The longest silence that means nothing: a step may take its time, an idle loop may not."""
        return self._stall_seconds if self._llm.num_open_requests else min(IDLE_SECONDS, self._stall_seconds)

    def stop(self) -> None:
        """Nobody wants to know any more."""
        if self._question is not None:
            self._question.cancel()
