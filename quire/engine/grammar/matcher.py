"""A guide, as the engine sees it: one grammar in a process of its own."""

from __future__ import annotations

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

_told = msgspec.msgpack.Decoder(wire.Told)
_answer = msgspec.msgpack.Decoder(wire.MatcherReply)

GONE = "the process that kept the output to its form has ended"


class MatcherClient:
    """Sends operations, takes answers, reads masks. Never waits."""

    def __init__(self, number: int, form: bytes, rows: int, words: int) -> None:
        self.number = number
        self.form = form
        self.users: set[str] = set()
        """Ids of unfinished requests that need it."""
        self.pid = 0
        self.memory = 0
        self.is_compiled = False
        self.is_held = False
        """It has answered since it was needed last: it is there and stays."""
        self.refusal = ""
        self.is_dead = False
        self.begun = 0.0
        """When it began to compile."""
        self.attempts = 0
        self.unanswered = 0
        """Messages."""
        self.answers = 0
        self.compile_cpu = 0.0
        """Seconds of CPU it had used when its grammar was compiled."""
        self._operations: list[list[Any]] = []
        self._failures: dict[int, str] = {}
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._memory = os.memfd_create("quire-grammar")
        size = rows * words * 4
        os.ftruncate(self._memory, max(size, len(form)))
        self._shared = mmap.mmap(self._memory, 0)
        self._shared[: len(form)] = form
        self.masks: NDArray[np.int32] = np.frombuffer(self._shared, np.int32, rows * words).reshape(rows, words)
        self.free_slots = list(range(rows))
        """Places among them that no sequence has."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        """Whether it has a process, or will have one."""
        return not (self.is_dead or self.refusal)

    @property
    def is_started(self) -> bool:
        return self._theirs.fileno() < 0

    def take_files(self) -> list[int]:
        """Its end of the socket and its memory, for the fork; to be followed by `started`."""
        return [self._theirs.fileno(), self._memory]

    def started(self) -> None:
        """The fork has them."""
        self._theirs.close()
        os.close(self._memory)

    # Operations

    def ask(self, op: Op, *arguments: Any) -> None:
        """To be sent with the next `flush`."""
        self._operations.append([int(op), *arguments])

    def flush(self) -> None:
        """Send what was asked since the last time."""
        if not self._operations or self.is_dead:
            return
        data, self._operations = wire.encode(self._operations), []
        self.unanswered += 1
        try:
            self._socket.send(data)
        except OSError:  # it is gone, or so far behind that it might as well be
            self.is_dead = True

    def read(self) -> None:
        """Take what has come."""
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
                self.answers += 1
                self.is_held = True
                self._failures.update(_answer.decode(data).failures)
            else:
                self._note(_told.decode(data))

    def _note(self, told: wire.Told) -> None:
        if told.refused:
            self.refusal = told.refused
        elif told.memory:
            self.is_compiled, self.memory, self.compile_cpu = True, told.memory, self.cpu_seconds()
        else:
            self.pid, self.begun = told.pid, time.monotonic()

    def failure_of(self, number: int) -> str:
        """What went wrong with a sequence, told once."""
        return self._failures.pop(number, "")

    def cpu_seconds(self) -> float:
        """What its process has used so far."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Let go of it. Its process leaves when it next looks at its socket, or is killed by the nursery."""
        self.is_dead = True
        self._socket.close()
        if not self.is_started:
            self.started()
        self.masks = np.empty((0, 0), np.int32)  # the map goes with its last reader
