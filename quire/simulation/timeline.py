"""The steps of a simulation as a trace file that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

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
