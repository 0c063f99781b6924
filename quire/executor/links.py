"""The engine's connections to its ranks, however they were started: send, receive, detect the loss of one."""

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
from quire.executor.liveness import Liveness
from quire.executor.shared_ring import MIN_BYTES, RingWriter
from quire.messages.frames import FrameSplitter, SocketReader, unframe

CHECK_SECONDS = 0.5
"""How often a wait for ranks checks whether they are alive and the wait was not given up."""
STOP_SECONDS = 5.0
"""How long ranks may take to exit after `ShutdownRank`; then they are killed."""


@dataclass(frozen=True)
class RankResources:
    """What a rank has on its machine."""

    threads: int
    """CPU threads it may use."""
    local_size: int
    """Ranks on the same machine, itself included: they share its memory."""
    owns_device: bool = False
    """Whether no other rank uses the GPU it sees."""


class StartedRanks(Protocol):
    """Processes that were started, one per rank."""

    on_this_machine: bool

    @property
    def sockets(self) -> Sequence[socket.socket]: ...

    @property
    def pids(self) -> list[int]: ...

    @property
    def resources(self) -> Sequence[RankResources]: ...

    @property
    def liveness(self) -> Liveness: ...

    @property
    def ring(self) -> RingWriter | None:
        """Memory shared with this process, if they are on its machine."""
        ...

    @property
    def host_file(self) -> int | None:
        """An empty file that all of them have open, for host memory shared with this process; None if not shared."""
        ...

    @property
    def rendezvous(self) -> str:
        """Where their process group is formed: a file's path, or tcp://HOST:PORT."""
        ...

    @property
    def kill(self) -> Any:
        """A `weakref.finalize` that kills them all and cleans up; also runs when the interpreter exits."""
        ...

    def name(self, rank: int) -> str:
        """As in `rank 1 of 2 (pid 17)`."""
        ...

    def describe_exit(self, rank: int) -> str:
        """How a rank that closed its socket has exited; may wait briefly to find out."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until all have exited, at most this long."""
        ...


class RankLinks:
    """A socket to each rank. When one rank is lost all are killed: the others would wait for it forever."""

    def __init__(self, ranks: StartedRanks) -> None:
        self.ranks = ranks
        self._sockets = ranks.sockets
        self._readers = [SocketReader(sock) for sock in self._sockets]
        self._frames = [FrameSplitter(wire.LARGEST) for _ in self._sockets]
        self._poll = select.poll()
        self._rank_of = {sock.fileno(): rank for rank, sock in enumerate(self._sockets)}
        for sock in self._sockets:
            self._poll.register(sock, select.POLLIN)
        self._received: deque[tuple[int, wire.Up]] = deque()
        """Messages read but not yet handled."""
        self.given_up = ""
        """Why the current wait should end, if it should. May be set in any thread."""
        self.lost = ""
        """Why the ranks were killed, if they were."""

    def __len__(self) -> int:
        return len(self._sockets)

    @property
    def pids(self) -> list[int]:
        return self.ranks.pids

    def send(self, message: wire.Down) -> None:
        """Send to every rank; a long message through shared memory, if there is some and it has room."""
        data = wire.encode(message)
        ring = self.ranks.ring
        if ring is not None and len(data) >= MIN_BYTES and self.ranks.kill.alive:
            message_bytes = unframe(data)
            at = ring.put(message_bytes)
            data = data if at is None else wire.encode(wire.Shared(at, len(message_bytes)))
        self.send_bytes([data] * len(self))

    def send_bytes(self, messages: list[bytes], watch: bool = True) -> None:
        """Send one message to each rank. Waits while a rank's socket is full; `watch` as in `receive`."""
        self._check_open()
        self.given_up = ""
        for rank, data in enumerate(messages):
            left = memoryview(data)
            while left:
                try:
                    left = left[self._sockets[rank].send(left, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self._wait_for_room(rank, watch)
                except OSError:
                    raise self.lose(self.ranks.describe_exit(rank)) from None

    def _wait_for_room(self, rank: int, watch: bool) -> None:
        """Wait until the rank's socket can be written. Reads from all ranks meanwhile: a rank blocked in a send would
        never read."""
        self.ranks.liveness.watch()
        sock = self._sockets[rank]
        self._poll.modify(sock, select.POLLIN | select.POLLOUT)
        try:
            while True:
                ready = self._poll.poll(1000 * CHECK_SECONDS)
                for descriptor, event in ready:
                    if event & ~select.POLLOUT:
                        self._read(self._rank_of[descriptor])
                if any(event & select.POLLOUT for _, event in ready):
                    return
                if not ready:
                    self._check_wait(watch)
        finally:
            if self.ranks.kill.alive:
                self._poll.modify(sock, select.POLLIN)

    def receive(self, until: Callable[[], bool], handle: Callable[[int, wire.Up], None], watch: bool = True) -> None:
        """Call `handle(rank, message)` for each message until `until()`. Raises RankLostError when a rank is lost.

        `watch`: a rank without heartbeats counts as lost.
        """
        self._check_open()
        self.given_up = ""
        self.ranks.liveness.watch()
        self._handle_received(handle)
        while not until():
            ready = self._poll.poll(1000 * CHECK_SECONDS)
            for descriptor, _ in ready:
                self._read(self._rank_of[descriptor])
                self._handle_received(handle)
            if not ready:
                self._check_wait(watch)

    def poll(self, handle: Callable[[int, wire.Up], None]) -> None:
        """Handle messages that have arrived, without waiting; raises RankLostError if a rank has exited."""
        self._check_open()
        for descriptor, _ in self._poll.poll(0):
            self._read(self._rank_of[descriptor])
        self._handle_received(handle)

    def _check_open(self) -> None:
        if not self.ranks.kill.alive:
            raise RankLostError(self.lost or "the ranks have been shut down")

    def _check_wait(self, watch: bool) -> None:
        """Raises if the wait was given up or a rank hangs."""
        if self.given_up:
            raise self.lose(f"the ranks do not respond: {self.given_up}")
        if watch and (rank := self.ranks.liveness.silent()) is not None:
            raise self.lose(f"{self.ranks.name(rank)} hangs: it is stopped or blocked")

    def _handle_received(self, handle: Callable[[int, wire.Up], None]) -> None:
        while self._received:
            handle(*self._received.popleft())

    def _read(self, rank: int) -> None:
        try:
            data = self._readers[rank].receive()
        except OSError:
            data = memoryview(b"")
        if not data:
            raise self.lose(self.ranks.describe_exit(rank))
        try:
            messages = [wire.decode_up(payload) for payload in self._frames[rank].feed(data)]
        except (msgspec.MsgspecError, ValueError) as error:
            raise self.lose(f"rank {rank} of {len(self)} sent an unreadable message: {error}") from error
        for message in messages:
            if isinstance(message, wire.RelayedLog):
                message.relay()
            else:
                self._received.append((rank, message))

    def lose(self, reason: str) -> RankLostError:
        """Kill all ranks; returns the error to raise, with the first reason there was."""
        self.lost = self.lost or reason
        self.ranks.kill()
        return RankLostError(self.lost)

    def stop(self) -> None:
        """Send the ranks a shutdown, and kill those that do not exit."""
        if not self.ranks.kill.alive:
            return
        data = wire.encode(wire.ShutdownRank())
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.settimeout(STOP_SECONDS)
                sock.sendall(data)
        self.ranks.wait(STOP_SECONDS)
        self.ranks.kill()
