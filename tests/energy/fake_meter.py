"""A meter for tests, given to engines by its dotted path: power while the process works and while it waits."""

from __future__ import annotations

import time
from typing import ClassVar

from quire.energy.meters import MeterContext, MeterError

IDLE_WATTS = 40.0
BUSY_WATTS = 200.0


class FakeMeter:
    """Draws BUSY_WATTS while steps run and IDLE_WATTS otherwise. The newest one is at `made[-1]`."""

    source = "fake"
    is_estimate = False
    made: ClassVar[list[FakeMeter]] = []

    def __init__(self, context: MeterContext) -> None:
        self._context = context
        self._begin = time.monotonic()
        self.first = self.used = 0.0
        """The first reading, and joules since then."""
        self.reads = 0
        self.is_broken = False
        FakeMeter.made.append(self)

    def read(self) -> float:
        if self.is_broken:
            raise MeterError("somebody took it away")
        self.reads += 1
        busy = self._context.busy_seconds()
        reading = IDLE_WATTS * (time.monotonic() - self._begin) + (BUSY_WATTS - IDLE_WATTS) * busy
        if self.reads == 1:
            self.first = reading
        self.used = reading - self.first
        return reading

    def close(self) -> None: ...
