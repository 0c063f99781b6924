"""`RemoteEngine`: the asyncio side of an engine in its own process."""

from __future__ import annotations

import abc
import asyncio
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from quire.config import EngineConfig
from quire.engine import ipc
from quire.engine.engine_info import EngineInfo
from quire.errors import EngineDeadError, QuireError, error_by_name
from quire.executor.child import child_context, describe_exit
from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.messages.frames import TURN_BYTES, FrameSplitter, SocketReader
from quire.paths import child_environment, scratch_prefix

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0
"""How long the process may take to exit after `ShutdownEngine`; then it is killed."""
KILL_SECONDS = 30.0
"""How long a killed process may take to exit: a driver may hold it for a while. After that it is left to the system."""
EXIT_STATUS_SECONDS = 2.0
"""How long to wait for the exit status of a process that has closed its socket."""


class EngineHandle(Protocol):
    """An engine as a replica uses it: a `RemoteEngine`, or in a front process the hub's engines."""

    info: EngineInfo
    death: str
    on_message: Callable[[ipc.Up], None]
    on_death: Callable[[str], None]

    @property
    def pid(self) -> int: ...

    @property
    def kill(self) -> Callable[[], object]: ...

    def wait_until_ready(self) -> None: ...

    def attach(self) -> None: ...

    def send(self, message: ipc.Down | bytes) -> None: ...

    def exit_reason(self, seconds: float) -> str: ...

    def end(self, reason: str) -> None: ...

    def close(self, reason: str) -> None: ...

    def stop(self) -> None: ...


class LinkedEngine(abc.ABC):
    """The asyncio end of a socket to an engine's loop. Subclasses say where the loop runs, and how it ends."""

    info: EngineInfo
    """Set by `wait_until_ready`."""

    def __init__(self, files: ModelFiles, model: ModelConfig, sock: socket.socket) -> None:
        self._files, self._model = files, model
        self.death = ""
        """Why it cannot be used any more; empty while it is alive."""
        self.on_message: Callable[[ipc.Up], None] = lambda message: None
        self.on_death: Callable[[str], None] = lambda reason: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._frames = FrameSplitter()
        self._unsent = bytearray()
        self._exit_task: asyncio.Task[None] | None = None
        self._socket = sock
        self._inlet = SocketReader(sock)

    # How the loop ends

    kill: Callable[[], object]
    """Ends the loop as soon as that can be done; calling it twice is fine."""

    @property
    @abc.abstractmethod
    def pid(self) -> int:
        """The process of the loop."""

    @property
    @abc.abstractmethod
    def _title(self) -> str:
        """What has ended, in reasons."""

    @property
    @abc.abstractmethod
    def _has_ended(self) -> bool: ...

    @abc.abstractmethod
    def _describe_end(self) -> str:
        """How it ended, in words."""

    @abc.abstractmethod
    def _wait_for_end(self, seconds: float) -> bool:
        """Whether it ends within `seconds`."""

    # Messages

    def wait_until_ready(self) -> None:
        """Blocks until the engine is ready; raises the error that kept it from starting."""
        try:
            self.info = engine_info(self._receive_ready(), self._files, self._model)
        except BaseException:
            self.kill()
            raise
        self._socket.setblocking(False)

    def attach(self) -> None:
        """Let the running event loop read messages, instead of the loop attached before."""
        loop = asyncio.get_running_loop()
        if loop is self._loop or self.death:
            return
        self.detach()
        self._loop = loop
        loop.add_reader(self._socket, self._read)
        if self._unsent:
            loop.add_writer(self._socket, self._write)

    def detach(self) -> None:
        """Stop reading messages."""
        if (loop := self._open_loop) is not None:
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
        self._loop = None

    def send(self, message: ipc.Down | bytes) -> None:
        """Send, or buffer until the socket has room; never waits. Does nothing if the engine is dead."""
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
            self._unsent.clear()  # it is dead: the reader reports that
        if (loop := self._open_loop) is not None:
            loop.remove_writer(self._socket)

    @property
    def _open_loop(self) -> asyncio.AbstractEventLoop | None:
        return None if self._loop is None or self._loop.is_closed() else self._loop

    def _read(self) -> None:
        try:
            data = self._inlet.receive(max(TURN_BYTES, self._frames.missing))
        except BlockingIOError:
            return
        except OSError:
            data = memoryview(b"")
        if not data:
            self._on_close()
        for payload in self._frames.feed(data):
            self._handle(payload)

    def _handle(self, payload: bytes) -> None:
        if self.death:
            return  # its requests may be at another engine by now
        try:
            message = ipc.decode_up(payload)
        except msgspec.MsgspecError as error:  # the call it answers is unknown and would wait forever
            self._report_death(f"{self._title} sent an unreadable message: {error}")
            return
        if isinstance(message, ipc.RelayedLog):
            message.relay()
        elif isinstance(message, ipc.Died):
            self._report_death(f"{self._title} has ended: {message.message}")
        else:
            self.on_message(message)

    def _receive_ready(self) -> ipc.EngineReady:
        """Wait for `EngineReady`; raises the error if the engine could not start."""
        while data := self._receive():
            for payload in self._frames.feed(data):
                message = ipc.decode_up(payload)
                if isinstance(message, ipc.EngineReady):
                    return message
                if isinstance(message, ipc.RequestRefused):
                    raise error_of(message)
                if isinstance(message, ipc.RelayedLog):
                    message.relay()
        self._wait_for_end(EXIT_STATUS_SECONDS)
        raise EngineDeadError(f"{self._describe_end()}, before it was ready")

    def _receive(self) -> memoryview:
        try:
            return self._inlet.receive()
        except OSError:  # it is dead, or was killed by another thread
            return memoryview(b"")

    # The end

    def _on_close(self) -> None:
        """The socket is closed: find out how the loop ended, and report it."""
        loop = self._loop
        self.detach()
        if not self.death and loop is not None:
            self._exit_task = loop.create_task(self._wait_for_exit())

    async def _wait_for_exit(self) -> None:
        deadline = time.monotonic() + EXIT_STATUS_SECONDS
        while not self._has_ended and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        self._report_death(self._describe_end())

    def _report_death(self, reason: str) -> None:
        if not self.death:
            self.death = reason
            self.detach()
            self.on_death(reason)

    def exit_reason(self, seconds: float) -> str:
        """How it ended, if it has or does so within `seconds`; else empty."""
        return self._describe_end() if self._wait_for_end(seconds) else ""

    def close(self, reason: str) -> None:
        """Stop sending and receiving; call `stop` next."""
        self.detach()
        self.death = self.death or reason

    def stop(self) -> None:
        """End a closed engine. Blocks until it has ended."""
        if not self._has_ended:
            with contextlib.suppress(OSError):
                self._socket.settimeout(STOP_SECONDS)
                self._socket.sendall(bytes(self._unsent) + ipc.encode(ipc.ShutdownEngine()))
            self._drain_until_exit()
        self.kill()

    def _drain_until_exit(self) -> None:
        """Keep reading, so that a loop blocked in a send gets to the shutdown message."""
        deadline = time.monotonic() + STOP_SECONDS
        with contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._inlet.receive():
                    break
        self._wait_for_end(max(0.0, deadline - time.monotonic()))


