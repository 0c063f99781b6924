"""Blocks between memory and disk while the engine's loop goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quire.kvcache.offload.disk.store import DiskStore

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Ticket:
    """One transfer under way. The buffer belongs to it until `poll` hands the ticket back."""

    kind: Literal["read", "write", "call"]
    key: bytes = b""
    buffer: memoryview | None = None
    call: Callable[[], object] | None = None
    ok: bool = False
    """Whether it did what it was for. A read that did not has left nothing of use in the buffer."""
    error: Exception | None = None
    """What a call raised; reads and writes raise nothing."""
    seconds: float = 0.0


class DiskIO:
    """A few threads that move blocks. Submit from the loop, poll in the loop: neither waits for the disk.

    Reads go before writes: somebody waits for a read. Order among transfers of one key is the caller's to keep.
    """

    def __init__(self, store: DiskStore, threads: int = 2, on_finished: Callable[[], object] | None = None) -> None:
        self.store = store
        self.num_threads = threads
        self.on_finished = on_finished
        """Called from a thread when a transfer is done."""
        self._urgent: deque[Ticket] = deque()
        self._patient: deque[Ticket] = deque()
        self._finished: deque[Ticket] = deque()
        self._pending = 0
        self._closing = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._work, name=f"kv-disk-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def pending(self) -> int:
        """Tickets that `poll` has not handed back yet."""
        return self._pending

    def submit_read(self, key: bytes, into: memoryview) -> Ticket:
        """Fill `into` with the block."""
        return self._submit(Ticket("read", key, into), self._urgent)

    def submit_write(self, key: bytes, payload: memoryview) -> Ticket:
        """Keep the block. `payload` must not change before the ticket comes back."""
        return self._submit(Ticket("write", key, payload), self._patient)

    def submit_call(self, call: Callable[[], object], urgent: bool = True) -> Ticket:
        """Something else that waits for the disk, such as a commit of sessions."""
        return self._submit(Ticket("call", call=call), self._urgent if urgent else self._patient)

    def poll(self) -> list[Ticket]:
        """Tickets finished since the last time, in the order they finished."""
        finished = []
        while self._finished:
            finished.append(self._finished.popleft())
        if finished:
            with self._changed:
                self._pending -= len(finished)
        return finished

    def wait(self, timeout: float | None = None) -> list[Ticket]:
        """Like `poll`, but if transfers are under way it waits for one to finish."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._finished) or not self._pending, timeout)
        return self.poll()

    def close(self) -> None:
        """Finish what was submitted and stop the threads; the store stays open."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _submit(self, ticket: Ticket, queue: deque[Ticket]) -> Ticket:
        with self._changed:
            if self._closing:
                raise RuntimeError("the transfers of this store have been closed")
            self._pending += 1
            queue.append(ticket)
            self._changed.notify_all()
        return ticket

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._urgent or self._patient or self._closing))
                if not self._urgent and not self._patient:
                    return
                ticket = (self._urgent or self._patient).popleft()
            self._run(ticket)
            with self._changed:
                self._finished.append(ticket)
                self._changed.notify_all()
            if self.on_finished is not None:
                self.on_finished()

    def _run(self, ticket: Ticket) -> None:
        begin = time.perf_counter()
        try:
            if ticket.call is not None:
                ticket.call()
                ticket.ok = True
            elif ticket.buffer is not None:
                move = self.store.read if ticket.kind == "read" else self.store.write
                ticket.ok = move(ticket.key, ticket.buffer)
        except Exception as error:  # a thread that dies would leave its tickets waiting for ever
            ticket.error = error
            logger.log(
                logging.DEBUG if ticket.kind == "call" else logging.ERROR, "a disk transfer failed", exc_info=error
            )
        ticket.seconds = time.perf_counter() - begin
