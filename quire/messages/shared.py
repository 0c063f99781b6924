"""Memory that several processes of ours see. It has no name: it goes with the last of them, however that ends."""

from __future__ import annotations

import mmap
import os
import tempfile


def unnamed_file() -> int:
    """A descriptor of an empty file in memory, or on disk where the system has no such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire")  # a name for people who look into /proc, and no path
    with tempfile.TemporaryFile(prefix="quire-") as file:
        return os.dup(file.fileno())


class SharedMemory:
    """Zeros at first. Other processes map it by its descriptor, which they inherit."""

    def __init__(self, size: int) -> None:
        self._descriptor = unnamed_file()
        os.truncate(self._descriptor, size)
        self.data = mmap.mmap(self._descriptor, size)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        """Others keep what they have mapped."""
        self.data.close()
        os.close(self._descriptor)


def map_shared(descriptor: int) -> mmap.mmap:
    """The memory behind an inherited descriptor, which is closed."""
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
