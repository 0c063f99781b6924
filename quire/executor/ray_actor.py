"""The Ray actor that runs a rank on a node of the cluster. Ray places and starts it; plans do not go through it.

The class is sent to the node as code, so that a node without quire, or with another version, can report that. This
module therefore imports nothing of quire.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import socket
from typing import Any


class RankActor:
    """One rank."""

    def node_info(self, paths: list[str]) -> dict[str, Any]:
        """The node's address, cores and package versions, and which of these paths are missing."""
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
        """Run the rank until the engine exits."""
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
