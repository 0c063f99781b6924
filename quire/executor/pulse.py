"""A byte of shared memory per rank that changes while its process runs: one that is stopped, or holds its interpreter
for ever, shows there. A step that takes long does not."""

from __future__ import annotations

import mmap
import time

from quire.messages.shared_memory import SharedMemory

BEAT_SECONDS = 0.25
SILENT_SECONDS = 10.0
"""A rank whose pulse has stood still for so long hangs."""


def beat(pulses: mmap.mmap, rank: int) -> None:
    """In a thread of the rank, for ever."""
    while True:
        pulses[rank] = (pulses[rank] + 1) % 256
        time.sleep(BEAT_SECONDS)


class Pulses:
    """The engine's view of them."""

    def __init__(self, size: int) -> None:
        self._memory = SharedMemory(size)
        self._seen = bytes(size)
        self._since = [0.0] * size

    def fileno(self) -> int:
        """For the ranks to inherit."""
        return self._memory.fileno()

    def watch(self) -> None:
        """Begin to look: what was before is forgotten."""
        self._seen = bytes(self._memory.data)
        self._since = [time.monotonic()] * len(self._seen)

    def silent(self) -> int | None:
        """A rank whose pulse has stood still for too long since `watch`."""
        now, new = time.monotonic(), bytes(self._memory.data)
        for rank, (old, value) in enumerate(zip(self._seen, new, strict=True)):
            if old != value:
                self._since[rank] = now
        self._seen = new
        return next((rank for rank, since in enumerate(self._since) if now - since > SILENT_SECONDS), None)

    def close(self) -> None:
        self._memory.close()
