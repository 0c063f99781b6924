"""Rank processes on this machine: start, talk, notice the death of one, leave nothing behind."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from quire.errors import RankLostError
from quire.executor import wire
from quire.executor.ends import describe_end
from quire.executor.pulse import Pulses
from quire.messages.frames import Frames, Inlet

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""A wait for ranks looks so often whether it still makes sense."""
STOP_SECONDS = 5.0
"""So long ranks may take to leave when told to; then they are killed."""
KILL_SECONDS = 30.0
BURIAL_SECONDS = 2.0
"""So long one waits to learn how a process ended whose end of the socket is closed."""


class RankProcesses:
    """One process a rank, a socket to each. When one is lost all are ended: the others would wait for it for ever."""

    def __init__(self, size: int, environment: Mapping[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="quire-ranks-"))
        """For the file in which the ranks find each other."""
        self._pulses = Pulses(size)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self.end = weakref.finalize(self, _end, self._processes, self._sockets, self._pulses, self.folder, os.getpid())
        """Kill them all and clear up, also when this object or the interpreter goes."""
        try:
            for rank in range(size):
                self._start(rank, environment)
        except BaseException:
            self.end()
            raise
        self._inlets = [Inlet(sock) for sock in self._sockets]
        self._frames = [Frames() for _ in self._sockets]
        self._poll = select.poll()
        self._rank_of = {sock.fileno(): rank for rank, sock in enumerate(self._sockets)}
        for sock in self._sockets:
            self._poll.register(sock, select.POLLIN)
        self.given_up = ""
        """Why nobody is to wait any longer, if so. May be set in any thread."""
        self.lost = ""
        """Why there are no ranks any more, if so."""

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _start(self, rank: int, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "quire.executor.rank"]
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(self._pulses.fileno()), str(rank)],
                pass_fds=[theirs.fileno(), self._pulses.fileno()],
                stdin=subprocess.DEVNULL,
                env=dict(environment),
            )
        self._processes.append(process)
        self._sockets.append(ours)

    def send(self, message: wire.Down) -> None:
        """To every rank."""
        self.send_bytes([wire.encode(message)] * len(self))

    def send_bytes(self, messages: list[bytes]) -> None:
        """To each rank its own."""
        if not self.end.alive:
            raise RankLostError(self.lost or "the ranks have been shut down")
        for rank, data in enumerate(messages):
            try:
                self._sockets[rank].sendall(data)
            except OSError:
                raise self.lose(self._describe(rank)) from None

    def receive(self, until: Callable[[], bool], take: Callable[[int, wire.Up], None], watch: bool = True) -> None:
        """Hand what comes to `take(rank, message)` until `until()` says so. Raises RankLostError when a rank is lost.

        `watch`: one that does not move for seconds counts as lost.
        """
        self.given_up = ""
        self._pulses.watch()
        while not until():
            ready = self._poll.poll(1000 * LOOK_SECONDS)
            for descriptor, _ in ready:
                self._read(self._rank_of[descriptor], take)
            if ready:
                continue
            if self.given_up:
                raise self.lose(f"the ranks do not answer: {self.given_up}")
            if watch and (rank := self._pulses.silent()) is not None:
                raise self.lose(f"{self._name(rank)} (pid {self.pids[rank]}) hangs: it is stopped, or cannot go on")

    def look(self, take: Callable[[int, wire.Up], None]) -> None:
        """Take what is there already; raises if a rank has gone."""
        for descriptor, _ in self._poll.poll(0):
            self._read(self._rank_of[descriptor], take)

    def _read(self, rank: int, take: Callable[[int, wire.Up], None]) -> None:
        try:
            data = self._inlets[rank].receive()
        except OSError:
            data = memoryview(b"")
        if not data:
            raise self.lose(self._describe(rank))
        for payload in self._frames[rank].feed(data):
            try:
                message = wire.decode_up(payload)
            except msgspec.MsgspecError as error:
                raise self.lose(f"{self._name(rank)} sent what cannot be read: {error}") from error
            if isinstance(message, wire.Log):
                message.relay()
            else:
                take(rank, message)

    def lose(self, why: str) -> RankLostError:
        """End all ranks; returns the error that says why."""
        self.lost = self.lost or why
        self.end()
        return RankLostError(why)

    def stop(self) -> None:
        """Let the ranks leave, and see to it that they do."""
        if not self.end.alive:
            return
        data = wire.encode(wire.Shutdown())
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.settimeout(STOP_SECONDS)
                sock.sendall(data)
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.end()

    def _describe(self, rank: int) -> str:
        """How a rank ended whose end of the socket is closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(BURIAL_SECONDS)
        return describe_end(self._processes[rank], self._name(rank))

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self)}"


def _end(
    processes: list[subprocess.Popen[bytes]], sockets: list[socket.socket], pulses: Pulses, folder: Path, owner: int
) -> None:
    """Whatever happened, nothing stays behind."""
    if os.getpid() != owner:
        return  # a fork of ours ends, and the ranks are not its own
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error("a rank (pid %d) does not end, although it was killed", process.pid)
    for sock in sockets:
        sock.close()
    pulses.close()
    shutil.rmtree(folder, ignore_errors=True)
