"""Sends requests at their arrival times, waits for all of them, and shows progress."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from quire.cli.bench.load.client import Client, RequestResult, RunCounters
from quire.cli.interrupts import cancelled_by_interrupt

YIELD_EVERY = 16
"""When all requests start at once, the event loop may send after every this many."""
REDRAWS_PER_SECOND = 4
"""Of the progress display: redrawing takes CPU time from sending."""


@dataclass
class LoadRun:
    """The results of one run, and its times."""

    results: list[RequestResult]
    start: float
    end: float
    cpu: float
    """CPU seconds of this process."""
    was_stopped: bool = False

    @property
    def duration(self) -> float:
        return self.end - self.start


async def send_all(client: Client, bodies: Sequence[bytes], times: Sequence[float], concurrency: int | None) -> LoadRun:
    """Send each body at its time, at most `concurrency` at once; an interrupt ends the run early."""
    _allow_many_files()
    gc.freeze()  # keeps later collections short: they skip the objects that exist now
    tasks: list[asyncio.Task[RequestResult]] = []
    was_stopped = False
    cpu, start = time.process_time(), time.perf_counter()
    try:
        with cancelled_by_interrupt():
            await _dispatch(client, zip(bodies, times, strict=True), start, concurrency, tasks)
            await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        was_stopped = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    end = time.perf_counter()
    gc.unfreeze()
    client.host.close()
    results = [task.result() for task in tasks if not task.cancelled()]  # some may not have started
    return LoadRun(results, start, end, time.process_time() - cpu, was_stopped)


async def _dispatch(
    client: Client,
    schedule: Iterable[tuple[bytes, float]],
    start: float,
    concurrency: int | None,
    tasks: list[asyncio.Task[RequestResult]],
) -> None:
    """Start each request at its time, once a slot is free."""
    slots = asyncio.Semaphore(concurrency) if concurrency else None
    freed: collections.deque[float] = collections.deque([0.0] * (concurrency or 0))
    """When each free slot became free: waiting for a slot does not count as send delay."""

    async def one(body: bytes, due: float) -> RequestResult:
        try:
            return await client.send(body, max(0.0, time.perf_counter() - due))
        finally:
            if slots is not None:
                freed.append(time.perf_counter())
                slots.release()

    for body, at in schedule:
        if (wait := start + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        due = start + at
        if slots is not None:
            await slots.acquire()
            due = max(due, freed.popleft())
        tasks.append(asyncio.create_task(one(body, due)))
        if wait <= 0 and len(tasks) % YIELD_EVERY == 0:
            await asyncio.sleep(0)


def _allow_many_files() -> None:
    """Raise the limit of open files to its maximum: every stream is a socket."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on Windows; macOS refuses its own hard limit
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class LoadProgress:
    """Shows the counters on the terminal while entered; without a terminal it does nothing."""

    def __init__(self, counters: RunCounters, total: int | None, what: str) -> None:
        self._counters = counters
        self._total = total
        self._what = what
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if sys.stderr.isatty():
            self._task = asyncio.create_task(self._show())

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        counters, seen, then = self._counters, self._counters.tokens, time.perf_counter()
        columns = (
            TextColumn(self._what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[now]}"),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
            task = progress.add_task("", total=self._total, now="")
            while True:
                await asyncio.sleep(1 / REDRAWS_PER_SECOND)
                tokens, now = counters.tokens, time.perf_counter()
                rate = (tokens - seen) / (now - then)
                seen, then = tokens, now
                failed = f"  [red]{counters.failed} failed[/]" if counters.failed else ""
                first = f"  first after {1000 * counters.latest_ttft:.0f} ms" if counters.latest_ttft else ""
                status = f"{counters.open} open  {rate:,.0f} tok/s{first}{failed}"
                progress.update(task, completed=counters.done, now=status)
                progress.refresh()
