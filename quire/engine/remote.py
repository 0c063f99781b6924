"""`RemoteEngine`: an engine in a process of its own, as an asyncio program sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.engine import ipc
from quire.engine.engine_info import EngineInfo
from quire.errors import EngineDeadError, QuireError, told
from quire.executor.child import surroundings
from quire.executor.exit_status import describe_end
from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.messages.frames import FrameSplitter, SocketReader
from quire.paths import child_environment

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0
"""So long the process may take to leave when told to; then it is killed."""
KILL_SECONDS = 30.0
"""So long a killed process may take to be gone: a driver may hold it for a while. Then it is left to the system."""
BURIAL_SECONDS = 2.0
"""So long the front waits to learn how a process ended whose end of the socket is closed."""


class RemoteEngine:
    """Starts the process, passes messages, notices its death. One that is dead stays dead: make another."""

    facts: EngineInfo
    """Known once it is ready."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        model: ModelConfig,
        module: str = "quire.engine.process",
        replica: int = 0,
        replicas: int = 1,
        meeting: str = "",
    ) -> None:
        """Starts the process, which runs `module`, and waits for nothing: `wait_until_ready` comes next. `replica`:
        which engine it is, of how many that share the machine; `meeting`: a file in which those find each other that
        step together."""
        self._files, self._model = files, model
        self.death = ""
        """Why nothing can be asked of it any more; empty while it lives."""
        self.on_message: Callable[[ipc.Up], None] = lambda message: None
        self.on_death: Callable[[str], None] = lambda reason: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._frames = FrameSplitter()
        self._unsent = bytearray()
        self._burial: asyncio.Task[None] | None = None
        # What cannot be sent is said before anything is started.
        start = ipc.encode(
            ipc.StartEngine(**surroundings(config, files), replica=replica, replicas=replicas, meeting=meeting)
        )
        self._socket, theirs = socket.socketpair()
        self._inlet = SocketReader(self._socket)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
        self.kill = weakref.finalize(self, _kill, self._process, self._socket, os.getpid())
        """Ends the process at once, also when this object or the interpreter goes."""
        with contextlib.suppress(ConnectionError):  # it is dead already: reading says so
            self._socket.sendall(start)

    def wait_until_ready(self) -> None:
        """Blocks until the engine is made, or raises what kept it from that."""
        try:
            self.facts = _facts(self._receive_ready(), self._files, self._model)
        except BaseException:
            self.kill()
            raise
        self._socket.setblocking(False)

    @property
    def pid(self) -> int:
        return self._process.pid

    # Messages

    def attach(self) -> None:
        """Let the running event loop read what comes. Another loop than before takes over."""
        loop = asyncio.get_running_loop()
        if loop is self._loop or self.death:
            return
        self.detach()
        self._loop = loop
        loop.add_reader(self._socket, self._read)
        if self._unsent:
            loop.add_writer(self._socket, self._write)

    def detach(self) -> None:
        """No loop reads any more."""
        if (loop := self._open_loop) is not None:
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
        self._loop = None

    def send(self, message: ipc.Down | bytes) -> None:
        """Send, or keep until the socket has room; never waits. To a dead process nothing is sent."""
        if self.death:
            return
        self._unsent += message if isinstance(message, bytes) else ipc.encode(message)
        self._write()

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            if (loop := self._open_loop) is not None:
                loop.add_writer(self._socket, self._write)
            return
        except OSError:
            self._unsent.clear()  # it is dead: the reader learns the same, and tells
        if (loop := self._open_loop) is not None:
            loop.remove_writer(self._socket)

    @property
    def _open_loop(self) -> asyncio.AbstractEventLoop | None:
        return None if self._loop is None or self._loop.is_closed() else self._loop

    def _read(self) -> None:
        try:
            data = self._inlet.receive()
        except BlockingIOError:
            return
        except OSError:
            data = memoryview(b"")
        if not data:
            self._bury()
        for payload in self._frames.feed(data):
            self._take(payload)

    def _take(self, payload: bytes) -> None:
        try:
            message = ipc.decode_up(payload)
        except msgspec.MsgspecError as error:  # nobody knows what it was about: whoever waits would wait for ever
            self._announce(f"the engine's process (pid {self.pid}) sent what cannot be read: {error}")
            return
        if isinstance(message, ipc.RelayedLog):
            message.relay()
        elif isinstance(message, ipc.Died):
            self._announce(f"the engine's process (pid {self.pid}) has ended: {message.message}")
        else:
            self.on_message(message)

    # The end

    def _bury(self) -> None:
        """The socket is closed: find out how the process ended, and say so."""
        loop = self._loop
        self.detach()
        if not self.death and loop is not None:
            self._burial = loop.create_task(self._wait_for_end())

    async def _wait_for_end(self) -> None:
        deadline = time.monotonic() + BURIAL_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        self._announce(_describe_end(self._process))

    def _announce(self, reason: str) -> None:
        if not self.death:
            self.death = reason
            self.detach()
            self.on_death(reason)

    def ended(self, seconds: float) -> str:
        """How the process has ended, if it has, or does so within these seconds; else empty."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return _describe_end(self._process)
        return ""

    def end(self, reason: str) -> None:
        """Kill the process, whatever it is in the middle of, and say why."""
        if self._process.poll() is None:
            self._process.kill()
        self._announce(reason)

    def close(self, reason: str) -> None:
        """Nothing is sent or received any more; `stop` comes next."""
        self.detach()
        self.death = self.death or reason

    def stop(self) -> None:
        """End the process of a closed engine and wait for that. Blocks."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._socket.settimeout(STOP_SECONDS)
                self._socket.sendall(bytes(self._unsent) + ipc.encode(ipc.ShutdownEngine()))
            self._drain_until_end()
        self.kill()

    def _drain_until_end(self) -> None:
        """Read on, so that a process in the middle of telling something can come to the message that ends it."""
        deadline = time.monotonic() + STOP_SECONDS
        with contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._inlet.receive():
                    break
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))

    def _receive_ready(self) -> ipc.EngineReady:
        while data := self._receive():
            for payload in self._frames.feed(data):
                message = ipc.decode_up(payload)
                if isinstance(message, ipc.EngineReady):
                    return message
                if isinstance(message, ipc.RequestRefused):
                    raise error_of(message)
                if isinstance(message, ipc.RelayedLog):
                    message.relay()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(BURIAL_SECONDS)
        raise EngineDeadError(f"{_describe_end(self._process)}, before it was ready")

    def _receive(self) -> memoryview:
        try:
            return self._inlet.receive()
        except OSError:  # it is dead, or was killed while another thread waits here
            return memoryview(b"")


def error_of(refused: ipc.RequestRefused) -> QuireError:
    """The error that was raised in the other process."""
    if (known := told(refused.error, refused.message, refused.parameter)) is not None:
        return known
    if not refused.id:
        return EngineDeadError(f"the engine could not be made: {refused.error}: {refused.message}")
    return QuireError(f"the engine failed to take the request: {refused.error}: {refused.message}")


def _facts(ready: ipc.EngineReady, files: ModelFiles, model: ModelConfig) -> EngineInfo:
    said: dict[str, Any] = {name: getattr(ready, name) for name in ready.__struct_fields__ if name != "key_root"}
    return EngineInfo(files=files, model=model, keys=ContentKeys.rooted(ready.block_size, ready.key_root), **said)


def _describe_end(process: subprocess.Popen[bytes]) -> str:
    return describe_end(process, "the engine's process")


def _kill(process: subprocess.Popen[bytes], sock: socket.socket, owner: int) -> None:
    """Whatever happened, no process stays behind."""
    if os.getpid() != owner:
        return  # a fork of the front ends, and the engine is not its own
    if process.poll() is None:
        process.kill()
    try:
        process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        logger.error("the engine's process (pid %d) does not end, although it was killed", process.pid)
    sock.close()
