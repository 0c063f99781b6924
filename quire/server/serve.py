"""Runs a server: bind the socket, start the engine, serve requests, shut down gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import stat
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from quire.adapters.folder import describe_adapter
from quire.api.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.resource_limits import raise_descriptor_limit
from quire.server.app import find_middleware, make_app
from quire.server.config import ServerConfig
from quire.server.context import ServerContext
from quire.server.fronts.hub import Fronts, NoFronts, make_fronts
from quire.server.lifecycle.accepting import FrontListener
from quire.server.lifecycle.connection import LimitedProtocol

logger = logging.getLogger(__name__)

BACKLOG = 1 << 14
KEEP_ALIVE_SECONDS = 75
"""Idle connections are closed after this; longer than clients keep theirs, so that clients close first."""
TLS_CIPHERS = "TLSv1"
"""OpenSSL's list of usual ciphers of TLS 1.2 and below; uvicorn's default."""
FLUSH_SECONDS = 2
"""Time that interrupted responses get to leave the socket."""


def serve(
    engine: EngineConfig, config: ServerConfig, on_ready: Callable[[ServerContext, str], None] | None = None
) -> int:
    """Run a server until a signal stops it. `on_ready` is called with it and its address when it accepts requests."""
    raise_descriptor_limit()
    find_middleware(config)  # refuses a wrong one before the model is loaded
    check_modules(engine, config)
    with listening(config) as (sock, url):
        llm = AsyncLLM.from_config(engine, spares_torch=True)
        try:
            load_modules(llm, config)
            run_loop(run(llm, config, sock, url, on_ready))
        finally:
            llm.shutdown()
    return 0


def load_modules(llm: AsyncLLM, config: ServerConfig) -> None:
    """List the adapters that are served from the start."""
    for request in config.adapters:
        llm.adapters.add(request)


def check_modules(engine: EngineConfig, config: ServerConfig) -> None:
    """Refuse adapters that cannot be served before the model is loaded, as far as that is possible."""
    if engine.in_process and config.api_server_count != 1:
        raise ConfigError(
            f"in_process keeps the server in one process, but api_server_count is {config.api_server_count}: use one "
            "of them",
            "in_process",
            True,
        )
    if config.lora_modules and not engine.enable_lora:
        raise ConfigError("lora_modules needs enable_lora (--enable-lora)", "lora_modules")
    for request in config.adapters:
        if not config.served_model_name and request.name == engine.model:
            raise ConfigError(f"{request.name!r} is the name of the model itself", "lora_modules", request.name)
        describe_adapter(Path(request.path), engine.max_lora_rank)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def run(
    llm: AsyncLLM,
    config: ServerConfig,
    sock: socket.socket,
    url: str,
    on_ready: Callable[[ServerContext, str], None] | None = None,
) -> None:
    """Serve on a socket until a signal arrives."""
    fronts = make_fronts(config, sock)
    context = ServerContext(llm, config, fronts.counts)
    http = HttpServer(context, config, fronts)
    await context.start()
    await fronts.start(context)
    gc.freeze()  # objects that exist now are never collected: later collections scan only newer ones, and are short
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, http.on_signal)
    loop.add_signal_handler(signal.SIGHUP, lambda: None if context.is_draining else context.reload())
    try:
        await http.serve_on(sock, lambda: on_ready(context, url) if on_ready is not None else None)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
        await fronts.stop()
        await context.stop()
        if http.force_exit:
            llm.kill_engine("the server received a second stop signal")


class HttpServer(uvicorn.Server):
    """uvicorn with our signal handling: the first signal drains, the second stops at once."""

    def __init__(self, context: ServerContext, config: ServerConfig, fronts: NoFronts | Fronts | None = None) -> None:
        """`fronts`: the other front processes, if this is the hub."""
        super().__init__(
            uvicorn.Config(
                make_app(context),
                http=LimitedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=FLUSH_SECONDS,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=config.client_certificates,
                ssl_ciphers=config.ssl_ciphers or TLS_CIPHERS,
            )
        )
        self.config.max_header_bytes = config.max_header_bytes  # type: ignore[attr-defined]
        self.config.stall_timeout = config.stall_timeout  # type: ignore[attr-defined]
        self._counts = context.admission.counts
        if self._counts.fronts > 1:
            self.config.front_counts = self._counts  # type: ignore[attr-defined]
        self._context = context
        self._settings = config
        self._stopping = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._fronts = NoFronts() if fronts is None else fronts

    async def serve_on(self, sock: socket.socket, on_ready: Callable[[], None]) -> None:
        """Accept requests until stopped."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[sock])
        on_ready()
        await self.main_loop()
        await self.shutdown(sockets=[sock])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept requests: with several fronts, those that are this front's share."""
        if self._counts.fronts == 1:
            await super().startup(sockets)
            return
        config, state = self.config, self.server_state

        def make_protocol() -> asyncio.Protocol:
            return LimitedProtocol(config=config, server_state=state, app_state={})

        self.servers = [
            FrontListener(sock, self._counts, make_protocol, config.ssl)  # type: ignore[misc]
            for sock in sockets or []
        ]
        self.started = True

    def on_signal(self) -> None:
        """SIGTERM or Ctrl-C."""
        if self._draining is None:
            seconds = self._settings.shutdown_timeout
            count = len(self._context.exchanges)
            logger.info("stopping: %d requests have %g seconds to finish; another signal stops at once", count, seconds)
            self._draining = asyncio.ensure_future(self._drain(seconds))
        else:
            self.force_exit = True
            self._draining.cancel()
            self._stopping.set()

    async def _drain(self, seconds: float) -> None:
        await asyncio.gather(self._context.drain(seconds), self._fronts.drain())
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wait for the stop event, updating the Date header. uvicorn's own loop polls ten times a second."""
        certificate = CertificateFiles(self.config) if self._settings.enable_ssl_refresh else None
        while not self._stopping.is_set():
            await self.on_tick(0)
            if certificate is not None:
                certificate.refresh()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)


