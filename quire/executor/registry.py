"""Executor backends by name."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.errors import ConfigError, ValidationError
from quire.executor.base import ExecutorBackend
from quire.registry import resolve

EXECUTORS = {
    "uni": "quire.executor.local.LocalBackend",
    "mp": "quire.executor.multiprocess.MultiprocessBackend",
    "ray": "quire.executor.ray_ranks.RayBackend",
    "null": "quire.executor.null.NullBackend",
}


def executor_backend(config: EngineConfig) -> ExecutorBackend:
    """The backend that `distributed_executor_backend` names, by a short name or a dotted path."""
    try:
        backend: ExecutorBackend = resolve("executor backend", config.executor_name, EXECUTORS)()
    except ValidationError as error:
        raise ConfigError(str(error), "distributed_executor_backend", config.executor_name) from error
    return backend
