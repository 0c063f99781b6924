"""The engine's side of a matcher: one grammar in its own process."""

from __future__ import annotations

import math
import mmap
import os
import socket
import time
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.engine.grammar import wire
from quire.engine.grammar.wire import Op

_status_decoder = msgspec.msgpack.Decoder(wire.MatcherStatus)
_reply_decoder = msgspec.msgpack.Decoder(wire.MatcherReply)

EXITED = "the grammar's matcher process has ended"


class MatcherClient:
    """Sends operations, reads replies and masks. Never waits."""

    def __init__(self, number: int, form: bytes, shape: tuple[int, int, int]) -> None:
        """`shape`: slots, masks in each, words of a mask."""
        self.number = number
        self.form = form
        self.users: set[str] = set()
        """Ids of unfinished requests that use it."""
        self.pid = 0
        self.memory = 0
        self.is_compiled = False
        self.is_confirmed = False
        """It has replied since its users last changed: it is alive and will not exit while it has some."""
        self.refusal = ""
        self.is_dead = False
        self.compiling_since = 0.0
        self.attempts = 0
        self.unanswered = 0
        """Messages without a reply."""
        self.num_masks = 0
        """Masks it has made."""
        self.runs: dict[int, list[int]] = {}
        """By sequence: the tokens after each of which its slot has a mask…"""
        self.certain: dict[int, list[int]] = {}
        """…and those that the grammar leaves no choice about."""
        self.compile_cpu_seconds = 0.0
        """CPU time it had used when its grammar was compiled."""
        self._operations: list[list[Any]] = []
        self._failures: dict[int, str] = {}
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._memory = os.memfd_create("quire-grammar")
        os.ftruncate(self._memory, max(math.prod(shape) * 4, len(form)))
        self._shared = mmap.mmap(self._memory, 0)
        self._shared[: len(form)] = form
        self.masks: NDArray[np.int32] = np.frombuffer(self._shared, np.int32, math.prod(shape)).reshape(shape)
        self.free_slots = list(range(shape[0]))
        """Slots that no sequence uses."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        """Whether it has a process, or will have one."""
        return not (self.is_dead or self.refusal)

    @property
    def is_started(self) -> bool:
        return self._theirs.fileno() < 0

    def files(self) -> list[int]:
        """Its end of the socket and its memory, for the fork; call `mark_started` once they are sent."""
        return [self._theirs.fileno(), self._memory]

    def mark_started(self) -> None:
        """The fork has the files: close them here."""
        self._theirs.close()
        os.close(self._memory)

    # Operations

    def add(self, op: Op, *arguments: Any) -> None:
        """Queue an operation for the next `flush`."""
        self._operations.append([int(op), *arguments])

    def flush(self) -> None:
        """Send the queued operations."""
        if not self._operations or self.is_dead:
            return
        data, self._operations = wire.encode(self._operations), []
        self.unanswered += 1
        try:
            self._socket.send(data)
        except OSError:  # it has exited, or does not read any more
            self.is_dead = True

    def read(self) -> None:
        """Read messages that have arrived."""
        while not self.is_dead:
            try:
                data = self._socket.recv(wire.MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.is_dead = True
            elif self.is_compiled:
                self.unanswered -= 1
                self.is_confirmed = True
                self._take(_reply_decoder.decode(data))
            else:
                self._update(_status_decoder.decode(data))

    def _take(self, reply: wire.MatcherReply) -> None:
        self.num_masks += 1 + sum(map(len, reply.runs.values()))
        self._failures.update(reply.failures)
        self.runs.update((number, run) for number, run in reply.runs.items() if number in self.runs)
        self.certain.update((number, run) for number, run in reply.certain.items() if number in self.certain)

    def follow(self, number: int) -> None:
        """A sequence begins."""
        self.runs[number], self.certain[number] = [], []

    def forget(self, number: int) -> None:
        """The sequence has finished."""
        self.runs.pop(number, None)
        self.certain.pop(number, None)

    def _update(self, status: wire.MatcherStatus) -> None:
        if status.refused:
            self.refusal = status.refused
        elif status.memory:
            self.is_compiled, self.memory, self.compile_cpu_seconds = True, status.memory, self.cpu_seconds()
        else:
            self.pid, self.compiling_since = status.pid, time.monotonic()

    def take_failure(self, number: int) -> str:
        """The error of a sequence, once."""
        return self._failures.pop(number, "")

    def cpu_seconds(self) -> float:
        """CPU time its process has used so far."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Close the connection. Its process exits when it next reads its socket, or when the fork server kills it."""
        self.is_dead = True
        self._socket.close()
        if not self.is_started:
            self.mark_started()
        self.masks = np.empty((0, 0, 0), np.int32)  # the mapping is freed with its last reader
