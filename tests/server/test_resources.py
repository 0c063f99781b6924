"""Out of file descriptors: 503 with the cause in the log; nothing dies, and all is well when there are some again."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from quire.engine.process import refusal
from quire.engine.remote import error_of
from quire.errors import QuireError
from quire.server.errors import as_api_error
from tests.server.attacked_server import AttackedServer

TEXT = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 2}


@contextmanager
def descriptors_left(pid: int, count: int) -> Iterator[None]:
    """The process can open `count` more files."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    free = (number for number in itertools.count() if number not in used)
    limit = next(itertools.islice(free, max(0, count - 1), None)) + (count > 0)  # numbers below it are handed out
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def form(number: int) -> dict[str, object]:
    return {**BODY, "structured_outputs": {"regex": f"[a-c]{{1,{number}}}"}}


def test_an_engine_without_descriptors_answers_503_and_stays(attacked: AttackedServer) -> None:
    engine = attacked.engine
    for left in (0, 1, 2):
        with descriptors_left(engine, left):
            answer = attacked.post(TEXT, form(100 + left))
            assert answer.status_code == 503 and "descriptor" in answer.text, answer.text
            assert attacked.post(TEXT, BODY).status_code == 200
    assert attacked.engine == engine
    assert "no free file descriptor" in attacked.stderr
    assert attacked.post(TEXT, form(100)).status_code == 200


def test_a_fork_server_that_cannot_be_started_is_a_503_and_the_engine_stays(attacked: AttackedServer) -> None:
    """The matcher has its files, the process that forks matchers does not."""
    engine = attacked.engine
    (forker,) = [pid for pid in children_of(engine) if is_fork_server(pid)]
    os.kill(forker, 9)
    while len(children_of(engine)) and is_fork_server(forker):
        time.sleep(0.01)
    for left in (3, 4, 5, 6):
        with descriptors_left(engine, left):
            assert attacked.post(TEXT, form(200 + left)).status_code in (200, 503)
            assert attacked.post(TEXT, BODY).status_code == 200
    assert attacked.engine == engine
    assert attacked.post(TEXT, form(200)).status_code == 200


def test_a_session_call_without_descriptors_is_a_503() -> None:
    """The engine sends the error's name, and the front raises it."""
    sent = refusal("1", OSError(errno.EMFILE, "Too many open files"))
    assert as_api_error(error_of(sent)).status == 503


def test_connections_leave_descriptors_for_requests(attacked: AttackedServer) -> None:
    with ExitStack() as held:
        _fill_until_refused(attacked, held)
    assert "connections leave no free file descriptor" in attacked.stderr
    assert attacked.request("GET", "/version").status_code == 200


def _fill_until_refused(attacked: AttackedServer, held: ExitStack) -> None:
    """Connections of earlier tests have left free numbers far below the limit, which are handed out first."""
    for _ in range(200):
        with descriptors_left(attacked.pid, 5):
            answer = attacked.request("GET", "/version")
            if answer.status_code == 200:
                held.enter_context(attacked.connect())
                continue
            assert answer.status_code == 503 and answer.headers["retry-after"] and "connections" in answer.text
            assert answer.headers["connection"] == "close"
            with attacked.connect() as idle:
                idle.settimeout(5)
                try:
                    assert idle.recv(1) == b""  # closed soon
                except ConnectionError:
                    pass
                except TimeoutError:  # it stays open: another was closed after the answer
                    continue
            return
    pytest.fail("connections took the descriptors of requests")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENFILE, "Too many open files in system"),
        OSError(errno.ENOMEM, "Cannot allocate memory"), BlockingIOError(errno.EAGAIN, "Resource unavailable"),
        MemoryError(), RuntimeError("can't start new thread"),
    ],
)  # fmt: skip
def test_lack_of_a_resource_is_a_503(error: BaseException) -> None:
    answer = as_api_error(error)
    assert answer.status == 503 and "out of resources" in answer.message and "Retry-After" in answer.headers


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("no"), QuireError("no")])
def test_other_errors_are_a_500(error: BaseException) -> None:
    assert as_api_error(error).status == 500


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_fork_server(pid: int) -> bool:
    with suppress(OSError):
        return b"quire.engine.grammar.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
