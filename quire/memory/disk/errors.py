"""What can go wrong with memory on disk, in words for people."""

from __future__ import annotations

import errno
from pathlib import Path

from quire.errors import QuireError, ValidationError


class StoreError(QuireError, RuntimeError):
    """A folder that keeps memory on disk cannot do what was asked of it."""


class StoreInUseError(StoreError):
    """Another process owns the folder. `pid` is that process, where known."""

    def __init__(self, folder: Path, pid: int | None) -> None:
        owner = f"process {pid}" if pid else "another process"
        super().__init__(
            f"{folder} is in use by {owner}: a folder of KV blocks or sessions has one owner at a time. "
            "Stop that process, or choose another folder"
        )
        self.folder = folder
        self.pid = pid


class StoreUnavailableError(StoreError):
    """The folder cannot be used at all: read-only, no folder, no permission, or of a newer version."""


class StoreFullError(StoreError):
    """The disk has no room left for something that must not be dropped."""


class SessionNotFoundError(QuireError, KeyError):
    """No session answers to this name."""

    def __str__(self) -> str:
        return str(self.args[0])


class SessionExistsError(ValidationError):
    """A session of this name exists already."""


class SessionLostError(StoreError):
    """The session's tokens were damaged on disk. `name` says which session, the message what happened."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"session {name!r} is lost: {reason}. Delete it and start again, or accept what is left of it (recover)"
        )
        self.name = name
        self.reason = reason


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
