"""Processes of ours that serve another: what they are told first, how they listen, and when they leave."""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import signal
import socket
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


class Surroundings(msgspec.Struct):
    """What a process must know to see the same model in the same way as the one that starts it."""

    settings: dict[str, Any]
    """The fields of an `EngineConfig`."""
    files: dict[str, str | None]
    """`ModelFiles` as plain data: the model is looked up once, by whoever the user has asked."""
    import_path: list[str]
    """Where the other process imports from: dotted paths in settings mean the same here. Empty: it is another machine,
    where this means nothing."""
    log_level: int


class RelayedLog(msgspec.Struct, tag=True):
    """A line of the process's log, for the handlers of the other: there the user has set logging up."""

    name: str
    level: int
    message: str

    def relay(self) -> None:
        """Log it here."""
        logging.getLogger(self.name).log(self.level, "%s", self.message)


def surroundings(config: EngineConfig, files: ModelFiles) -> dict[str, Any]:
    """The fields of `Surroundings`, as they are in this process."""
    return {
        "settings": _settings_of(config),
        "files": files.to_plain(),
        "import_path": list(sys.path),
        "log_level": logging.getLogger("quire").getEffectiveLevel(),
    }


def adopt(told: Surroundings, level: int, tell: Callable[[RelayedLog], object], prefix: str = "") -> None:
    """Import from where the other process does, and hand it this one's log, from `level` on."""
    if told.import_path:
        sys.path[:] = told.import_path
    root = logging.getLogger("quire")
    root.setLevel(level)
    root.addHandler(_LogSender(tell, prefix))
    root.propagate = False


def model_of(told: Surroundings) -> tuple[EngineConfig, ModelFiles, ModelConfig]:
    """The configuration and the model that the process was told of."""
    # Imported now and not above: it takes its time, and the watch on the other process must stand before.
    from quire.config import EngineConfig
    from quire.loading.files import ModelFiles
    from quire.loading.read_config import read_model_config

    config, files = EngineConfig(**told.settings), ModelFiles.from_plain(told.files)
    return config, files, read_model_config(files, config.hf_overrides)


def leave_signals() -> None:
    """Ctrl-C reaches the whole terminal, a service's stop all its processes: who started this one decides."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def leave_with(sock: socket.socket, tidy_up: Callable[[], object] = lambda: None) -> None:
    """From a thread: when the other end of the socket closes, go, whatever the process is in the middle of.

    PR_SET_PDEATHSIG would not do: it fires when the thread that started us ends, and that may be any.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(sock, getattr(select, "POLLRDHUP", 0))  # what comes to read wakes nobody here
        poll.poll()
        tidy_up()
        os._exit(1)

    threading.Thread(target=watch, name="quire-watch", daemon=True).start()


class ChildLink:
    """One end of the socket, for a process that does nothing while it waits."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._inlet = SocketReader(sock)
        self._frames = FrameSplitter()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._lock = threading.Lock()
        self._kept: list[bytes] = []
        """Messages that came together with the first."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send_bytes(self, data: bytes) -> None:
        """Waits while the other end is behind. May be called from any thread."""
        with self._lock:
            self._socket.sendall(data)

    def take(self, seconds: float | None) -> list[bytes]:
        """Messages that have come; waits for one read's worth, at most so long, None for ever. Raises EOFError when the
        other end is gone.

        A read may end inside a message: then the list can be empty although something came.
        """
        if self._kept:
            kept, self._kept = self._kept, []
            return kept
        if not self._poll.poll(None if seconds is None else 1000 * seconds):
            return []
        try:
            data = self._inlet.receive()
        except ConnectionError:
            data = memoryview(b"")
        if not data:
            raise EOFError("the other process has gone")
        return list(self._frames.feed(data))

    def first(self) -> bytes:
        """The next message, waited for."""
        while not (messages := self.take(None)):
            pass
        self._kept = messages[1:]
        return messages[0]


class _LogSender(logging.Handler):
    """Hands log lines to the other process."""

    def __init__(self, tell: Callable[[RelayedLog], object], prefix: str) -> None:
        super().__init__()
        self._tell, self._prefix = tell, prefix

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell(RelayedLog(record.name, record.levelno, self._prefix + self.format(record)))
        except Exception:  # nobody is there to read it
            self.handleError(record)


def _settings_of(config: EngineConfig) -> dict[str, Any]:
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    settings["logits_processors"] = [_dotted(item) for item in config.logits_processors]
    settings["hf_overrides"] = None if config.hf_overrides is None else dict(config.hf_overrides)
    return settings


def _dotted(item: str | type) -> str:
    """A class by its path: the other process imports it by itself."""
    if isinstance(item, str):
        return item
    if item.__module__ == "__main__" or item.__qualname__ != item.__name__:
        raise ConfigError(
            f"the engine's process cannot import {item.__qualname__} of {item.__module__}: put it at the top of a "
            "module and give its dotted path",
            "logits_processors",
            item,
        )
    return f"{item.__module__}.{item.__name__}"
