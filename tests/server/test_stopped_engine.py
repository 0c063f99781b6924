"""Routes that ask the engine something answer in bounded time while it is stopped."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.attacked_server import ADMIN, KEYS, AttackedServer
from tests.server.conftest import Host

ROUTES = (
    ("GET", "/admin/stats", ADMIN),
    ("GET", "/admin/memory", ADMIN),
    ("POST", "/admin/reset_prefix_cache", ADMIN),
    ("GET", "/v1/sessions", KEYS[0]),
    ("GET", "/v1/sessions/a", KEYS[0]),
    ("DELETE", "/v1/sessions/a", KEYS[0]),
    ("GET", "/v1/sessions/a/export", KEYS[0]),
    ("POST", "/v1/sessions/a/suspend?wait=true", KEYS[0]),
)
BOUND = 30.0
"""Seconds: a few on an idle machine."""


def test_waits_for_a_stopped_engine_are_bounded(attacked: AttackedServer) -> None:
    engine = attacked.engine
    os.kill(engine, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with ThreadPoolExecutor(len(ROUTES)) as pool:
            answers = list(pool.map(lambda route: attacked.request(*route, timeout=BOUND), ROUTES))
        assert time.monotonic() - begin < BOUND
    finally:
        os.kill(engine, signal.SIGCONT)
    stats, *others = answers
    assert stats.status_code == 200 and stats.json()["engine"] == {}
    assert "has made no step" in stats.json()["status"]
    for answer in others:
        assert answer.status_code == 503 and "the engine does not answer" in answer.text, answer.text
        assert answer.headers["retry-after"]
    attacked.assert_unharmed()
    assert attacked.stats()["engine"] and attacked.stats()["status"] == "serving"


@pytest.mark.slow
def test_one_stopped_replica_is_named_and_the_others_report(tiny_model: Any) -> None:
    host = Host(tiny_model, data_parallel_size=2)
    live, stop = host.start(admin_key="boss")
    admin = {"authorization": "Bearer boss"}
    pid = host.llm.replicas[1].pid
    try:
        os.kill(pid, signal.SIGSTOP)
        stats = live.client.get("/admin/stats", headers=admin, timeout=BOUND).json()
        assert live.client.get("/admin/memory?replica=1", headers=admin, timeout=BOUND).status_code == 503
        assert live.client.get("/admin/memory?replica=0", headers=admin).status_code == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "has made no step" in stats["status"] and stats["engine"]
    first, second = stats["replicas"]
    assert first["status"] == "serving" and first["engine"] and "has made no step" in second["status"]
    stop()
    host.close()
