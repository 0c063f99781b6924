"""An engine in a thread of the caller's process, for machines with little memory: one Python, one torch, one heap.

The same loop and the same messages as in a process of its own (`quire.engine.process`), through a socket pair. What it
gives up: a step that hangs or a crash in native code ends the whole process, and Python's lock is shared with requests
that are read and streams that are written.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import threading
import weakref
from collections.abc import Sequence

from quire.config import EngineConfig
from quire.engine import ipc
from quire.engine.lean import import_lean_torch, share_one_heap
from quire.engine.memory_watch import give_back_heap
from quire.engine.process import EngineLoop, death_notice, make_default, start_refusal
from quire.engine.remote import STOP_SECONDS, LinkedEngine
from quire.errors import ConfigError
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig

logger = logging.getLogger(__name__)


class ThreadEngine(LinkedEngine):
    """Runs the loop in a thread, passes messages, and reports its end. It cannot be restarted: make another."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, model: ModelConfig, grammar_ends: Sequence[int] = ()
    ) -> None:
        """Starts the thread, without waiting for the engine: call `wait_until_ready` next."""
        share_one_heap()
        ours, theirs = socket.socketpair()
        super().__init__(files, model, ours)
        self._thread = threading.Thread(
            target=_run, args=(theirs, config, files, model, grammar_ends), name="quire-engine", daemon=True
        )
        self.kill = weakref.finalize(self, _close, ours, os.getpid())
        """Closes the socket: the loop ends after the step that it makes."""
        self._thread.start()

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def _title(self) -> str:
        return "the engine's thread"

    @property
    def _has_ended(self) -> bool:
        return not self._thread.is_alive()

    def _describe_end(self) -> str:
        return "the engine's thread has ended" if self._has_ended else "the engine's thread has closed its connection"

    def _wait_for_end(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return self._has_ended

    def end(self, reason: str) -> None:
        """Report this reason. The loop ends after the step that it makes; `stop` waits for that."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._report_death(reason)

    def stop(self) -> None:
        """End the loop. A step that does not end takes the process with it: there is no other way to free its memory
        and its threads."""
        super().stop()
        if not self._has_ended:
            logger.critical("the engine's thread has not ended within %g s: the process ends", STOP_SECONDS)
            os._exit(1)


def _close(sock: socket.socket, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def _run(
    sock: socket.socket, config: EngineConfig, files: ModelFiles, model: ModelConfig, grammar_ends: Sequence[int]
) -> None:
    """What the thread does."""
    with sock, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        link = ipc.MessageLink(sock)
        try:
            import_lean_torch()
            _check_model(model, config)
            core, info = make_default(config, files, model, grammar_ends=grammar_ends)
        except Exception as error:
            link.send(start_refusal(error))
            return
        gc.collect()
        give_back_heap()
        gc.freeze()  # these objects stay: a collection over all of them would pause every stream
        try:
            link.send(ipc.ready_message(info))
            EngineLoop(link, core).run()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass
        except Exception as error:
            link.send(death_notice(error))
        finally:
            core.shutdown()


def _check_model(model: ModelConfig, config: EngineConfig) -> None:
    """Refuse models that run through transformers: its models need another import of it than its tokenizers."""
    from quire.models.registry import implementation

    if implementation(model.architecture, config.model_impl) == "transformers":
        raise ConfigError(
            f"in_process runs quire's own models, and {model.architecture} runs through transformers: leave out "
            "in_process",
            "in_process",
            True,
        )
