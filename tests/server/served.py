"""`quire serve` as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class Served:
    """A server in its own process, and what it writes to stderr."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str] | None = None, before: Sequence[str] = ()
    ) -> None:
        """`before`: a command that runs the server as its own."""
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "quire.cli.main", "serve", *arguments],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
            env={**os.environ, "COLUMNS": "200", **(environment or {})},
        )  # fmt: skip
        self.stderr = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr += line

    def wait_for(self, pattern: str, seconds: float = 90) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, self.stderr)) is None:
            assert time.monotonic() < deadline and self.process.poll() is None, self.stderr
            time.sleep(0.02)
        return match

    @property
    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def end(self) -> int:
        code = self.process.wait(60)
        self._reader.join(10)
        return code


@contextmanager
def served(*arguments: str, before: Sequence[str] = ()) -> Iterator[Served]:
    made = Served(list(arguments), before=before)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            os.killpg(made.process.pid, signal.SIGKILL)
        made.end()
