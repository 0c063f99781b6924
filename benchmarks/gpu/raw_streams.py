"""HTTP streams read from raw sockets by processes of their own, so that the server is measured and not the client.

A load is a list of clients, each a list of request bodies that are sent one after the other on one connection. Every
process reads a share of the clients; times are of `time.perf_counter`, which is one clock for all processes.
"""

from __future__ import annotations

import multiprocessing
import re
import resource
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TEXT = re.compile(rb'"(?:text|content)":"[^"]')
"""In the first event that has text."""
COUNT = re.compile(rb'"completion_tokens":(\d+)')
LAST_CHUNK = b"0\r\n\r\n"
START_SECONDS = 60.0
WORK_SECONDS = 90.0


@dataclass(slots=True)
class Sent:
    """One request."""

    client: int
    begin: float
    first: float = 0.0
    """When its first text arrived."""
    end: float = 0.0
    tokens: int = 0
    """As the server counts them."""
    reads: int = 0
    failure: str = ""


class Client:
    """A connection, and the requests that are sent on it in sequence."""

    def __init__(self, number: int, address: tuple[str, int], path: str, bodies: Sequence[bytes]) -> None:
        self.done: list[Sent] = []
        self.socket = socket.create_connection(address)
        self._number = number
        self._head = f"POST {path} HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: application/json\r\n"
        self._bodies = iter(bodies)
        self._tail = b""
        self._now: Sent
        self.send_next()

    def send_next(self) -> bool:
        """Send the next request; False if there is none."""
        body = next(self._bodies, None)
        if body is None:
            self.socket.close()
            return False
        self._tail = b""
        self._now = Sent(self._number, time.perf_counter())
        self.socket.sendall(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return True

    def read(self) -> bool:
        """Read what has arrived; False when there is nothing left to do."""
        data, now = self.socket.recv(1 << 16), self._now
        now.reads += 1
        data = self._tail + data
        if not now.first:
            if (data.startswith(b"HTTP/") and not data.startswith(b"HTTP/1.1 200")) or not data:
                now.failure = data[-300:].decode(errors="replace") or "the connection was closed"
                self.done.append(now)
                self.socket.close()
                return False
            if TEXT.search(data) is not None:
                now.first = time.perf_counter()
        self._tail = data[-1024:]
        if not data.endswith(LAST_CHUNK):
            return True
        now.end = time.perf_counter()
        if (count := COUNT.search(data)) is None:
            now.failure = f"no count of tokens: {data[-300:].decode(errors='replace')}"
        else:
            now.tokens = int(count[1])
        self.done.append(now)
        return self.send_next()


def _read_all(
    pipe: Any, address: tuple[str, int], path: str, first: int, bodies: list[list[bytes]], stagger: float
) -> None:
    """The work of one process: all its clients, each started `stagger` seconds after the one before."""
    raise_descriptor_limit()
    pipe.send("ready")
    begin, clients, done = pipe.recv(), 0, []
    time.sleep(max(0.0, begin - time.perf_counter()))
    with selectors.DefaultSelector() as selector:
        while clients < len(bodies) or selector.get_map():
            if clients < len(bodies) and time.perf_counter() >= begin + clients * stagger:
                client = Client(first + clients, address, path, bodies[clients])
                selector.register(client.socket, selectors.EVENT_READ, client)
                clients += 1
            for key, _ in selector.select(0 if clients < len(bodies) else None):
                if not key.data.read():
                    selector.unregister(key.fd)
                    done += key.data.done
    pipe.send(done)


class Load:
    """Clients in several processes."""

    def __init__(
        self, address: tuple[str, int], path: str, bodies: list[list[bytes]], processes: int, stagger: float = 0.0
    ) -> None:
        """`bodies`: of each client. Starts as soon as all processes are there."""
        context = multiprocessing.get_context("spawn")
        processes = min(processes, len(bodies))
        self._pipes, self._processes, first = [], [], 0
        for number in range(processes):
            share = bodies[number::processes]
            ours, theirs = context.Pipe()
            arguments = (theirs, address, path, first, share, stagger * processes)
            process = context.Process(target=_read_all, args=arguments, daemon=True)
            process.start()
            theirs.close()
            first += len(share)
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            self._receive(pipe, START_SECONDS)
        begin = time.perf_counter() + 0.05
        for pipe in self._pipes:
            pipe.send(begin)

    def _receive(self, pipe: Any, seconds: float) -> Any:
        if not pipe.poll(seconds):
            self.stop()
            raise TimeoutError(f"a process of the load said nothing for {seconds:.0f} s")
        return pipe.recv()

    def wait(self) -> list[Sent]:
        """All requests, when the last has ended; raises if one failed."""
        found = [sent for pipe in self._pipes for sent in self._receive(pipe, WORK_SECONDS)]
        self.stop()
        for sent in found:
            if sent.failure:
                raise RuntimeError(f"a request failed: {sent.failure}")
        return found

    def stop(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.kill()
            process.join()


class IdleStreams:
    """Connections with a request for a stream on each that the engine does not get to."""

    def __init__(self, address: tuple[str, int], path: str, body: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._address = address
        self._sockets: list[socket.socket] = []

    def open(self, count: int) -> None:
        """Open more, until there are so many."""
        while len(self._sockets) < count:
            sock = socket.create_connection(self._address, timeout=START_SECONDS)
            sock.sendall(self._request)
            self._sockets.append(sock)

    def answered(self) -> int:
        """How many have had an answer, or were closed."""
        count = 0
        for sock in self._sockets:
            sock.setblocking(False)
            try:
                sock.recv(1, socket.MSG_PEEK)
                count += 1
            except BlockingIOError:
                pass
        return count

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()


def raise_descriptor_limit() -> int:
    """Let this process open as many files as it may; returns how many that is."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is at least as large as `percent` of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
