"""`quire serve` as process 1 of a container: orphans are reaped, signals arrive, the exit status is the server's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from quire.cli import main as cli
from tests.processes import children
from tests.server.served import served

FIRST = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
"""Runs a command as process 1 of its own processes."""
needs_namespaces = pytest.mark.skipif(
    subprocess.run([*FIRST, "true"], capture_output=True).returncode != 0, reason="no namespaces here"
)
SCRIPT = """
import os, pathlib, signal, sys, time
from quire.cli.init_process import fork_if_first

fork_if_first()
assert os.getpid() != 1 and os.getppid() == 1
signal.signal(signal.SIGHUP, lambda *_: sys.exit(7))
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
if (parent := os.fork()) == 0:
    if os.fork():
        os._exit(0)
    time.sleep(0.05)  # an orphan by now
    os._exit(0)
os.waitpid(parent, 0)
deadline = time.monotonic() + 30
while len(left := [path.name for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]) > 2:
    assert time.monotonic() < deadline, left
    time.sleep(0.005)
print("alone", flush=True)
time.sleep(60)
"""


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@needs_namespaces
@pytest.mark.parametrize("sent, code", [(signal.SIGHUP, 7), (signal.SIGTERM, 128 + signal.SIGKILL)])
def test_orphans_are_reaped_and_signals_passed_on(sent: signal.Signals, code: int) -> None:
    with subprocess.Popen([*FIRST, sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as outside:
        assert outside.stdout is not None and outside.stdout.readline() == "alone\n"
        (first,) = children(outside.pid)
        os.kill(first, sent)
        assert outside.wait(60) == code


def test_the_server_asks_for_it_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(BaseException):
        pass

    def ask() -> None:
        raise Asked

    monkeypatch.setattr(cli, "fork_if_first", ask)
    with pytest.raises(Asked):
        cli.main(["serve", "--help"])
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])


@needs_namespaces
@pytest.mark.slow
def test_killed_engines_leave_no_zombies(tiny_model: Path) -> None:
    """Their ranks and their grammars' processes become orphans."""
    flags = ("--device", "cpu", "--port", "0", "--num-gpu-blocks-override", "64", "--tensor-parallel-size", "2")
    with served(str(tiny_model), *flags, before=FIRST) as server:
        port = server.wait_for(r"http://127.0.0.1:(\d+)/v1")[1]
        url = f"http://127.0.0.1:{port}"
        body = {"prompt": "abc", "max_tokens": 2, "structured_outputs": {"regex": "[a-z]+"}}
        (first,) = children(server.process.pid)
        (front,) = children(first)
        for _ in range(3):
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
            (engine,) = children(front)
            os.kill(engine, signal.SIGKILL)
            wait_until(lambda engine=engine: children(front) not in ([], [engine]))  # type: ignore[misc]
        wait_until(lambda: not any(is_zombie(pid) for pid in all_children(first)))
        os.kill(first, signal.SIGTERM)
        assert server.end() == 0


def all_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return False
