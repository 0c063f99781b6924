"""Live servers: real sockets and a real engine with the tiny model, one engine for all of them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest

from quire import AsyncLLM
from quire.loading.hub import DEFAULT_MODEL
from quire.server.config import ServerConfig
from quire.server.context import ServerContext
from quire.server.serve import HttpServer, listening
from tests.conftest import write_tiny_model
from tests.server.attacked_server import AttackedServer, attacked_server
from tests.server.scripted import TEMPLATE, Script

T = TypeVar("T")
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 256, "device": "cpu", "max_num_seqs": 16}
MODEL = "tiny"


class Live:
    """A running server, and clients for it."""

    def __init__(self, url: str, server: ServerContext, http: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.server = server
        self.http = http
        self._loop = loop
        self.client = httpx.Client(base_url=url, timeout=60)

    def openai(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **settings})

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the server's own event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def call(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    async def _engine_metrics(self) -> dict[str, float]:
        return {metric.name: metric.value for metric in await self.server.llm.get_metrics()}

    def engine_metrics(self) -> dict[str, float]:
        """The engine's metrics."""
        return self.run(self._engine_metrics())

    def assert_idle(self, seconds: float = 10.0) -> None:
        """Nothing is open, queued or running, and all blocks are free."""
        deadline = time.monotonic() + seconds
        names = ("quire:num_requests_running", "quire:num_requests_waiting", "quire:num_blocks_used")
        while True:
            engine_metrics = self.engine_metrics()
            left = {name: engine_metrics[name] for name in names if engine_metrics[name]}
            left |= {"open": len(self.server.exchanges)} if self.server.exchanges else {}
            left |= {"queued": self.server.admission.queued_tokens} if self.server.admission.queued_tokens else {}
            left |= {"admitted": self.server.admission.sequences} if self.server.admission.sequences else {}
            left |= {"bodies": self.server.bodies.held} if self.server.bodies.held else {}
            if not left:
                return
            assert time.monotonic() < deadline, left
            time.sleep(0.02)


class Host:
    """An event loop in a thread, with one engine that any number of servers share."""

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.llm = AsyncLLM(model, **{**SETTINGS, **settings})
        self.is_tiny = self.llm.info.max_model_len <= 256

    def start(self, **settings: Any) -> tuple[Live, Callable[[], None]]:
        # The tiny model's context is 256 characters: too short for tool descriptions.
        tiny = {"enable_tool_preamble": False} if self.is_tiny else {}
        defaults = {"port": 0, "served_model_name": (MODEL,), "enable_prompt_tokens_details": True}
        config = ServerConfig(**{**defaults, **tiny, **settings})
        ready: Future[Live] = Future()

        async def work() -> None:
            with listening(config) as (sock, url):
                server = ServerContext(self.llm, config)
                http = HttpServer(server, config)
                await server.start()
                await http.serve_on(sock, lambda: ready.set_result(Live(url, server, http, self.loop)))
                await server.stop()

        done = asyncio.run_coroutine_threadsafe(work(), self.loop)
        done.add_done_callback(
            lambda end: end.exception() and not ready.done() and ready.set_exception(end.exception())
        )
        live = ready.result(30)

        def stop() -> None:
            live.client.close()
            if not done.done():
                live.call(live.http.on_signal)
            done.result(30)

        return live, stop

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(asyncio.to_thread(self.llm.shutdown), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)


@pytest.fixture(scope="session")
def host(tiny_model: Path) -> Iterator[Host]:
    made = Host(tiny_model)
    yield made
    made.close()


@pytest.fixture(scope="session")
def plain_server(host: Host) -> Iterator[Live]:
    live, stop = host.start()
    yield live
    stop()


@pytest.fixture
def live(plain_server: Live) -> Iterator[Live]:
    """A server with default settings; checked to be idle after the test."""
    yield plain_server
    plain_server.assert_idle()


@pytest.fixture(scope="session")
def real_server() -> Iterator[Live]:
    host = Host(DEFAULT_MODEL, max_model_len=2048, cpu_weights="dense")
    live, stop = host.start(served_model_name=(DEFAULT_MODEL, MODEL))
    yield live
    stop()
    host.close()


@pytest.fixture
def real(real_server: Live) -> Iterator[Live]:
    """A server with the default model, for tests where the text matters; checked to be idle after the test."""
    yield real_server
    real_server.assert_idle()


@pytest.fixture
def serving(host: Host) -> Iterator[Callable[..., Live]]:
    """Starts servers with a test's own settings; they are checked and stopped after it."""
    started: list[tuple[Live, Callable[[], None]]] = []

    def start(**settings: Any) -> Live:
        started.append(host.start(**settings))
        return started[-1][0]

    yield start
    for live, stop in started:
        live.assert_idle()
        stop()


@pytest.fixture(scope="session")
def attacked_process(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    flags = ("--trust-request-chat-template", "--stall-timeout", "2", "--grammar-timeout", "2")
    folder = tmp_path_factory.mktemp("attacked")
    with attacked_server(tiny_model, folder, *flags, "--enable-prompt-tokens-details") as made:
        yield made


@pytest.fixture
def attacked(attacked_process: AttackedServer) -> Iterator[AttackedServer]:
    """A `quire serve` process; checked to be unchanged after the test."""
    yield attacked_process
    attacked_process.assert_unharmed()


@pytest.fixture(scope="session")
def long_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = write_tiny_model(tmp_path_factory.mktemp("long"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 18}))
    host = Host(folder, chat_template=TEMPLATE, num_gpu_blocks_override=1 << 14)
    yield host
    host.close()


@pytest.fixture
def script(long_host: Host, monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script(long_host.llm.inputs)
    monkeypatch.setattr(long_host.llm, "run", made.run)
    monkeypatch.setattr(long_host.llm, "call_sessions", made.call_sessions)
    return made


@pytest.fixture
def scripted(long_host: Host, script: Script) -> Iterator[Live]:
    live, stop = long_host.start()
    yield live
    live.assert_idle()
    stop()
