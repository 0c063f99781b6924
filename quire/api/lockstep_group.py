"""Engines that step in lockstep because each holds a part of the experts: they start, wake and end together."""

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

EXIT_WAIT_SECONDS = 0.1
"""How long to wait for a process that may be about to exit by itself, so that its own reason is reported."""


class LockstepGroup:
    """The part of an engine group that only such engines need."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._folder = Path(tempfile.mkdtemp(prefix="quire-lockstep-"))
        self.close = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        """Removes the folder; also runs when this object is collected or the interpreter exits."""
        self._generation = 0
        self._joined: set[int] = set()
        self._requests = itertools.count(1)
        self._rebalances = itertools.count(1)

    def rendezvous_file(self, number: int) -> str:
        """The file in which an engine that is being started finds the others. Engines of one generation share it; an
        engine that is started again opens the next generation."""
        if number in self._joined:
            self._generation += 1
            self._joined.clear()
        self._joined.add(number)
        return str(self._folder / f"rendezvous-{self._generation}")

    def wake_all(self) -> None:
        """Call after a request was sent to one of them: all wake up.

        In this order: an engine that was woken before the request arrived might agree that there is nothing to do.
        """
        message = ipc.encode(ipc.Wake(next(self._requests)))
        for replica in self._replicas:
            replica.engine.send(message)

    def next_rebalance(self) -> int:
        """The number of the next rebalancing, the same for all engines."""
        return next(self._rebalances)

    def end_others(self, lost: Replica) -> None:
        """One engine is dead: end the others, which can do nothing without its experts.

        `lost` may only be the first whose death was noticed: an engine that has exited by itself keeps its own reason.
        """
        others = [replica for replica in self._replicas if not replica.death]
        deadline = time.monotonic() + EXIT_WAIT_SECONDS
        for replica in others:
            own = replica.engine.exit_reason(max(0.0, deadline - time.monotonic()))
            replica.end_engine(own or f"it shares the experts with replica {lost.number}, which is down: {lost.death}")
