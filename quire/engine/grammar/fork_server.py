"""The engine's side of the fork server: the process that forks matchers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import weakref

from quire.engine.grammar import wire
from quire.paths import child_environment

START_SECONDS = 120.0
"""How long loading the vocabulary may take."""


class ForkServerClient:
    """Starts the fork server and sends it commands; never waits for it."""

    def __init__(self, spec: wire.ForkServerSpec) -> None:
        self.is_ready = False
        self.death = ""
        """Why it cannot be used any more; empty while it is alive."""
        self._started_at = time.monotonic()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quire.engine.grammar.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        self._control.setblocking(False)
        # It exits by itself when it is idle for long, and its messages are read only while a request needs it: until
        # then it would be a zombie.
        threading.Thread(target=self._process.wait, name="quire-grammar-exit", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._process, self._control, os.getpid())
        """Kills it and its matchers; also runs when this object is collected or the interpreter exits."""
        self._control.send(wire.encode(spec))

    def fileno(self) -> int:
        return self._control.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> None:
        """Read its message, if there is one."""
        try:
            message = self._control.recv(wire.MESSAGE_BYTES)
        except BlockingIOError:
            if not self.is_ready and time.monotonic() - self._started_at > START_SECONDS:
                self._end(f"the vocabulary was not loaded after {START_SECONDS:g} s")
            return
        except OSError:
            message = b""
        if message == wire.READY:
            self.is_ready = True
        else:
            self._end(message.decode("utf-8", "replace") or "the grammar fork server has exited")

    def start(self, number: int, length: int, files: list[int]) -> None:
        """Fork a matcher with these files: its socket and its memory, whose first `length` bytes are its form."""
        try:
            socket.send_fds(self._control, [wire.COMMAND.pack(wire.START, number, length)], files)
        except OSError as error:
            self._end(f"the grammar fork server has exited: {error}")

    def kill(self, number: int) -> None:
        """Kill a matcher."""
        with contextlib.suppress(OSError):
            self._control.send(wire.COMMAND.pack(wire.KILL, number, 0))

    def stay(self) -> None:
        """It may be needed soon: it is not to exit for being idle."""
        with contextlib.suppress(OSError):
            self._control.send(wire.COMMAND.pack(wire.STAY, 0, 0))

    def _end(self, reason: str) -> None:
        self.death = reason
        self.close()


def _environment() -> dict[str, str]:
    """One thread: a process that forks must have no others, and idle ones must not spin."""
    single = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    return {
        **child_environment(),
        **dict.fromkeys(single, "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _close(process: subprocess.Popen[bytes], control: socket.socket, owner: int) -> None:
    control.close()
    if os.getpid() == owner:  # a fork of the engine has this object, but not the child
        process.kill()  # its matchers exit with it
        process.wait()
