"""A front that is not the hub: the server of any process, over an `AsyncLLM` whose only engine is the hub."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from quire.api.adapters import AdapterEntry
from quire.api.async_llm import AsyncLLM
from quire.api.engine_group import EngineGroup
from quire.config import EngineConfig
from quire.engine import ipc
from quire.engine.engine_info import EngineInfo
from quire.engine.remote import engine_info
from quire.engine.session_calls import SessionOp
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.server.config import ServerConfig
from quire.server.context import ServerContext
from quire.server.fronts import messages
from quire.server.fronts.counts import FrontCounts
from quire.server.fronts.link import FrontLink
from quire.server.http import Exchange
from quire.server.lifecycle.supervisor import Health, Supervisor
from quire.server.observability.observer import ROUTE
from quire.server.serve import HttpServer

WITH_BODY = ("POST", "PUT", "PATCH")
REQUEST_ID = b"x-request-id"


class HubEngine:
    """All engines of the hub as one. The connection lasts as long as this process."""

    info: EngineInfo
    death = ""

    def __init__(self, sock: socket.socket, start: messages.StartFront, files: ModelFiles, model: ModelConfig) -> None:
        self.state = start.state
        self.on_message: Callable[[ipc.Up], None] = lambda message: None
        self.on_death: Callable[[str], None] = lambda reason: None
        self.on_ready: Callable[[], None] = lambda: None
        """Called when an engine has been replaced by one that may have another size."""
        self.on_drain: Callable[[], None] = lambda: None
        self.on_adapters: Callable[[list[AdapterEntry]], None] = lambda adapters: None
        self.read_metrics: Callable[[], Any] = lambda: None
        self._files, self._model = files, model
        self.info = engine_info(start.ready, files, model)
        self._answers: dict[int, asyncio.Queue[messages.RouteStart | messages.RouteBody]] = {}
        self._numbers = itertools.count()
        self._link = FrontLink(sock)
        self._link.on_payload = self._take
        # When the hub exits, so does this process (`exit_with_peer`).

    @property
    def pid(self) -> int:
        """The hub's process."""
        return os.getppid()

    def attach(self) -> None:
        """Let the running event loop read messages."""
        self._link.attach()

    def send(self, message: messages.ToHub | bytes) -> None:
        """Send, or buffer until the socket has room; never waits."""
        self._link.send(message if isinstance(message, bytes) else messages.encode(message))

    async def ask_route(
        self, call: messages.RouteCall
    ) -> AsyncGenerator[messages.RouteStart | messages.RouteBody, None]:
        """The hub's answer to a request, part by part. Leaving early ends the request."""
        call.question = number = next(self._numbers)
        answer = self._answers[number] = asyncio.Queue()
        self.send(call)
        is_whole = False
        try:
            while not is_whole:
                part = await answer.get()
                is_whole = isinstance(part, messages.RouteBody) and not part.more
                yield part
        finally:
            del self._answers[number]
            if not is_whole:
                self.send(messages.RouteCancel(number))

    def _take(self, payload: bytes) -> None:
        message = messages.decode_to_front(payload)
        match message:
            case messages.HubState():
                self.state = message
            case messages.DrainFront():
                self.on_drain()
            case messages.SetAdapters(question=question, adapters=adapters):
                self.on_adapters(adapters)
                self.send(messages.AdaptersSet(question))
            case messages.GetFrontMetrics(question=question):
                self.send(messages.FrontMetrics(question, self.read_metrics()))
            case messages.RouteStart(question=question) | messages.RouteBody(question=question):
                if (answer := self._answers.get(question)) is not None:
                    answer.put_nowait(message)
            case ipc.EngineReady():
                self.info = engine_info(message, self._files, self._model)
                self.on_ready()
                self.send(messages.KeysFollow(message.key_root))
            case messages.StartFront():
                raise RuntimeError("unexpected second StartFront message")
            case _:
                self.on_message(message)

    # What a replica does with an engine's process: there is none here

    def wait_until_ready(self) -> None:
        pass

    def exit_reason(self, seconds: float) -> str:
        return ""

    def kill(self) -> None:
        self._link.close()

    def end(self, reason: str) -> None:
        self.close(reason)

    def close(self, reason: str) -> None:
        self.death = self.death or reason

    def stop(self) -> None:
        self._link.close()


