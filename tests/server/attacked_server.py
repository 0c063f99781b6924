"""A `quire serve` process with the tiny model, to be attacked: its responses, its resources, its state afterwards."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.processes import children, descendants, descriptors, is_gone
from tests.server.served import Served

KEYS = ("alpha", "beta")
ADMIN = "boss"
FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "256", "--port", "0", "--log-level",
    "warning", "--served-model-name", "tiny", "--no-enable-tool-preamble", "--api-key", *KEYS, "--admin-key", ADMIN,
)  # fmt: skip
IDLE = ("quire:num_requests_running", "quire:num_requests_waiting", "quire:num_blocks_used")
LISTENING, CLOSED = "0A", "0"  # in /proc/net/tcp: a state, and the inode of a socket that only the kernel still holds
LONG = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0}


@dataclass(frozen=True)
class Holdings:
    """Resources a server could leak: descriptors by kind, processes, and temporary files by name prefix (without the
    random suffix)."""

    descriptors: dict[str, int]
    engines: int
    temporary: tuple[str, ...]


class AttackedServer:
    """A server in its own process."""

    def __init__(self, served: Served, temporary: Path) -> None:
        self._served = served
        self._temporary = temporary
        self._client = httpx.Client(timeout=60, verify=False, trust_env=False, headers={"connection": "close"})
        self.url = served.wait_for(r"(http://127.0.0.1:\d+)/v1")[1]
        self.pid = served.process.pid
        parts = urlsplit(self.url)
        self.address = (parts.hostname or "", parts.port or 0)
        self._warm_up()
        self._wait_until_alone()
        self.start = self.holdings()

    # Sending requests

    def post(self, path: str, body: Any, key: str = KEYS[0], **headers: str) -> httpx.Response:
        """Post JSON, or bytes unchanged, on a new connection."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.request("POST", path, key, content=data, headers={"content-type": "application/json", **named})

    def request(self, method: str, path: str, key: str | None = KEYS[0], **more: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self._client.request(method, self.url + path, headers={**headers, **more.pop("headers", {})}, **more)

    def connect(self, buffer: int = 0) -> socket.socket:
        """A bare connection; `buffer`: bytes of receive buffer the kernel keeps for a client that does not read."""
        sock = socket.socket()
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.settimeout(30)
        sock.connect(self.address)
        return sock

    def exchange(self, data: bytes, answers: int = 0) -> bytes:
        """All received bytes until the server closes, or until `answers` responses have arrived."""
        with self.connect() as sock:
            with suppress(OSError):
                sock.sendall(data)
            return receive(sock, answers)

    # Inspecting the server

    @property
    def engine(self) -> int:
        """The pid of the engine's process; 0 if there is none at the moment."""
        return next(iter(children(self.pid)), 0)

    def stats(self) -> dict[str, Any]:
        answer = self.request("GET", "/admin/stats", ADMIN)
        assert answer.status_code == 200, answer.text
        stats: dict[str, Any] = answer.json()
        return stats

    def holdings(self) -> Holdings:
        """An engine makes the folder of sessions when it first needs it."""
        names = [name for name in os.listdir(self._temporary) if not name.startswith("quire-sessions-")]
        temporary = tuple(sorted(name.rpartition("-")[0] or name for name in names))
        return Holdings(descriptors(self.pid), len(children(self.pid)), temporary)

    @property
    def stderr(self) -> str:
        """What the server has written to stderr so far."""
        return self._served.stderr

    def assert_unharmed(self, seconds: float = 60.0) -> None:
        """The server is healthy and idle, and holds the resources it held at the start."""
        deadline = time.monotonic() + seconds
        while wrong := self._wrong():
            assert time.monotonic() < deadline and self._served.process.poll() is None, (wrong, self.stderr)
            time.sleep(0.05)
        assert "Traceback" not in self.stderr, self.stderr

    def _wrong(self) -> dict[str, Any]:
        """What differs from a healthy, idle server."""
        if (health := self.request("GET", "/health", None)).status_code != 200:
            return {"health": health.text}
        stats = self.stats()
        wrong = {name: stats["engine"][name] for name in IDLE if stats["engine"][name]}
        wrong |= {name: stats[name] for name in ("open_requests", "queued_tokens") if stats[name]}
        if (now := self.holdings()) != self.start:
            wrong["held"] = now, self.start
        return wrong

    def _warm_up(self) -> None:
        """Open what a server opens once and keeps: thread pools, the process for grammars."""
        constraint = {"structured_outputs": {"regex": "[a-z]+"}}
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
        for path, body in (
            ("/v1/completions", {"prompt": "abc", "max_tokens": 2, **constraint}),
            ("/v1/chat/completions", {**chat, "tools": [tool]}),
            ("/v1/embeddings", {"input": ["abc", "the world"]}),
        ):
            answer = self.post(path, body)
            assert answer.status_code == 200, answer.text

    def _wait_until_alone(self) -> None:
        """The server closes its end of a connection a moment after we have closed ours."""
        deadline = time.monotonic() + 60
        while connections(self.pid, self.address[1]):
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.01)


@contextmanager
def attacked_server(model: Path, temporary: Path, *flags: str) -> Iterator[AttackedServer]:
    """A server that must exit by itself at the end, and leave nothing behind."""
    served = Served([str(model), *FLAGS, *flags], {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)})
    try:
        made = AttackedServer(served, temporary)
        yield made
        family = descendants(made.pid)
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0, served.stderr
        assert [pid for pid in family if not is_gone(pid)] == []
        assert os.listdir(temporary) == [], sorted(str(p) for p in temporary.rglob("*"))
    finally:
        if served.process.poll() is None:
            os.killpg(served.process.pid, signal.SIGKILL)
            served.end()


def receive(sock: socket.socket, answers: int = 0) -> bytes:
    """All received bytes until the end of the stream, or until `answers` responses have arrived."""
    data = b""
    with suppress(OSError):
        while not (answers and len(statuses(data)) >= answers) and (piece := sock.recv(1 << 16)):
            data += piece
    return data


def statuses(data: bytes) -> list[int]:
    """Status codes of the responses on a connection, in order, as far as they have arrived; the last may be chunked."""
    found = []
    while data:
        top, _, rest = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in top.split(b"\r\n")[1:] if b": " in line)
        length = int(fields.get(b"content-length", len(rest)))
        if b"\r\n\r\n" not in data or len(rest) < length:
            break
        found.append(int(top.split(b" ", 2)[1]))
        data = rest[length:]
    return found


def request_head(
    path: str, length: int | None = None, *lines: str, method: str = "POST", key: str | None = KEYS[0]
) -> bytes:
    """A request's head, with its empty line."""
    fields = [f"{method} {path} HTTP/1.1", "host: x", "content-type: application/json"]
    fields += [] if key is None else [f"authorization: Bearer {key}"]
    fields += [] if length is None else [f"content-length: {length}"]
    return "\r\n".join([*fields, *lines, "", ""]).encode()


def raw_request(path: str, body: Any, *lines: str) -> bytes:
    """A whole request as bytes."""
    data = json.dumps(body).encode()
    return request_head(path, len(data), *lines) + data


def connections(pid: int, port: int) -> int:
    """The server's ends of client connections that are still open."""
    found = 0
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, here, _, state, *_, inode = line.split()[:10]
        found += int(here.rpartition(":")[2], 16) == port and state != LISTENING and inode != CLOSED
    return found
