"""What can go wrong with memory on disk, in words for people."""

from __future__ import annotations

import errno
from pathlib import Path

from quire.errors import SessionLostError, StoreInUseError, StoreUnavailableError


def in_use(folder: Path, pid: int | None) -> StoreInUseError:
    """Another process owns the folder."""
    owner = f"process {pid}" if pid else "another process"
    return StoreInUseError(
        f"{folder} is in use by {owner}: a folder of KV blocks or sessions has one owner at a time. "
        "Stop that process, or choose another folder",
        pid,
    )


def lost(name: str, reason: str) -> SessionLostError:
    """The session cannot be read as it was written."""
    return SessionLostError(
        f"session {name!r} is lost: {reason}. Delete it and start again, or accept what is left of it (recover)", name
    )


def unavailable(folder: Path, error: OSError) -> StoreUnavailableError:
    """What an operating system's refusal of a whole folder means to the user."""
    advice = {
        errno.EROFS: "it lies on a read-only file system",
        errno.EACCES: "this user may not write there",
        errno.EPERM: "this user may not write there",
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "this user's disk quota is used up",
        errno.ENOTDIR: "part of the path is a file",
        errno.EEXIST: "it is a file",
    }.get(error.errno or 0, error.strerror or str(error))
    return StoreUnavailableError(
        f"{folder} cannot keep anything on disk: {advice}. Choose a folder that can be written"
    )
