"""Ten thousand open streams that wait for their first token cost the others nothing."""

from __future__ import annotations

import json
import resource
import selectors
import socket

import httpx
import pytest

from benchmarks.front_overhead import Stream, front_seconds, null_server
from quire.loading.hub import DEFAULT_MODEL

IDLE, ROWS, PACE = 10_000, 64, 20.0
MEASURED_TOKENS = 15_000
AT_ONCE = 100


class BusyStreams:
    """As many streams as the engine has rows, so that others wait; none ends during the test."""

    def __init__(self, host: str, port: int) -> None:
        self._selector = selectors.DefaultSelector()
        for _ in range(ROWS):
            stream = Stream(host, port, "completions", 8000)
            self._selector.register(stream.socket, selectors.EVENT_READ, stream)

    def read(self, tokens: int) -> None:
        """Read at least so many tokens."""
        while tokens > 0:
            for key, _ in self._selector.select():
                tokens += key.data.events
                key.data.read()
                tokens -= key.data.events
                assert not key.data.is_over

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.socket.close()


def waiting_stream(host: str, port: int) -> socket.socket:
    """A connection with a request for a stream on it."""
    body = json.dumps({"prompt": "a", "max_tokens": 9, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    sock = socket.create_connection((host, port))
    sock.sendall(head % len(body) + body)
    return sock


@pytest.mark.slow
@pytest.mark.parametrize("fronts", [1, 2])
def test_ten_thousand_idle_streams_do_not_slow_others(fronts: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < IDLE + 1000:
        pytest.skip(f"this process may open {hard} files (ulimit -Hn), and each stream is one")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, IDLE + 1000), hard))
    with null_server(PACE, DEFAULT_MODEL, fronts=fronts, max_num_seqs=ROWS) as (host, port, pid):
        busy = BusyStreams(host, port)
        busy.read(ROWS * 10)  # warm-up
        costs: list[float] = []
        idle: list[socket.socket] = []
        for _ in range(2):
            begin = front_seconds(pid)
            busy.read(MEASURED_TOKENS)
            costs.append(front_seconds(pid) - begin)
            while len(idle) < IDLE:
                idle += [waiting_stream(host, port) for _ in range(AT_ONCE)]
                busy.read(1)
            while httpx.get(f"http://{host}:{port}/load", timeout=60).json()["server_load"] < IDLE + ROWS:
                busy.read(ROWS)
        for sock in idle:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)  # it is open, and nothing has come
            sock.close()
        busy.close()
    print(f"{MEASURED_TOKENS} tokens: {costs[0]:.2f} CPU s alone, {costs[1]:.2f} beside {IDLE} idle streams")
    assert costs[1] < 1.5 * costs[0]
