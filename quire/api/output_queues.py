"""Outputs of an engine in this process, sorted by the call that waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.api.engine import FailedRequest, LLMEngine, deferred_interrupts
from quire.messages.outputs import Output

Queue = list[Output | FailedRequest]
POLL_SECONDS = 0.02
"""A thread that waits for engines in other processes releases the lock this often."""


class CallLock:
    """A reentrant lock for calls from many threads. A waiting thread gets it before the one that has just released
    it: a thread that makes step after step would otherwise starve the others.

    The garbage collector may close a stream, and so take the lock, anywhere in here: both locks are reentrant.
    """

    def __init__(self) -> None:
        self._next = threading.RLock()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined] # its owner does not queue
            self._lock.acquire()
            return
        with self._next:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class OutputQueues:
    """A queue of outputs for each call, so that streams can be interleaved with other calls, and calls can come from
    many threads: a step by any of them is a step for all."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._queues: dict[str, Queue] = {}
        self.lock = CallLock()
        """Held by the thread that uses the engine."""

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No other thread uses the engine inside, and Ctrl-C is deferred."""
        with self.lock, deferred_interrupts():
            yield

    def register(self, request_id: str, queue: Queue) -> None:
        """Outputs of the request go to this queue. Call it under the lock that the request was added under."""
        self._queues[request_id] = queue

    def drop(self, ids: list[str]) -> None:
        """Abort what is unfinished of these requests, and discard further outputs."""
        with self.lock:
            for request_id in ids:
                self._queues.pop(request_id, None)
            self._engine.abort_request(ids)

    @contextmanager
    def reading(self, ids: list[str]) -> Iterator[Callable[[], list[Output]]]:
        """Gives a function that returns what arrived for these requests, which share a queue, and makes a step if
        nothing has; it raises if one of them has failed.

        However the block ends, the requests are dropped.
        """
        queue = self._queues[ids[0]] if ids else []

        def take() -> list[Output]:
            with self.lock:
                if not queue:
                    self.step()
                taken, queue[:] = list(queue), []
            if (failed := next((one for one in taken if isinstance(one, FailedRequest)), None)) is not None:
                raise failed.error
            return taken  # type: ignore[return-value]  # none of them has failed

        try:
            yield take
        finally:
            self.drop(ids)

    def step(self) -> None:
        """One step; its outputs go to their queues."""
        with self.lock:
            for one in self._engine.collect(POLL_SECONDS):
                if (queue := self._queues.get(one.request_id)) is not None:
                    queue.append(one)
