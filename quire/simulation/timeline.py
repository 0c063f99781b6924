"""What happened in a simulation, for other programs: its steps as a trace file that Perfetto (ui.perfetto.dev) and
chrome://tracing open, and the slowest requests as the page's timelines."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec

from quire.messages.engine_view import RequestTimeline
from quire.simulation.device import SimulatedStep

MOST_STEPS = 200_000
"""Steps that are kept: a larger file is slow to open."""


class Timeline:
    """Collects steps, one track a replica."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []

    def note(self, replica: int, step: SimulatedStep) -> None:
        """A step was launched."""
        if len(self._events) >= MOST_STEPS:
            return
        shape = step.shape
        kind = "mixed" if shape.decodes and shape.prompt_tokens else "decode" if shape.decodes else "prompt"
        self._events.append(
            {
                "name": f"{kind} {shape.tokens}",
                "ph": "X",
                "ts": round(1e6 * step.start, 3),
                "dur": round(1e6 * (step.end - step.start), 3),
                "pid": 0,
                "tid": replica,
                "args": {"decodes": shape.decodes, "prompt tokens": shape.prompt_tokens, "context": shape.context},
            }
        )

    def write(self, path: str) -> None:
        """Write the file."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": f"replica {tid}"}}
            for tid in sorted({event["tid"] for event in self._events})
        ]
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": names + self._events, "displayTimeUnit": "ms"}, file)


class SlowestRequests:
    """Keeps the timelines of the slowest requests, as `GET /v1/engine/requests/{id}/timeline` has them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: list[tuple[float, int, RequestTimeline]] = []
        self._order = itertools.count()

    def note(self, seconds: float, timeline: Callable[[], RequestTimeline | None]) -> None:
        """A request has ended, that took so long."""
        if len(self._kept) == self._count and seconds <= self._kept[0][0]:
            return
        if (found := timeline()) is not None:
            keep = heapq.heappush if len(self._kept) < self._count else heapq.heapreplace
            keep(self._kept, (seconds, next(self._order), msgspec.structs.replace(found, offset=0.0)))

    @property
    def timelines(self) -> list[RequestTimeline]:
        """The slowest first."""
        return [timeline for _, _, timeline in sorted(self._kept, reverse=True)]

    def write(self, path: str) -> None:
        """Write a file with a list of them."""
        with open(path, "wb") as file:
            file.write(msgspec.json.encode(self.timelines))
