"""Rank processes on this machine: start them, report how they exited, clean up after them."""

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

from quire.executor.child import describe_exit
from quire.executor.links import RankResources
from quire.executor.liveness import MemoryHeartbeats
from quire.executor.shared_ring import RingWriter
from quire.messages.shared_memory import unnamed_file

logger = logging.getLogger(__name__)

KILL_SECONDS = 30.0
"""How long a killed process may take to exit."""
EXIT_STATUS_SECONDS = 2.0
"""How long to wait for the exit status of a process that has closed its socket."""


class RankProcesses:
    """One process per rank, with a socket to each and memory shared by all of them."""

    on_this_machine = True

    def __init__(self, size: int, threads: int, environment: Mapping[str, str]) -> None:
        """`threads`: CPU threads of each."""
        self.resources = [RankResources(threads, local_size=size)] * size
        self._folder = Path(tempfile.mkdtemp(prefix="quire-ranks-"))
        self.rendezvous = str(self._folder / "rendezvous")
        self.liveness = MemoryHeartbeats(size)
        self.ring = RingWriter(size)
        self.host_file = unnamed_file()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.sockets: list[socket.socket] = []
        self.kill = weakref.finalize(
            self,
            _kill,
            self._processes,
            [self.liveness, self.ring],
            self.sockets,
            self.host_file,
            self._folder,
            os.getpid(),
        )
        try:
            for rank in range(size):
                self._start(rank, size, environment)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _start(self, rank: int, size: int, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = [theirs.fileno(), self.liveness.fileno(), self.ring.fileno(), self.host_file]
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

    def describe_exit(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(EXIT_STATUS_SECONDS)
        return describe_exit(self._processes[rank], self._title(rank))

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _title(self, rank: int) -> str:
        return f"rank {rank} of {len(self._processes)}"


def _kill(
    processes: list[subprocess.Popen[bytes]],
    memories: list[MemoryHeartbeats | RingWriter],
    sockets: list[socket.socket],
    host_file: int,
    folder: Path,
    owner: int,
) -> None:
    if os.getpid() != owner:
        return  # this is a fork of the owner: the ranks are not its children
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error("rank process %d was killed and has not exited after %g s", process.pid, KILL_SECONDS)
    for each in (*sockets, *memories):
        each.close()
    os.close(host_file)
    shutil.rmtree(folder, ignore_errors=True)
