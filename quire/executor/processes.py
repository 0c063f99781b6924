"""Rank processes on this machine: start them, say how they ended, leave nothing behind."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

from quire.executor.exit_status import describe_end
from quire.executor.links import RankPlace
from quire.executor.pulse import Pulses
from quire.executor.shared_ring import RingWriter
from quire.messages.shared_memory import unnamed_file

logger = logging.getLogger(__name__)

KILL_SECONDS = 30.0
BURIAL_SECONDS = 2.0
"""So long one waits to learn how a process ended whose end of the socket is closed."""


class RankProcesses:
    """One process a rank, with a socket to each, and memory that all of them see."""

    def __init__(self, size: int, threads: int, environment: Mapping[str, str]) -> None:
        """`threads`: how many each of them may use."""
        self.places = [RankPlace(threads, neighbours=size)] * size
        self._folder = Path(tempfile.mkdtemp(prefix="quire-ranks-"))
        self.rendezvous = str(self._folder / "meeting")
        self.pulse = Pulses(size)
        self.ring = RingWriter(size)
        self.host_file = unnamed_file()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.sockets: list[socket.socket] = []
        self.end = weakref.finalize(
            self,
            _end,
            self._processes,
            [self.pulse, self.ring],
            self.sockets,
            self.host_file,
            self._folder,
            os.getpid(),
        )
        try:
            for rank in range(size):
                self._start(rank, size, environment)
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _start(self, rank: int, size: int, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = [theirs.fileno(), self.pulse.fileno(), self.ring.fileno(), self.host_file]
            process = subprocess.Popen(
                [sys.executable, "-m", "quire.executor.rank", *map(str, [*inherited, rank, size])],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env=dict(environment),
            )
        self._processes.append(process)
        self.sockets.append(ours)

    def name(self, rank: int) -> str:
        return f"{self._title(rank)} (pid {self._processes[rank].pid})"

    def describe_end(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(BURIAL_SECONDS)
        return describe_end(self._processes[rank], self._title(rank))

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _title(self, rank: int) -> str:
        return f"rank {rank} of {len(self._processes)}"


def _end(
    processes: list[subprocess.Popen[bytes]],
    memories: list[Pulses | RingWriter],
    sockets: list[socket.socket],
    host_file: int,
    folder: Path,
    owner: int,
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
    for each in (*sockets, *memories):
        each.close()
    os.close(host_file)
    shutil.rmtree(folder, ignore_errors=True)
