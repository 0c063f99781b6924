"""Whole writes, whole reads, and files that are there entirely or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, or raise."""
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(fd, view, offset)
        if count <= 0:
            raise OSError(f"a write of {len(view)} bytes at {offset} made no progress")
        view, offset = view[count:], offset + count


def read_into(fd: int, into: memoryview, offset: int) -> bool:
    """Fill `into` from `offset`; False if the file ends before."""
    view = into.cast("B")
    while view:
        count = os.preadv(fd, [view], offset)
        if count <= 0:
            return False
        view, offset = view[count:], offset + count
    return True


def reserve(fd: int, size: int) -> None:
    """Let the file be `size` bytes long, with room on the disk for all of them; what is new reads as zeros."""
    os.posix_fallocate(fd, 0, size)


def sync_folder(folder: Path) -> None:
    """Files made, renamed and removed in the folder stay so after a loss of power."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_then_rename(path: Path, data: bytes) -> None:
    """Replace the file at `path`: a reader, and a crash, find all of the old one or all of the new one."""
    draft = path.with_name(path.name + ".new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, data, 0)
        os.fsync(fd)
    except OSError:
        os.unlink(draft)
        raise
    finally:
        os.close(fd)
    os.replace(draft, path)
    sync_folder(path.parent)
