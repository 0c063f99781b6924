"""Child processes (engines and ranks): start message, logs, messages, and how they exit."""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from quire.errors import ConfigError
from quire.messages.frames import FrameSplitter, SocketReader

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.loading.files import ModelFiles
    from quire.loading.model_config import ModelConfig


class ChildContext(msgspec.Struct):
    """The parent's configuration and import path; base of the first message to a child."""

    settings: dict[str, Any]
    """The fields of an `EngineConfig`."""
    files: dict[str, str | None]
    """`ModelFiles` as plain data: the model's name is resolved once, in the process the user called."""
    import_path: list[str]
    """The parent's `sys.path`, so that dotted paths in settings mean the same. Empty on another machine, where it has
    no meaning."""
    log_level: int


def child_context(config: EngineConfig, files: ModelFiles) -> dict[str, Any]:
    """The fields of `ChildContext` for a child of this process."""
    return {
        "settings": _plain_settings(config),
        "files": files.to_plain(),
        "import_path": list(sys.path),
        "log_level": logging.getLogger("quire").getEffectiveLevel(),
    }


def _plain_settings(config: EngineConfig) -> dict[str, Any]:
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    settings["logits_processors"] = [_dotted_path(item) for item in config.logits_processors]
    settings["hf_overrides"] = None if config.hf_overrides is None else dict(config.hf_overrides)
    return settings


def _dotted_path(item: str | type) -> str:
    """A class by its path: the child imports it."""
    if isinstance(item, str):
        return item
    if item.__module__ == "__main__" or item.__qualname__ != item.__name__:
        raise ConfigError(
            f"the engine's process cannot import {item.__qualname__} of {item.__module__}: define it at the top level "
            "of a module and pass its dotted path",
            "logits_processors",
            item,
        )
    return f"{item.__module__}.{item.__name__}"


def load_context(context: ChildContext) -> tuple[EngineConfig, ModelFiles, ModelConfig]:
    """In the child: the configuration and the model it describes."""
    # Imported here: it takes seconds, and `exit_with_peer` must run before.
    from quire.config import EngineConfig
    from quire.loading.files import ModelFiles
    from quire.loading.model_config import read_model_config

    config, files = EngineConfig(**context.settings), ModelFiles.from_plain(context.files)
    return config, files, read_model_config(files, config.hf_overrides)


# Logs


class RelayedLog(msgspec.Struct, tag=True):
    """A log record of the child, for the parent's handlers: the user has configured logging there."""

    name: str
    level: int
    message: str

    def relay(self) -> None:
        """Log it here."""
        logging.getLogger(self.name).log(self.level, "%s", self.message)


class _LogSender(logging.Handler):
    """Sends log records to the parent."""

    def __init__(self, send: Callable[[RelayedLog], object], prefix: str) -> None:
        super().__init__()
        self._send, self._prefix = send, prefix

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(RelayedLog(record.name, record.levelno, self._prefix + self.format(record)))
        except Exception:  # the parent has exited
            self.handleError(record)


def apply_context(context: ChildContext, level: int, send: Callable[[RelayedLog], object], prefix: str = "") -> None:
    """Use the parent's import path, and send it this process's log records of `level` and above."""
    if context.import_path:
        sys.path[:] = context.import_path
    root = logging.getLogger("quire")
    root.setLevel(level)
    root.addHandler(_LogSender(send, prefix))
    root.propagate = False


# Messages


class ChildLink:
    """The child's end of the socket to its parent, for a process that only waits for messages."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._inlet = SocketReader(sock)
        self._frames = FrameSplitter()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._lock = threading.Lock()
        self._unread: list[bytes] = []
        """Messages that arrived together with the one `next_payload` returned."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send_bytes(self, data: bytes) -> None:
        """Waits while the socket is full. May be called from any thread."""
        with self._lock:
            self._socket.sendall(data)

    def receive_payloads(self, seconds: float | None) -> list[bytes]:
        """Messages of one read; waits at most `seconds` (None: no limit). Raises EOFError when the parent has exited.

        A read may end inside a message: the list can be empty although data came.
        """
        if self._unread:
            unread, self._unread = self._unread, []
            return unread
        if not self._poll.poll(None if seconds is None else 1000 * seconds):
            return []
        try:
            data = self._inlet.receive()
        except ConnectionError:
            data = memoryview(b"")
        if not data:
            raise EOFError("the other process has exited")
        return list(self._frames.feed(data))

    def next_payload(self) -> bytes:
        """Waits for the next message."""
        while not (payloads := self.receive_payloads(None)):
            pass
        self._unread = payloads[1:]
        return payloads[0]


# Exit


def ignore_signals() -> None:
    """Ctrl-C reaches every process of the terminal, and a service's stop all its processes: the parent decides."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def exit_with_peer(sock: socket.socket, cleanup: Callable[[], object] = lambda: None) -> None:
    """Exit the process, whatever it is doing, when the other end of the socket closes. Runs in a thread.

    PR_SET_PDEATHSIG would not do: it fires when the thread that started this process ends.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(sock, getattr(select, "POLLRDHUP", 0))  # only the close, not data to read
        poll.poll()
        cleanup()
        os._exit(1)

    threading.Thread(target=watch, name="quire-watch", daemon=True).start()


def describe_exit(process: subprocess.Popen[bytes], title: str) -> str:
    """How a child ended, in words. `title`: which process it is."""
    code = process.poll()
    name = f"{title} (pid {process.pid})"
    if code is None:
        return f"{name} has closed its connection"
    if code >= 0:
        return f"{name} has exited with code {code}"
    try:
        by = signal.Signals(-code).name
    except ValueError:
        by = f"signal {-code}"
    hint = ": the system does that when memory runs out" if by == "SIGKILL" else ""
    return f"{name} was killed by {by}{hint}"
