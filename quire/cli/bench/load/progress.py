"""The view of a run on its way: how far, how many at once, how fast."""

from __future__ import annotations

import asyncio
import sys
import time
from types import TracebackType

from quire.cli.bench.load.client import RunCounters

PER_SECOND = 4
"""Redrawing is work this process could be late for."""


class LoadProgress:
    """While entered, shows a tally on the terminal; nothing where there is none."""

    def __init__(self, tally: RunCounters, total: int | None, what: str) -> None:
        self._tally = tally
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

        tally, seen, then = self._tally, self._tally.tokens, time.perf_counter()
        columns = (
            TextColumn(self._what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[now]}"),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
            task = progress.add_task("", total=self._total, now="")
            while True:
                await asyncio.sleep(1 / PER_SECOND)
                tokens, now = tally.tokens, time.perf_counter()
                rate = (tokens - seen) / (now - then)
                seen, then = tokens, now
                failed = f"  [red]{tally.failed} failed[/]" if tally.failed else ""
                first = f"  first after {1000 * tally.latest_ttft:.0f} ms" if tally.latest_ttft else ""
                said = f"{tally.open} open  {rate:,.0f} tok/s{first}{failed}"
                progress.update(task, completed=tally.done, now=said)
                progress.refresh()
