"""Files on disk: complete writes and reads, atomic replacement, and folders that one process owns.

They hold conversations: files and folders are private to the user that runs quire, and a link in place of a file is
never followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
from pathlib import Path

from quire.errors import StoreInUseError, StoreUnavailableError

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
FILE_MODE = 0o600
FOLDER_MODE = 0o700

_owned: dict[tuple[int, int], Path] = {}
_owned_guard = threading.Lock()


def open_new(path: Path) -> int:
    """A descriptor of a new, empty, private file; what has this name is removed."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)


def open_own(path: Path, create: bool = False) -> int:
    """A descriptor of a file in a folder of ours. Raises if it is a link, or no plain file."""
    # Without O_NONBLOCK, opening a pipe would wait.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    fd = os.open(path, flags, FILE_MODE)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise OSError(errno.ELOOP, "a link or no plain file", str(path))
    return fd


def make_private(folder: Path) -> None:
    """Create the folder, and folders above it as needed, or make what is in it private if other users may read it."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(mode=FOLDER_MODE)
    if not folder.is_dir():
        raise FileExistsError(errno.EEXIST, "it is a file", str(folder))
    if not folder.stat().st_mode & 0o077:
        return
    try:
        for inside, folders, files in os.walk(folder):
            for name in (*folders, *files):
                _tighten(Path(inside, name))
        folder.chmod(FOLDER_MODE)  # last: if this is interrupted, the next start does it again
        logger.info("%s was readable by other users: it is private now", folder)
    except OSError as error:
        logger.warning("%s is readable by other users, and cannot be made private: %s", folder, error.strerror)


def _tighten(path: Path) -> None:
    status = path.lstat()
    is_folder = stat.S_ISDIR(status.st_mode)
    if not is_folder and not (stat.S_ISREG(status.st_mode) and status.st_nlink == 1):
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.fchmod(fd, FOLDER_MODE if is_folder else FILE_MODE)
    finally:
        os.close(fd)


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
    """Make the file `size` bytes long, all allocated on the disk; new bytes read as zeros."""
    os.posix_fallocate(fd, 0, size)


def sync_folder(folder: Path) -> None:
    """Make created, renamed and removed files of the folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_then_rename(path: Path, data: bytes) -> None:
    """Replace the file at `path`: after a crash, as for a reader, it is entirely old or entirely new."""
    draft = path.with_name(path.name + ".new")
    fd = open_new(draft)
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


def unavailable(folder: Path, error: OSError) -> StoreUnavailableError:
    """The error for a folder that cannot be used, with the reason in words."""
    reason = {
        errno.EROFS: "it is on a read-only file system",
        errno.EACCES: "this user may not write there",
        errno.EPERM: "this user may not write there",
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "this user's disk quota is used up",
        errno.ENOTDIR: "part of the path is a file",
        errno.EEXIST: "it is a file",
        errno.ELOOP: f"{error.filename} is a link or no plain file; remove it",
    }.get(error.errno or 0, error.strerror or str(error))
    return StoreUnavailableError(f"{folder} cannot be written: {reason}. Choose a folder that can be written")


class FolderLock:
    """Exclusive ownership of a folder until `release`, or until the process ends, however it ends.

    The lock is a POSIX record lock: the kernel drops it with the process, and forked children do not hold it.
    Such a lock does not exclude its own process, so folders owned by this process are kept in a table.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            make_private(folder)
            status = folder.stat()
        except OSError as error:
            raise unavailable(folder, error) from None
        self._identity = (status.st_dev, status.st_ino)
        with _owned_guard:
            # Before the file is opened: closing any descriptor of it would drop the lock we already hold.
            if self._identity in _owned:
                raise _in_use(folder, os.getpid())
            self._fd = self._lock()
            _owned[self._identity] = folder

    def _lock(self) -> int:
        """Lock the lock file; returns its descriptor."""
        try:
            fd = open_own(self.folder / LOCK_NAME, create=True)
        except OSError as error:
            raise unavailable(self.folder, error) from None
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 32, 0).strip()
            os.close(fd)
            raise _in_use(self.folder, int(text) if text.isdigit() else None) from None
        except OSError as error:
            os.close(fd)
            raise unavailable(self.folder, error) from None
        # The pid only serves the error message of a second process: a full disk must not fail the lock.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return fd

    def release(self) -> None:
        """Unlock the folder. The lock file stays: removing it would let two processes lock two files."""
        with _owned_guard:
            if _owned.pop(self._identity, None) is not None:
                os.close(self._fd)


def _in_use(folder: Path, pid: int | None) -> StoreInUseError:
    owner = f"process {pid}" if pid else "another process"
    return StoreInUseError(
        f"{folder} is in use by {owner}: only one process at a time may use a folder of KV blocks or sessions. "
        "Stop that process, or choose another folder",
        pid,
    )
