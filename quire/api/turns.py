"""A lock for calls that come from many threads."""

from __future__ import annotations

import threading


class Turns:
    """One thread at a time, which may take several turns within each other. Who waits is before who has just had one:
    a thread that makes step after step would otherwise never let another in."""

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._lock.acquire()
        else:
            with self._next:
                self._lock.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._lock.release()
