"""Finds, joins or starts a Ray cluster, and leaves it; every call is bounded in time."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from quire.errors import ClusterError, ConfigError

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""How long the cluster's head may take to answer."""
CALL_SECONDS = 10.0
"""Timeout of a call to Ray, which by itself waits minutes for a lost head."""
STORE_BYTES = 100 << 20
"""Object store of a cluster started here: no objects go through it."""
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""Opens a gRPC connection, Ray's protocol: the HTTP/2 preface and an empty settings frame."""

T = TypeVar("T")
_ours = False
"""Whether this module connected the process to Ray, and not the user."""
_holders = 0
"""Engines of this process that have ranks on the cluster."""


def connect(address: str | None) -> str:
    """Join the cluster at `address` ("local": start one; None: RAY_ADDRESS, the one that `ray start` started here, or a
    new one). Returns the address. A process that is already connected keeps its connection."""
    global _ours
    ray = import_ray()
    if ray.is_initialized():
        return _address(ray)
    found = _find_cluster(address)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # off by default: it prints a page
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # otherwise Ray warns that this will become the default
    logging.getLogger("ray").setLevel(logging.ERROR)
    if found is not None:
        _check_answers(found)
    try:
        with _signals_kept():
            if found is None:
                logger.info("starting a Ray cluster of this machine only")
                ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
            else:
                ray.init(address=found, **quiet)
    except (Exception, SystemExit) as error:  # Ray raises SystemExit if its head does not answer
        where = "started here" if found is None else f"joined at {found}"
        raise ClusterError(f"the Ray cluster cannot be {where}: {_first_line(error)}") from error
    _ours = True
    _redirect_output()
    return _address(ray)


def hold() -> None:
    """Count an engine with ranks on the cluster, until it calls `leave`."""
    global _holders
    _holders += 1


def leave() -> None:
    """An engine has ended its ranks. After the last one, disconnect if this module connected; a cluster started here
    ends."""
    global _holders, _ours
    _holders -= 1
    if _ours and not _holders:
        _ours = False
        bounded(import_ray().shutdown, 2 * CALL_SECONDS)


def import_ray() -> Any:
    """The module; raises ConfigError with the command to install it."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "distributed_executor_backend is 'ray', and Ray is not installed: pip install 'quire[ray]'",
            "distributed_executor_backend",
            "ray",
        ) from error
    return ray


def bounded(call: Callable[[], T], seconds: float = CALL_SECONDS) -> T | None:
    """The result of a call to Ray; None if it fails or takes too long."""
    answers: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            if import_ray().is_initialized():  # otherwise Ray would connect to some cluster
                answers.append(call())

    thread = threading.Thread(target=run, name="quire-ray", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down
        run()
    else:
        thread.join(seconds)
    return answers[0] if answers else None


def alive_nodes() -> dict[str, dict[str, Any]]:
    """The cluster's nodes by id: `NodeManagerAddress`, `Resources`."""
    ray = import_ray()
    return {node["NodeID"]: node for node in bounded(ray.nodes) or [] if node["Alive"]}


def _find_cluster(address: str | None) -> str | None:
    """The address to join; None: start a cluster."""
    if address == "local":
        return None
    if address is None or address == "auto":
        try:
            from ray._private.services import get_ray_address_from_environment

            find: Callable[..., str | None] = get_ray_address_from_environment  # the lookup of Ray's own commands
            address = find(address, None)
        except ImportError:
            address = os.environ.get("RAY_ADDRESS") or None
        except ConnectionError as error:
            raise ClusterError(f"ray_address is 'auto', and no Ray cluster runs here: {_first_line(error)}") from error
        if address is None or address == "local":
            return None
    if "://" in address:
        raise ConfigError(
            f"ray_address must be HOST:PORT of the cluster's head, 'local' or 'auto', got {address!r}: an engine runs "
            "on a node of the cluster, not as a client from outside",
            "ray_address",
            address,
        )
    return address


def _check_answers(address: str) -> None:
    """Raises unless a Ray head answers. Ray itself would wait for minutes, and then exit the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"ray_address must be HOST:PORT, for example 10.0.0.1:6379; got {address!r}", "ray_address", address
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as sock:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return
            sock.sendall(_HTTP2_HELLO)
            answer = sock.recv(9)
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        raise ClusterError(
            f"no Ray cluster can be reached at {address} ({why} within {CONNECT_SECONDS:.0f} s): check ray_address "
            "or RAY_ADDRESS, and that `ray start --head` runs there"
        ) from error
    if len(answer) < 4 or answer[3] != 4:  # no frame of settings
        raise ClusterError(f"the server at {address} is not a Ray cluster: check ray_address or RAY_ADDRESS")


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray replaces the SIGTERM handler; restore it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _redirect_output() -> None:
    """Send what Ray prints about lost nodes to the debug log: the error that follows has it in one line."""
    with contextlib.suppress(Exception):
        from ray._private import worker

        if hasattr(worker, "print_to_stdstream"):
            worker.print_to_stdstream = lambda data, *_, **__: logger.debug("ray: %s", data.get("lines"))


def _address(ray: Any) -> str:
    return str(ray.get_runtime_context().gcs_address)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
