"""Work that clients leave behind: it is not started, or abandoned; it delays no other tenant and no shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.api.text_encoding import TextEncoder
from tests.abuse.bodies import CHAT, DETOKENIZE, TEXT, TOKENIZE, USER
from tests.processes import rss
from tests.server.attacked_server import FLAGS, KEYS, AttackedServer, request_head
from tests.server.conftest import Live
from tests.server.served import served

LONG = "the world " * 2000


class Gate:
    """Tokenizing that waits to be let on; counts what has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.begun: list[int] = []
        encode = TextEncoder.encode

        def gated(encoder: TextEncoder, text: str, *more: Any) -> list[int]:
            if text.startswith("the world"):
                self.begun.append(len(text))
                assert self.open.wait(60)
            return encode(encoder, text, *more)

        monkeypatch.setattr(TextEncoder, "encode", gated)


def wait_until(holds: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def sent(live: Live, path: str, body: Any, key: str = "none") -> Iterator[socket.socket]:
    """A client that has sent a request, and disconnects."""
    name, port = live.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    with socket.create_connection((name, int(port))) as sock:
        sock.sendall(request_head(path, len(data), key=key) + data)
        yield sock


@pytest.mark.parametrize("path", [TOKENIZE, TEXT])
def test_work_of_clients_that_hung_up_is_not_started(
    serving: Callable[..., Live], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    live, gate = serving(), Gate(monkeypatch)
    pool = live.server.limits.work
    clients = [sent(live, path, {"prompt": LONG}) for _ in range(8)]
    for client in clients:
        client.__enter__()
    wait_until(lambda: len(gate.begun) == pool._per_tenant and pool.num_waiting == 8 - pool._per_tenant)
    for client in clients:
        client.__exit__(None, None, None)
    wait_until(lambda: pool.num_waiting == 0 and not live.server.exchanges)
    gate.open.set()
    wait_until(lambda: pool.num_running == 0)
    assert len(gate.begun) == pool._per_tenant


def test_one_tenants_long_texts_do_not_hold_up_another(
    serving: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    live, gate = serving(api_key=KEYS), Gate(monkeypatch)
    pool = live.server.limits.work
    with ThreadPoolExecutor(20) as clients:
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        flood = [clients.submit(live.post, TOKENIZE, {"prompt": LONG}, headers=headers) for _ in range(20)]
        wait_until(lambda: pool.num_waiting == 20 - pool._per_tenant)
        other = live.post(TEXT, {"prompt": "a b " * 1500}, headers={"authorization": f"Bearer {KEYS[1]}"})
        assert other.status_code == 400 and "maximum context length" in other.text
        assert len(gate.begun) == pool._per_tenant
        gate.open.set()
        assert {each.result().status_code for each in flood} == {400}


def test_tokenize_and_detokenize_have_the_bounds_of_completions(live: Live) -> None:
    assert live.post(TOKENIZE, {"prompt": "a" * 256}).json()["count"] == 256
    for path, body in (
        (TOKENIZE, {"prompt": "a" * 257}),
        (TOKENIZE, {"prompt": "the world " * 300_000}),
        (TOKENIZE, {"messages": [{"role": "user", "content": "a" * 300}]}),
        (DETOKENIZE, {"tokens": [5] * 257}),
    ):
        answer = live.post(path, body)
        assert answer.status_code == 400 and "maximum context length is 256" in answer.text, answer.text[:200]
    assert len(live.post(DETOKENIZE, {"tokens": [90] * 256}).json()["prompt"]) >= 256


def test_a_shutdown_does_not_wait_for_work(serving: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    """The drain has a time limit, and abandoned work none."""
    live, gate = serving(shutdown_timeout=0.2), Gate(monkeypatch)
    pool = live.server.limits.work
    with sent(live, TOKENIZE, {"prompt": LONG}) as sock:
        wait_until(lambda: bool(gate.begun))
        live.call(live.http.on_signal)
        sock.settimeout(30)
        assert b" 503 " in sock.recv(1 << 16)[:20]
        wait_until(lambda: not live.server.exchanges)
    assert pool.num_running == 1
    gate.open.set()


SLOW_TEMPLATE = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


def test_sigterm_keeps_its_time_limit_whatever_runs(tiny_model: Path) -> None:
    """Thirty templates that each take their whole second of CPU time, when the signal comes."""
    flags = (*FLAGS, "--trust-request-chat-template", "--shutdown-timeout", "0.5")
    with served(str(tiny_model), *flags) as made:
        url = made.wait_for(r"http://127.0.0.1:(\d+)/v1")
        body = json.dumps({"messages": USER, "chat_template": SLOW_TEMPLATE}).encode()
        socks = [socket.create_connection(("127.0.0.1", int(url[1]))) for _ in range(30)]
        for sock in socks:
            sock.sendall(request_head(CHAT, len(body)) + body)
        time.sleep(0.5)
        begin = time.monotonic()
        made.process.send_signal(signal.SIGTERM)
        assert made.end() == 0, made.stderr
        took = time.monotonic() - begin
        for sock in socks:
            sock.close()
    assert took < 25  # all of them would take 30 s of CPU time; this takes about 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_long_prompts_and_hang_ups_leave_memory_bounded(attacked: AttackedServer) -> None:
    """Eight prompts as long as a body may be, on each route that tokenizes, then all hang up; twenty times."""
    before = highest = rss(attacked.pid)
    texts = ["a b " * 2_000_000, "é" * 3_900_000, " " * 7_800_000]
    for turn in range(20):
        path = (TOKENIZE, TEXT, CHAT)[turn % 3]
        field: Any = {"messages": [{"role": "user", "content": texts[turn % 3]}]} if path == CHAT else None
        data = json.dumps(field or {"prompt": texts[turn % 3]}, ensure_ascii=False).encode()
        socks = [attacked.connect() for _ in range(8)]
        threads = [
            threading.Thread(target=sock.sendall, args=(request_head(path, len(data)) + data,)) for sock in socks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        highest = max(highest, rss(attacked.pid))
        for sock in socks:
            sock.close()
        begin = time.monotonic()
        assert attacked.post(TEXT, {"prompt": "abc", "max_tokens": 1}, KEYS[1]).status_code == 200
        assert time.monotonic() - begin < 10
    attacked.assert_unharmed()
    print(f"\nfront: {before >> 20} MiB before, at most {highest >> 20}, {rss(attacked.pid) >> 20} after")
    assert highest - before < 1 << 30
    assert os.path.exists(f"/proc/{attacked.pid}")