class CertificateFiles:
    """The files of the server's TLS certificate, read again when they change."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._config = config
        self._seen = self._times()

    def _times(self) -> list[int]:
        names = (self._config.ssl_certfile, self._config.ssl_keyfile, self._config.ssl_ca_certs)
        return [os.stat(name).st_mtime_ns for name in names if name is not None]

    def refresh(self) -> None:
        """Load files that changed since the last call; new connections use them. Files that do not load are logged, and
        tried again when they change once more."""
        config = self._config
        try:
            now = self._times()
        except OSError:  # being replaced
            return
        if now == self._seen or config.ssl is None:
            return
        self._seen = now
        try:
            config.ssl.load_cert_chain(str(config.ssl_certfile), config.ssl_keyfile, config.ssl_keyfile_password)
            if config.ssl_ca_certs is not None:
                config.ssl.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:  # `ssl.SSLError` is one
            logger.error("the TLS certificate %s cannot be loaded again: %s", config.ssl_certfile, error)
        else:
            logger.info("the TLS certificate %s was loaded again", config.ssl_certfile)


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[tuple[socket.socket, str]]:
    """A bound socket and its address. Binding first reports a port in use before the model is loaded."""
    if config.uds is not None:
        sock = _bind_unix(config.uds)
        try:
            yield sock, f"unix:{config.uds}"
        finally:
            sock.close()
            with contextlib.suppress(OSError):
                os.unlink(config.uds)
        return
    sock = _bind_port(config.host, config.port)
    scheme = "http" if config.ssl_certfile is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    with sock:
        yield sock, f"{scheme}://{host}:{sock.getsockname()[1]}"


def _bind_port(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host!r}: {error.strerror or error}", "host", host) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another port with --port", "port", port
        ) from error
    return sock


def _bind_unix(path: str) -> socket.socket:
    """Bind a socket that only the server's user may connect to. A stale socket file is replaced."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"cannot listen on {path}: the file exists and is not a socket", "uds", path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path) == 0:
                raise ConfigError(f"cannot listen on {path}: another server uses it", "uds", path)
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mask = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(mask)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror}", "uds", path) from error
    return sock
