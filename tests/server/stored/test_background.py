"""Background responses with a stand-in for the engine: retries, events that are kept, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from quire.errors import EngineDeadError
from quire.output.parsers.deltas import Content
from quire.server.dialects.responses_tools import OfferedTools
from quire.server.dialects.responses_writer import ResponseWriter, new_response
from quire.server.errors import ApiError, unavailable
from quire.server.protocol.common import Usage
from quire.server.protocol.fields import FieldReader
from quire.server.protocol.response_events import ResponseEvent
from quire.server.protocol.responses import ResponsesRequest
from quire.server.stored import background
from quire.server.stored.background import BackgroundResponses
from quire.server.stored.store import ResponseStore
from quire.server.stored.tree import StoreBounds
from quire.server.stored.turns import ResponseTurn


class Answer:
    """Answers with ten words, after raising some errors."""

    def __init__(self, store: ResponseStore, name: str = "resp_1", *failures: Exception) -> None:
        request = ResponsesRequest(input="x", background=True)
        self.writer = ResponseWriter(new_response(request, name, 1, "m", True), OfferedTools(None, FieldReader()))
        self.turn = ResponseTurn("me", name, True)
        self.tries = 0
        self.may_end = asyncio.Event()
        self._store = store
        self._failures = list(failures)

    async def events(self) -> AsyncGenerator[list[ResponseEvent], None]:
        self.tries += 1
        if self._failures:
            raise self._failures.pop(0)
        yield self.writer.start()
        for number in range(10):
            yield self.writer.write([Content(f"{number} ")])
        await self.may_end.wait()
        last = self.writer.finish("stop", Usage(1, 2, 1))
        await self._store.run(self._store.finish, self.turn.record(self.writer.response))
        yield last


def run(work: Callable[[BackgroundResponses, ResponseStore], Coroutine[Any, Any, None]]) -> None:
    async def all_of_it() -> None:
        store = ResponseStore(None, StoreBounds(10, 1 << 20, 100.0))
        await work(BackgroundResponses(store, 2), store)
        store.close()

    asyncio.run(all_of_it())


async def status(store: ResponseStore, name: str = "resp_1") -> Any:
    return (await store.run(store.response, "me", name))["status"]


def test_what_the_server_refuses_for_now_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RETRY_SECONDS", 0.0)

    async def work(jobs: BackgroundResponses, store: ResponseStore) -> None:
        answer: Any = Answer(store, "resp_1", ApiError(429, "full"), unavailable("restarting"))
        answer.may_end.set()
        job = await jobs.start(answer, keeps_events=False)
        await job.task
        assert (answer.tries, await status(store)) == (3, "completed")

    run(work)


@pytest.mark.parametrize("error", [EngineDeadError("it died of this"), ApiError(400, "no"), ValueError("a bug")])
def test_what_an_engine_died_of_is_not_tried_again(error: Exception) -> None:
    async def work(jobs: BackgroundResponses, store: ResponseStore) -> None:
        answer: Any = Answer(store, "resp_1", error)
        job = await jobs.start(answer, keeps_events=True)
        await job.task
        assert (answer.tries, await status(store)) == (1, "failed")
        events = b"".join([data async for data in job.follow(-1)])
        assert b"event: response.failed" in events

    run(work)


def test_a_follower_that_comes_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "JOB_EVENT_BYTES", 4000)

    async def work(jobs: BackgroundResponses, store: ResponseStore) -> None:
        answer: Any = Answer(store)
        answer.may_end.set()
        job = await jobs.start(answer, keeps_events=True)
        await job.task
        assert job.event_bytes <= 4000
        with pytest.raises(ApiError, match="event 0 is no longer kept"):
            [data async for data in job.follow(-1)]
        late = b"".join([data async for data in job.follow(job._first)])
        assert late.count(b"event: ") == len(job._events) - 1 and b"event: response.completed" in late

    run(work)


def test_events_are_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(jobs: BackgroundResponses, store: ResponseStore) -> None:
        answer: Any = Answer(store)
        answer.may_end.set()
        job = await jobs.start(answer, keeps_events=True)
        await job.task
        assert jobs.find("me", "resp_1") is job and jobs.find("other", "resp_1") is None
        monkeypatch.setattr(background, "EVENT_SECONDS", -1.0)
        assert jobs.find("me", "resp_1") is None
        assert await status(store) == "completed"

    run(work)


def test_room_comes_back_when_one_ends() -> None:
    async def work(jobs: BackgroundResponses, store: ResponseStore) -> None:
        answers: list[Any] = [Answer(store, f"resp_{number}") for number in range(3)]
        first, second = [await jobs.start(answer, keeps_events=False) for answer in answers[:2]]
        with pytest.raises(ApiError, match="at most 2") as caught:
            jobs.check_room("me")
        assert caught.value.status == 429 and caught.value.headers["Retry-After"]
        jobs.check_room("other")
        first.interrupt()
        await asyncio.wait([first.task])
        jobs.check_room("me")
        answers[1].may_end.set()
        await second.task
        second.interrupt()
        assert (await status(store, "resp_0"), await status(store, "resp_1")) == ("cancelled", "completed")

    run(work)


def test_a_server_that_stops_fails_what_runs() -> None:
    async def work(jobs: BackgroundResponses, store: ResponseStore) -> None:
        answer: Any = Answer(store)
        job = await jobs.start(answer, keeps_events=True)
        while not job._events[2:]:
            await asyncio.sleep(0)
        await jobs.stop()
        found = await store.run(store.response, "me", "resp_1")
        assert found["status"] == "failed" and "shut down" in found["error"]["message"]
        assert not jobs.running

    run(work)
