"""A front that is killed, by the kernel for its memory or by anyone, and is started again as the systemd unit says."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import yaml

from tests.deploy.test_hosting import DEPLOY, unit
from tests.processes import descendants, is_gone
from tests.server.attacked_server import FLAGS, KEYS
from tests.server.served import Served

HEADERS = {"authorization": f"Bearer {KEYS[0]}"}
DEADLINE = 90.0


class RestartingService:
    """Starts a command again whenever it ends, as `Restart=always` and a container's restart policy do."""

    def __init__(self, arguments: list[str]) -> None:
        service = unit()["Service"]
        assert service["Restart"] == "always"
        self._pause = float(service["RestartSec"])
        self._arguments = arguments
        self._is_stopped = False
        self.started: list[Served] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_stopped:
            self.started.append(Served(self._arguments, {"OMP_NUM_THREADS": "1"}))
            self.started[-1].process.wait()
            time.sleep(self._pause)

    def stop(self) -> None:
        self._is_stopped = True
        for served in self.started:
            with contextlib.suppress(OSError):
                os.killpg(served.process.pid, signal.SIGKILL)
        self._thread.join(30)

    def url(self, number: int) -> str:
        """The address of the server after `number` restarts, once it serves."""
        deadline = time.monotonic() + DEADLINE
        while len(self.started) <= number:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return self.started[number].wait_for(r"(http://127.0.0.1:\d+)/v1", DEADLINE)[1]


@contextlib.contextmanager
def service(*arguments: str) -> Iterator[RestartingService]:
    made = RestartingService(list(arguments))
    try:
        yield made
    finally:
        made.stop()


def test_a_killed_front_takes_its_processes_along_and_its_successor_has_the_sessions(
    tiny_model: Path, tmp_path: Path
) -> None:
    with service(str(tiny_model), *FLAGS, "--kv-disk", str(tmp_path / "kv")) as running:
        url = running.url(0)
        made = httpx.post(f"{url}/v1/sessions", json={"id": "kept", "input": "the world"}, headers=HEADERS, timeout=60)
        assert made.status_code == 200, made.text
        front = running.started[0].process.pid
        family = descendants(front)
        assert family
        os.kill(front, signal.SIGKILL)  # the front only: what the kernel does when memory runs out
        url = running.url(1)  # the folder of sessions is free: its former owner is gone
        deadline = time.monotonic() + DEADLINE
        while left := [pid for pid in family if not is_gone(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        kept = httpx.get(f"{url}/v1/sessions/kept", headers=HEADERS, timeout=60).json()
        assert kept["num_tokens"] == made.json()["num_tokens"]
        body = {"prompt": "abc", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=60).status_code == 200


def test_every_way_to_host_it_starts_a_killed_front_again() -> None:
    assert unit()["Service"]["Restart"] == "always"
    assert yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["quire"]["restart"] == "unless-stopped"
    (deployment,) = [
        each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if each["kind"] == "Deployment"
    ]
    pod = deployment["spec"]["template"]["spec"]
    assert pod.get("restartPolicy", "Always") == "Always"
    assert pod["containers"][0]["resources"]["limits"]["memory"]
