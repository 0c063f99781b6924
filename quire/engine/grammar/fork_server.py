"""The nursery, as the engine sees it: a process that starts others."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import weakref

from quire.engine.grammar import wire
from quire.paths import child_environment

START_SECONDS = 120.0
"""So long loading the vocabulary may take."""


class ForkServerClient:
    """Starts the process and tells it what to do; nothing here waits for it."""

    def __init__(self, setup: wire.Setup) -> None:
        self.is_ready = False
        self.death = ""
        """Why it is of no use any more; empty while it is."""
        self._begun = time.monotonic()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quire.engine.grammar.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        self._control.setblocking(False)
        self.close = weakref.finalize(self, _close, self._process, self._control, os.getpid())
        """Ends it and everyone it started, also when this object or the interpreter goes."""
        self._control.send(wire.encode(setup))

    def fileno(self) -> int:
        return self._control.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> None:
        """Take what has come."""
        try:
            said = self._control.recv(wire.MESSAGE_BYTES)
        except BlockingIOError:
            if not self.is_ready and time.monotonic() - self._begun > START_SECONDS:
                self._end(f"the vocabulary was not loaded after {START_SECONDS:g} s")
            return
        except OSError:
            said = b""
        if said == wire.READY:
            self.is_ready = True
        else:
            self._end(said.decode("utf-8", "replace") or "the process of the grammars has ended")

    def start(self, number: int, length: int, files: list[int]) -> None:
        """Fork a guide over these files: its socket and its memory, whose first `length` bytes are its form."""
        try:
            socket.send_fds(self._control, [wire.ORDER.pack(wire.START, number, length)], files)
        except OSError as error:
            self._end(f"the process of the grammars has ended: {error}")

    def kill(self, number: int) -> None:
        """End a guide, whatever it is doing."""
        with contextlib.suppress(OSError):
            self._control.send(wire.ORDER.pack(wire.KILL, number, 0))

    def _end(self, reason: str) -> None:
        self.death = reason
        self.close()


def _environment() -> dict[str, str]:
    """One thread: what forks must not have others, and what waits must not spin."""
    single = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    return {
        **child_environment(),
        **dict.fromkeys(single, "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _close(process: subprocess.Popen[bytes], control: socket.socket, owner: int) -> None:
    control.close()
    if os.getpid() == owner:  # a fork of ours has the object, but not the child
        process.kill()  # its guides go with it
        process.wait()
