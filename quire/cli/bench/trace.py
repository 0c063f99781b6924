"""Reads a profiler's trace: where the time of a step was spent."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "quire:"
"""Prefix of the names of our marks in a trace: `quire:step` and its parts."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class TraceEntry:
    """A kernel or an operator: number of calls and total time."""

    calls: int = 0
    microseconds: float = 0.0

    def add(self, microseconds: float) -> None:
        self.calls += 1
        self.microseconds += microseconds


@dataclass
class Trace:
    """Times in microseconds, over all recorded steps."""

    steps: int
    wall: float
    """From the start of the first step to the end of the last."""
    parts: dict[str, float]
    """Host time by part of the loop."""
    kernels: dict[str, TraceEntry] = field(default_factory=dict)
    operators: dict[str, TraceEntry] = field(default_factory=dict)
    busy: float = 0.0
    """Time in which the device was busy."""
    longest_gap: float = 0.0
    after_gap: str = ""
    """The kernel after the longest gap."""

    @classmethod
    def read(cls, path: Path) -> Trace:
        """From a file written by torch.profiler."""
        with gzip.open(path, "rt") as file:
            return cls.of(json.load(file)["traceEvents"])

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> Trace:
        """From the events of such a file."""
        spans = [event for event in events if event.get("ph") == "X"]
        marks = [event for event in spans if event.get("cat") == "user_annotation" and event["name"].startswith(MARK)]
        whole = [mark for mark in marks if mark["name"] == MARK + "step"]
        if not whole:
            raise ValueError("the trace contains no step: the run was too short to be profiled")
        begin = min(step["ts"] for step in whole)
        end = max(step["ts"] + step["dur"] for step in whole)
        parts: dict[str, float] = defaultdict(float)
        for mark in marks:
            parts[mark["name"].removeprefix(MARK)] += mark["dur"]
        trace = cls(len(whole), end - begin, dict(parts))
        trace._add_kernels([event for event in spans if event.get("cat") in ON_DEVICE], begin, end)
        trace._add_operators([event for event in spans if event.get("cat") == "cpu_op"], begin, end)
        return trace

    def _add_kernels(self, events: list[dict[str, Any]], begin: float, end: float) -> None:
        """A kernel's time counts from the end of all before it: with dependent launches one starts early and waits."""
        spans = [
            (max(event["ts"], begin), min(event["ts"] + event["dur"], end), short(event["name"]))
            for event in events
            if event["ts"] < end and event["ts"] + event["dur"] > begin
        ]
        done = begin
        for start, stop, name in sorted(spans):
            if start - done > self.longest_gap:
                self.longest_gap, self.after_gap = start - done, name
            self.busy += max(0.0, stop - max(start, done))
            done = max(done, stop)
        done = begin
        for start, stop, name in sorted(spans, key=lambda span: span[1]):
            self.kernels.setdefault(name, TraceEntry()).add(stop - max(start, done))
            done = stop

    def _add_operators(self, events: list[dict[str, Any]], begin: float, end: float) -> None:
        """An operator's own time, without that of the operators it called."""
        threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            if begin <= event["ts"] < end:
                threads[event["tid"]].append(event)
        for each in threads.values():
            for name, self_time in _self_times(each):
                self.operators.setdefault(name, TraceEntry()).add(self_time)

    @property
    def operators_time(self) -> float:
        """The sum over all operators."""
        return sum(entry.microseconds for entry in self.operators.values())


def _self_times(events: list[dict[str, Any]]) -> list[tuple[str, float]]:
    self_times = {id(event): event["dur"] for event in events}
    open_spans: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while open_spans and open_spans[-1]["ts"] + open_spans[-1]["dur"] <= event["ts"]:
            open_spans.pop()
        if open_spans:
            self_times[id(open_spans[-1])] -= event["dur"]
        open_spans.append(event)
    return [(event["name"], max(0.0, self_times[id(event)])) for event in events]


def short(kernel: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    name = re.sub(r"^(void|int|float) ", "", kernel)
    return re.split(r"[<(]", name, maxsplit=1)[0].strip() or kernel
