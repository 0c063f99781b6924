"""Batch files in OpenAI's format: one request per line in, one response per line out."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import uuid
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from quire.errors import ValidationError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
UNVERSIONED = ("/score", "/rerank", "/classify", "/pooling")
"""The ends of further urls, as vLLM has them: /score, /v1/score, …"""
STANDARD = "-"
_LINE = re.compile(r"line \d+: ")
MAX_ID_LENGTH = 4096
PIPE_READ_AHEAD = 64
"""Lines read from a pipe ahead of use."""


class LineError(Exception):
    """A line that is not a valid request. `custom_id` is set if it could be read."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


class BatchRequest(msgspec.Struct):
    """A line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _OnlyCustomId(msgspec.Struct):
    custom_id: str | None = None


class _OnlyStream(msgspec.Struct):
    stream: Any = None


class BatchResponse(msgspec.Struct):
    """The HTTP response; its body is null if the request failed."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why the line was not run."""

    code: str
    message: str


class BatchResult(msgspec.Struct):
    """A line of the output: a response, or an error and the status of the response; only an error if the line was not
    run."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: Any = None

    @classmethod
    def of(cls, custom_id: str, status: int, request_id: str, body: bytes) -> BatchResult:
        raw = msgspec.Raw(body or b"null")
        if status == 200:
            return cls(_new_id(), custom_id, BatchResponse(status, request_id, raw))
        return cls(_new_id(), custom_id, BatchResponse(status, request_id, msgspec.Raw(b"null")), raw)

    @classmethod
    def of_error(cls, error: LineError) -> BatchResult:
        return cls(_new_id(), error.custom_id, error=BatchError(error.code, str(error)))

    @property
    def ok(self) -> bool:
        return self.response is not None and self.response.status_code == 200


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def read_line(text: bytes, number: int) -> BatchRequest:
    """Parse a line; raises `LineError` with the line's number in its message."""
    where = f"line {number}"
    try:
        request = msgspec.json.decode(text, type=BatchRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_line", f"{where}: {error}", _custom_id(text)) from None
    if not 0 < len(request.custom_id) <= MAX_ID_LENGTH:
        raise LineError("invalid_line", f"{where}: custom_id must have 1 to {MAX_ID_LENGTH} characters")
    if request.method != "POST":
        raise LineError("invalid_method", f"{where}: method must be POST, got {request.method!r}", request.custom_id)
    if request.url not in URLS and not request.url.endswith(UNVERSIONED):
        listed = ", ".join((*URLS, *UNVERSIONED))
        raise LineError("invalid_url", f"{where}: url must be one of {listed}; got {request.url!r}", request.custom_id)
    try:
        body = msgspec.json.decode(request.body, type=_OnlyStream)
    except msgspec.MsgspecError as error:
        raise LineError("invalid_line", f"{where}: body: {error}", request.custom_id) from None
    if body.stream not in (None, False):
        raise LineError("stream_not_supported", f"{where}: batches do not stream: leave stream out", request.custom_id)
    return request


def _custom_id(text: bytes) -> str | None:
    try:
        return msgspec.json.decode(text, type=_OnlyCustomId).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _refuse_address(flag: str, name: str) -> None:
    if name.startswith(("http://", "https://")):
        raise ValidationError(f"{flag} {name}: only files are read and written; download and upload with curl, or pipe")


def _without_number(message: str) -> str:
    return _LINE.sub("", message, count=1)


class BatchOutput(AbstractContextManager["BatchOutput"]):
    """Writes results as they arrive. An existing file is continued."""

    def __init__(self, name: str, overwrite: bool = False) -> None:
        self.done: set[str] = set()
        """custom_ids with a result from an earlier run."""
        self._reported: Counter[str] = Counter()
        """Errors of an earlier run for lines without a custom_id. Their line numbers may have changed since."""
        self._file: BinaryIO
        if name == STANDARD:
            self._file = sys.stdout.buffer
            return
        _refuse_address("--output-file", name)
        path = Path(name)
        try:
            if not overwrite and path.exists():
                self._continue(path)
            self._file = open(path, "wb" if overwrite else "ab")  # noqa: SIM115  (closed in __exit__)
        except OSError as error:
            raise ValidationError(f"--output-file {name}: {error.strerror}") from error

    def _continue(self, path: Path) -> None:
        """Continue an earlier run's output. An incomplete last line is removed."""
        whole = 0
        with path.open("r+b") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    file.truncate(whole)
                    break
                whole += len(line)
                try:
                    result = msgspec.json.decode(line, type=BatchResult)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise ValidationError(
                        f"{path}, line {number}, is not a batch result ({error}): give another --output-file, or "
                        "use --overwrite"
                    ) from None
                if result.custom_id is not None:
                    self.done.add(result.custom_id)
                elif isinstance(result.error, dict):
                    self._reported[_without_number(str(result.error.get("message")))] += 1

    def was_reported(self, error: LineError) -> bool:
        """Whether an earlier run has written this line's error. Each result stands for one line."""
        if error.custom_id is not None:
            return error.custom_id in self.done
        message = _without_number(str(error))
        self._reported[message] -= 1
        return self._reported[message] >= 0

    def write(self, result: BatchResult) -> None:
        """Write and flush one line: results so far survive if the process is killed."""
        self._file.write(msgspec.json.encode(result) + b"\n")
        self._file.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._file is not sys.stdout.buffer:
            self._file.close()


class BatchInput(AbstractContextManager["BatchInput"]):
    """Lines with their numbers, from a file or standard input; empty lines are skipped."""

    def __init__(self, name: str) -> None:
        self.total: int | None = None
        """Number of lines, if known: not for standard input."""
        self._number = 0
        self._pipe: _PipeReader | None = None
        if name == STANDARD:
            self._file: BinaryIO = sys.stdin.buffer
            return
        _refuse_address("--input-file", name)
        try:
            with open(name, "rb") as file:
                self.total = sum(1 for line in file if line.strip())
            self._file = open(name, "rb")  # noqa: SIM115  (closed in __exit__)
        except OSError as error:
            raise ValidationError(f"--input-file {name}: {error.strerror}") from error

    async def next(self) -> tuple[int, bytes] | None:
        """The next line, or None at the end."""
        while line := await self._read():
            self._number += 1
            number = self._number  # other tasks read lines meanwhile
            if line.strip():
                return number, line
        return None

    async def _read(self) -> bytes:
        if self.total is not None:
            return self._file.readline()
        if self._pipe is None:
            self._pipe = _PipeReader(self._file)
        return await self._pipe.read()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.total is not None:
            self._file.close()


class _PipeReader:
    """Reads a pipe in a thread: its writer may be slow, and the event loop must not block."""

    def __init__(self, file: BinaryIO) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = threading.Semaphore(PIPE_READ_AHEAD)
        threading.Thread(target=self._follow, args=(file,), daemon=True).start()

    async def read(self) -> bytes:
        """A line; empty at the end."""
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
            except RuntimeError:  # the event loop has ended
                return
            if not line:
                return
