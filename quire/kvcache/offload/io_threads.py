"""Reads and writes of a block store in threads, while the engine's loop continues."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.kvcache.offload.block_store import BlockStore
from quire.sleeping import sleep_until

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class IOTask:
    """One read, write or call. It owns its buffer until `poll` returns it."""

    kind: Literal["read", "write", "call"]
    key: bytes = b""
    buffer: memoryview | None = None
    call: Callable[[], object] | None = None
    ok: bool = False
    """Whether it succeeded. A failed read leaves undefined bytes in the buffer."""
    error: Exception | None = None
    """What a call raised. Of reads and writes: an error in the store itself."""
    seconds: float = 0.0


class IOThreads:
    """A few threads that move blocks. The loop submits and polls; neither waits for the store.

    Reads run before writes: a request waits for each read. The caller keeps tasks of the same key in order.
    """

    def __init__(self, store: BlockStore, threads: int = 2) -> None:
        self.store = store
        self.num_threads = threads
        self._urgent: deque[IOTask] = deque()
        self._writes: deque[IOTask] = deque()
        self._finished: deque[IOTask] = deque()
        self._pending = 0
        self._closing = False
        self._changed = threading.Condition()
        self._wakeup = socket.socketpair()
        """The threads write a byte after each task, so that `sleep` can wait for other files too."""
        for end in self._wakeup:
            end.setblocking(False)
        self._threads = [threading.Thread(target=self._work, name=f"kv-disk-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def pending(self) -> int:
        """Tasks that `poll` has not returned yet."""
        return self._pending

    def submit_read(self, key: bytes, into: memoryview) -> IOTask:
        """Fill `into` with the block."""
        return self._submit(IOTask("read", key, into), self._urgent)

    def submit_write(self, key: bytes, payload: memoryview) -> IOTask:
        """Keep the block. `payload` must not change before `poll` returns the task."""
        return self._submit(IOTask("write", key, payload), self._writes)

    def submit_call(self, call: Callable[[], object]) -> IOTask:
        """Any other blocking call, such as a commit of sessions."""
        return self._submit(IOTask("call", call=call), self._urgent)

    def poll(self) -> list[IOTask]:
        """Tasks finished since the last poll, in the order they finished."""
        finished = []
        while self._finished:
            finished.append(self._finished.popleft())
        if finished:
            with self._changed:
                self._pending -= len(finished)
        return finished

    def sleep(self, seconds: float, wakes: Sequence[int] = ()) -> None:
        """Wait until a task finishes, or one of the descriptors `wakes` can be read."""
        wakeup = self._wakeup[0]
        if wakeup.fileno() in sleep_until([wakeup.fileno(), *wakes], seconds):
            with contextlib.suppress(BlockingIOError):
                while wakeup.recv(4096):
                    pass

    def close(self) -> None:
        """Finish what was submitted and stop the threads; the store stays open."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for end in self._wakeup:
            end.close()

    def _submit(self, task: IOTask, queue: deque[IOTask]) -> IOTask:
        with self._changed:
            if self._closing:
                raise RuntimeError("the I/O threads of this store are closed")
            self._pending += 1
            queue.append(task)
            self._changed.notify_all()
        return task

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._urgent or self._writes or self._closing))
                if not self._urgent and not self._writes:
                    return
                task = (self._urgent or self._writes).popleft()
            self._run(task)
            with self._changed:
                self._finished.append(task)
                self._changed.notify_all()
            with contextlib.suppress(BlockingIOError):  # the buffer is full: `sleep` will return anyway
                self._wakeup[1].send(b"!")

    def _run(self, task: IOTask) -> None:
        begin = time.perf_counter()
        try:
            if task.call is not None:
                task.call()
                task.ok = True
            elif task.buffer is not None:
                transfer = self.store.read if task.kind == "read" else self.store.write
                task.ok = transfer(task.key, task.buffer)
        except Exception as error:  # a thread that ended here would leave its task pending
            task.error = error
            level = logging.DEBUG if task.kind == "call" else logging.ERROR
            logger.log(level, "a %s of the block store failed", task.kind, exc_info=error)
        task.seconds = time.perf_counter() - begin
