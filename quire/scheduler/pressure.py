"""How full each tier is, as two watermarks see it, and what was done about it.

Past the first watermark of the device's cache one new request a step is admitted and sessions without a turn leave,
one a step; past the second, or when rows will lack blocks within a few steps, the policy's victim goes. What counts in
a tier below is what somebody owns: cached blocks that nobody owns give way by themselves. When it is full the oldest
goes for the newest; on disk KV is dropped, and tokens never.
"""

from __future__ import annotations

import math

from quire.kvcache.block_pool import BlockPool
from quire.kvcache.offload.manager import OffloadManager

FIRST = 0.15
"""With less than this share left, room is made before it is needed…"""
SECOND = 0.03
"""…and with less than this, whatever is in the way goes."""


class MemoryPressure:
    """The level of each tier (0, or how many watermarks it is past), and counts of what followed from it."""

    def __init__(self) -> None:
        self.device = self.host = self.disk = 0
        self.slowed = 0
        """Steps in which requests waited that there was room for."""
        self.slept = 0
        """Sessions put to sleep to make room."""

    def look(self, pool: BlockPool, tiers: OffloadManager | None) -> None:
        """See how full the tiers are now."""
        self.device = level(pool.free, pool.capacity)
        if tiers is not None:
            self.host = level(tiers.host.num_slots - tiers.host.num_pinned, tiers.host.num_slots)
            self.disk = 0 if tiers.store is None else level(*tiers.store.headroom)

    def __str__(self) -> str:
        return f"pressure {self.device} device, {self.host} host, {self.disk} disk"


def level(free: int, capacity: int) -> int:
    """0: calm, 1: past the first watermark, 2: past the second."""
    return (free < FIRST * capacity) + (free < SECOND * capacity)


def reserve(capacity: int) -> int:
    """What must be left so that the second is not passed."""
    return math.ceil(SECOND * capacity)
