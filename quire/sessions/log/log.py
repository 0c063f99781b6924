"""The log: files of frames, appended to at one end, emptied and removed at the other."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from quire.errors import StoreError, StoreFullError, StoreUnavailableError
from quire.kvcache.offload.disk.files import sync_folder, write_all, write_then_rename
from quire.sessions.log.frames import Found, Frame, FrameKind, encode, frame_bytes, scan

logger = logging.getLogger(__name__)

VERSION = 1
MAGIC = b"quireSL\n"
HEADER = struct.Struct("<8sII32s8s8x")
HEADER_COPIES = 4
BODY = HEADER_COPIES * HEADER.size
STEP_BYTES = 1 << 20
"""Room is reserved in such steps: a commit has no new length to note, and a full disk shows before it hurts."""

SMALLEST_RESERVE_BYTES = 512


class FrameAddress(NamedTuple):
    """Where a frame lies."""

    file: int
    offset: int
    size: int


class Summary(msgspec.Struct, array_like=True):
    """What a file held when it was closed: its nonce, its length, and the last frame of each session in it."""

    nonce: bytes
    length: int
    sessions: list[tuple[int, int, str, bool]]
    """id, seq, name, and whether that frame ended the session"""


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
        """How much of the file is reserved."""
        self.safe = BODY
        """How much is on the disk for sure."""
        self.sessions: dict[int, tuple[int, bool]] = {}
        """Last frame of each session that has one here, and whether it ended the session."""

    def note(self, frame: Frame | Found) -> None:
        """A frame was added."""
        if frame.kind is not FrameKind.CHUNK and frame.seq >= self.sessions.get(frame.id, (0, False))[0]:
            self.sessions[frame.id] = frame.seq, frame.kind is FrameKind.DELETE


class LoadedLog(NamedTuple):
    """What an earlier run left of one file; no file where only its summary is left."""

    file: LogFile | None
    founds: list[Found]
    summary: Summary | None


class SessionLog:
    """Frames in order. Raises `StoreFullError` or `StoreError` when one cannot be kept, and is then as before."""

    def __init__(
        self,
        folder: Path,
        file_bytes: int,
        lock: threading.RLock,
        make_room: Callable[[int], object] | None = None,
    ) -> None:
        self.folder = folder
        self.file_bytes = file_bytes
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
        self.names: Callable[[int], str] = lambda number: ""
        """How the summaries learn names."""

    @property
    def size(self) -> int:
        """Length of all files."""
        return sum(file.end for file in self.files.values())

    @property
    def reserve_bytes(self) -> int:
        """Room put by for a full disk."""
        return min(STEP_BYTES, self.file_bytes)

    @property
    def active(self) -> int:
        """The file that frames go to; 0 before the first."""
        return self._active.number if self._active else 0

    # Reading

    def load(self) -> Iterator[LoadedLog]:
        """Everything that earlier runs left, oldest first. What a crash left of unfinished writes is cut off."""
        for path in self.folder.glob("*.new"):
            path.unlink(missing_ok=True)
        logs, summaries = self._numbers("*.log"), self._numbers("*.sum")
        # Never a number again: the summary of a file that vanished would speak for another.
        self._last_number = max(logs | summaries | self._numbers("*.unreadable"), default=0)
        for number in sorted(logs | summaries):
            summary, newest = _read_summary(self._path(number, ".sum")), number == max(logs, default=0)
            if number not in logs:
                yield LoadedLog(None, [], summary)
                continue
            file, founds = self._load_file(number, summary, newest)
            if newest and file is not None and file.end < self.file_bytes and _ends_whole(founds):
                self._active = file
            yield LoadedLog(file, founds, summary)

    def forget_missing(self) -> None:
        """Summaries of files that are no more have done their work."""
        for number in self._numbers("*.sum") - self._numbers("*.log"):
            self._path(number, ".sum").unlink(missing_ok=True)

    def read(self, place: FrameAddress) -> Found | None:
        """The frame at a place, if it is still there whole."""
        file = self.files[place.file]
        found = next(scan(os.pread(file.fd, place.size, place.offset), 0, file.nonce), None)
        return found if found is not None and found.whole else None

    # Writing

    def append(self, frames: Sequence[Frame], freeing: bool = False) -> list[FrameAddress]:
        """Add frames at the end, in order. They are durable after the next commit.

        `freeing`: what is added makes other things go, so it may use what is put by for a full disk.
        """
        ways_out = [self._make_room] if self._make_room else []
        if freeing:
            ways_out.append(self._spend_reserve)
        spent = False
        with self._lock:
            self._check_works()
            if self._is_closed:  # another may own the folder by now, and the next file may be theirs
                raise StoreError(f"nothing can be added to sessions in {self.folder}: the store is closed")
            while True:
                try:
                    places = self._append(frames)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not ways_out:
                        raise self._refusal(error) from error
                # KV on the same disk goes before a single token does.
                ways_out.pop(0)(4 * STEP_BYTES)
                spent = True
            if spent:
                self.put_by()
            return places

    def commit(self) -> None:
        """All that was appended before is durable when this returns. Many who wait share one sync."""
        with self._synced_some:
            target = self._written
            # Whoever another's sync covers leaves as soon as that is done; the first of the others does the next.
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
            self._break(error)
        finally:
            os.close(fd)
            with self._synced_some:
                self._is_syncing = False
                self._synced_some.notify_all()

    def remove(self, number: int) -> None:
        """Drop a file, once what it held is durable elsewhere."""
        with self._lock:
            self._sync_active()
            file = self.files.pop(number)
            os.close(file.fd)
            try:
                file.path.with_suffix(".sum").unlink(missing_ok=True)
                file.path.unlink()
                sync_folder(self.folder)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", file.path, error)
            self.put_by()

    def put_by(self) -> None:
        """Keep some room for deletions on a full disk, as much of it as the disk has."""
        size = self.reserve_bytes
        while size >= SMALLEST_RESERVE_BYTES:
            try:
                fd = os.open(self._reserve_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    os.posix_fallocate(fd, 0, size)
                finally:
                    os.close(fd)
                return
            except OSError:
                self._spend_reserve()
                size //= 2

    def close(self) -> None:
        """Sync, say what the last file holds, and let go."""
        with self._lock:
            try:
                if self._active is not None and self._broken is None:
                    self._leave(self._active)
            except (OSError, StoreError) as error:
                logger.warning("%s could not be closed properly: %s", self.folder, error)
            for file in self.files.values():
                os.close(file.fd)
            self.files.clear()
            self._active = None
            self._is_closed = True

    # Inside

    @property
    def _reserve_path(self) -> Path:
        return self.folder / "reserve"

    def _spend_reserve(self, size: int = 0) -> None:
        with contextlib.suppress(OSError):
            self._reserve_path.unlink(missing_ok=True)

    def _append(self, frames: Sequence[Frame]) -> list[FrameAddress]:
        # All in one file and one write: what fails has then left nothing behind, not even in part.
        sizes = [frame_bytes(len(frame.payload), len(frame.name.encode())) for frame in frames]
        file = self._active
        if file is None or (file.end + sum(sizes) > self.file_bytes and file.end > BODY):
            file = self._roll()
        places, offset = [], file.end
        for size in sizes:
            places.append(FrameAddress(file.number, offset, size))
            offset += size
        self._write(file, b"".join(encode(frame, file.safe, file.nonce) for frame in frames))
        for frame in frames:
            file.note(frame)
        return places

    def _write(self, file: LogFile, data: bytes) -> None:
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
        """Room up to `end`, and a step more if the disk has it."""
        for room in (max(end, min(file.room + STEP_BYTES, self.file_bytes)), end):
            try:
                os.posix_fallocate(file.fd, file.room, room - file.room)
            except OSError:
                if room == end:
                    raise
            else:
                file.room = room
                return

    def _roll(self) -> LogFile:
        if self._active is not None:
            self._leave(self._active)
        self._last_number += 1
        number = self._last_number
        path = self._path(number, ".log")
        nonce = os.urandom(32)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(fd, _header(number, nonce) * HEADER_COPIES, 0)
            os.fsync(fd)
            sync_folder(self.folder)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._active = self.files[number] = LogFile(path, number, fd, nonce)
        return self._active

    def _leave(self, file: LogFile) -> None:
        """Nothing is added to the file for now: all of it is durable, and so is the list of who is in it."""
        self._sync_active()
        os.ftruncate(file.fd, file.end)
        file.room = file.end
        sessions = [(number, seq, self.names(number), ended) for number, (seq, ended) in file.sessions.items()]
        data = msgspec.msgpack.encode(Summary(file.nonce, file.end, sessions))
        try:
            write_then_rename(file.path.with_suffix(".sum"), blake3(data).digest(16) + data)
        except OSError as error:
            # It only serves to name the losses if the file is damaged later.
            logger.warning("the summary of %s could not be written: %s", file.path, error)

    def _sync_active(self) -> None:
        self._check_works()
        if self._active is not None:
            try:
                os.fdatasync(self._active.fd)
            except OSError as error:
                self._break(error)
            self._active.safe = self._active.end
        self._synced = self._written

    def _break(self, error: OSError) -> None:
        # What a failed sync left behind is unknown, and a second one would lie: nothing more is promised.
        self._broken = f"{self.folder} could not be synced: {error.strerror or error}"
        raise StoreError(f"{self._broken}. Sessions are read-only until the folder is opened again") from error

    def _check_works(self) -> None:
        if self._broken is not None:
            raise StoreError(f"{self._broken}. Sessions are read-only until the folder is opened again")

    def _refusal(self, error: OSError) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreFullError(
                f"the disk is full: nothing can be added to sessions in {self.folder}. "
                "Make room there, or delete sessions"
            )
        return StoreError(f"nothing can be added to sessions in {self.folder}: {error.strerror or error}")

    def _load_file(self, number: int, summary: Summary | None, last: bool) -> tuple[LogFile | None, list[Found]]:
        path = self._path(number, ".log")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        size = os.fstat(fd).st_size
        data = os.pread(fd, size, 0)
        nonce = _read_header(path, data, number) or (summary.nonce if summary else None)
        if nonce is None:
            os.close(fd)
            if last and not data.strip(b"\0"):
                path.unlink()
            else:
                logger.error("%s is damaged beyond reading: sessions known from it alone are lost", path)
                path.rename(path.with_suffix(".unreadable"))
            return None, []
        file = self.files[number] = LogFile(path, number, fd, nonce)
        founds = list(scan(data, BODY, nonce))
        if last:
            founds = _without_torn_end(founds, summary)
        # A frame that lacks no more than its back is whole: what follows it must not begin within it.
        file.end = file.room = founds[-1].end if founds else BODY
        if size > file.end:
            os.ftruncate(fd, file.end)
        return file, founds

    def _numbers(self, pattern: str) -> set[int]:
        return {int(path.stem) for path in self.folder.glob(pattern) if path.stem.isdigit()}

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"{number:08d}{suffix}"


def _without_torn_end(founds: list[Found], summary: Summary | None) -> list[Found]:
    """Leave out what was never promised: from the first damage on after all that is known to have been durable."""
    durable = max((found.safe for found in founds if found.kind is not None), default=0)
    if summary is not None:
        durable = max(durable, summary.length)
    for i, found in enumerate(founds):
        if not found.whole and found.offset >= durable:
            torn = founds[i:]
            logger.info("%d bytes of unfinished writes are left out", torn[-1].end - found.offset)
            return founds[:i]
    return founds


def _ends_whole(founds: list[Found]) -> bool:
    """Whether frames can follow: after what is left of a damaged one they might pass for a part of it."""
    return bool(founds) and founds[-1].whole


def _header(number: int, nonce: bytes) -> bytes:
    fields = MAGIC + struct.pack("<II", VERSION, number) + nonce
    return HEADER.pack(MAGIC, VERSION, number, nonce, blake3(fields).digest(8))


def _read_header(path: Path, data: bytes, number: int) -> bytes | None:
    """The nonce, from any copy of the header that is whole."""
    for copy in range(HEADER_COPIES):
        header = data[HEADER.size * copy : HEADER.size * (copy + 1)]
        if len(header) < HEADER.size:
            break
        magic, version, named, nonce, check = HEADER.unpack(header)
        if magic != MAGIC or blake3(header[:48]).digest(8) != check:
            continue
        if version != VERSION:
            raise StoreUnavailableError(
                f"{path} has format {version}, this quire writes {VERSION}: "
                "use the quire that wrote it, or another folder"
            )
        if named == number:
            return nonce
    return None


def _read_summary(path: Path) -> Summary | None:
    try:
        data = path.read_bytes()
        if blake3(data[16:]).digest(16) == data[:16]:
            return msgspec.msgpack.decode(data[16:], type=Summary)
    except (OSError, msgspec.DecodeError):
        return None
    return None
