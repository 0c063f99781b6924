"""Measures how long an event loop works without looking at its sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class LoopWatch:
    """The longest pass of an event loop, which runs all callbacks that are ready, in CPU time of its thread: other
    processes do not matter."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop: Any = loop
        self.longest = 0.0

    @contextmanager
    def watching(self) -> Iterator[LoopWatch]:
        run_once = self._loop._run_once

        def timed() -> None:
            begin = time.thread_time()
            run_once()
            self.longest = max(self.longest, time.thread_time() - begin)

        self._loop._run_once = timed
        try:
            yield self
        finally:
            del self._loop._run_once
