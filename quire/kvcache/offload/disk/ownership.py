"""One process owns a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path

from quire.kvcache.offload.disk.errors import in_use, unavailable

LOCK_NAME = "lock"

_held: dict[tuple[int, int], Path] = {}
_guard = threading.Lock()


class Ownership:
    """A folder that is ours until `release`, or until the process ends, however it ends.

    The lock is a POSIX record lock: the kernel drops it with the process, and children made by fork do not hold it.
    Such locks do not keep a process from itself, so folders owned here are remembered here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            status = folder.stat()
        except OSError as error:
            raise unavailable(folder, error) from None
        self._identity = (status.st_dev, status.st_ino)
        with _guard:
            # Before the file is opened: closing any descriptor of it would drop the lock we already hold.
            if self._identity in _held:
                raise in_use(folder, os.getpid())
            self._fd = self._lock()
            _held[self._identity] = folder

    def _lock(self) -> int:
        try:
            fd = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise unavailable(self.folder, error) from None
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 32, 0).strip()
            os.close(fd)
            raise in_use(self.folder, int(text) if text.isdigit() else None) from None
        except OSError as error:
            os.close(fd)
            raise unavailable(self.folder, error) from None
        # The pid is a courtesy to whoever comes second: a full disk must not keep us out for want of it.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return fd

    def release(self) -> None:
        """Let others have the folder. The lock file stays: removing it would let two processes lock two files."""
        with _guard:
            if _held.pop(self._identity, None) is not None:
                os.close(self._fd)
