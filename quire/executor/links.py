"""The engine's links to its ranks, whatever started them: send, receive, notice the loss of one."""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from quire.errors import RankLostError
from quire.executor import wire
from quire.executor.shared_ring import LEAST_BYTES, RingWriter
from quire.messages.frames import FrameSplitter, SocketReader, unframe

LOOK_SECONDS = 0.5
"""A wait for ranks looks so often whether it still makes sense."""
STOP_SECONDS = 5.0
"""So long ranks may take to leave when told to; then they are killed."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is, and what it has there."""

    threads: int
    """Of the CPU."""
    neighbours: int
    """Ranks on the same machine, itself included: they share its memory."""
    own_device: bool = False
    """Whether the GPU it sees is its own."""


class Liveness(Protocol):
    """Tells which rank has stopped to live without ending."""

    def watch(self) -> None:
        """Begin to look: what was before is forgotten."""
        ...

    def silent(self) -> int | None:
        """A rank that has shown no life for too long since `watch`."""
        ...


class StartedRanks(Protocol):
    """Processes that were started, one a rank, and can be ended."""

    @property
    def sockets(self) -> Sequence[socket.socket]: ...

    @property
    def pids(self) -> list[int]: ...

    @property
    def places(self) -> Sequence[RankPlace]: ...

    @property
    def pulse(self) -> Liveness: ...

    @property
    def ring(self) -> RingWriter | None:
        """Memory that they share with this process, where they do."""
        ...

    @property
    def host_file(self) -> int | None:
        """An empty file that all of them have open, for host memory that this process sees too; None where not."""
        ...

    @property
    def rendezvous(self) -> str:
        """Where they find each other: a file's path, or tcp://HOST:PORT."""
        ...

    @property
    def end(self) -> Any:
        """Kill them all and clear up, also when this object or the interpreter goes: a `weakref.finalize`."""
        ...

    def name(self, rank: int) -> str:
        """As in `rank 1 of 2 (pid 17)`."""
        ...

    def describe_end(self, rank: int) -> str:
        """How a rank ended whose end of the socket is closed; may wait a moment to learn it."""
        ...

    def wait(self, seconds: float) -> None:
        """Until all have ended, at most so long."""
        ...


class RankLinks:
    """A socket to each rank. When one is lost all are ended: the others would wait for it for ever."""

    def __init__(self, ranks: StartedRanks) -> None:
        self.ranks = ranks
        self._sockets = ranks.sockets
        self._inlets = [SocketReader(sock) for sock in self._sockets]
        self._frames = [FrameSplitter(wire.LARGEST) for _ in self._sockets]
        self._poll = select.poll()
        self._rank_of = {sock.fileno(): rank for rank, sock in enumerate(self._sockets)}
        for sock in self._sockets:
            self._poll.register(sock, select.POLLIN)
        self._heard: deque[tuple[int, wire.Up]] = deque()
        """What ranks have said and nobody has taken yet."""
        self.given_up = ""
        """Why nobody is to wait any longer, if so. May be set in any thread."""
        self.lost = ""
        """Why there are no ranks any more, if so."""

    def __len__(self) -> int:
        return len(self._sockets)

    @property
    def pids(self) -> list[int]:
        return self.ranks.pids

    def send(self, message: wire.Down) -> None:
        """To every rank."""
        data = wire.encode(message)
        ring = self.ranks.ring
        if ring is not None and len(data) >= LEAST_BYTES and self.ranks.end.alive:
            message_bytes = unframe(data)
            at = ring.put(message_bytes)
            data = data if at is None else wire.encode(wire.Shared(at, len(message_bytes)))
        self.send_bytes([data] * len(self))

    def send_bytes(self, messages: list[bytes], watch: bool = True) -> None:
        """To each rank its own. Waits while one is behind; `watch` as in `receive`."""
        self._check()
        self.given_up = ""
        for rank, data in enumerate(messages):
            left = memoryview(data)
            while left:
                try:
                    left = left[self._sockets[rank].send(left, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self._wait_for_room(rank, watch)
                except OSError:
                    raise self.lose(self.ranks.describe_end(rank)) from None

    def _wait_for_room(self, rank: int, watch: bool) -> None:
        """Until the rank reads on. All are heard meanwhile: one that waits for that reads nothing."""
        self.ranks.pulse.watch()
        sock = self._sockets[rank]
        self._poll.modify(sock, select.POLLIN | select.POLLOUT)
        try:
            while True:
                ready = self._poll.poll(1000 * LOOK_SECONDS)
                for descriptor, event in ready:
                    if event & ~select.POLLOUT:
                        self._read(self._rank_of[descriptor])
                if any(event & select.POLLOUT for _, event in ready):
                    return
                if not ready:
                    self._look_after(watch)
        finally:
            if self.ranks.end.alive:
                self._poll.modify(sock, select.POLLIN)

    def receive(self, until: Callable[[], bool], take: Callable[[int, wire.Up], None], watch: bool = True) -> None:
        """Hand what comes to `take(rank, message)` until `until()` says so. Raises RankLostError when a rank is lost.

        `watch`: one that does not move for seconds counts as lost.
        """
        self._check()
        self.given_up = ""
        self.ranks.pulse.watch()
        self._hand_over(take)
        while not until():
            ready = self._poll.poll(1000 * LOOK_SECONDS)
            for descriptor, _ in ready:
                self._read(self._rank_of[descriptor])
                self._hand_over(take)
            if not ready:
                self._look_after(watch)

    def look(self, take: Callable[[int, wire.Up], None]) -> None:
        """Take what is there already; raises if a rank has gone."""
        self._check()
        for descriptor, _ in self._poll.poll(0):
            self._read(self._rank_of[descriptor])
        self._hand_over(take)

    def _check(self) -> None:
        if not self.ranks.end.alive:
            raise RankLostError(self.lost or "the ranks have been shut down")

    def _look_after(self, watch: bool) -> None:
        """Whether it makes sense to wait on."""
        if self.given_up:
            raise self.lose(f"the ranks do not answer: {self.given_up}")
        if watch and (rank := self.ranks.pulse.silent()) is not None:
            raise self.lose(f"{self.ranks.name(rank)} hangs: it is stopped, or cannot go on")

    def _hand_over(self, take: Callable[[int, wire.Up], None]) -> None:
        while self._heard:
            take(*self._heard.popleft())

    def _read(self, rank: int) -> None:
        try:
            data = self._inlets[rank].receive()
        except OSError:
            data = memoryview(b"")
        if not data:
            raise self.lose(self.ranks.describe_end(rank))
        try:
            messages = [wire.decode_up(payload) for payload in self._frames[rank].feed(data)]
        except (msgspec.MsgspecError, ValueError) as error:
            raise self.lose(f"rank {rank} of {len(self)} sent what cannot be read: {error}") from error
        for message in messages:
            if isinstance(message, wire.RelayedLog):
                message.relay()
            else:
                self._heard.append((rank, message))

    def lose(self, why: str) -> RankLostError:
        """End all ranks; returns the error that says why: the first that there was."""
        self.lost = self.lost or why
        self.ranks.end()
        return RankLostError(self.lost)

    def end(self) -> None:
        """Kill all ranks, whatever they are in the middle of."""
        self.ranks.end()

    def stop(self) -> None:
        """Let the ranks leave, and see to it that they do."""
        if not self.ranks.end.alive:
            return
        data = wire.encode(wire.ShutdownRank())
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.settimeout(STOP_SECONDS)
                sock.sendall(data)
        self.ranks.wait(STOP_SECONDS)
        self.ranks.end()
