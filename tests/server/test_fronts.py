"""Several front processes on one port are one server: limits, sessions, metrics, deaths and shutdown."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.front_overhead import null_server
from tests.adapters.folders import tensors, write
from tests.server.scrape import Scrape
from tests.server.served import Served, served

ADMIN = {"authorization": "Bearer boss"}
ROWS, QUEUED = 4, 2
FLAGS = [
    "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "128", "--port", "0", "--admin-key", "boss",
    "--max-num-seqs", str(ROWS), "--max-queued-requests", str(QUEUED), "--api-server-count", "2",
]  # fmt: skip
LONG = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "seed": 1}
PATIENCE_SECONDS = 60.0


def wait_until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


class TwoFronts:
    """A server with a hub and one more front; requests can be sent to either."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.url = server.wait_for(r"(http://127.0.0.1:\d+)/v1")[1]
        self.hub = server.process.pid

    @property
    def engine(self) -> int:
        (pid,) = self._children("quire.engine.process")
        return pid

    def _children(self, module: str) -> list[int]:
        return [pid for pid in self.server.children if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]

    @property
    def front(self) -> int:
        """The process of the front that is not the hub."""
        (pid,) = self.fronts()
        return pid

    def fronts(self) -> list[int]:
        """Processes of fronts that are not the hub."""
        return self._children("quire.server.fronts.process")

    @contextmanager
    def asking(self, pid: int, **fields: Any) -> Iterator[socket.socket]:
        """A connection to this process, with a request for a stream on it."""
        body = json.dumps({**LONG, "stream": True, **fields}).encode()
        host, port = self.url.removeprefix("http://").split(":")
        with stopped(self.front if pid == self.hub else self.hub):
            sock = socket.create_connection((host, int(port)), PATIENCE_SECONDS)
            sock.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += sock.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
        with sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            sock.sendall(b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            yield sock

    @contextmanager
    def connected(self, pid: int) -> Iterator[httpx.Client]:
        """A client with one connection, which this process has accepted: the other is stopped meanwhile."""
        other = self.front if pid == self.hub else self.hub
        transport = httpx.HTTPTransport(limits=httpx.Limits(max_connections=1))
        with httpx.Client(base_url=self.url, transport=transport, timeout=PATIENCE_SECONDS) as client:
            with stopped(other):
                assert client.get("/version").status_code == 200
            yield client

    def metrics(self) -> Scrape:
        return Scrape(httpx.get(f"{self.url}/metrics", timeout=PATIENCE_SECONDS).text)

    def is_idle(self) -> bool:
        """No request runs or waits in the engine, and all blocks are free."""
        page = self.metrics()
        names = ("num_requests_running", "num_requests_waiting", "num_blocks_used")
        return not any(page.sum(f"quire:{name}") for name in names)

    def wait_until_idle(self) -> None:
        wait_until(self.is_idle)
        stats = httpx.get(f"{self.url}/admin/stats", headers=ADMIN, timeout=PATIENCE_SECONDS).json()
        assert (stats["open_requests"], stats["queued_tokens"]) == (0, 0)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does not run inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def fronts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoFronts]:
    adapters = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(1)
    write(adapters / "mine", tensors(width=64))
    with served(str(tiny_model), *FLAGS, "--enable-lora", "--allowed-lora-path", str(adapters)) as server:
        yield TwoFronts(server)


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(1 << 16):
        data += piece
    return data


def text_of(answer: bytes) -> str:
    """The text of a raw streamed answer."""
    events = [line.removeprefix(b"data: ") for line in answer.split(b"\r\n") if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of an answer; the last one is [DONE]."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        *events, last = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


class TestTwoFronts:
    def test_both_answer_with_the_same_bytes(self, fronts: TwoFronts) -> None:
        found = []
        for pid in (fronts.hub, fronts.front):
            with fronts.connected(pid) as client:
                whole = client.post("/v1/completions", json=LONG, headers={"x-request-id": "same"})
                events = streamed(client, "/v1/completions", LONG)
                texts = "".join(event["choices"][0]["text"] for event in events)
                assert texts == whole.json()["choices"][0]["text"] and len(events) > 1
                headers = {name: value for name, value in whole.headers.items() if name != "date"}
                found.append((re.sub(rb'"created":\d+', b"", whole.content), headers, client.get("/v1/models").content))
        assert found[0] == found[1]
        fronts.wait_until_idle()

    def test_both_have_the_same_adapters(self, fronts: TwoFronts) -> None:
        def names(client: httpx.Client) -> list[str]:
            return [card["id"] for card in client.get("/v1/models").json()["data"][1:]]

        def texts(*clients: httpx.Client, **more: Any) -> set[str]:
            answers = [client.post("/v1/completions", json={**LONG, "temperature": 0, **more}) for client in clients]
            return {answer.json()["choices"][0]["text"] for answer in answers}

        mine = {"lora_name": "mine", "lora_path": "mine"}
        with fronts.connected(fronts.hub) as first, fronts.connected(fronts.front) as second:
            both = (first, second)
            plain = texts(*both)
            for asked, unloads in ((second, first), (first, second)):
                assert asked.post("/v1/load_lora_adapter", json=mine).status_code == 401
                assert asked.post("/v1/load_lora_adapter", json=mine, headers=ADMIN).status_code == 200
                assert [names(client) for client in both] == [["mine"], ["mine"]]
                adapted = texts(*both, model="mine")
                assert len(plain) == len(adapted) == 1 and plain != adapted
                assert unloads.post("/v1/unload_lora_adapter", json=mine, headers=ADMIN).status_code == 200
                assert [names(client) for client in both] == [[], []]
                assert [
                    client.post("/v1/completions", json={**LONG, "model": "mine"}).status_code for client in both
                ] == [
                    404,
                    404,
                ]
        fronts.wait_until_idle()

    def test_a_limit_holds_for_both_together(self, fronts: TwoFronts) -> None:
        before = fronts.metrics().sum("quire:requests_rejected_total")
        with fronts.connected(fronts.hub) as first, fronts.connected(fronts.front) as second:
            with stopped(fronts.engine), fronts.asking(fronts.hub, n=3), fronts.asking(fronts.front, n=3):
                for client in (first, second):
                    wait_until(lambda: client.get("/load").json() == {"server_load": 2})  # noqa: B023
                refusals = [client.post("/v1/completions", json=LONG) for client in (first, second)]
            for refusal in refusals:
                assert refusal.status_code == 429 and refusal.headers["retry-after"]
                assert refusal.json()["error"]["message"].startswith("the server is busy: 2 requests are waiting")
            assert fronts.metrics().sum("quire:requests_rejected_total") == before + 2
            fronts.wait_until_idle()
            assert [client.post("/v1/completions", json=LONG).status_code for client in (first, second)] == [200, 200]

    def test_metrics_are_of_both_together(self, fronts: TwoFronts) -> None:
        names = ("quire:generation_tokens_total", "quire:request_prompt_tokens_count", "http_requests_total")
        before = fronts.metrics()
        with fronts.connected(fronts.hub) as first, fronts.connected(fronts.front) as second:
            for client, count in ((first, 2), (second, 3)):
                for _ in range(count):
                    assert client.post("/v1/completions", json={**LONG, "max_tokens": 7}).status_code == 200
            pages = [Scrape(client.get("/metrics").text) for client in (first, second)]
            stats = [client.get("/admin/stats", headers=ADMIN).json() for client in (first, second)]
            assert second.get("/admin/stats").status_code == 401
        for page in pages:
            assert [page.sum(name) - before.sum(name) for name in names] == [35, 5, 5]
            gaps = "quire:inter_token_latency_seconds_count"
            assert page.sum(gaps) - before.sum(gaps) == 30
        assert stats[0]["status"] == stats[1]["status"] == "serving"

    def test_a_session_continues_at_the_other_front(self, fronts: TwoFronts) -> None:
        turn = {"input": "def", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
        with fronts.connected(fronts.hub) as first, fronts.connected(fronts.front) as second:
            made = second.post("/v1/sessions", json={"id": "shared", "input": "abc"}).json()
            answers = [client.post("/v1/sessions/shared/generate", json=turn).json() for client in (first, second)]
            listed = [[one["id"] for one in client.get("/v1/sessions").json()["data"]] for client in (first, second)]
            length = first.get("/v1/sessions/shared").json()["num_tokens"]
            assert second.delete("/v1/sessions/shared").status_code == 200
            assert first.get("/v1/sessions/shared").status_code == 404
        assert listed == [["shared"], ["shared"]]
        usage = [answer["usage"] for answer in answers]
        assert usage[0]["prompt_tokens"] > made["num_tokens"] and usage[1]["prompt_tokens"] > usage[0]["total_tokens"]
        assert length == usage[1]["total_tokens"]

    def test_both_show_the_engine(self, fronts: TwoFronts) -> None:
        """The page, the feed and a request of the other front."""
        seen = []
        for pid, other in ((fronts.hub, fronts.front), (fronts.front, fronts.hub)):
            with fronts.connected(pid) as client, fronts.connected(other) as elsewhere:
                assert client.get("/").status_code == 200
                name = f"shown-{pid}"
                assert client.post("/v1/completions", json=LONG, headers={"x-request-id": name}).status_code == 200
                told = elsewhere.get(f"/v1/engine/requests/{name}/timeline").json()
                assert told["finish_reason"] and sum(step["drew"] for step in told["steps"])
                events = client.get("/v1/engine/feed?frames=3&hz=10").text.split("\n\n")
                frames = [json.loads(event.removeprefix("data: ")) for event in events if event]
                assert [frame["frame"] for frame in frames] == [1, 2, 3] and frames[0]["is_whole"]
                seen.append(frames[-1]["counters"]["generated_tokens"])
        assert seen[1] > seen[0]  # one engine counts for both
        fronts.wait_until_idle()

    def test_responses_are_kept_for_both(self, fronts: TwoFronts) -> None:
        fields = {"max_output_tokens": 5, "temperature": 0, "ignore_eos": True}
        with fronts.connected(fronts.hub) as first, fronts.connected(fronts.front) as second:
            made = second.post("/v1/responses", json={"input": "abc", **fields}).json()
            path = f"/v1/responses/{made['id']}"
            assert first.get(path).json() == second.get(path).json() == made
            then = {"input": "def", "previous_response_id": made["id"], "stream": True, **fields}
            for client in (first, second):
                with client.stream("POST", "/v1/responses", json=then) as answer:
                    *_, last = (line for line in answer.iter_lines() if line.startswith("data: "))
                assert json.loads(last.removeprefix("data: "))["type"] == "response.incomplete"  # 5 tokens
            wrong = [client.post("/v1/responses", json={"input": 3}) for client in (first, second)]
            assert wrong[0].content == wrong[1].content and wrong[1].status_code == 400
            assert second.delete(path).status_code == 200
            missing = [client.get(path) for client in (first, second)]
            assert missing[0].content == missing[1].content and missing[1].status_code == 404
        fronts.wait_until_idle()

    def test_a_front_that_is_killed_is_started_again(self, fronts: TwoFronts) -> None:
        tokens = fronts.metrics().sum("quire:generation_tokens_total")
        lost = fronts.front
        with fronts.connected(fronts.hub) as client:
            with stopped(fronts.engine), fronts.asking(lost, n=2) as broken, fronts.asking(fronts.hub) as whole:
                wait_until(lambda: client.get("/load").json() == {"server_load": 2})
                os.kill(lost, signal.SIGKILL)
                with suppress(ConnectionResetError):
                    assert broken.recv(1) == b""
                wait_until(lambda: client.get("/load").json() == {"server_load": 1})
                os.kill(fronts.engine, signal.SIGCONT)
                assert read_to_end(whole).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            fronts.wait_until_idle()
        again = wait_until(lambda: [pid for pid in fronts.fronts() if pid != lost])[0]
        fronts.server.wait_for(r"front 1 \(pid \d+\) was killed by SIGKILL.*1 of its requests")
        with fronts.connected(again) as client:
            assert client.post("/v1/completions", json=LONG).status_code == 200
            assert Scrape(client.get("/metrics").text).sum("quire:generation_tokens_total") >= tokens

    def test_an_engine_that_dies_is_back_for_both(self, fronts: TwoFronts) -> None:
        with fronts.connected(fronts.hub) as first, fronts.connected(fronts.front) as second:
            whole = second.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
            with stopped(fronts.engine), fronts.asking(fronts.front) as sock:
                wait_until(lambda: first.get("/load").json() == {"server_load": 1})
                os.kill(fronts.engine, signal.SIGKILL)
                assert text_of(read_to_end(sock)) == whole  # it goes on at the next engine
            for client in (second, first):
                wait_until(lambda: client.get("/ready").status_code == 200)  # noqa: B023
                assert client.get("/health").status_code == 200
                assert client.post("/v1/completions", json=LONG).status_code == 200
            assert second.get("/admin/stats", headers=ADMIN).json()["restarts"] == 1
        fronts.wait_until_idle()

    def test_a_front_ends_with_the_hub(self, tiny_model: Path) -> None:
        with null_server(0, str(tiny_model), fronts=2) as (_, _, hub):
            children = [int(pid) for pid in Path(f"/proc/{hub}/task/{hub}/children").read_text().split()]
            assert len(children) == 2  # the engine, and the front
            os.kill(hub, signal.SIGKILL)
            for pid in children:
                wait_until(lambda: not Path(f"/proc/{pid}").exists())  # noqa: B023

    def test_both_finish_their_streams_before_a_shutdown(
        self, fronts: TwoFronts
    ) -> None:  # the last: it ends the server
        front, engine = fronts.front, fronts.engine
        with (
            fronts.connected(fronts.hub) as first,
            fronts.connected(front) as second,
            stopped(engine),
            fronts.asking(fronts.hub) as one,
            fronts.asking(front) as other,
        ):
            wait_until(lambda: first.get("/load").json() == {"server_load": 2})
            os.killpg(fronts.hub, signal.SIGTERM)  # all processes get it, as from a terminal or a service
            for client in (first, second):
                wait_until(lambda: client.get("/ready").status_code == 503)  # noqa: B023
            os.kill(engine, signal.SIGCONT)
            for sock in (one, other):
                assert read_to_end(sock).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert fronts.server.end() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in (front, engine))
