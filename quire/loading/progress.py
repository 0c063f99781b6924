"""Progress bars on a terminal: of a download or load in bytes, of other work in steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def bytes_bar(label: str, total: int, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes on stderr. Yields a function that takes the bytes done so far."""
    if not (shown and _has_terminal()):
        yield lambda done: None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(label, total, (DownloadColumn(), TransferSpeedColumn())) as show:
        yield show


@contextmanager
def count_bar(label: str, total: int, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """The same for work that is counted, with the time left."""
    if not (shown and _has_terminal()):
        yield lambda done: None
        return
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    with _bar(label, total, (MofNCompleteColumn(), TimeRemainingColumn())) as show:
        yield show


def _has_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def _bar(label: str, total: int, details: Sequence[Any]) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), *details, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=min(done, total))
