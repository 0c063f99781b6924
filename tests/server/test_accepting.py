"""Fronts that share a port have about as many connections each, in whatever order they are woken."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from quire.server.config import ServerConfig
from quire.server.fronts.counts import Count, FrontCounts, make_memory
from quire.server.lifecycle.accepting import AT_ONCE, SLACK, FrontListener
from quire.server.lifecycle.connection import LimitedProtocol
from quire.server.serve import listening, run_loop

CLIENTS = 300
PATIENCE_SECONDS = 60.0


class Connection(asyncio.Protocol):
    """Counts itself, as `LimitedProtocol` does."""

    def __init__(self, counts: FrontCounts) -> None:
        self._counts = counts
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._counts.add(Count.CONNECTIONS, 1)

    def connection_lost(self, error: Exception | None) -> None:
        self._counts.add(Count.CONNECTIONS, -1)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Port:
    """A listening socket and its fronts."""

    def __init__(self, sock: socket.socket, counts: list[FrontCounts]) -> None:
        self._sock = sock
        self._clients: list[socket.socket] = []
        self._sockets: list[socket.socket] = []
        self.counts = counts
        self.listeners: list[FrontListener] = []

    def accept_with(self, *numbers: int) -> None:
        """Let these fronts accept."""
        for number in numbers:
            counts, sock = self.counts[number], self._sock.dup()  # each has its own descriptor, as each process
            self._sockets.append(sock)
            made = FrontListener(sock, counts, lambda counts=counts: Connection(counts), None)  # type: ignore[misc]
            self.listeners.append(made)

    def connect(self, clients: int) -> None:
        """That many more clients."""
        for _ in range(clients):
            self._clients.append(socket.create_connection(self._sock.getsockname()))

    async def shares(self) -> list[int]:
        """Connections of each front, when all are accepted."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while self.counts[0].total(Count.CONNECTIONS) < len(self._clients):
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)
        return [each.own(Count.CONNECTIONS) for each in self.counts]

    async def leave(self) -> None:
        """All clients leave."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        while self.counts[0].total(Count.CONNECTIONS):
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.leave()
        for listener in self.listeners:
            listener.close()
            await listener.wait_closed()
        for sock in self._sockets:
            sock.close()


@pytest.fixture(params=[asyncio.run, run_loop], ids=["asyncio", "uvloop"])
def ported(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[Port], Coroutine[Any, Any, None]]], None]]:
    """Runs a coroutine with a port of three fronts."""
    memory = make_memory(3)

    async def on_port(work: Callable[[Port], Coroutine[Any, Any, None]]) -> None:
        with listening(ServerConfig(port=0)) as (sock, _):
            port = Port(sock, [FrontCounts(3, number, memory) for number in range(3)])
            await work(port)
            await port.close()

    yield lambda work: request.param(on_port(work))
    os.close(memory)


def test_a_burst_is_shared(ported: Any) -> None:
    async def work(port: Port) -> None:
        port.accept_with(0, 1, 2)
        port.connect(CLIENTS)
        shares = await port.shares()
        most = SLACK + CLIENTS // 3 // 16 + AT_ONCE
        assert sum(shares) == CLIENTS and max(shares) - min(shares) <= 2 * most, shares
        await port.leave()
        assert await port.shares() == [0, 0, 0]

    ported(work)


def test_a_front_alone_accepts_all(ported: Any) -> None:
    async def work(port: Port) -> None:
        port.accept_with(1)
        port.connect(CLIENTS)
        assert await port.shares() == [0, CLIENTS, 0]

    ported(work)


def test_fronts_that_accept_nothing_are_not_waited_for(ported: Any) -> None:
    """One has exited, and the counters of another say that it accepts, but it does not come to it."""

    async def work(port: Port) -> None:
        port.counts[2].add(Count.ACCEPTING, 1)
        port.accept_with(0)
        port.connect(CLIENTS)
        assert await port.shares() == [CLIENTS, 0, 0]
        port.counts[0].end(2)
        port.connect(10)
        assert await port.shares() == [CLIENTS + 10, 0, 0]

    ported(work)


def test_a_new_front_gets_the_next_connections(ported: Any) -> None:
    async def work(port: Port) -> None:
        port.accept_with(0)
        port.connect(60)
        assert await port.shares() == [60, 0, 0]
        port.accept_with(1)
        for _ in range(40):
            port.connect(1)
            shares = await port.shares()
        assert shares[1] > 20, shares

    ported(work)


def test_connections_answer_and_a_client_that_left_does_no_harm(ported: Any) -> None:
    async def work(port: Port) -> None:
        port.connect(3)
        for client in port._clients[:2]:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a reset
            client.close()
        del port._clients[:2]
        port.accept_with(0)
        client = port._clients[0]
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, b"hello")
        assert await asyncio.wait_for(loop.sock_recv(client, 10), PATIENCE_SECONDS) == b"hello"

    ported(work)


def test_http_connections_are_counted() -> None:
    """`LimitedProtocol` counts what fronts compare."""
    import uvicorn

    counts = FrontCounts(1)

    async def asgi(scope: Any, receive: Any, send: Any) -> None: ...

    async def work() -> None:
        config = uvicorn.Config(app=asgi, ws="none", lifespan="off", log_config=None)
        config.front_counts = counts  # type: ignore[attr-defined]
        config.load()
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        await loop.connect_accepted_socket(lambda: LimitedProtocol(config, state, {}), ours)
        assert counts.own(Count.CONNECTIONS) == 1
        theirs.close()
        while counts.own(Count.CONNECTIONS):
            await asyncio.sleep(0.005)
        assert not state.connections

    run_loop(work())
