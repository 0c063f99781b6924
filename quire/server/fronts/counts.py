"""Counters of all front processes, in memory that they share."""

from __future__ import annotations

import enum
import mmap
import os
import sys
import tempfile


class Count(enum.IntEnum):
    """What each front counts."""

    REQUESTS = 0
    """Admitted and not ended."""
    SEQUENCES = 1
    """Of these requests."""
    QUEUED_TOKENS = 2
    """Prompt tokens of requests without an output yet."""
    BODY_BYTES = 3
    """Of the bodies of open requests."""
    REJECTED_REQUESTS = 4
    REJECTED_TOKENS = 5
    CONNECTIONS = 6
    """Open, with or without a request."""
    ACCEPTING = 7
    """1: it accepts connections."""


ENDLESS = (Count.REJECTED_REQUESTS, Count.REJECTED_TOKENS)
"""They only grow: what a front that exits has counted stays counted."""


class FrontCounts:
    """A front adds to its own counters and reads the sum of all fronts', so that limits hold for all together.

    Nothing is locked. A front that takes something adds first and then looks at the sum, so that two that do it at the
    same moment may both be refused, and never both exceed a limit.
    """

    def __init__(self, fronts: int = 1, number: int = 0, descriptor: int | None = None) -> None:
        """`number`: of this front; `descriptor`: of the memory, from `make_memory`, if there are several."""
        size = 8 * fronts * len(Count)
        self.fronts = fronts
        self._own = number * len(Count)
        self._values = memoryview(bytearray(size) if descriptor is None else mmap.mmap(descriptor, size)).cast("q")

    def add(self, count: Count, value: int) -> None:
        """Add to this front's counter."""
        self._values[self._own + count] += value

    def total(self, count: Count) -> int:
        """The sum over all fronts."""
        return sum(self._values[count :: len(Count)])

    def own(self, count: Count) -> int:
        """This front's counter."""
        return self._values[self._own + count]

    def fewest_connections(self) -> int:
        """Of a front that accepts more; 0 if none does."""
        size = len(Count)
        connections, accepting = self._values[Count.CONNECTIONS :: size], self._values[Count.ACCEPTING :: size]
        return min((many for many, accepts in zip(connections, accepting, strict=True) if accepts), default=0)

    def end(self, number: int) -> None:
        """Front `number` has exited, and what it held is free. Only the hub calls it."""
        for count in Count:
            at = number * len(Count) + count
            if count in ENDLESS:
                self.add(count, self._values[at])
            self._values[at] = 0


def make_memory(fronts: int) -> int:
    """The descriptor of memory for so many fronts, which child processes can inherit."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("quire-fronts")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, 8 * fronts * len(Count))
    return descriptor
