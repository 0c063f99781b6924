"""The log: files of frames. New frames are appended to the newest file; files without live frames are removed."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.errors import StoreError, StoreFullError
from quire.kvcache.offload.disk.files import open_new, open_own, sync_folder, write_all, write_then_rename
from quire.sessions.log.format import (
    BODY,
    CHUNK_ROW,
    INDEX_VERSION,
    SESSION_ROW,
    FileIndex,
    Frame,
    FrameKind,
    ScannedFrame,
    Summary,
    digest_of,
    encode,
    encode_beside,
    file_header,
    frame_bytes,
    read_beside,
    read_nonce,
    scan,
    without_torn_end,
)

logger = logging.getLogger(__name__)

STEP_BYTES = 1 << 20
"""Files grow in such steps: most commits then do not change a file's length, and a full disk is noticed early."""

SHORT_FILE_BYTES = 1 << 20
SMALLEST_RESERVE_BYTES = 512


class FrameAddress(NamedTuple):
    """Where a frame is."""

    file: int
    offset: int
    size: int


class LogFile:
    """One file of the log."""

    def __init__(self, path: Path, number: int, fd: int, nonce: bytes, end: int = BODY) -> None:
        self.path = path
        self.number = number
        self.fd = fd
        self.nonce = nonce
        self.end = end
        """Where the next frame goes."""
        self.room = end
        """How many bytes of the file are allocated."""
        self.safe = BODY
        """How many bytes are durable."""
        self.sessions, self.chunks = bytearray(), bytearray()
        """As in its index."""
        self.is_damaged = False

    def record(self, frame: Frame | ScannedFrame, offset: int, size: int) -> None:
        """A frame was added."""
        assert frame.kind is not None
        if frame.kind is FrameKind.CHUNK:
            digest = frame.digest if isinstance(frame, ScannedFrame) else digest_of(frame.payload)
            self.chunks += CHUNK_ROW.pack(frame.id, frame.seq, digest, self.number, offset)
        else:
            self.sessions += SESSION_ROW.pack(frame.id, frame.seq, frame.kind, offset, size)

    def last_frames(self) -> Iterator[tuple[int, int, bool]]:
        """Seq of the last frame of each session in this file, and whether it deleted the session."""
        last: dict[int, tuple[int, bool]] = {}
        for number, seq, kind, _, _ in SESSION_ROW.iter_unpack(self.sessions):
            if number not in last or seq >= last[number][0]:
                last[number] = seq, kind == FrameKind.DELETE
        return ((number, seq, is_deleted) for number, (seq, is_deleted) in last.items())

    def forget_content(self) -> None:
        """The file is in the catalog, and nothing is appended to it any more."""
        self.sessions, self.chunks = bytearray(), bytearray()


class LoadedLog(NamedTuple):
    """A file of an earlier run; `file` is None if only its summary is left."""

    file: LogFile | None
    frames: list[ScannedFrame]
    summary: Summary | None
    indexed: FileIndex | None = None
    """Instead of frames, which were not read."""


