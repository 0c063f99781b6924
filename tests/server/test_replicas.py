"""A server with two engines: one that dies is replaced while the other serves; metrics name their engine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from tests.server.scrape import Scrape
from tests.server.served import Served, served

FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "128", "--max-num-seqs", "8", "--port", "0",
    "--served-model-name", "tiny", "--no-enable-tool-preamble", "--admin-key", "boss", "--data-parallel-size", "2",
    "--log-level", "warning",
)  # fmt: skip
SETTLED_SECONDS = 10.0
ADMIN = {"authorization": "Bearer boss"}


class Pair:
    """A server over two engines, in its own process."""

    def __init__(self, process: Served) -> None:
        self.served = process
        self.url = process.wait_for(r"(http://127.0.0.1:\d+)/v1", 180)[1]
        self.client = httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    def complete(self, prompt: Any, **more: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=body(prompt, **more))

    def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.get("/admin/stats", headers=ADMIN).raise_for_status().json()
        return answer

    def scrape(self) -> Scrape:
        return Scrape(self.client.get("/metrics").text)

    def until(self, condition: Callable[[], bool], seconds: float = 180.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.served.stderr
            time.sleep(0.05)


def body(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 0, **more}


@pytest.fixture
def pair(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Checked to leave nothing behind after the test."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with served(str(tiny_model), *FLAGS) as process:
        made = Pair(process)
        yield made
        children = process.children
        assert len(children) == 2
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 0
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_two_engines_serve_as_one_and_a_death_is_not_noticed(pair: Pair, llm: LLM) -> None:
    prompts = [f"{i} the world" for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    assert [choice["text"] for choice in pair.complete(prompts).raise_for_status().json()["choices"]] == expected
    _check_metrics(pair)
    assert pair.client.get("/admin/memory?replica=1", headers=ADMIN).status_code == 200
    shown = [
        json.loads(pair.client.get(f"/admin/feed?frames=1&replica={number}", headers=ADMIN).text.partition("data: ")[2])
        for number in (0, 1)
    ]
    assert [frame["counters"]["steps"] for frame in shown] == [
        replica["engine"]["quire:steps"] for replica in pair.stats()["replicas"]
    ]
    assert len(shown[0]["slow"]["replicas"]) == 2
    refused = pair.client.get("/admin/memory?replica=2", headers=ADMIN)
    assert refused.status_code == 400 and "there are 2, numbered from 0" in refused.json()["error"]["message"]
    assert pair.client.post("/admin/reset_prefix_cache", headers=ADMIN).json() == {"is_empty": True}
    for i in range(8):  # without a disk sessions end with their engine
        assert pair.client.post("/v1/sessions", json={"id": f"s{i}", "input": [5 + i] * 200}).status_code == 200

    os.kill(pair.served.children[0], signal.SIGKILL)
    assert [choice["text"] for choice in pair.complete(prompts).raise_for_status().json()["choices"]] == expected
    assert pair.client.get("/health").status_code == pair.client.get("/ready").status_code == 200
    pair.until(lambda: pair.stats()["status"] == "serving" and pair.stats()["restarts"] == 1)
    assert pair.scrape().sum("quire:engine_restarts_total", engine="0") == 1
    assert 0 < len(pair.client.get("/v1/sessions").json()["data"]) < 8
    assert [choice["text"] for choice in pair.complete(prompts).raise_for_status().json()["choices"]] == expected


def _check_metrics(pair: Pair) -> None:
    scrape = pair.scrape()
    for engine in ("0", "1"):
        assert scrape.sum("quire:engine_up", engine=engine) == 1
        assert scrape.sum("quire:steps_total", engine=engine) > 0
        assert scrape.sum("quire:cache_config_info", engine=engine) == 1
        assert scrape.sum("quire:router_prompt_tokens_total", engine=engine) > 0
        assert scrape.sum("quire:router_open_requests", engine=engine) == 0
    assert scrape.sum("quire:generation_tokens_total", engine="all") == 40 * 20
    stats = pair.stats()
    steps = [replica["engine"]["quire:steps"] for replica in stats["replicas"]]
    assert all(steps) and stats["engine"]["quire:steps"] == sum(steps)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_under_load(pair: Pair) -> None:
    """Every request gets all its tokens; nothing is left behind."""
    asyncio.run(_kills(pair, 50))


async def _kills(pair: Pair, rounds: int) -> None:
    rng, ends = random.Random(rounds), Counter[str]()
    stopping = False

    async def ask(client: httpx.AsyncClient) -> str:
        size, streams = rng.randint(1, 120), rng.random() < 0.5
        asked = body("the world"[: rng.randint(1, 9)], max_tokens=size, stream=streams)
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            data = (await answer.aread()).decode()
        assert answer.status_code == 200, data
        if not streams:
            assert json.loads(data)["usage"]["completion_tokens"] == size
            return "whole"
        events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
        assert "error" not in events[-1], events[-1]
        assert data.rstrip().endswith("data: [DONE]")
        return "streamed"

    async def user() -> None:
        async with httpx.AsyncClient(base_url=pair.url, timeout=120, trust_env=False) as client:
            while not stopping:
                ends[await ask(client)] += 1

    users = [asyncio.ensure_future(user()) for _ in range(24)]
    held, ready = [], dict.fromkeys(pair.served.children, time.monotonic())
    for done in range(rounds):
        victim = rng.choice(pair.served.children)
        # The restart delay grows for engines that die soon after starting: fifty rounds would take hours.
        since = ready.get(victim, time.monotonic())
        await asyncio.sleep(max(0.0, since + SETTLED_SECONDS - time.monotonic()) + rng.random())
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(pair.until, lambda done=done: _is_whole(pair, done + 1))
        before = ends.total()
        await asyncio.to_thread(pair.until, lambda before=before: ends.total() > before + 24)
        ready = {pid: ready.get(pid, time.monotonic()) for pid in pair.served.children}
        held.append(_held(pair.served.process.pid))
        print(f"round {done + 1}: {dict(ends)}; descriptors and MiB: {held[-1]}", flush=True)
        assert not [user for user in users if user.done()], [user.exception() for user in users if user.done()]
    stopping = True
    await asyncio.gather(*users)
    await asyncio.sleep(0.5)
    assert pair.scrape().sum("quire:requests_resumed_total") >= rounds
    assert held[-1][0] <= held[0][0] + 4 and held[-1][1] < held[rounds // 5][1] + 20


def _is_whole(pair: Pair, restarts: int) -> bool:
    stats = pair.stats()
    return stats["status"] == "serving" and stats["restarts"] == restarts and len(pair.served.children) == 2


def _held(pid: int) -> tuple[int, int]:
    """Descriptors of a process, and MiB of its memory."""
    status = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1]
    return len(os.listdir(f"/proc/{pid}/fd")), int(status.split()[0]) >> 10
