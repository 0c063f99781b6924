"""CUDA graphs without a GPU: what would be captured runs eagerly, at every replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.worker import cuda_graphs
from quire.worker.cuda_graphs import CapturedDecodePath, CapturedMixedPath, CapturedVerifyPath
from quire.worker.worker import Worker


class _EagerGraph:
    def __init__(self, run: Callable[[], torch.Tensor | None]) -> None:
        self.replay = run


class _EagerPool:
    def __init__(self, batch: object) -> None:
        pass

    def capture(self, run: Callable[[], torch.Tensor | None], warm_up: bool = False) -> _EagerGraph:
        if warm_up:
            with torch.inference_mode():
                run()
        return _EagerGraph(run)


def run_graphs_eagerly(monkeypatch: pytest.MonkeyPatch, kinds: set[str]) -> set[tuple[bool, str]]:
    """Captured paths of these kinds ("decode", "verify", "mixed") run in Triton's interpreter. Returns a list of what
    has run, filled as it runs: (on the last pipeline stage, "decode step" or the like)."""
    used: set[tuple[bool, str]] = set()
    paths = {"decode": CapturedDecodePath, "verify": CapturedVerifyPath, "mixed": CapturedMixedPath}
    for kind, path in paths.items():
        if kind not in kinds:
            monkeypatch.setattr(path, "fit", lambda self, plan: None)
            monkeypatch.setattr(path, "_capture", lambda self, shape: None)
        for part in ("step", "forward"):
            monkeypatch.setattr(path, f"_run_{part}", _noted(getattr(path, f"_run_{part}"), f"{kind} {part}", used))
    monkeypatch.setattr(cuda_graphs, "GraphPool", _EagerPool)
    monkeypatch.setattr(cuda_graphs, "LONG_CONTEXT", 16)
    monkeypatch.setattr(cuda_graphs, "capture_sizes", lambda max_rows: [4, max_rows])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(Worker, "_can_capture", lambda self: True)
    return used


def _noted(run: Callable[..., Any], name: str, used: set[tuple[bool, str]]) -> Callable[..., Any]:
    def noted(self: Any, shape: Any) -> Any:
        used.add((self._is_last_stage, name))
        return run(self, shape)

    return noted