class SessionLog:
    """An append-only sequence of frames. An append that raises `StoreFullError` or `StoreError` has changed nothing."""

    def __init__(
        self,
        folder: Path,
        file_bytes: int,
        lock: threading.RLock,
        make_room: Callable[[int], object] | None = None,
    ) -> None:
        self.folder = folder
        self.file_bytes = file_bytes
        """Length of a file in a long log…"""
        self.roll_bytes = min(file_bytes, SHORT_FILE_BYTES)
        """…and of the newest one: a short log has short files, which are cleaned sooner."""
        self.files: dict[int, LogFile] = {}
        self._active: LogFile | None = None
        self._lock = lock
        self._synced_some = threading.Condition(lock)
        self._is_syncing = False
        self._make_room = make_room
        self._last_number = 0
        self._written = 0
        self._synced = 0
        self._broken: str | None = None
        self._is_closed = False
        self._unindexed: list[LogFile] = []
        self.names: Callable[[int], str] = lambda number: ""
        """Maps a session's id to its name, for summaries."""

    @property
    def size(self) -> int:
        """Length of all files."""
        return sum(file.end for file in self.files.values())

    @property
    def reserve_bytes(self) -> int:
        """Size of the file `reserve`: disk space kept so that sessions can be deleted on a full disk."""
        return min(STEP_BYTES, self.file_bytes)

    @property
    def active(self) -> int:
        """Number of the file that frames are appended to; 0: none yet."""
        return self._active.number if self._active else 0

    # Reading

    def load(self) -> Iterator[LoadedLog]:
        """The files of earlier runs, oldest first. What a crash left of unfinished writes is truncated."""
        for path in self.folder.glob("*.new"):
            path.unlink(missing_ok=True)
        logs, summaries = self._file_numbers("*.log"), self._file_numbers("*.sum")
        # Numbers are not used twice: the summary of a vanished file would describe another.
        self._last_number = max(logs | summaries | self._file_numbers("*.unreadable"), default=0)
        for number in sorted(logs | summaries):
            summary, newest = read_beside(self._path(number, ".sum"), Summary), number == max(logs, default=0)
            if number not in logs:
                yield LoadedLog(None, [], summary)
                continue
            file, index = self._load_indexed(number, summary)
            frames: list[ScannedFrame] = []
            if index is None:
                file, frames = self._load_file(number, summary, newest)
            # Not after a damaged frame: new frames could pass for a part of it.
            is_whole = index is not None or (bool(frames) and frames[-1].whole)
            if newest and file is not None and file.end < self.file_bytes and is_whole:
                self._active = file
            yield LoadedLog(file, frames, summary, index)
            if file is not None and index is None and not file.is_damaged:
                self._unindexed.append(file)  # after a crash, or of a version that wrote none
            elif file is not None and file is not self._active:
                file.forget_content()

    def write_missing_indexes(self) -> None:
        """Write the indexes of files that were loaded without one."""
        for file in self._unindexed:
            if file is not self._active and file.number in self.files:
                self._write_beside(file)
                file.forget_content()
        self._unindexed.clear()

    def scan_file(self, file: LogFile) -> list[ScannedFrame]:
        """All frames of a file whose index was used: one of them turned out to be damaged."""
        return list(scan(os.pread(file.fd, file.end, 0), BODY, file.nonce))

    def remove_orphaned_summaries(self) -> None:
        """Remove summaries and indexes of files that no longer exist."""
        logs = self._file_numbers("*.log")
        for suffix in (".sum", ".idx"):
            for number in self._file_numbers(f"*{suffix}") - logs:
                self._path(number, suffix).unlink(missing_ok=True)

    def read(self, address: FrameAddress) -> ScannedFrame | None:
        """The frame at an address; None if it is damaged."""
        file = self.files[address.file]
        frame = next(scan(os.pread(file.fd, address.size, address.offset), 0, file.nonce), None)
        return frame if frame is not None and frame.whole else None

    # Writing

    def append(self, frames: Sequence[Frame], freeing: bool = False) -> list[FrameAddress]:
        """Append frames, in order. They are durable after the next commit.

        `freeing`: these frames make others garbage, so on a full disk they may use the reserve.
        """
        sources = [self._make_room] if self._make_room else []
        if freeing:
            sources.append(self._free_reserve)
        freed = False
        with self._lock:
            self._check_works()
            if self._is_closed:  # another process may own the folder by now
                raise StoreError(f"cannot write sessions in {self.folder}: the store is closed")
            while True:
                try:
                    addresses = self._append(frames)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not sources:
                        raise self._append_error(error) from error
                # KV on the same disk is dropped before any token is refused.
                sources.pop(0)(4 * STEP_BYTES)
                freed = True
            if freed:
                self.fill_reserve()
            return addresses

    def commit(self) -> None:
        """Everything appended before is durable when this returns. Concurrent callers share one sync."""
        with self._synced_some:
            target = self._written
            # A caller covered by another's sync returns when that is done; the first of the others does the next sync.
            while self._is_syncing and self._synced < target:
                self._synced_some.wait()
            self._check_works()
            file, mark = self._active, self._written
            if self._synced >= target or file is None:
                return
            end, fd = file.end, os.dup(file.fd)
            self._is_syncing = True
        try:
            os.fdatasync(fd)
            with self._lock:
                self._synced = max(self._synced, mark)
                file.safe = max(file.safe, end)
        except OSError as error:
            self._mark_broken(error)
        finally:
            os.close(fd)
            with self._synced_some:
                self._is_syncing = False
                self._synced_some.notify_all()

    def remove(self, number: int) -> None:
        """Delete a file, after its live frames are durable elsewhere."""
        with self._lock:
            self._sync_active()
            file = self.files.pop(number)
            os.close(file.fd)
            try:
                file.path.with_suffix(".idx").unlink(missing_ok=True)
                file.path.with_suffix(".sum").unlink(missing_ok=True)
                file.path.unlink()
                sync_folder(self.folder)
            except OSError as error:
                logger.warning("cannot remove %s: %s", file.path, error)
            self.fill_reserve()

    def fill_reserve(self) -> None:
        """Allocate the reserve, or as much of it as the disk has room for."""
        size = self.reserve_bytes
        if self._reserve_path.is_symlink():
            self._free_reserve()
        while size >= SMALLEST_RESERVE_BYTES:
            try:
                fd = open_own(self._reserve_path, create=True)
                try:
                    os.posix_fallocate(fd, 0, size)
                finally:
                    os.close(fd)
                return
            except OSError:
                self._free_reserve()
                size //= 2

    def close(self) -> None:
        """Sync, write the last file's summary, and close all files."""
        with self._lock:
            try:
                if self._active is not None and self._broken is None:
                    self._seal(self._active)
            except (OSError, StoreError) as error:
                logger.warning("cannot close %s cleanly: %s", self.folder, error)
            for file in self.files.values():
                os.close(file.fd)
            self.files.clear()
            self._active = None
            self._is_closed = True

    # Internals

    @property
    def _reserve_path(self) -> Path:
        return self.folder / "reserve"

    def _free_reserve(self, size: int = 0) -> None:
        with contextlib.suppress(OSError):
            self._reserve_path.unlink(missing_ok=True)

    def _append(self, frames: Sequence[Frame]) -> list[FrameAddress]:
        """Append frames to the newest file, or to a new one if they do not fit; returns their addresses."""
        # One file and one write: a failed append then leaves nothing behind.
        sizes = [frame_bytes(len(frame.payload), len(frame.name.encode())) for frame in frames]
        file = self._active
        if file is None or (file.end + sum(sizes) > self.roll_bytes and file.end > BODY):
            file = self._roll()
        addresses, offset = [], file.end
        for size in sizes:
            addresses.append(FrameAddress(file.number, offset, size))
            offset += size
        self._write(file, b"".join(encode(frame, file.safe, file.nonce) for frame in frames))
        for frame, address in zip(frames, addresses, strict=True):
            file.record(frame, address.offset, address.size)
        return addresses

    def _write(self, file: LogFile, data: bytes) -> None:
        """Append bytes to the file; on an error the file is as before."""
        end = file.end + len(data)
        try:
            if end > file.room:
                self._reserve(file, end)
            write_all(file.fd, data, file.end)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fd, file.end)
                file.room = file.end
            raise
        self._written += len(data)
        file.end = end

    def _reserve(self, file: LogFile, end: int) -> None:
        """Allocate the file up to `end`, and a step more if the disk has room."""
        for room in (max(end, min(file.room + STEP_BYTES, self.roll_bytes)), end):
            try:
                os.posix_fallocate(file.fd, file.room, room - file.room)
            except OSError:
                if room == end:
                    raise
            else:
                file.room = room
                return

    def _roll(self) -> LogFile:
        """Seal the newest file and start another."""
        if (full := self._active) is not None:
            self._seal(full)
        self.roll_bytes = min(self.file_bytes, max(SHORT_FILE_BYTES, self.size // 8))
        self._last_number += 1
        number = self._last_number
        path = self._path(number, ".log")
        nonce = os.urandom(32)
        fd = open_new(path)
        try:
            write_all(fd, file_header(number, nonce), 0)
            os.fsync(fd)
            sync_folder(self.folder)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        if full is not None:
            full.forget_content()
        self._active = self.files[number] = LogFile(path, number, fd, nonce)
        return self._active

    def _seal(self, file: LogFile) -> None:
        """Nothing is appended to the file for now: sync it, and write its summary."""
        self._sync_active()
        os.ftruncate(file.fd, file.end)
        file.room = file.end
        self._write_beside(file)

    def _write_beside(self, file: LogFile) -> None:
        """Write the summary of a file, and its index unless it is damaged."""
        sessions = [(number, seq, self.names(number), ended) for number, seq, ended in file.last_frames()]
        try:
            write_then_rename(file.path.with_suffix(".sum"), encode_beside(Summary(file.nonce, file.end, sessions)))
            if file.is_damaged:
                return
            # A time that no later write can give the file: clocks of file systems tick a few hundred times a second.
            unique = time.time_ns() - int.from_bytes(os.urandom(4), "little") % 10**9
            os.utime(file.fd, ns=(unique, unique))
            modified = os.fstat(file.fd).st_mtime_ns
            index = FileIndex(INDEX_VERSION, file.end, modified, bytes(file.chunks), bytes(file.sessions))
            write_then_rename(file.path.with_suffix(".idx"), encode_beside(index))
        except OSError as error:
            # The summary names lost sessions if the file is damaged later; the index saves time when it is opened.
            logger.warning("cannot write the summary or the index of %s: %s", file.path, error)

    def _load_indexed(self, number: int, summary: Summary | None) -> tuple[LogFile | None, FileIndex | None]:
        """The file and its index, if it has one that holds, and a summary."""
        path = self._path(number, ".log")
        index = None if summary is None else read_beside(path.with_suffix(".idx"), FileIndex)
        if index is None or summary is None or index.version != INDEX_VERSION:
            return None, None
        fd = open_own(path)
        status = os.fstat(fd)
        is_same = (status.st_size, status.st_mtime_ns, summary.length) == (index.length, index.modified, index.length)
        nonce = read_nonce(path, os.pread(fd, BODY, 0), number) if is_same else None
        if nonce is None or nonce != summary.nonce:
            os.close(fd)
            return None, None
        file = self.files[number] = LogFile(path, number, fd, nonce, end=index.length)
        file.chunks, file.sessions = bytearray(index.chunks), bytearray(index.sessions)
        return file, index

    def _sync_active(self) -> None:
        self._check_works()
        if self._active is not None:
            try:
                os.fdatasync(self._active.fd)
            except OSError as error:
                self._mark_broken(error)
            self._active.safe = self._active.end
        self._synced = self._written

    def _mark_broken(self, error: OSError) -> None:
        # What a failed sync wrote is unknown, and a second sync would report success: accept no more writes.
        self._broken = f"cannot sync {self.folder}: {error.strerror or error}"
        raise StoreError(f"{self._broken}. Sessions are read-only until the folder is opened again") from error

    def _check_works(self) -> None:
        if self._broken is not None:
            raise StoreError(f"{self._broken}. Sessions are read-only until the folder is opened again")

    def _append_error(self, error: OSError) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreFullError(
                f"the disk is full: cannot write sessions in {self.folder}. Free disk space, or delete sessions"
            )
        return StoreError(f"cannot write sessions in {self.folder}: {error.strerror or error}")

    def _load_file(self, number: int, summary: Summary | None, last: bool) -> tuple[LogFile | None, list[ScannedFrame]]:
        """The file and its frames. One without a valid header is renamed, or removed if it is the last and empty."""
        path = self._path(number, ".log")
        fd = open_own(path)
        size = os.fstat(fd).st_size
        data = os.pread(fd, size, 0)
        nonce = read_nonce(path, data, number) or (summary.nonce if summary else None)
        if nonce is None:
            os.close(fd)
            if last and not data.strip(b"\0"):
                path.unlink()
            else:
                logger.error("%s is unreadable: sessions that are only in this file are lost", path)
                path.rename(path.with_suffix(".unreadable"))
            return None, []
        file = self.files[number] = LogFile(path, number, fd, nonce)
        frames = list(scan(data, BODY, nonce))
        if last:
            frames = without_torn_end(frames, summary)
        # A frame that lacks only its back is whole: the next one must not begin within it.
        file.end = file.room = frames[-1].end if frames else BODY
        if size > file.end:
            os.ftruncate(fd, file.end)
        return file, frames

    def _file_numbers(self, pattern: str) -> set[int]:
        return {int(path.stem) for path in self.folder.glob(pattern) if path.stem.isdigit()}

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"{number:08d}{suffix}"
