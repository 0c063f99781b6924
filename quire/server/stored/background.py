"""Responses in the background: generated after their request was answered, whether or not a client waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quire.engine.session_calls import DeleteSession
from quire.errors import QuireError, StoreError
from quire.server.errors import ApiError, as_api_error, retry_text, unavailable
from quire.server.http import named_event
from quire.server.protocol.response_events import ResponseEvent
from quire.server.stored.store import ResponseStore, StoredTurn, as_stored_error
from quire.server.stored.tree import StoreBounds

if TYPE_CHECKING:
    from quire.api.async_llm import AsyncLLM
    from quire.server.config import ServerConfig
    from quire.server.stored.turns import ResponseAnswer

logger = logging.getLogger(__name__)

T = TypeVar("T")

EVENT_SECONDS = 300.0
"""How long the events of a response can be read after its end…"""
MOST_EVENT_BYTES = 64 << 20
"""…and of all responses together; the oldest ended ones go first."""
JOB_EVENT_BYTES = 16 << 20
"""Of one response; then the first half of its events goes."""
RETRY_SECONDS = 1.0
"""How often a response that cannot begin, because the queue is full or the engine restarts, is tried again."""
CLEAN_SECONDS = 60.0
"""How often what has expired is looked for."""


class BackgroundJob:
    """One response being generated, and its events."""

    def __init__(self, answer: ResponseAnswer, store: ResponseStore, keeps_events: bool) -> None:
        self.answer = answer
        self.ended = 0.0
        """When it ended, in monotonic seconds; 0: it has not."""
        self.keeps_events = keeps_events
        self.event_bytes = 0
        self._events: list[bytes] = []
        self._first = 0
        """The number of the first event that is kept."""
        self._store = store
        self._changed = asyncio.Event()
        self._why: ApiError | None = None
        self.stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it is stored as queued, or could not be."""
        self.stored.add_done_callback(lambda stored: stored.exception())  # its client may have left
        self.note(answer.writer.queue())
        self.task: asyncio.Task[None] = asyncio.ensure_future(self._run())

    @property
    def owner(self) -> str:
        return self.answer.turn.owner

    @property
    def response_id(self) -> str:
        return self.answer.turn.response_id

    def interrupt(self, why: ApiError | None = None) -> None:
        """End it, if its last token is not there yet: with an error, or because a client cancelled it."""
        if self.is_open:
            self._why = why
            self.task.cancel()

    @property
    def is_open(self) -> bool:
        """Whether more may be generated; if not, it ends as soon as it is stored."""
        return self.answer.writer.response.status in ("queued", "in_progress") and not self.task.done()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Encoded events with numbers above `after`, until its end. Raises 400 for events that are gone."""
        while True:
            changed = self._changed
            if after + 1 < self._first:
                raise ApiError(400, f"event {after + 1} is no longer kept: retrieve the response without stream")
            if new := self._events[after + 1 - self._first :]:
                after += len(new)
                yield b"".join(new)
            elif self.ended:
                return
            else:
                await changed.wait()

    def note(self, events: list[ResponseEvent]) -> None:
        """Keep events for those who follow."""
        if not self.keeps_events:
            return
        new = [named_event(event.kind, event) for event in events]
        self._events += new
        self.event_bytes += sum(map(len, new))
        if self.event_bytes > JOB_EVENT_BYTES:
            dropped = self._events[: len(self._events) // 2]
            del self._events[: len(dropped)]
            self._first += len(dropped)
            self.event_bytes -= sum(map(len, dropped))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run(self) -> None:
        try:
            await self._store.run(lambda: self._store.begin(self._record()))
            self.stored.set_result(None)
            await self._generate()
        except asyncio.CancelledError:
            await self._keep_as_it_is(self._why)
        except Exception as error:
            if not self.stored.done():
                self.stored.set_exception(error)
                return
            await self._keep_as_it_is(as_api_error(error))
        finally:
            if not self.stored.done():
                self.stored.set_exception(self._why or unavailable("the response was interrupted"))
            self.answer.turn.unlock()
            self.ended = time.monotonic()
            self._wake()

    async def _generate(self) -> None:
        while True:
            has_begun = False
            try:
                async with contextlib.aclosing(self.answer.events()) as batches:
                    async for events in batches:
                        if not has_begun:
                            has_begun = True
                            await self._update()
                        self.note(events)
                return
            except ApiError as error:  # the server's own, before the engine had it
                if has_begun or error.status not in (429, 503):
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _update(self) -> None:
        with contextlib.suppress(StoreError):
            await self._store.run(lambda: self._store.update(self._record()))

    def _record(self) -> StoredTurn:
        """What the store keeps of it; encoded in the store's thread, while nothing is generated."""
        return self.answer.turn.record(self.answer.writer.response)

    async def _keep_as_it_is(self, why: ApiError | None) -> None:
        """Store a response that was cancelled, or has failed, with the output it has."""
        writer = self.answer.writer
        events = writer.cancel() + ([] if why is None else writer.fail(why))
        try:
            await self._store.run(lambda: self._store.end(self._record()))
        except StoreError as error:
            logger.error("response %s ended, and that could not be stored: %s", self.response_id, error)
        self.note(events)


