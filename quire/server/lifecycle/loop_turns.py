"""`LoopTurns`: of many requests that arrive at once, a few start in each pass of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 8
"""Requests that start in one pass. Reading and preparing a small one takes about half a millisecond."""


class LoopTurns:
    """Between two looks at its sockets, an event loop runs all that is ready. Without turns, 500 requests that arrive
    at once would be prepared in one pass, and for a quarter of a second no running stream would get its tokens. They
    start in order of arrival."""

    def __init__(self) -> None:
        self._started = 0
        """In this pass."""
        self._is_counting = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Returns at once for the first few requests of a pass; the others wait for a later one."""
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin_pass)
        if self._started < AT_ONCE and not self._waiting:
            self._started += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _begin_pass(self) -> None:
        self._started = 0
        while self._waiting and self._started < AT_ONCE:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise it was cancelled
                turn.set_result(None)
                self._started += 1
        self._is_counting = self._started > 0
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin_pass)
