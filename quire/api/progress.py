"""A progress bar for batches."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from quire.messages.outputs import Output, RequestOutput


class Progress:
    """Finished requests and tokens per second, if stderr is a terminal."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._total = total
        self._bar = None
        self._input = self._output = 0
        self._begin = time.monotonic()
        if enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("generating"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[rate]}"),
                console=Console(stderr=True),
                transient=True,
            )

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, rate="")
        return self

    def finished(self, output: Output) -> None:
        """One request has finished."""
        if self._bar is not None:
            elapsed = time.monotonic() - self._begin
            self._input += len(output.prompt_token_ids)
            if isinstance(output, RequestOutput):
                self._output += sum(len(sequence.token_ids) for sequence in output.outputs)
            rate = f"in {self._input / elapsed:.0f} tok/s, out {self._output / elapsed:.0f} tok/s"
            self._bar.update(self._task, advance=1, rate=rate)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
