"""Where the lines of a batch come from."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import BinaryIO

from quire.cli.batch.files import STANDARD
from quire.errors import ValidationError

AHEAD = 64
"""Lines that are read from a pipe before they are wanted."""


class Source(AbstractContextManager["Source"]):
    """Lines with their numbers, from a file or standard input; empty ones are passed over."""

    def __init__(self, name: str) -> None:
        self.total: int | None = None
        """How many there are, where that can be known."""
        self._number = 0
        self._pipe: _Pipe | None = None
        if name == STANDARD:
            self._file: BinaryIO = sys.stdin.buffer
            return
        try:
            with open(name, "rb") as file:
                self.total = sum(1 for line in file if line.strip())
            self._file = open(name, "rb")  # noqa: SIM115  (closed in __exit__)
        except OSError as error:
            raise ValidationError(f"--input-file {name}: {error.strerror}") from error

    async def next(self) -> tuple[int, bytes] | None:
        """The next one, or None at the end."""
        while line := await self._read():
            self._number += 1
            number = self._number  # others read while we look at it
            if line.strip():
                return number, line
        return None

    async def _read(self) -> bytes:
        if self.total is not None:
            return self._file.readline()
        if self._pipe is None:
            self._pipe = _Pipe(self._file)
        return await self._pipe.read()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.total is not None:
            self._file.close()


class _Pipe:
    """A pipe read by a thread: who writes into it may be slow, and the event loop must not wait."""

    def __init__(self, file: BinaryIO) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = threading.Semaphore(AHEAD)
        threading.Thread(target=self._follow, args=(file,), daemon=True).start()

    async def read(self) -> bytes:
        """A line; empty at the end, and ever after."""
        line = await self._lines.get()
        if line:
            self._room.release()
        else:
            self._lines.put_nowait(line)
        return line

    def _follow(self, file: BinaryIO) -> None:
        while self._room.acquire():
            line = file.readline()
            try:
                self._loop.call_soon_threadsafe(self._lines.put_nowait, line)
            except RuntimeError:  # the loop has ended; nobody wants more
                return
            if not line:
                return
