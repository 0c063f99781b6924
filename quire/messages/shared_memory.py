"""Anonymous memory shared by several processes. It is freed with the last of them, however that ends."""

from __future__ import annotations

import mmap
import os
import tempfile


def unnamed_file() -> int:
    """A descriptor of an empty file in memory, or on disk where the system lacks memfd."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire")  # the name shows in /proc; there is no path
    with tempfile.TemporaryFile(prefix="quire-") as file:
        return os.dup(file.fileno())


class SharedMemory:
    """Zero-filled memory. Child processes map it by its descriptor, which they inherit."""

    def __init__(self, size: int) -> None:
        self._descriptor = unnamed_file()
        os.truncate(self._descriptor, size)
        self.data = mmap.mmap(self._descriptor, size)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        """Other processes keep their mappings."""
        self.data.close()
        os.close(self._descriptor)


def map_shared(descriptor: int) -> mmap.mmap:
    """The memory behind an inherited descriptor, which is closed."""
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
