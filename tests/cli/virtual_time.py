"""An event loop with a clock of its own: where there is nothing to do, the next timer is due at once. Delays are exact
whatever else the machine does, and cost no time."""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire.cli.bench import serve
from tests.cli.stub_server import StubServer


class _WaitlessSelector(selectors.DefaultSelector):
    """Moves the clock forward instead of waiting."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or (ready := super().select(0)):
            return super().select(timeout)
        self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Every connection leads to `stub`, which runs in this loop. Socket pairs deliver what is sent at once."""

    def __init__(self, stub: StubServer) -> None:
        self._clock = _WaitlessSelector()
        super().__init__(self._clock)
        self._stub = stub

    def time(self) -> float:
        return self._clock.now

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        here, there = socket.socketpair()
        reader = asyncio.StreamReader(loop=self)
        protocol = asyncio.StreamReaderProtocol(reader, self._stub.serve, loop=self)
        await self.connect_accepted_socket(lambda: protocol, there)
        return await super().create_connection(factory, sock=here)


@contextmanager
def virtual(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[StubServer]:
    """A stub server that `quire bench serve` of this process reaches at `url`, in virtual time."""
    stub = StubServer(url="http://stub.invalid", **settings)

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        loop = VirtualLoop(stub)
        with monkeypatch.context() as patched:
            patched.setattr(time, "perf_counter", loop.time)
            try:
                return loop.run_until_complete(work)
            finally:
                loop.run_until_complete(_cancel_others())
                loop.close()

    with monkeypatch.context() as patched:
        patched.setattr(serve, "_run_loop", run)
        yield stub


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
