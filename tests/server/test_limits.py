"""Admission, deadlines and disconnects."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from quire.server import context as context_module
from quire.server.lifecycle.supervisor import Supervisor
from quire.server.limits import AdmissionLimiter
from quire.server.routes.page import ROUTES as PAGE_ROUTES
from tests.server.conftest import Host, Live
from tests.server.test_errors import error_of, read_all

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0}
ROWS = 16


@contextmanager
def full_server(live: Live) -> Iterator[None]:
    """Every row of the engine is occupied while the block runs (for at most 200 steps); then its client disconnects."""
    body = {"prompt": "abc", "n": ROWS, "stream": True, **LONG}
    with live.client.stream("POST", TEXT, json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)
        yield


class TestKeys:
    def test_every_route_except_probes_needs_a_key(self, serving: Callable[..., Live]) -> None:
        live = serving(api_key=("first", "second"), admin_key="boss")
        for path, methods in live.client.get(
            "/openapi.json", headers={"authorization": "Bearer first"}
        ).json()["paths"].items():  # fmt: skip
            for method in methods:
                answer = live.client.request(method.upper(), path.replace("{model}", "tiny"))
                if path in ("/health", "/ping") or path in {route.path for route in PAGE_ROUTES}:
                    assert answer.status_code == (404 if "{" in path else 200)
                else:
                    assert answer.status_code == 401 and answer.json()["error"]["message"]
        error_of(live.client.get("/no/such/route"), 401)

    def test_probes_say_why_only_with_a_key(
        self, serving: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        live = serving(api_key=("first",))
        monkeypatch.setattr(Supervisor, "is_serving", False)
        monkeypatch.setattr(Supervisor, "status", "no file /home/me/model")
        for path in ("/health", "/ping"):
            for key, says_why in ((None, False), ("other", False), ("first", True)):
                answer = live.client.get(path, headers={} if key is None else {"x-api-key": key})
                assert (answer.status_code, "/home/me" in answer.text) == (503, says_why)
                assert int(answer.headers["retry-after"]) >= 1

    def test_any_of_the_keys_is_accepted(self, serving: Callable[..., Live]) -> None:
        live = serving(api_key=("first", "second"))
        for key in ("first", "second"):
            assert live.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
            assert live.client.get("/v1/models", headers={"x-api-key": key}).status_code == 200
        for wrong in ("Bearer third", "Bearer firs", "Bearer first2", "Bearer", "first", "Basic first"):
            error_of(live.client.get("/v1/models", headers={"authorization": wrong}), 401)

    def test_admin_routes_need_the_admin_key(self, serving: Callable[..., Live]) -> None:
        live = serving(api_key=("user",), admin_key="boss")
        error_of(live.client.get("/admin/stats", headers={"authorization": "Bearer user"}), 401)
        error_of(live.client.get("/v1/models", headers={"authorization": "Bearer boss"}), 401)
        headers = {"authorization": "Bearer boss"}
        assert live.client.post("/admin/reset_prefix_cache", headers=headers).json() == {"is_empty": True}
        stats = live.client.get("/admin/stats", headers=headers).json()
        assert stats["status"] == "serving" and stats["open_requests"] == 0

    def test_tenants_share_no_cache(self, live: Live, serving: Callable[..., Live]) -> None:
        def cached(where: Live, **headers: str) -> int:
            body = {"prompt": list(range(10, 60)), "max_tokens": 1}
            usage = where.post(TEXT, body, headers=headers).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        keyed = serving(api_key=("first", "second"))
        first, second = {"authorization": "Bearer first"}, {"authorization": "Bearer second"}
        assert [cached(keyed, **first), cached(keyed, **first), cached(keyed, **second)] == [0, 48, 0]
        assert [cached(keyed, **second, **{"x-tenant": "x"}), cached(keyed, **second)] == [48, 48]
        assert [cached(live, **{"x-tenant": "a"}), cached(live, **{"x-tenant": "b"})] == [0, 0]


class TestQueue:
    def test_a_full_queue_answers_429(self, serving: Callable[..., Live]) -> None:
        live = serving(max_queued_requests=2)
        with full_server(live):
            refused = live.post(TEXT, {"prompt": "abc", "n": 3, "max_tokens": 2})
            error = error_of(refused, 429)
            assert error["type"] == "RateLimitError"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            streamed = live.post(TEXT, {"prompt": "abc", "n": 3, "max_tokens": 2, "stream": True})
            error_of(streamed, 429)
            assert live.client.get("/load").json() == {"server_load": 1}
        live.assert_idle()
        assert live.post(TEXT, {"prompt": "abc", "n": 3, "max_tokens": 2}).status_code == 200

    def test_queued_prompts_are_limited_in_tokens(self, serving: Callable[..., Live]) -> None:
        live = serving(max_queued_tokens=150)
        answers: list[httpx.Response] = []
        with full_server(live):
            waiting = threading.Thread(
                target=lambda: answers.append(live.post(TEXT, {"prompt": [5] * 100, "max_tokens": 1}))
            )
            waiting.start()
            while live.server.admission.queued_tokens == 0:
                time.sleep(0.001)
            error = error_of(live.post(TEXT, {"prompt": [6] * 100, "max_tokens": 1}), 429)
            assert "100 prompt tokens" in error["message"]
        waiting.join()
        assert answers[0].status_code == 200

    def test_an_empty_server_admits_a_request_over_the_limit(self) -> None:
        admission = AdmissionLimiter(rows=2, max_requests=1, max_tokens=10)
        ticket = admission.enter([(8, 1000)])[0]
        ticket.start()
        ticket.leave()
        ticket.leave()
        assert (admission.sequences, admission.queued_tokens, admission.requests) == (0, 0, 0)
        admission.enter([(2, 5)])
        admission.enter([(1, 5)])
        with pytest.raises(Exception, match="busy"):
            admission.enter([(1, 1)])


class TestDeadlines:
    @pytest.mark.parametrize("how", ["field", "header", "server"])
    def test_a_request_past_its_deadline_is_ended(self, serving: Callable[..., Live], how: str) -> None:
        live = serving(request_timeout=0.05 if how == "server" else None)
        body = {"prompt": "abc", "n": ROWS, **LONG} | ({"timeout": 0.05} if how == "field" else {})
        headers = {"x-request-timeout": "0.05"} if how == "header" else {}
        error = error_of(live.post(TEXT, body, headers=headers), 408)
        assert error["type"] == "timeout" and "0.05" in error["message"]
        live.assert_idle()

    def test_a_queued_request_past_its_deadline_is_ended(self, live: Live) -> None:
        with full_server(live):
            error_of(live.post(TEXT, {"prompt": "abc", "timeout": 0.02}), 408)

    def test_a_stream_reports_the_timeout_in_its_last_event(self, live: Live) -> None:
        # Sixty-four times what the engine has rows for: 12,800 steps, which no machine does in time.
        body = {"prompt": ["abc"] * 64, "n": ROWS, "stream": True, "timeout": 0.25, **LONG}
        answer = live.post(TEXT, body)
        assert answer.status_code in (200, 408)
        if answer.status_code == 200:
            *_, last, done, _ = answer.text.split("\n\n")
            assert done == "data: [DONE]"
            assert json.loads(last[6:])["error"]["code"] == 408

    def test_the_timeout_header_is_validated(self, live: Live) -> None:
        for wrong in ("0", "-1", "nan", "1e9", "soon"):
            answer = live.post(TEXT, {"prompt": "abc"}, headers={"x-request-timeout": wrong})
            error_of(answer, 400)


def send(live: Live, body: dict[str, Any], buffer: int = 0) -> socket.socket:
    """Send a request without reading the response, with a receive buffer of `buffer` bytes."""
    data = json.dumps(body).encode()
    address = httpx.URL(live.url)
    sock = socket.socket()
    if buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.settimeout(20)
    sock.connect((address.host, address.port))
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(data) + data
    )
    return sock


def disconnect(live: Live, count: int) -> None:
    rng = random.Random(7)
    for i in range(count):
        body = {"prompt": ["abc", "the world"][: 1 + i % 2], "n": 1 + i % 3, "stream": bool(i % 4 < 2), **LONG}
        sock = send(live, body)
        time.sleep(rng.random() * 0.02)
        if rng.random() < 0.3:
            sock.settimeout(0.2)
            with suppress(OSError):
                sock.recv(100)
        sock.close()


class TestHangUps:
    def test_disconnects_leave_nothing_behind(self, live: Live) -> None:
        disconnect(live, 40)
        live.assert_idle(5)

    @pytest.mark.slow
    def test_a_thousand_disconnects(self, live: Live) -> None:
        disconnect(live, 1000)
        live.assert_idle(5)

    @pytest.mark.parametrize("streams", [False, True])
    def test_the_engine_stops_within_a_step(self, live: Live, streams: bool) -> None:
        before = live.engine_metrics()["quire:generation_tokens"]
        sock = send(live, {"prompt": "abc", "n": ROWS, "stream": streams, **LONG})
        while live.engine_metrics()["quire:num_requests_running"] == 0:
            time.sleep(0.005)
        sock.close()
        live.assert_idle(5)
        assert live.engine_metrics()["quire:generation_tokens"] - before < ROWS * 200


class TestSlowReaders:
    BODY: ClassVar[dict[str, Any]] = {"prompt": "abc", "n": 4, "stream": True, "logprobs": 5, **LONG}

    @staticmethod
    def with_small_buffers(live: Live) -> Live:
        """The kernel would buffer megabytes for a client that does not read."""
        for sock in live.http.servers[0].sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        return live

    def test_unread_output_is_merged_and_nothing_is_lost(self, serving: Callable[..., Live]) -> None:
        live = self.with_small_buffers(serving())
        body = {**self.BODY, "seed": 5}
        whole = live.post(TEXT, {**body, "stream": False}).json()
        with send(live, body, 8192) as sock:
            time.sleep(1.5)
            data = b""
            while b"[DONE]" not in data:
                data += sock.recv(1 << 20)
        lines = [line for line in data.split(b"\r\n") if line.startswith(b"data: {")]
        texts = [""] * 4
        for line in lines:
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert len(lines) < 4 * 200

    def test_a_client_that_never_reads_is_disconnected(
        self, serving: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(context_module, "STALL_CHECK_SECONDS", 0.1)
        live = self.with_small_buffers(serving(stall_timeout=0.5))
        with send(live, self.BODY, 2048) as sock:
            while not live.server.exchanges:
                time.sleep(0.01)
            live.assert_idle(10)
            assert b"[DONE]" not in read_all(sock)


def test_cors_is_off_by_default(live: Live, serving: Callable[..., Live]) -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in live.client.get("/health", headers=headers).headers
    assert live.client.options(CHAT, headers=headers).status_code == 405
    open_to_a = serving(allowed_origins=("https://a.example",))
    answer = open_to_a.client.options(CHAT, headers=headers)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://a.example"
    other = open_to_a.client.get("/health", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


class TestBodies:
    """Limits on each body, and on all of them together."""

    def test_too_many_bytes_of_bodies_together_are_rejected(self, serving: Callable[..., Live]) -> None:
        live = serving(max_body_bytes=300_000, max_open_body_bytes=500_000)
        body = json.dumps({"prompt": "abc", "max_tokens": 1}).encode() + b" " * 200_000
        with half_sent(live, body), half_sent(live, body):
            wait_until(lambda: live.server.bodies.held > 300_000)
            refused = live.client.post(TEXT, content=body, headers={"content-type": "application/json"})
            assert (
                refused.headers["retry-after"] == "1" and "--max-open-body-bytes" in error_of(refused, 429)["message"]
            )
            assert live.post(TEXT, {"prompt": "abc", "max_tokens": 1}).status_code == 200
        wait_until(lambda: live.server.bodies.held == 0)
        again = live.client.post(TEXT, content=body, headers={"content-type": "application/json"})
        assert again.status_code == 200

    def test_bodies_count_until_they_are_answered(self, live: Live) -> None:
        with full_server(live):
            assert live.server.bodies.held > 0
        wait_until(lambda: live.server.bodies.held == 0)


@contextmanager
def half_sent(live: Live, body: bytes) -> Iterator[None]:
    """A client that has sent most of its body, and then disconnects."""
    host, port = live.url.removeprefix("http://").split(":")
    head = f"POST {TEXT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + body[:-10])
        yield


def wait_until(holds: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_prompts_times_sequences_are_limited(serving: Callable[..., Live]) -> None:
    live = serving(max_prompts=6)
    assert live.post(TEXT, {"prompt": ["a", "b"], "n": 3, "max_tokens": 1}).status_code == 200
    assert live.post(TEXT, {"prompt": "a", "n": 7, "max_tokens": 1}).status_code == 200
    assert error_of(live.post(TEXT, {"prompt": ["a", "b"], "n": 4, "max_tokens": 1}), 400)["param"] == "n"
    assert error_of(live.post(TEXT, {"prompt": ["a"] * 7, "max_tokens": 1}), 400)["param"] == "prompt"


def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it(live: Live) -> None:
    text = "a b " * 2_000_000
    began = time.perf_counter()
    for path, body, param in (
        (TEXT, {"prompt": text}, "input_text"),
        (CHAT, {"messages": [{"role": "user", "content": text}]}, "input_text"),
        ("/v1/embeddings", {"input": ["a", text]}, "input"),
    ):
        answer = live.post(path, body)
        assert answer.status_code == 400, answer.text[:200]
        assert answer.json()["error"]["param"] == param
    assert time.perf_counter() - began < 5


def test_without_a_tokenizer_text_is_refused_and_token_ids_are_not(tiny_model: Path) -> None:
    host = Host(tiny_model, skip_tokenizer_init=True)
    live, stop = host.start()
    try:
        for path, body in ((TEXT, {"prompt": "abc"}), (CHAT, {"messages": [{"role": "user", "content": "abc"}]})):
            assert "--skip-tokenizer-init" in error_of(live.post(path, body), 400)["message"]
        assert "--skip-tokenizer-init" in error_of(live.post("/v1/embeddings", {"input": "abc"}), 400)["message"]
        answer = live.post(TEXT, {"prompt": [5, 6], "max_tokens": 3, "return_token_ids": True, "ignore_eos": True})
        assert len(answer.json()["choices"][0]["token_ids"]) == 3
        tools = [{"type": "function", "function": {"name": "f"}}]
        error_of(live.post(CHAT, {"messages": [{"role": "user", "content": "abc"}], "tools": tools}), 400)
    finally:
        stop()
        host.close()
