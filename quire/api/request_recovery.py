"""Open requests outlive their engine: they go on at another replica, or at the engine that takes its place.

The front has each request's prompt, its parameters with the seed, and its tokens so far, and a draw depends on nothing
but these. So an engine that gets the request with its tokens draws the ones that the dead engine would have drawn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from quire.api.death_watch import DeathWatch
from quire.api.output_stream import OutputStream
from quire.engine import ipc
from quire.engine.session_calls import RewriteSession
from quire.errors import EngineDeadError, QuireError
from quire.messages.request import NewRequest
from quire.output.processor import OutputProcessor

if TYPE_CHECKING:
    from quire.api.engine_group import EngineGroup
    from quire.api.replica import Replica

logger = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS = 30.0
RACE_SECONDS = 0.01
"""Pause before a call is repeated that found no engine, where one is ready by now."""
SETTLED_SECONDS = 300.0
"""An engine that lived this long did not fail in a row with the one before, even if it has yielded nothing."""


def pauses() -> Iterator[float]:
    """Seconds to wait before each restart attempt: none, then 1, doubling each time."""
    yield 0.0
    seconds = 1.0
    while True:
        yield min(seconds, LONGEST_PAUSE_SECONDS)
        seconds = min(2 * seconds, LONGEST_PAUSE_SECONDS)


class RequestRecovery:
    """Holds the requests that have no engine, sends them to the next, and restarts engines unless a supervisor does."""

    def __init__(self, group: EngineGroup, outputs: OutputProcessor, most_restarts: int) -> None:
        """`most_restarts`: how often in a row, without a token in between, an engine may die or fail to start before
        its requests fail too."""
        self._group = group
        self._outputs = outputs
        self._most_restarts = most_restarts
        self._waiting: dict[str, OutputStream] = {}
        """Requests without an engine, by key, in the order in which they came."""
        self._watch = DeathWatch()
        self._restarts: dict[int, asyncio.Task[None]] = {}
        """Restarts under way, by replica."""
        self._listeners: list[asyncio.Future[None]] = []
        """Resolved when a replica is open for all requests, or given up."""
        self.resumed = 0
        """Requests that went on at another engine."""

    # What can be expected

    def awaits(self, replica: Replica) -> bool:
        """Whether the replica, if its engine is dead, will have another."""
        return not replica.is_shut and not replica.is_killed and replica.failures <= self._most_restarts > 0

    @property
    def is_hopeful(self) -> bool:
        """Whether a request can be computed, if not at once."""
        return any(replica.is_hopeful for replica in self._group.replicas)

    @property
    def _awaits_any(self) -> bool:
        """Whether a replica whose engine is dead will have another."""
        return any(replica.death and self.awaits(replica) for replica in self._group.replicas)

    def can_wait(self, request: NewRequest) -> bool:
        """Whether a request that no replica can have now may wait for one."""
        home = self._group.affinity.known(request.session) if request.session else None
        return self.is_hopeful if home is None else home.is_hopeful

    def ensure_restarts(self) -> None:
        """Restart dead engines that are waited for and that nothing restarts yet."""
        for replica in self._group.replicas:
            if replica.death and not replica.is_supervised and self.awaits(replica):
                self._restart(replica)

    async def next_engine(self) -> bool:
        """Waits until a replica takes requests that did not, if one is waited for; False: none is."""
        replicas = self._group.replicas
        if not self._awaits_any and not any(replica.is_draining or replica.trial is not None for replica in replicas):
            await asyncio.sleep(RACE_SECONDS)
            return not any(replica.death for replica in replicas)
        self.ensure_restarts()
        ready = asyncio.get_running_loop().create_future()
        self._listeners.append(ready)
        await ready
        return True

    def _notify(self) -> None:
        listeners, self._listeners = self._listeners, []
        for ready in listeners:
            if not ready.done():
                ready.set_result(None)

    # Requests without an engine

    def park(self, stream: OutputStream) -> None:
        """The request waits for an engine."""
        stream.replica = None
        self._waiting[stream.key] = stream
        self.ensure_restarts()

    def leave(self, stream: OutputStream) -> None:
        """The reader of a request without an engine has left."""
        if self._waiting.pop(stream.key, None) is not None:
            self._outputs.forget(stream.key)

    def forget(self, stream: OutputStream) -> None:
        """The reader of a request has left, wherever the request was."""
        self._watch.forget(stream.key)
        for replica in self._group.replicas:
            if replica.trial is stream:
                self._next_trial(replica)

    def abort(self, stream: OutputStream) -> None:
        """Abort a request without an engine; its reader gets a last output."""
        if self._waiting.pop(stream.key, None) is not None:
            self._end(stream, "abort")

    def _end(self, stream: OutputStream, reason: str, message: str | None = None) -> None:
        """End a request here, with the tokens it has."""
        self._watch.forget(stream.key)
        views, _ = self._outputs.process(self._outputs.ends(stream.key, reason, message))
        for view in views:
            view.request_id = stream.request_id
            stream.put(view)

    def _fail(self, streams: Iterable[OutputStream], error: QuireError) -> None:
        for stream in streams:
            self._waiting.pop(stream.key, None)
            self._watch.forget(stream.key)
            self._outputs.forget(stream.key)
            stream.fail(error)

    def _place(self, stream: OutputStream) -> None:
        """Send a request to an engine that may have it; if there is none, it waits."""
        assert stream.request is not None
        try:
            chosen = self._group.choose(stream.request)
        except EngineDeadError as error:
            if self.can_wait(stream.request):
                self._waiting[stream.key] = stream
            else:
                self._fail([stream], error)
        except Exception as error:  # a user's routing policy failed: so does this request, and the others are placed
            logger.exception("the routing policy failed")
            self._fail([stream], QuireError(f"the routing policy failed: {type(error).__name__}: {error}"))
        else:
            self._send(stream, chosen)

    def _place_all(self) -> None:
        """Send all requests to engines that may have them, but those that are to be retried alone."""
        waiting, self._waiting = self._waiting, {}
        for key, stream in waiting.items():
            if key in self._watch.suspects:
                self._waiting[key] = stream
            else:
                self._place(stream)

    def _send(self, stream: OutputStream, replica: Replica) -> None:
        """Send a request with the tokens it has."""
        request = self._outputs.continued(stream.key)
        if stream.engine is None or stream.engine.info.keys.root() != replica.info.keys.root():
            request = msgspec.structs.replace(request, keys=[])  # those of other weights, which a reload has replaced
        replica.attach()
        if request.session and not self._group.affinity.survives:
            self._remake_session(request, replica)
        self._watch.sent(stream.key, self._outputs.num_tokens(stream.key))
        self._group.launch(replica, stream, request, ipc.encode(ipc.Add(request)))

    def _remake_session(self, request: NewRequest, replica: Replica) -> None:
        """The session has died with its engine: the prompt is its whole content."""
        self._group.affinity.place(request.session, replica)
        replica.send_session_op(RewriteSession(request.session, request.prompt, request.salt))

    # Engines that die

    def engine_died(self, replica: Replica, streams: list[OutputStream], is_planned: bool) -> None:
        """An engine is dead, and had these open requests. `is_planned`: it was ended to be replaced."""
        replica.trial = None
        if not is_planned:
            replica.failures = 1 if replica.age > SETTLED_SECONDS else replica.failures + 1
        if replica.is_shut or replica.is_killed or not self._most_restarts:
            self._fail(streams, replica.dead_error)
            self.give_up(replica)
            return
        guilty: dict[str, str] = {}
        if not is_planned:
            tokens = {stream.key: self._outputs.num_tokens(stream.key) for stream in streams}
            guilty = self._watch.engine_died(tokens, replica.death)
        for stream in streams:
            stream.replica = None
            if stream.key in guilty:
                logger.error("request %s: %s", stream.request_id, guilty[stream.key])
                self._end(stream, "error", guilty[stream.key])
            elif stream.is_aborted:
                self._end(stream, "abort")
            else:
                self.resumed += 1
                self._waiting[stream.key] = stream
        self._place_all()
        if streams:
            logger.warning(
                "%d requests of an engine that has ended go on; %d requests wait for an engine",
                len(streams) - len(guilty), len(self._waiting),
            )  # fmt: skip
        if not is_planned:
            self.attempt_failed(replica)

    def attempt_failed(self, replica: Replica) -> None:
        """An engine has died, or could not be started: start another, or give it up."""
        if self.awaits(replica):
            self.ensure_restarts()
        else:
            self.give_up(replica)

    def give_up(self, replica: Replica) -> None:
        """The replica is not waited for any more: fail the requests that no other replica can have."""
        if not self.is_hopeful:
            self._fail(list(self._waiting.values()), self._group.dead_error)
        waiting = list(self._waiting.values())
        lost = [one for one in waiting if one.request is not None and not self.can_wait(one.request)]
        if not self._awaits_any:
            lost += [self._waiting[key] for key in self._watch.suspects if key in self._waiting]
        self._fail(lost, replica.dead_error)
        self._notify()

    # Engines that are ready

    def engine_ready(self, replica: Replica) -> None:
        """A replica has a new engine: suspects run at it alone, one after the other, then it is open for all."""
        self._next_trial(replica)

    def on_output(self, replica: Replica) -> None:
        """Called after each output of a replica where a suspect runs alone."""
        stream = replica.trial
        assert stream is not None
        if stream.is_ended or self._watch.passes(stream.key, self._outputs.num_tokens(stream.key)):
            self._next_trial(replica)

    def _next_trial(self, replica: Replica) -> None:
        """Send the next suspect to the replica; without one, the replica is open for all requests."""
        replica.trial = None
        if replica.death or replica.is_draining:
            return
        chosen = next((key for key in self._watch.suspects if self._may_try(key, replica)), None)
        if self._group.router is not None:
            (self._group.router.reopen if chosen is None else self._group.router.close)(str(replica.number))
        if chosen is None:
            self._place_all()
            self._notify()
        else:
            self._watch.begin_trial(chosen)
            replica.trial = self._waiting.pop(chosen)
            self._send(replica.trial, replica)

    def _may_try(self, key: str, replica: Replica) -> bool:
        stream = self._waiting.get(key)
        if stream is None or stream.request is None:
            return False
        is_empty = all(other.is_ended for other in replica.streams.values())
        if not is_empty and self._watch.needs_empty(key) and self._awaits_any:
            return False  # an engine that is about to be ready has no other request
        home = self._group.affinity.known(stream.request.session) if stream.request.session else None
        return home is None or home is replica

    # Restarting

    def _restart(self, replica: Replica) -> None:
        """Restart the replica's engine in the background."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no event loop: the next call starts it
            return
        under_way = self._restarts.get(replica.number)
        if under_way is None or under_way.done() or under_way.get_loop() is not loop:
            self._restarts[replica.number] = loop.create_task(self._restart_until_ready(replica))

    async def _restart_until_ready(self, replica: Replica) -> None:
        before_next = pauses()
        while replica.death and not replica.is_supervised and self.awaits(replica):
            await asyncio.sleep(next(before_next))
            try:
                await replica.restart(only_if_dead=True)
                before_next = pauses()  # if it dies at once, a request may be the cause: the next engine finds out
            except Exception as error:  # `replica.failures` counts it
                logger.error("the engine could not be restarted: %s", error)

    async def close(self) -> None:
        """End restarts that are under way."""
        under_way = [task for task in self._restarts.values() if not task.done()]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
