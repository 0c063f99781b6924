"""The engine's view of host memory that its ranks share: whole blocks, for the disk to read and write."""

from __future__ import annotations

import os
from collections.abc import Sequence

from quire.executor import wire
from quire.messages.shared_memory import map_shared


class EngineHost:
    """Slots, each of which holds the ranks' parts of a block one after another."""

    def __init__(self, file: int, slots: int, parts: Sequence[int]) -> None:
        """`file`: an empty one that all ranks have open. `parts`: the bytes of each rank's part."""
        self._slot_bytes = sum(parts)
        os.truncate(file, slots * self._slot_bytes)
        # Never closed: the disk's threads may be in the middle of a slot. It goes with the last who sees it.
        self._data = memoryview(map_shared(os.dup(file)))
        offsets = [sum(parts[:rank]) for rank in range(len(parts))]
        self.shares = [wire.HostShare(slots, self._slot_bytes, offset) for offset in offsets]
        """What each rank is told."""

    def slot(self, number: int) -> memoryview:
        """A slot's bytes."""
        return self._data[number * self._slot_bytes : (number + 1) * self._slot_bytes]
