"""Engines are replaced under a running server, on SIGHUP or by /admin/reload, and no client notices."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import AsyncLLM
from quire.api.replica import Replica
from quire.server.config import ServerConfig
from quire.server.context import ServerContext
from quire.server.serve import listening, run

ADMIN = {"authorization": "Bearer boss"}
LENGTH = 200


class NullLLM(AsyncLLM):
    """Its engines compute nothing."""

    engine_module = "benchmarks.null_engine"


class Client:
    """A client in another thread than the server."""

    def __init__(self, llm: AsyncLLM, url: str) -> None:
        self.llm = llm
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self.pool = ThreadPoolExecutor(8)

    def complete(self) -> int:
        """Tokens of an answer."""
        asked = {"prompt": "abc", "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
        answer = self.http.post("/v1/completions", json=asked).raise_for_status().json()
        return int(answer["usage"]["completion_tokens"])

    def begin(self, count: int) -> list[Future[int]]:
        """Requests whose first tokens are there."""
        before = self.llm.token_times.tokens
        requests = [self.pool.submit(self.complete) for _ in range(count)]
        self.until(lambda: self.llm.token_times.tokens > before + 10 * count)
        return requests

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)


def serve(llm: AsyncLLM, work: Callable[[Client], None], **settings: Any) -> None:
    """Run a server with signal handlers in this thread until `work`, in another, is done."""
    config = ServerConfig(port=0, admin_key="boss", **settings)
    failures: list[BaseException] = []

    def on_ready(context: ServerContext, url: str) -> None:
        def run_client() -> None:
            try:
                work(Client(llm, url))
            except BaseException as error:
                failures.append(error)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=run_client, daemon=True).start()

    try:
        with listening(config) as (sock, url):
            asyncio.run(run(llm, config, sock, url, on_ready))
    finally:
        llm.shutdown()
    if failures:
        raise failures[0]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of replicas, as their engines are started. The first engines are so slow that no request ends before they
    are replaced, unless a test sets another pace; later ones are fast."""
    monkeypatch.setenv("NULL_ENGINE_PACE", "20")
    numbers: list[int] = []
    start, adopt = Replica.start, Replica.adopt

    def noted(replica: Replica) -> None:
        numbers.append(replica.number)
        start(replica)

    def adopt_and_hurry(replica: Replica) -> None:
        adopt(replica)
        os.environ["NULL_ENGINE_PACE"] = "1000"

    monkeypatch.setattr(Replica, "start", noted)
    monkeypatch.setattr(Replica, "adopt", adopt_and_hurry)
    return numbers


@pytest.mark.parametrize("replicas", [1, 2])
def test_signals_replace_each_engine_once_and_no_request_is_lost(
    tiny_model: Path, started: list[int], replicas: int
) -> None:
    llm = NullLLM(tiny_model, device="cpu", num_gpu_blocks_override=128, data_parallel_size=replicas)
    started.clear()

    def work(client: Client) -> None:
        requests = client.begin(4)
        for _ in range(3):  # they are one reload
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
        client.until(lambda: llm.is_reloading)
        assert client.http.get("/health").status_code == 200  # a liveness probe must not end the server
        late = client.pool.submit(client.complete)
        assert [one.result(60) for one in (*requests, late)] == [LENGTH] * 5
        client.until(lambda: len(started) == replicas and not llm.is_reloading and not llm.errored)
        assert client.http.get("/ready").status_code == 200 and client.complete() == LENGTH
        assert started == list(range(replicas)) and llm.num_resumed > 0
        metrics = client.http.get("/metrics").text
        assert "quire:requests_resumed_total{" in metrics
        stats = client.http.get("/admin/stats", headers=ADMIN).json()
        assert stats["status"] == "serving" and stats["restarts"] == 0

    serve(llm, work, reload_timeout=0.0)


def test_the_admin_route_waits_until_all_engines_are_replaced(
    tiny_model: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NULL_ENGINE_PACE", "200")
    llm = NullLLM(tiny_model, device="cpu", num_gpu_blocks_override=128)
    started.clear()

    def work(client: Client) -> None:
        assert client.http.post("/admin/reload").status_code == 401 and not started
        requests = client.begin(2)
        both = [client.pool.submit(client.http.post, "/admin/reload", headers=ADMIN) for _ in range(2)]
        for answer in (one.result(60) for one in both):
            assert answer.status_code == 200, answer.text
            assert answer.json()["engines"] == 1 and answer.json()["resumed_requests"] == 0
        assert started == [0]  # the second joined the first
        assert [one.result(60) for one in requests] == [LENGTH] * 2  # they had time to finish

    serve(llm, work, reload_timeout=60.0)


def test_a_reload_that_fails_is_an_error_and_the_supervisor_goes_on(
    tiny_model: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = NullLLM(tiny_model, device="cpu", num_gpu_blocks_override=128)
    started.clear()
    start = Replica.start

    def fail_once(replica: Replica) -> None:
        start(replica)
        if len(started) == 1:
            replica.starting.kill()  # type: ignore[union-attr]

    monkeypatch.setattr(Replica, "start", fail_once)

    def work(client: Client) -> None:
        requests = client.begin(2)
        failed = client.http.post("/admin/reload", headers=ADMIN)
        assert failed.status_code == 503 and "before it was ready" in failed.text
        assert [one.result(60) for one in requests] == [LENGTH] * 2
        assert len(started) == 2

    serve(llm, work, reload_timeout=0.0)
