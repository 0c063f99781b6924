"""Engines that step together, because each holds a part of the experts: they meet, wake and end together."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from quire.api.replica import Replica
from quire.engine import ipc

LOOK_SECONDS = 0.1
"""So long a process that is about to end by itself is given, so that it can be said how."""


class LockstepGroup:
    """What a fleet does for such engines that others do not need."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._folder = Path(tempfile.mkdtemp(prefix="quire-meeting-"))
        self.close = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        """Nothing stays behind; also when this object or the interpreter goes."""
        self._generation = 0
        self._invited: set[int] = set()
        self._requests = itertools.count(1)
        self._rebalances = itertools.count(1)

    def meeting(self, number: int) -> str:
        """The file in which an engine that is being started finds the others. Those of one generation have the same;
        an engine that is started again begins another."""
        if number in self._invited:
            self._generation += 1
            self._invited.clear()
        self._invited.add(number)
        return str(self._folder / f"meeting-{self._generation}")

    def rouse(self) -> None:
        """A request has been sent to one of them: all wake up.

        In this order: an engine that had heard of a request and not got it might agree that there is nothing to do.
        """
        message = ipc.encode(ipc.Wake(next(self._requests)))
        for replica in self._replicas:
            replica.engine.send(message)

    def next_rebalance(self) -> int:
        """The number that all are asked with to move experts."""
        return next(self._rebalances)

    def follow(self, lost: Replica) -> None:
        """One is dead: the others can do nothing without its experts.

        It may be a survivor that was told first, and the one that took it along has not been heard of yet.
        """
        others = [replica for replica in self._replicas if not replica.death]
        deadline = time.monotonic() + LOOK_SECONDS
        for replica in others:
            own = replica.engine.exit_reason(max(0.0, deadline - time.monotonic()))
            replica.kill_engine(own or f"it shares the experts with replica {lost.number}, which is down: {lost.death}")
