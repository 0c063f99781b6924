"""How much memory is in use where a model runs: measured by each rank, watched by the engine."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class MemoryUse(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a device and of its machine now."""

    device_free: int
    """What a step can allocate: free, or cached by the allocator."""
    device_total: int
    host_free: int
    host_total: int

    @classmethod
    def tightest(cls, ranks: Iterable[MemoryUse]) -> MemoryUse | None:
        """Of each kind, that of the rank with the least; None without ranks."""
        found = list(ranks)
        if not found:
            return None
        device = min(found, key=lambda one: one.device_free)
        host = min(found, key=lambda one: one.host_free / max(1, one.host_total))
        return cls(device.device_free, device.device_total, host.host_free, host.host_total)