class BackgroundResponses:
    """The background responses of all tenants."""

    def __init__(self, store: ResponseStore, most: int) -> None:
        """`most`: of one tenant at once."""
        self._store = store
        self._most = most
        self._jobs: OrderedDict[tuple[str, str], BackgroundJob] = OrderedDict()
        """Those that run, and those that ended and whose events are kept, oldest first."""

    def check_room(self, owner: str) -> None:
        """Raise 429 if the owner has as many as it may."""
        count = sum(not job.ended for job in self._jobs.values() if job.owner == owner)
        if count >= self._most:
            raise ApiError(
                429,
                f"{count} background responses are under way; at most {self._most} (--max-background-responses). Wait "
                "for one to finish, or cancel one",
                headers={"Retry-After": retry_text(5.0)},
            )

    async def start(self, answer: ResponseAnswer, keeps_events: bool) -> BackgroundJob:
        """Store a response as queued, and begin it, after `check_room`. From here on the job unlocks its turn."""
        self.forget_old()
        job = BackgroundJob(answer, self._store, keeps_events)
        self._jobs[job.owner, job.response_id] = job
        try:
            await asyncio.shield(job.stored)  # a client that leaves now has begun it
        except StoreError as error:
            self.forget(job.owner, job.response_id)
            raise as_stored_error(error) from None
        return job

    def find(self, owner: str, name: str) -> BackgroundJob | None:
        """The job of a response that runs, or whose events are still kept."""
        self.forget_old()
        return self._jobs.get((owner, name))

    def forget(self, owner: str, name: str) -> None:
        """Its events cannot be read any more."""
        self._jobs.pop((owner, name), None)

    @property
    def running(self) -> list[BackgroundJob]:
        return [job for job in self._jobs.values() if not job.ended]

    async def stop(self) -> None:
        """The server ends: what runs has failed."""
        for job in self.running:
            job.interrupt(unavailable("the server was shut down; the response was interrupted"))
        await asyncio.gather(*(job.task for job in self._jobs.values()), return_exceptions=True)

    def forget_old(self) -> None:
        """Forget responses that ended, once their events are not kept any more."""
        total, now = sum(job.event_bytes for job in self._jobs.values()), time.monotonic()
        for key, job in list(self._jobs.items()):
            is_old = total > MOST_EVENT_BYTES or not job.keeps_events or now - job.ended > EVENT_SECONDS
            if job.ended and is_old:
                total -= job.event_bytes
                del self._jobs[key]


class StoredResponses:
    """What the server keeps of responses: their store, and those in the background."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, is_here: bool = True) -> None:
        """`is_here`: False in a front process that leaves responses to the hub."""
        self.is_on = is_here and config.max_stored_responses > 0
        """Whether responses are stored; if not, none is ever found."""
        self._llm = llm
        self._unneeded: list[str] = []
        """Sessions to delete."""
        self._has_work = asyncio.Event()
        disk = llm.config.kv_disk
        bounds = StoreBounds(config.max_stored_responses, config.max_stored_bytes, config.stored_response_ttl)
        folder = None if disk is None or not self.is_on else Path(disk).expanduser() / "responses"
        self.store = ResponseStore(folder, bounds, self._on_drop)
        self.background = BackgroundResponses(self.store, config.max_background_responses)
        self.locked: set[tuple[str, str]] = set()
        """Conversations (owner and id) with a response under way."""
        self._cleaning: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to remove what has expired; call it in the event loop."""
        if self.is_on:
            self._cleaning = asyncio.ensure_future(self._clean())

    async def stop(self) -> None:
        """End background responses and close the store."""
        await self.background.stop()
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.gather(self._cleaning, return_exceptions=True)
        await asyncio.to_thread(self.store.close)

    def measure(self, name: str) -> dict[tuple[str, ...], float]:
        """The values of one of the metrics of what is stored."""
        match name:
            case "stored_response_bytes":
                return {(): self.store.total_bytes}
            case "stored_responses_dropped":
                return {(reason,): count for reason, count in self.store.removed.items()}
            case "background_responses":
                return {(): len(self.background.running)}
        return {}

    async def call(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call a method of the store. What is wrong with the store becomes a response."""
        try:
            return await self.store.run(method, *arguments)
        except StoreError as error:
            raise as_stored_error(error) from None

    def _on_drop(self, key: str) -> None:
        self._unneeded.append(key)
        self._has_work.set()

    async def _clean(self) -> None:
        while True:
            self._has_work.clear()
            with contextlib.suppress(StoreError):
                await self.store.run(lambda: None)  # every call removes what has expired
            await self.store.tidy()
            self.background.forget_old()
            while self._unneeded:
                key = self._unneeded.pop()
                with contextlib.suppress(QuireError):  # the session expires anyway
                    await self._llm.call_sessions(DeleteSession(key))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_work.wait(), CLEAN_SECONDS)
