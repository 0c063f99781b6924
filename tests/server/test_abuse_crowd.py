"""Many clients that disconnect midway or see the engine die: all get a response, and nothing is leaked."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli.bench.load.http import Host, WholeResponse
from quire.server.protocol.embeddings import EmbeddingRequest
from quire.server.routes.embeddings import vectors
from tests.processes import descendants, is_gone
from tests.server.attacked_server import KEYS, AttackedServer
from tests.server.conftest import Live
from tests.server.traffic import TEXT, Ask, Users, draw, users_of

pytestmark = pytest.mark.timeout(3000)


def run(attacked: AttackedServer, work: Coroutine[Any, Any, None], seconds: float = 2700) -> None:
    """Run with a time limit; the server must be unharmed shortly after."""

    async def bounded() -> None:
        await asyncio.wait_for(work, seconds)

    asyncio.run(bounded())
    attacked.assert_unharmed(10)


class TestHangUps:
    def test_disconnects_leave_nothing_behind(self, attacked: AttackedServer) -> None:
        run(attacked, disconnects(attacked, 60))

    @pytest.mark.slow
    def test_a_thousand_disconnects(self, attacked: AttackedServer) -> None:
        run(attacked, disconnects(attacked, 1000))


async def disconnects(attacked: AttackedServer, count: int) -> None:
    """Eight clients that disconnect at a time, and one that stays and must be served throughout."""
    begin = time.monotonic()
    with users_of(attacked, count) as users:

        async def disconnecting_client() -> None:
            while users.ends["hung up"] < count:
                await users.disconnect(draw(users.rng))

        async def staying_client() -> None:
            while users.ends["hung up"] < count:
                assert await users.ask(draw(users.rng)) == "answered"

        await asyncio.gather(staying_client(), *(disconnecting_client() for _ in range(8)))
    print(f"{count} hang-ups in {time.monotonic() - begin:.1f} s; {dict(users.ends)}")


class TestStreams:
    def test_sixty_streams_at_once(self, attacked: AttackedServer) -> None:
        run(attacked, streams(attacked, 60, 40))

    @pytest.mark.slow
    def test_five_hundred_streams_at_once(self, attacked: AttackedServer) -> None:
        run(attacked, streams(attacked, 500, 100))


async def streams(attacked: AttackedServer, count: int, size: int) -> None:
    """Each stream gets the same tokens as when it runs alone, although the cache holds few of them."""
    prompts = ["the world", "abc", "on the 7th", "hers"]
    fields = {"temperature": 0, "max_tokens": size, "ignore_eos": True}
    alone = [attacked.post(TEXT, {"prompt": prompt, **fields}).json()["choices"][0]["text"] for prompt in prompts]
    host = Host(attacked.url, {"Authorization": f"Bearer {KEYS[0]}"})
    firsts: list[float] = []

    async def stream(index: int) -> str:
        answer, sent = Timed(), time.monotonic()
        body = {"prompt": prompts[index % len(prompts)], **fields, "stream": True}
        await host.post(TEXT, json.dumps(body).encode(), answer)
        firsts.append(answer.first - sent)
        *events, done, rest = bytes(answer.body).split(b"\n\n")
        assert (answer.status, done, rest) == (200, b"data: [DONE]", b""), answer.body[-300:]
        return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events)

    begin = time.monotonic()
    texts = await asyncio.gather(*(stream(index) for index in range(count)))
    took = time.monotonic() - begin
    host.close()
    assert all(text == alone[index % len(prompts)] for index, text in enumerate(texts))
    firsts.sort()
    preempted = attacked.stats()["engine"]["quire:num_preemptions"]
    print(
        f"{count} streams of {size} tokens in {took:.1f} s ({count * size / took:.0f} tokens/s), first token after "
        f"{firsts[count // 2]:.2f} s, at worst {firsts[-1]:.2f} s; {preempted:.0f} preemptions so far"
    )


class Timed(WholeResponse):
    """Records when its first chunk arrived."""

    first = 0.0

    def feed(self, body: bytes, at: float) -> None:
        self.first = self.first or time.monotonic()
        super().feed(body, at)


class TestKills:
    def test_two_kills(self, attacked: AttackedServer) -> None:
        run(attacked, kills(attacked, 2, settled=0.0))

    @pytest.mark.slow
    def test_twenty_kills(self, attacked: AttackedServer) -> None:
        """Each engine serves for a while first: the restart delay grows for engines that die soon after starting."""
        run(attacked, kills(attacked, 20, settled=11.0))


def the_engine(engine: int, rng: random.Random) -> int:
    return engine


async def kills(
    attacked: AttackedServer,
    count: int,
    settled: float,
    victim: Callable[[int, random.Random], int] = the_engine,
    within: float = 0.0,
) -> None:
    """`kill -9` at any moment, under mixed load. `victim`: which process to kill, given the engine's; `within`: seconds
    in which its death must be noticed."""
    times: list[float] = []
    with users_of(attacked, count) as users:
        is_over = False
        restarts = attacked.stats()["restarts"]

        async def user() -> None:
            while not is_over:
                ask = draw(users.rng)
                if users.rng.random() < 0.1:
                    await users.disconnect(ask)
                elif await users.ask(ask) == "failed":
                    await asyncio.sleep(0.1)

        crowd = [asyncio.ensure_future(user()) for _ in range(12)]
        for killed in range(1, count + 1):
            await more_answers(users, 10)
            await asyncio.sleep(settled + users.rng.random())
            engine = attacked.engine
            family = [engine, *descendants(engine)]
            assert "/dev/shm" not in Path(f"/proc/{engine}/maps").read_text()  # so no part of it can be left
            os.kill(victim(engine, users.rng), signal.SIGKILL)
            begin = time.monotonic()
            await assert_recovers(attacked, within)
            await more_answers(users, 1)
            times.append(time.monotonic() - begin)
            assert attacked.engine not in (0, engine) and all(map(is_gone, family))
            assert (await asyncio.to_thread(attacked.stats))["restarts"] == restarts + killed
        is_over = True
        await asyncio.gather(*crowd)
    assert users.ends["failed"] == 0  # all went on at the next engine
    times.sort()
    print(
        f"{count} kills: {dict(users.ends)}; serving again after {times[count // 2]:.2f} s, at worst {times[-1]:.2f} s"
    )


async def assert_recovers(attacked: AttackedServer, within: float) -> None:
    """Without an engine requests get a 503 with Retry-After; once it is restarted they are answered. `within`: seconds
    in which the death must be noticed."""
    saw = False
    noticed_by, deadline = time.monotonic() + within, time.monotonic() + 120
    while True:
        health = await asyncio.to_thread(attacked.request, "GET", "/health", None)
        if health.status_code == 200 and not saw:
            assert time.monotonic() < noticed_by, "it was healthy all the time"
            continue
        if health.status_code == 200:
            return
        assert health.status_code == 503 and int(health.headers["retry-after"]) >= 1
        assert (await asyncio.to_thread(attacked.stats))["status"]  # can be inspected at this moment
        saw = True
        assert time.monotonic() < deadline, health.text
        await asyncio.sleep(0.05)


async def more_answers(users: Users, count: int) -> None:
    enough = users.ends["answered"] + count
    deadline = time.monotonic() + 120
    while users.ends["answered"] < enough:
        assert time.monotonic() < deadline, users.wrong
        await asyncio.sleep(0.02)


def test_embeddings_cancelled_at_any_moment_free_their_queue_slot(live: Live) -> None:
    """Also at the last moment, when only cleanup remains."""

    async def work() -> None:
        server = live.server
        (output,) = [output async for output in server.llm.encode("abc")]
        exchange: Any = SimpleNamespace(id="x", tenant="")
        body = EmbeddingRequest(input=["abc", "the world"])

        async def take() -> Any:
            return output

        async def submit(*arguments: Any, **more: Any) -> Any:
            return SimpleNamespace(take=take)

        llm = SimpleNamespace(submit=submit, leave=lambda stream: None)
        stub: Any = SimpleNamespace(llm=llm, config=server.config)
        stub.admission, stub.observer = server.admission, server.observer
        done = False
        for moment in itertools.count():
            task = asyncio.ensure_future(vectors(stub, exchange, body, [[5], [6]]))
            for _ in range(moment):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert server.admission.requests == server.admission.sequences == 0, moment
            if done:
                break
        assert moment > 2

    live.run(work())


def test_requests_leave_no_reference_cycles(live: Live) -> None:
    """The collector visits old objects only when there are a quarter more of them: minutes of traffic would stay in
    memory."""

    def ask() -> None:
        for body in ({}, {"stream": True}, {"prompt": ["abc", "abd"]}, {"prompt": 5}, {"temperature": -9}):
            live.post(TEXT, {"prompt": "abc", "max_tokens": 2, **body})
        live.post("/v1/embeddings", {"input": "abc"})
        live.client.get("/health")
        live.client.get("/nothing")

    ask()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        ask()
        live.assert_idle()
        gc.collect()
        kinds = {type(thing) for thing in gc.garbage}
        assert not [kind for kind in kinds if kind.__module__.startswith(("quire.", "uvicorn.", "starlette."))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_leaked_request_is_detected(attacked: AttackedServer) -> None:
    """Checks the check: `assert_unharmed` must report a leaked request."""

    async def work() -> None:
        users = Users(attacked, 1)
        short = Ask(TEXT, {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}, tokens=4)
        assert "where 4 tokens were asked for" in await users.ask(short)
        assert "HTTP 400" in await users.ask(Ask(TEXT, {"prompt": 5}))
        assert len(users.wrong) == 2
        users.close()

    run(attacked, work())
