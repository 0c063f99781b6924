"""The actor that holds a rank on a node of a Ray cluster. Ray places, starts and watches it; it carries no plans.

The class travels to the node as code, so that a node without quire, or with another one, can say so. That is why
nothing of quire is imported above.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import socket
from typing import Any


class RankActor:
    """One rank."""

    def facts(self, paths: list[str]) -> dict[str, Any]:
        """What is there: versions, cores, and which of these paths."""
        import ray

        return {
            "address": ray.util.get_node_ip_address(),
            "node": ray.get_runtime_context().get_node_id(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            "quire": self._version_of_quire(),
            "torch": self._version("torch"),
            "missing": [path for path in paths if not os.path.exists(path)],
        }

    def run(self, address: tuple[str, int], secret: bytes, rank: int, environment: dict[str, str]) -> None:
        """Be the rank, until the engine has gone."""
        os.environ.update(environment)
        from quire.executor.rank import serve_engine_at

        serve_engine_at(address, secret, rank)

    def _version_of_quire(self) -> str:
        try:
            return str(importlib.import_module("quire").__version__)
        except ImportError:
            return ""

    def _version(self, package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""