class RemoteEngine(LinkedEngine):
    """Starts the process, passes messages, and reports its death. It cannot be restarted: make another."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        model: ModelConfig,
        module: str = "quire.engine.process",
        replica: int = 0,
        replicas: int = 1,
        rendezvous: str = "",
        grammar_ends: Sequence[int] = (),
    ) -> None:
        """Starts the process, which runs `module`, without waiting for it: call `wait_until_ready` next. `replica`: its
        number among the `replicas` that share the machine; `rendezvous`: path of the file through which engines in
        lockstep find each other; `grammar_ends`: as in `StartEngine`."""
        # Raises for settings that cannot be sent, before the process is started.
        start = ipc.encode(
            ipc.StartEngine(
                **child_context(config, files),
                replica=replica,
                replicas=replicas,
                rendezvous=rendezvous,
                grammar_ends=list(grammar_ends),
            )
        )
        ours, theirs = socket.socketpair()
        super().__init__(files, model, ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
        self.kill = weakref.finalize(self, _kill, self._process, self._socket, os.getpid())
        """Kills the process; also runs when this object is collected or the interpreter exits."""
        with contextlib.suppress(ConnectionError):  # it has exited already, which the next read reports
            self._socket.sendall(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def _title(self) -> str:
        return f"the engine's process (pid {self.pid})"

    @property
    def _has_ended(self) -> bool:
        return self._process.poll() is not None

    def _describe_end(self) -> str:
        return describe_exit(self._process, "the engine's process")

    def _wait_for_end(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._has_ended

    def end(self, reason: str) -> None:
        """Kill the process, and report this reason."""
        if self._process.poll() is None:
            self._process.kill()
        self._report_death(reason)


def error_of(refused: ipc.RequestRefused) -> QuireError:
    """The error raised in the other process."""
    if (known := error_by_name(refused.error, refused.message, refused.parameter)) is not None:
        return known
    if not refused.id:
        return EngineDeadError(f"the engine could not be started: {refused.error}: {refused.message}")
    return QuireError(f"the engine failed to accept the request: {refused.error}: {refused.message}")


def engine_info(ready: ipc.EngineReady, files: ModelFiles, model: ModelConfig) -> EngineInfo:
    """The engine that the message describes."""
    fields: dict[str, Any] = msgspec.structs.asdict(ready)
    keys = ContentKeys.rooted(ready.block_size, fields.pop("key_root"))
    return EngineInfo(files=files, model=model, keys=keys, **fields)


def _kill(process: subprocess.Popen[bytes], sock: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return  # this is a fork of the front: the engine is not its child
    if process.poll() is None:
        process.kill()
    try:
        process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        logger.error(
            "the engine's process (pid %d) was killed and has not exited after %g s", process.pid, KILL_SECONDS
        )
    sock.close()
    for folder in Path(tempfile.gettempdir()).glob(f"{scratch_prefix(process.pid)}*"):  # a killed process leaves them
        shutil.rmtree(folder, ignore_errors=True)
