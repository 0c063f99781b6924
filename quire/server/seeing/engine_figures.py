"""What the engine says of itself, for someone who cannot wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quire.engine.stats import Metric
from quire.errors import QuireError

PATIENCE_SECONDS = 1.0


class EngineFigures:
    """The last figures the engine gave. One question is open at a time, however many look."""

    def __init__(self, ask: Callable[[], Awaitable[list[Metric]]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self.known: dict[str, Metric] = {}
        """By their name without a prefix."""

    async def refresh(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Ask anew. An engine that is dead, or busy for longer, leaves what is known as it is."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._read())
        await asyncio.wait([self._asking], timeout=seconds)

    async def _read(self) -> None:
        try:
            metrics = await self._ask()
        except QuireError:  # dead; the last figures stand
            return
        self.known = {metric.name.partition(":")[2]: metric for metric in metrics}
