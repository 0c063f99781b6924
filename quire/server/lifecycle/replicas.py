"""Keeps several engines alive, each for itself: while one comes back the others serve."""

from __future__ import annotations

import asyncio

from quire.api.async_llm import AsyncLLM
from quire.server.lifecycle.supervisor import Health, Supervisor


class ReplicaSupervisor:
    """A supervisor for each engine, and what they know together."""

    def __init__(self, llm: AsyncLLM, stall_seconds: float = 20.0, hang_timeout: float = 0.0) -> None:
        """As `Supervisor`."""
        self.each = [
            Supervisor(replica, stall_seconds, hang_timeout, place=f"replica {replica.number}")
            for replica in llm.replicas
        ]

    def start(self) -> None:
        """Watch, in the running event loop."""
        for one in self.each:
            one.start()

    async def stop(self) -> None:
        """Leave the engines to themselves: what dies from now on stays dead."""
        await asyncio.gather(*(one.stop() for one in self.each))

    @property
    def restarts(self) -> int:
        """Engines brought back so far."""
        return sum(one.restarts for one in self.each)

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine to send requests to."""
        return any(one.is_serving for one in self.each)

    @property
    def status(self) -> str:
        """The state of the engines in a sentence."""
        return self._told([Health(one.is_serving, one.status) for one in self.each]).message

    @property
    def retry_after(self) -> int:
        """Whole seconds, at least one, until whoever is down may be back: the first of them, where none serves."""
        seconds = [one.retry_after for one in self.each if not one.is_serving]
        return (max if self.is_serving else min)(seconds, default=1)

    async def health(self) -> Health:
        """Asks the loops. Good as long as one of them does its work."""
        return self._told(await asyncio.gather(*(one.health() for one in self.each)))

    def _told(self, found: list[Health]) -> Health:
        good = sum(one.ok for one in found)
        if good == len(found):
            return Health(True, "serving")
        words = [f"{good} of {len(found)} replicas serve", *(one.message for one in found if not one.ok)]
        return Health(good > 0, "; ".join(words))


def supervise(llm: AsyncLLM, stall_seconds: float, hang_timeout: float) -> Supervisor | ReplicaSupervisor:
    """What keeps these engines alive."""
    kind = Supervisor if len(llm.replicas) == 1 else ReplicaSupervisor
    return kind(llm, stall_seconds, hang_timeout)
