"""`WorkPool`: the threads in which large requests are read, rendered and tokenized."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from quire.errors import SHUT_DOWN, EngineDeadError

T = TypeVar("T")

MOST_THREADS = 8
IDLE_SECONDS = 10.0
"""A thread without work exits after this."""


class AbandonedError(Exception):
    """The caller of this work has left."""


class _PoolJob:
    """One piece of work."""

    def __init__(self, work: Callable[[], Any], tenant: str) -> None:
        self.work: Callable[[], Any] | None = work
        self.tenant = tenant
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.is_abandoned = False


_current = threading.local()


def check_abandoned() -> None:
    """Called now and then by long work: raises if its caller has left. Outside a pool it does nothing."""
    job: _PoolJob | None = getattr(_current, "job", None)
    if job is not None and job.is_abandoned:
        raise AbandonedError


class WorkPool:
    """A few threads that take turns between tenants.

    A tenant never has all of them, so that another's work starts at once, or after the work of a tenant that has more.
    Work whose caller is cancelled is not started; if it runs, it is told (`check_abandoned`). No work delays the end of
    the process: the threads are daemons.
    """

    def __init__(self, threads: int | None = None) -> None:
        """`threads`: that one tenant may use, by default one a core; there is one more for others."""
        self._per_tenant = max(1, min(MOST_THREADS, threads or os.cpu_count() or 1))
        self._queues: OrderedDict[str, deque[_PoolJob]] = OrderedDict()
        """By tenant; the next to have a turn first."""
        self._running: dict[str, set[_PoolJob]] = {}
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._is_closed = False

    async def run(self, function: Callable[..., T], *arguments: Any, tenant: str = "") -> T:
        """The result of a call in one of the threads."""
        job = _PoolJob(functools.partial(function, *arguments), tenant)
        self._add(job)
        try:
            result: T = await job.future
            return result
        except asyncio.CancelledError:
            job.is_abandoned = True
            job.work = None  # what it holds is free now, and it is not started
            raise
        finally:
            del job  # an exception refers to this frame, and the job to the exception

    def _add(self, job: _PoolJob) -> None:
        with self._changed:
            if self._is_closed:
                raise EngineDeadError(SHUT_DOWN)
            self._queues.setdefault(job.tenant, deque()).append(job)
            if sum(map(len, self._queues.values())) > self._idle and self._threads <= self._per_tenant:
                self._threads += 1
                threading.Thread(target=self._serve, name="quire-work", daemon=True).start()
            self._changed.notify()

    @property
    def num_waiting(self) -> int:
        """Pieces of work that have not started, without abandoned ones."""
        with self._changed:
            return sum(not job.is_abandoned for queue in self._queues.values() for job in queue)

    @property
    def num_running(self) -> int:
        with self._changed:
            return sum(map(len, self._running.values()))

    def close(self, seconds: float = 0.0) -> None:
        """Start nothing more, tell what runs that it is abandoned, and wait for its end for so long at most."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._is_closed = True
            for job in [job for queue in self._queues.values() for job in queue]:
                _answer(job, None, EngineDeadError(SHUT_DOWN))
            self._queues.clear()
            for job in [job for jobs in self._running.values() for job in jobs]:
                job.is_abandoned = True
            self._changed.notify_all()
            while self._running and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    # In the threads

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            _execute(job)
            self._end(job)
            del job

    def _next(self) -> _PoolJob | None:
        """Wait for work; None: there is none, and the thread ends."""
        with self._changed:
            until = time.monotonic() + IDLE_SECONDS
            while (job := self._take()) is None:
                left = until - time.monotonic()
                if self._is_closed or left <= 0:
                    self._threads -= 1
                    return None
                self._idle += 1
                self._changed.wait(left)
                self._idle -= 1
            self._running.setdefault(job.tenant, set()).add(job)
            return job

    def _take(self) -> _PoolJob | None:
        """The first job of the next tenant that does not have all its threads."""
        for tenant in list(self._queues):
            queue = self._queues[tenant]
            while queue and queue[0].is_abandoned:
                queue.popleft()
            if not queue:
                del self._queues[tenant]
            elif len(self._running.get(tenant, ())) < self._per_tenant:
                self._queues.move_to_end(tenant)
                return queue.popleft()
        return None

    def _end(self, job: _PoolJob) -> None:
        with self._changed:
            self._running[job.tenant].discard(job)
            if not self._running[job.tenant]:
                del self._running[job.tenant]
            self._changed.notify_all()


def _execute(job: _PoolJob) -> None:
    work, job.work = job.work, None
    outcome, error = None, None
    _current.job = job
    try:
        if work is not None:
            outcome = work()
    except BaseException as caught:
        error = caught
    finally:
        _current.job = None
    _answer(job, outcome, error)
    del job, error, work  # the error's traceback refers to this frame


def _answer(job: _PoolJob, outcome: Any, error: BaseException | None) -> None:
    with suppress(RuntimeError):  # the loop is closed
        job.loop.call_soon_threadsafe(_settle, job.future, outcome, error)


def _settle(future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if future.done():  # cancelled meanwhile
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)
