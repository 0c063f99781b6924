"""The hub's side: starts the other fronts, relays between them and the engines, restarts those that exit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import msgspec

from quire.api.adapters import AdapterEntry
from quire.api.relay import refusal_of
from quire.engine import ipc
from quire.errors import QuireError
from quire.executor.child import child_context, describe_exit
from quire.messages.frames import frame
from quire.paths import child_environment
from quire.server.app import routes_of
from quire.server.config import ServerConfig
from quire.server.context import ServerContext
from quire.server.errors import ApiError, as_api_error, in_client_terms
from quire.server.fronts import messages
from quire.server.fronts.counts import FrontCounts, make_memory
from quire.server.fronts.link import FrontLink
from quire.server.http import ClientDisconnectedError, Exchange
from quire.server.lifecycle.supervisor import pauses
from quire.server.observability.snapshots import MetricsSnapshot, merged_snapshots
from quire.server.routing import Route

logger = logging.getLogger(__name__)

CORES_PER_FRONT = 4
MOST_FRONTS = 8
"""With `--api-server-count 0`."""
IDS_PER_FRONT = 1 << 40
"""Request numbers of one front process."""
STATE_SECONDS = 0.1
"""How often the engines' state is compared with what fronts know of it."""
ANSWER_SECONDS = 1.0
"""How long `/metrics` waits for fronts; after that their last figures are shown."""
SETTLED_SECONDS = 10.0
"""A front that served this long is restarted without a pause."""
EXIT_SECONDS = 5.0
"""How long a front may take to exit when it has drained, and a killed one to be gone."""


