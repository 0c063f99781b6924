"""Measures how long an event loop works without a turn for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager


class LoopWatch:
    """The longest callback of an event loop, in CPU time of its thread: other processes do not matter."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.longest = 0.0

    @contextmanager
    def watching(self) -> Iterator[LoopWatch]:
        run = asyncio.Handle._run
        loop = self._loop

        def timed(handle: asyncio.Handle) -> None:
            if handle._loop is not loop:  # type: ignore[attr-defined]
                run(handle)
                return
            begin = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - begin)

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        try:
            yield self
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]
