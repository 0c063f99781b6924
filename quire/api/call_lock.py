"""A lock for calls that come from many threads."""

from __future__ import annotations

import threading


class CallLock:
    """One thread at a time, which may take several turns within each other. Who waits is before who has just had one:
    a thread that makes step after step would otherwise never let another in.

    The collector may end a stream, and so take a turn, anywhere in here: both locks can be taken again by their thread.
    """

    def __init__(self) -> None:
        self._next = threading.RLock()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined] # within its own turn nobody waits in line
            self._lock.acquire()
            return
        with self._next:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