def front_count(config: ServerConfig) -> int:
    """Number of front processes, with the hub."""
    return config.api_server_count or max(1, min(MOST_FRONTS, (os.cpu_count() or 1) // CORES_PER_FRONT))


class FrontProcess:
    """One front as the hub sees it."""

    def __init__(self, fronts: Fronts, number: int, start: messages.StartFront, descriptors: list[int]) -> None:
        """Starts the process, without waiting for it. `descriptors`: of the listening socket and the counters."""
        self.number = number
        self.title = f"front {number}"
        self.snapshot = MetricsSnapshot()
        """What it had counted when it was last asked."""
        self._fronts = fronts
        self._key_root = start.ready.key_root
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._answers: dict[int, asyncio.Future[MetricsSnapshot]] = {}
        self._informed: dict[int, asyncio.Future[None]] = {}
        """Adapters that it was told of, until it has answered."""
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._exchanges: dict[int, Exchange] = {}
        """Requests that are answered here for its clients."""
        ours, theirs = socket.socketpair()
        with theirs:
            passed = [theirs.fileno(), *descriptors]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire.server.fronts.process", *map(str, passed)],
                pass_fds=passed, stdin=subprocess.DEVNULL, env=child_environment(),
            )  # fmt: skip
        self._link = FrontLink(ours)
        self._link.on_payload, self._link.on_close = self._take, self._on_close
        self._link.attach()
        self._link.send(messages.encode(start))

    def send(self, message: messages.ToFront) -> None:
        """Send it a message, or buffer it; never waits."""
        self._link.send(messages.encode(message))

    async def ask_metrics(self) -> None:
        """Update `snapshot`; it stays as it is if there is no answer in time."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.send(messages.GetFrontMetrics(number))
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                self.snapshot = await asyncio.wait_for(answer, ANSWER_SECONDS)
        finally:
            del self._answers[number]

    async def set_adapters(self, adapters: list[AdapterEntry]) -> None:
        """Tell it which adapters there are; returns when it knows, or has exited: then the next one is told."""
        number = next(self._numbers)
        known = self._informed[number] = asyncio.get_running_loop().create_future()
        self.send(messages.SetAdapters(number, adapters))
        try:
            await asyncio.wait([known, self.closed], timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._informed[number]

    async def wait_for_exit(self, seconds: float = EXIT_SECONDS) -> str:
        """How it ended; it is killed if it does not within `seconds`."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if self.process.poll() is None:
            self.process.kill()
            await asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        return describe_exit(self.process, self.title)

    def close(self) -> None:
        """End the connection, and with it the process."""
        self._link.close()
        self._on_close()

    def _on_close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if not self.closed.done():
            self.closed.set_result(None)

    # Messages of the front

    def _take(self, payload: bytes) -> None:
        try:
            message = messages.decode_to_hub(payload)
        except ipc.MalformedRequestError as error:
            self.send(refusal_of(error.request_id, error))
            return
        except ipc.MalformedCallError as error:
            self.send(ipc.SessionReply(error.question, refused=refusal_of(str(error.question), error)))
            return
        except msgspec.MsgspecError as error:  # what it asks is unknown, and would be waited for
            logger.error("%s sent an unreadable message, and is restarted: %s", self.title, error)
            self.close()
            return
        llm = self._fronts.context.llm
        match message:
            case ipc.Add(request=request):
                if self._key_root != llm.info.keys.root():  # of weights that have been replaced
                    request.keys = []
                    payload = ipc.encode(message)
                else:
                    payload = frame(payload)
                llm.relay.add(request, payload, self)
            case messages.KeysFollow(root=root):
                self._key_root = root
            case ipc.Abort(id=key):
                llm.relay.abort(key)
            case ipc.Finish():
                llm.relay.finish(message)
            case ipc.SessionCall():
                self._run(self._call_sessions(message))
            case messages.SendSessionOp(key=key, op=op):
                llm.send_session_op(key, op)
            case messages.RouteCall():
                self._run(self._answer_route(message))
            case messages.RouteCancel(question=question):
                if (exchange := self._exchanges.get(question)) is not None:
                    exchange.interrupt(ClientDisconnectedError())
            case messages.FrontMetrics(question=question, snapshot=snapshot):
                if (answer := self._answers.get(question)) is not None and not answer.done():
                    answer.set_result(snapshot)
            case messages.AdaptersSet(question=question):
                if (known := self._informed.get(question)) is not None and not known.done():
                    known.set_result(None)
            case messages.FrontReady():
                if not self.ready.done():
                    self.ready.set_result(None)
            case _:
                logger.error("%s sent %s, which only engines answer", self.title, type(message).__name__)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call_sessions(self, call: ipc.SessionCall) -> None:
        try:
            answer = await self._fronts.context.llm.call_sessions(call.op)
        except Exception as error:
            if not isinstance(error, QuireError):
                logger.error("a session call failed", exc_info=error)
            self.send(ipc.SessionReply(call.question, refused=refusal_of(str(call.question), error)))
        else:
            self.send(ipc.SessionReply(call.question, answer))

    async def _answer_route(self, call: messages.RouteCall) -> None:
        """Answer a request that the front has authorized."""
        body: asyncio.Queue[Any] = asyncio.Queue()
        body.put_nowait({"type": "http.request", "body": call.body, "more_body": False})

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.send(messages.RouteStart(call.question, message["status"], message["headers"]))
            else:
                self.send(messages.RouteBody(call.question, message["body"], message.get("more_body", False)))

        scope = {
            "type": "http", "method": call.method, "path": call.route, "path_params": call.params,
            "query_string": call.query, "headers": call.headers, "http_version": "1.1",
        }  # fmt: skip
        context = self._fronts.context
        exchange = self._exchanges[call.question] = Exchange(scope, body.get, send, context.limits)
        exchange.tenant = call.tenant
        context.exchanges.add(exchange)
        try:
            await self._fronts.routes[call.method, call.route].handler(context, exchange)
        except asyncio.CancelledError:
            if exchange.interruption is None:
                raise
            if isinstance(exchange.interruption, ApiError):
                await exchange.fail(exchange.interruption)
        except Exception as error:
            await exchange.fail(in_client_terms(as_api_error(error, context.retry_after), exchange.client_names))
        finally:
            context.exchanges.discard(exchange)
            del self._exchanges[call.question]
            exchange.end()


class NoFronts:
    """The hub serves alone."""

    counts: FrontCounts | None = None

    async def start(self, context: ServerContext) -> None:
        pass

    async def drain(self) -> None:
        pass

    async def stop(self) -> None:
        pass


def make_fronts(config: ServerConfig, listening: socket.socket) -> NoFronts | Fronts:
    """The fronts besides the hub that this configuration asks for."""
    return Fronts(config, listening) if front_count(config) > 1 else NoFronts()


class Fronts:
    """All fronts but the hub itself."""

    def __init__(self, config: ServerConfig, listening: socket.socket) -> None:
        self.count = front_count(config)
        memory = make_memory(self.count)
        self.counts = FrontCounts(self.count, 0, memory)
        self.context: ServerContext
        """Set by `start`."""
        self._config = config
        self._memory = memory
        self._descriptors = [listening.fileno(), memory]
        self.routes: dict[tuple[str, str], Route] = {}
        """Those that only the hub answers."""
        self._alive: dict[int, FrontProcess] = {}
        self._serials = itertools.count(1)
        self._retired = MetricsSnapshot()
        """What fronts that have exited had counted."""
        self._tasks: list[asyncio.Task[None]] = []
        self._known: tuple[Any, ...] = ()
        self._is_stopping = False

    async def start(self, context: ServerContext) -> None:
        """Start the processes, and wait until they accept requests; raises if one cannot."""
        self.context = context
        context.metrics.gather_fronts = self._gather_metrics
        context.share_adapters = self._share_adapters
        self.routes = {(route.method, route.path): route for route in routes_of(context) if route.is_hubs}
        self.routes |= {("HEAD", path): route for (method, path), route in self.routes.items() if method == "GET"}
        self._known = (context.llm.info, self._state())
        first = [self._start(number) for number in range(1, self.count)]
        self._tasks = [asyncio.ensure_future(self._keep(front)) for front in first]
        self._tasks.append(asyncio.ensure_future(self._report_state()))
        for front in first:
            await asyncio.wait([front.ready, front.closed], return_when=asyncio.FIRST_COMPLETED)
            if not front.ready.done():
                reason = await front.wait_for_exit()
                await self.stop()
                raise QuireError(f"{reason}, before it was ready")

    async def drain(self) -> None:
        """Let them finish their requests, for `shutdown_timeout` at most, and wait until they have exited."""
        self._is_stopping = True
        for front in self._alive.values():
            front.send(messages.DrainFront())
        seconds = self._config.shutdown_timeout + EXIT_SECONDS
        await asyncio.gather(*(front.wait_for_exit(seconds) for front in list(self._alive.values())))

    async def stop(self) -> None:
        """End all of them at once."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        fronts = list(self._alive.values())
        for front in fronts:
            front.close()
        await asyncio.gather(*(front.wait_for_exit() for front in fronts))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._alive.clear()
        with contextlib.suppress(OSError):
            os.close(self._memory)

    # Processes

    def _start(self, number: int) -> FrontProcess:
        llm = self.context.llm
        start = messages.StartFront(
            **child_context(llm.config, llm.info.files),
            server=dataclasses.asdict(self._config),
            number=number,
            fronts=self.count,
            first_id=next(self._serials) * IDS_PER_FRONT,
            created=self.context.created,
            ready=ipc.ready_message(llm.info),
            state=self._state(),
            adapters=list(self.context.adapters),
        )
        made = self._alive[number] = FrontProcess(self, number, start, self._descriptors)
        return made

    async def _keep(self, front: FrontProcess) -> None:
        """Start a front again whenever it has exited."""
        waits, begin = pauses(), time.monotonic()
        while True:
            await front.closed
            aborted = self.context.llm.relay.drop_peer(front)
            reason = await front.wait_for_exit()
            self._release(front)
            if self._is_stopping:
                return
            logger.error("%s; it is started again, and %d of its requests are aborted", reason, aborted)
            if time.monotonic() - begin >= SETTLED_SECONDS:
                waits = pauses()
            await asyncio.sleep(next(waits))
            if self._is_stopping:
                return
            begin, front = time.monotonic(), self._start(front.number)

    def _release(self, front: FrontProcess) -> None:
        """A front has exited: what it held of the limits is free, and what it had counted stays counted."""
        self._alive.pop(front.number, None)
        self.counts.end(front.number)
        self._retired = merged_snapshots([self._retired, front.snapshot])

    # The whole

    def _state(self) -> messages.HubState:
        supervisor = self.context.supervisor
        hopeful = self.context.llm.is_hopeful
        return messages.HubState(supervisor.is_serving, hopeful, supervisor.status, supervisor.retry_after)

    async def _report_state(self) -> None:
        """Tell fronts when an engine has died or been restarted."""
        while True:
            await asyncio.sleep(STATE_SECONDS)
            info, state = self.context.llm.info, self._state()
            known, self._known = self._known, (info, state)
            for front in self._alive.values():
                if info is not known[0]:
                    front.send(ipc.ready_message(info))
                if state != known[1]:
                    front.send(state)

    async def _share_adapters(self) -> None:
        adapters = list(self.context.adapters)
        await asyncio.gather(*(front.set_adapters(adapters) for front in list(self._alive.values())))

    async def _gather_metrics(self) -> MetricsSnapshot:
        fronts = list(self._alive.values())
        await asyncio.gather(*(front.ask_metrics() for front in fronts))
        return merged_snapshots([self._retired, *(front.snapshot for front in fronts)])