class HubGroup(EngineGroup):
    """The hub in the place of the engines."""

    def __init__(self, hub: HubEngine, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._hub = hub
        hub.on_ready = lambda: self.on_ready()

    def start(self) -> None:
        """The hub runs already."""
        self.replicas[0].start()

    def start_engine(self, number: int) -> HubEngine:
        """The hub."""
        return self._hub

    def send_session_op(self, key: str, op: SessionOp) -> None:
        """Without an answer; the hub makes it even if the engine must be restarted first."""
        self._hub.send(messages.SendSessionOp(key, op))


class FrontLLM(AsyncLLM):
    """Generates with the engines of the hub."""

    _hub: HubEngine

    @classmethod
    def behind(
        cls, hub: HubEngine, first_id: int, config: EngineConfig, files: ModelFiles, model: ModelConfig
    ) -> AsyncLLM:
        """One whose requests are numbered from `first_id`."""
        made = cls.__new__(cls)
        made._hub = hub
        made._open_model(config, files, model, spares_torch=True)
        made._numbers = itertools.count(first_id)
        return made

    @property
    def is_hopeful(self) -> bool:
        """Whether a request can be computed, if not at once."""
        return self._hub.state.is_hopeful

    def _make_group(self, files: ModelFiles, model: ModelConfig) -> EngineGroup:
        one = EngineConfig(model=self.config.model)  # how many engines there are, and of what kind, the hub knows
        return HubGroup(self._hub, one, files, model, self.engine_module, self._outputs)


class HubSupervisor(Supervisor):
    """Reports the engines' state as the hub does; the hub restarts them."""

    def __init__(self, llm: AsyncLLM, hub: HubEngine) -> None:
        super().__init__(llm)
        self._hub = hub

    def start(self) -> None:
        """Nothing to do."""

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine to send requests to."""
        return self._hub.state.is_serving

    @property
    def status(self) -> str:
        """The state of the engines, as a sentence."""
        return self._hub.state.status

    @property
    def retry_after(self) -> int:
        """Whole seconds, at least one, after which a client should retry."""
        return self._hub.state.retry_after

    async def health(self) -> Health:
        """What the hub finds."""
        status, body = 0, b""
        async with aclosing(self._hub.ask_route(messages.RouteCall(0, "GET", "/health"))) as parts:
            async for part in parts:
                if isinstance(part, messages.RouteStart):
                    status = part.status
                else:
                    body += part.data
        return Health(status == 200, self.status if status == 200 else _message_of(body))


def _message_of(error: bytes) -> str:
    message: str = msgspec.json.decode(error)["error"]["message"]
    return message


async def run_front(
    start: messages.StartFront, hub: HubEngine, llm: AsyncLLM, listening: socket.socket, counts: int
) -> None:
    """Serve until the hub says that it is enough."""

    async def ask_hub(context: ServerContext, exchange: Exchange) -> None:
        scope = exchange.scope
        body = await exchange.read_body() if scope["method"] in WITH_BODY else b""
        headers = [
            *((name, value) for name, value in scope["headers"] if name != REQUEST_ID),
            (REQUEST_ID, exchange.id.encode()),
        ]
        call = messages.RouteCall(
            0,
            scope["method"],
            scope[ROUTE],
            exchange.path_params,
            scope["query_string"],
            headers,
            body,
            exchange.tenant,
        )
        async with exchange.interruptible(), aclosing(hub.ask_route(call)) as parts:
            async for part in parts:
                if isinstance(part, messages.RouteStart):
                    await exchange.start(part.status, part.headers)
                else:
                    await exchange.send_body(part.data, part.more)

    config = ServerConfig(**start.server)
    shared = FrontCounts(start.fronts, start.number, counts)
    context = ServerContext(llm, config, shared, HubSupervisor(llm, hub), ask_hub)
    context.created = start.created
    context.adapters.set(start.adapters)
    http = HttpServer(context, config)
    hub.read_metrics, hub.on_drain = context.metrics.snapshot, http.on_signal
    hub.on_adapters = context.adapters.set
    hub.attach()
    await context.start()
    gc.freeze()
    await http.serve_on(listening, lambda: hub.send(messages.FrontReady()))
    await context.stop()
