"""Hostile HTTP: smuggled, slow, truncated, endless or never read. The server is unharmed."""

from __future__ import annotations

import json
import resource
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from quire import resource_limits
from quire.server import serve
from quire.server.lifecycle import connection
from tests.processes import rss
from tests.server.attacked_server import LONG, AttackedServer, raw_request, receive, request_head, statuses
from tests.server.conftest import Live

TEXT = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 2}
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
MANY = {"prompt": "abc", "n": 16, **LONG}


class TestSmuggling:
    """What a proxy and the server might parse differently is rejected."""

    @pytest.mark.parametrize(
        "lines",
        [
            ["content-length: 4", "transfer-encoding: chunked"],
            ["transfer-encoding: chunked", "content-length: 4"],
            ["content-length: 4", "content-length: 5"],
            ["content-length: 4", "content-length: 4"],
            ["content-length: 4, 4"],
            ["content-length: -4"],
            ["content-length: +4"],
            ["content-length: 0x4"],
            ["content-length: 4 4"],
            ["content-length: 99999999999999999999999999"],
            ["content-length : 4"],
            ["transfer-encoding: xchunked"],
            ["transfer-encoding: chunked, identity"],
            ["transfer-encoding : chunked"],
            ["x: y\r\n folded: z"],
            ["x\0y: z"],
            ["x: y\0z"],
            ["x: y\rz: 1"],
            [": nameless"],
            ["no colon"],
        ],
        ids=", ".join,
    )
    def test_ambiguous_heads(self, attacked: AttackedServer, lines: list[str]) -> None:
        answer = attacked.exchange(request_head(TEXT, None, *lines) + b"0\r\n\r\n" + HEALTH)
        assert statuses(answer) == [400]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 400

    @pytest.mark.parametrize(
        "body", [b"zz\r\nabc\r\n", b"-1\r\n", b"fffffffffffffffff\r\nabc", b"3\r\nabcd\r\n0\r\n\r\n", b"3 abc\r\n"]
    )
    def test_invalid_chunks(self, attacked: AttackedServer, body: bytes) -> None:
        assert statuses(attacked.exchange(request_head(TEXT, None, "transfer-encoding: chunked") + body)) == [400]

    @pytest.mark.parametrize(
        "line", ["GET /health HTTP/1.2", "GET /health HTTP/3.0", "PRI * HTTP/2.0", "get /health HTTP/1.1",
                 "GET  HTTP/1.1", "GET /health HTTP/1.1 x", "\x16\x03\x01\x02\x00\x01",
                 "GET /\xff HTTP/1.1", "GET /a b HTTP/1.1"]
    )  # fmt: skip
    def test_invalid_request_lines(self, attacked: AttackedServer, line: str) -> None:
        assert statuses(attacked.exchange(line.encode("latin-1") + b"\r\nhost: x\r\n\r\n")) == [400]

    def test_bare_line_feeds(self, attacked: AttackedServer) -> None:
        assert statuses(attacked.exchange(b"GET /health HTTP/1.1\nhost: x\n\n")) == [400]

    def test_trailers_are_not_headers(self, attacked: AttackedServer) -> None:
        """A proxy that removes or checks headers lets trailers pass."""
        body = b'10\r\n{"prompt":"abc"}\r\n0\r\nauthorization: Bearer alpha\r\nx-tenant: other\r\n\r\n'
        lines = ["transfer-encoding: chunked", "connection: close"]
        assert statuses(attacked.exchange(request_head("/tokenize", None, *lines, key=None) + body)) == [401]
        assert statuses(attacked.exchange(request_head("/tokenize", None, *lines) + body)) == [200]

    def test_connect_and_absolute_urls(self, attacked: AttackedServer) -> None:
        assert statuses(attacked.exchange(b"CONNECT a.example:80 HTTP/1.1\r\nhost: x\r\n\r\n" + HEALTH)) == [405]
        request = request_head("http://a.example/version", None, "connection: close", method="GET")
        assert statuses(attacked.exchange(request)) == [200]  # only its path counts: nothing is proxied

    def test_protocol_upgrades_are_ignored_and_the_body_is_still_read(self, attacked: AttackedServer) -> None:
        """Java's own client offers an HTTP/2 upgrade with its first request."""
        upgrades = ["connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__"]
        request = raw_request(TEXT, BODY, *upgrades)
        assert statuses(attacked.exchange(request + request + HEALTH, answers=3)) == [200, 200, 200]
        with attacked.connect() as sock:
            for piece in (request[:20], request[20:-10], request[-10:]):
                sock.sendall(piece)
                time.sleep(0.02)
            assert statuses(receive(sock, 1)) == [200]
        for line in ("upgrade: websocket", "upgrade: websocket, h2c"):
            request = request_head("/version", None, "connection: upgrade, close", line, method="GET")
            assert statuses(attacked.exchange(request)) == [200]

    @pytest.mark.parametrize(
        "data, status",
        [
            (b"GET /health HTTP/1.1\r\n\r\n", 400),
            (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400),
            (b"GET /health HTTP/1.1\r\nhost: a b\r\n\r\n", 400),
            (b"GET /health HTTP/1.1\r\nhost: a/b@c\r\n\r\n", 400),
            (b"GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", 400),
            (b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", 400),
            (b"POST /version HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
            (b"POST /version HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
            (b"POST /version HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n"
             b"0\r\n\r\n", 400),
            (b"GET /health HTTP/0.9\r\nhost: a\r\n\r\n", 505),
            (b"GET /health HTTP/2.0\r\nhost: a\r\n\r\n", 505),
        ],
    )  # fmt: skip
    def test_ambiguous_hosts_codings_and_versions(self, attacked: AttackedServer, data: bytes, status: int) -> None:
        answer = attacked.exchange(data + HEALTH)
        assert statuses(answer) == [status]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == status
        assert statuses(attacked.exchange(HEALTH + data, answers=2))[0] == 200  # one before it is answered

    @pytest.mark.parametrize("host", [b"a.example", b"[::1]:8000", b"127.0.0.1:8000", b"", b"a_b.example:80"])
    def test_hosts_that_clients_send(self, attacked: AttackedServer, host: bytes) -> None:
        assert statuses(attacked.exchange(b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\n\r\n", answers=1)) == [200]

    @pytest.mark.parametrize("letter", ["a", "%00", "%F0%9F%98%80"])
    def test_an_unknown_path_is_not_repeated_at_length(self, attacked: AttackedServer, letter: str) -> None:
        before = len(attacked.stderr)
        answer = attacked.request("GET", f"/{letter * (60_000 // len(letter))}")
        assert answer.status_code == 404 and len(answer.content) < 1500 and "/openapi.json" in answer.text
        assert len(attacked.stderr) - before < 1000


class TestOldClients:
    def test_http_1_0_is_answered_and_the_connection_closed(self, attacked: AttackedServer) -> None:
        answer = attacked.exchange(raw_request(TEXT, BODY).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert statuses(answer) == [200] and b"connection: close" in answer

    def test_http_1_0_streams_are_not_chunked(self, attacked: AttackedServer) -> None:
        answer = attacked.exchange(raw_request(TEXT, {**BODY, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0"))
        top, _, body = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in top and f"content-length: {len(body)}".encode() in top
        assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")

    def test_http_1_0_errors_have_their_status(self, attacked: AttackedServer) -> None:
        body = {**BODY, "stream": True, "temperature": -9}
        assert statuses(attacked.exchange(raw_request(TEXT, body).replace(b"HTTP/1.1", b"HTTP/1.0"))) == [400]


class TestPipelines:
    def test_pipelined_requests_are_answered_in_order(self, attacked: AttackedServer) -> None:
        requests = [
            raw_request(TEXT, BODY),
            HEALTH,
            raw_request(TEXT, {"prompt": 5}),
            request_head("/version", method="GET"),
            HEALTH,
        ]
        assert statuses(attacked.exchange(b"".join(requests), 5)) == [200, 200, 400, 200, 200]

    def test_pipelined_requests_are_limited(self, attacked: AttackedServer) -> None:
        answered = statuses(attacked.exchange(HEALTH * 2000))
        assert 1 <= len(answered) <= connection.MAX_PIPELINED and set(answered) == {200}

    @pytest.mark.parametrize("garbage", [b"\0\1\2 garbage\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"x: " + b"y" * 200_000])
    def test_garbage_after_a_request_does_not_affect_its_response(
        self, attacked: AttackedServer, garbage: bytes
    ) -> None:
        assert statuses(attacked.exchange(HEALTH + garbage)) == [200]
        answer = attacked.exchange(raw_request(TEXT, {**MANY, "stream": True}) + garbage)
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1") == 1
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    @pytest.mark.parametrize("streams", [False, True])
    @pytest.mark.parametrize(
        "ahead", [HEALTH, HEALTH[:10], raw_request(TEXT, MANY), request_head(TEXT, 400_000) + b"x" * 300_000]
    )
    def test_a_disconnect_is_noticed_although_more_requests_are_pipelined(
        self, attacked: AttackedServer, streams: bool, ahead: bytes
    ) -> None:
        sock = attacked.connect()
        sock.sendall(raw_request(TEXT, {**MANY, "stream": streams}) + ahead)
        until(lambda: attacked.stats()["engine"]["quire:num_requests_running"] > 0)
        made = attacked.stats()["engine"]["quire:generation_tokens"]
        sock.close()
        until(lambda: attacked.stats()["engine"]["quire:num_requests_running"] == 0)
        assert attacked.stats()["engine"]["quire:generation_tokens"] - made < 16 * 200


class TestHeads:
    @pytest.mark.parametrize(
        ("start", "piece"),
        [
            (b"GET /version HTTP/1.1\r\nx: ", b"y" * 65536),
            (b"GET /version HTTP/1.1\r\n", b"x: y\r\n" * 10_000),
            (b"GET /version?", b"a" * 65536),
            (b"", b"G" * 65536),
            (b"", b"\r\n" * 30_000),
            (request_head(TEXT, None, "transfer-encoding: chunked") + b"1\r\n{\r\n0\r\nx: ", b"y" * 65536),
            (request_head(TEXT, None, "transfer-encoding: chunked") + b"1\r\n{\r\n0\r\n", b"x: y\r\n" * 10_000),
            (request_head(TEXT, None, "transfer-encoding: chunked") + b"1;", b"x" * 65536),
        ],
        ids=["a value", "lines", "a path", "a method", "empty lines", "a trailer", "trailers", "a chunk's extension"],
    )
    def test_huge_heads_are_cut_and_not_buffered(self, attacked: AttackedServer, start: bytes, piece: bytes) -> None:
        before = rss(attacked.pid)
        with attacked.connect() as sock:
            sent = 0
            with suppress(OSError):
                sock.sendall(start)
                while sent < 100 << 20:
                    sock.sendall(piece)
                    sent += len(piece)
            assert sent < 20 << 20  # what the kernel buffers
            answer = receive(sock)
        assert answer == b"" or statuses(answer) in ([431], [400])
        assert rss(attacked.pid) - before < 10 << 20

    def test_endless_heads_time_out(self, serving: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)
        monkeypatch.setattr(serve, "KEEP_ALIVE_SECONDS", 1)
        live = serving()
        address = (live.client.base_url.host, live.client.base_url.port)
        for start in (b"", HEALTH, HEALTH + HEALTH[:5], request_head("/version", 100_000, key=None) + b"x"):
            with socket.create_connection(address, timeout=10) as sock:
                sock.sendall(start)
                begin = time.monotonic()
                with suppress(OSError):
                    while time.monotonic() - begin < 8:
                        sock.sendall(b"x" if start.endswith(b"x") else b"GET"[:1] if not start else b"\r\n")
                        time.sleep(0.1)
                        start = start or b"G"
                assert time.monotonic() - begin < 6


class TestBodies:
    def test_bodies_truncated_at_any_byte(self, attacked: AttackedServer) -> None:
        request = raw_request(TEXT, {**BODY, "stream": True})
        for end in range(0, len(request), 9):
            with attacked.connect() as sock:
                sock.sendall(request[:end])
        for end in range(5, len(request), 25):
            with attacked.connect() as sock:
                sock.sendall(request[:end])
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end

    def test_bodies_longer_or_shorter_than_content_length(self, attacked: AttackedServer) -> None:
        data = json.dumps(BODY).encode()
        assert statuses(attacked.exchange(request_head(TEXT, len(data) - 5) + data, 1)) == [400]
        assert statuses(attacked.exchange(request_head(TEXT, len(data)) + data + b"more", 1)) == [200]
        begin = time.monotonic()
        with attacked.connect() as sock:
            sock.sendall(request_head(TEXT, len(data) + 5) + data)
            assert statuses(receive(sock)) == [408]
        assert 1.5 < time.monotonic() - begin < 15

    @pytest.mark.parametrize("framing", ["length", "chunks"])
    def test_slow_bodies_time_out(self, attacked: AttackedServer, framing: str) -> None:
        chunked = framing == "chunks"
        begin = time.monotonic()
        with attacked.connect() as sock:
            sock.sendall(request_head(TEXT, None if chunked else 5000, *["transfer-encoding: chunked"] * chunked))
            with suppress(OSError):
                while time.monotonic() - begin < 20:
                    sock.sendall(b"1\r\n \r\n" if chunked else b" ")
                    time.sleep(0.1)
            assert statuses(receive(sock)) in ([408], [])
        assert time.monotonic() - begin < 15

    def test_too_large_bodies(self, attacked: AttackedServer) -> None:
        assert statuses(attacked.exchange(request_head(TEXT, 1 << 40) + b"x" * 1000)) == [413]
        before = rss(attacked.pid)
        with attacked.connect() as sock, suppress(OSError):
            sock.sendall(request_head(TEXT, None, "transfer-encoding: chunked"))
            for _ in range(2000):
                sock.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        assert rss(attacked.pid) - before < 100 << 20

    def test_unauthorized_bodies_are_not_buffered(self, attacked: AttackedServer) -> None:
        """The key is checked before the body is read."""
        with attacked.connect() as sock:
            sock.sendall(request_head(TEXT, 20 << 20, key=None))
            assert b" 401 " in sock.recv(4096)
            with suppress(OSError):
                sock.sendall(b"x" * (4 << 20))

    def test_a_half_closed_connection_counts_as_disconnected(self, attacked: AttackedServer) -> None:
        """A client that has left cannot be distinguished from one that has only finished sending."""
        with attacked.connect() as sock:
            sock.sendall(raw_request(TEXT, MANY))
            until(lambda: attacked.stats()["engine"]["quire:num_requests_running"] > 0)
            sock.shutdown(socket.SHUT_WR)
            assert receive(sock) == b""


class TestReaders:
    BIG: dict[str, Any] = {"prompt": ["abc", "abd", "abe", "abf"], "n": 8, "logprobs": 20, **LONG}  # noqa: RUF012

    @pytest.mark.parametrize(("streams", "connection"), [(False, "keep-alive"), (False, "close"), (True, "keep-alive")])
    def test_a_client_that_never_reads_is_disconnected(
        self, attacked: AttackedServer, streams: bool, connection: str
    ) -> None:
        with attacked.connect(buffer=4096) as sock:
            sock.sendall(raw_request(TEXT, {**self.BIG, "stream": streams}, f"connection: {connection}"))
            attacked.assert_unharmed(60)  # while the client's end is still open

    def test_a_client_that_sends_more_instead_of_reading_is_disconnected(self, attacked: AttackedServer) -> None:
        with attacked.connect(buffer=4096) as sock:
            sock.sendall(raw_request(TEXT, self.BIG) + raw_request(TEXT, {**BODY, "stream": True}) + HEALTH * 3)
            attacked.assert_unharmed(60)

    def test_a_slow_reader_gets_everything(self, attacked: AttackedServer) -> None:
        with attacked.connect(buffer=4096) as sock:
            sock.sendall(raw_request(TEXT, {**MANY, "stream": True, "stream_options": {"include_usage": True}}))
            data = b""
            while not data.endswith(b"\r\n0\r\n\r\n"):
                data += (piece := sock.recv(20_000))
                assert piece
                time.sleep(0.001)
        assert b'"completion_tokens":3200' in data and data.count(b"[DONE]") == 1


def test_the_descriptor_limit_is_raised_to_the_hard_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        resource_limits.raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, resource_limits.MAX_DESCRIPTORS), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_connections_than_descriptors(attacked: AttackedServer) -> None:
    """A flood takes all descriptors; when it ends, the server accepts connections again."""
    soft, hard = resource.prlimit(attacked.pid, resource.RLIMIT_NOFILE)
    limit = sum(attacked.start.descriptors.values()) + 20
    resource.prlimit(attacked.pid, resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with ExitStack() as flood:
            for _ in range(100):
                with suppress(OSError):
                    flood.enter_context(attacked.connect())
            time.sleep(0.2)
    finally:
        resource.prlimit(attacked.pid, resource.RLIMIT_NOFILE, (soft, hard))
    attacked.assert_unharmed()
    assert attacked.post(TEXT, BODY).status_code == 200


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.01)
