"""The report of a profile: where the time of a step was spent."""

from __future__ import annotations

from typing import Any

from quire.cli.bench.limits import KINDS, OTHER, DeviceSpeed, StepShape, Work, kind_of
from quire.cli.bench.trace import Trace, TraceEntry
from quire.cli.terminal import table

SHOWN = 20
"""Kernels listed by name."""
PARTS = ("schedule", "launch", "collect", "update", "output")
"""Parts of a step on the host, in order."""

Rows = list[tuple[str, ...]]


def report(trace: Trace, work: Work, shape: StepShape, speed: DeviceSpeed | None, before: float | None) -> str:
    """An overview, then the kernels by kind and by name (without a GPU: torch's operators)."""
    lines = [
        f"\n{trace.steps} steps of {work.rows:.0f} requests, {work.tokens:.0f} tokens, {work.context:.0f} in context",
        table(_overview(trace, before)),
    ]
    if trace.kernels:
        lines += ["", _columns(_kind_rows(trace, work, shape, speed)), "", _columns(_kernel_rows(trace))]
        if speed is not None:
            lines.append(
                f"  limits as measured here: {speed.bytes_per_second / 1e12:.2f} TB/s copied, "
                f"{speed.operations_per_second / 1e12:.0f} TFLOP/s in bfloat16"
            )
    elif trace.operators:
        lines += ["", _columns(_operator_rows(trace))]
    return "\n".join(lines)


def _overview(trace: Trace, before: float | None) -> list[tuple[str, str]]:
    wall = trace.wall / trace.steps
    alone = "" if before is None else f"; {1000 * before:.3f} ms before the profiler started"
    rows = [("wall", f"{wall / 1000:.3f} ms per step{alone}")]
    if trace.kernels:
        gap = f"; the longest {trace.longest_gap:.0f} us, before {trace.after_gap}" if trace.after_gap else ""
        idle = trace.wall - trace.busy
        rows.append(("GPU busy", f"{trace.busy / trace.steps / 1000:.3f} ms, {100 * trace.busy / trace.wall:.1f}%"))
        rows.append(("gaps", f"{idle / trace.steps / 1000:.3f} ms, {100 * idle / trace.wall:.1f}%{gap}"))
    parts_us = [(part, trace.parts.get(part, 0.0)) for part in PARTS]
    rest = trace.wall - sum(time for _, time in parts_us)
    parts = ", ".join(f"{part} {time / trace.steps / 1000:.3f}" for part, time in [*parts_us, ("rest", rest)])
    return [*rows, ("host, ms", parts)]


def _kind_rows(trace: Trace, work: Work, shape: StepShape, speed: DeviceSpeed | None) -> Rows:
    """Kernels by kind, with the lower bound of their time."""
    sums: dict[str, TraceEntry] = {}
    for name, entry in trace.kernels.items():
        total = sums.setdefault(kind_of(name).name, TraceEntry())
        total.calls += entry.calls
        total.microseconds += entry.microseconds
    rows: Rows = [("kind", "calls", "us/step", "share", "limit us", "of limit")]
    for kind in (*KINDS, OTHER):
        if kind.name not in sums:
            continue
        total = sums[kind.name]
        spent = total.microseconds / trace.steps
        limit, reached = "", ""
        if speed is not None and kind.cost is not None and spent:
            bound = 1e6 * speed.seconds(kind.cost(shape, work))
            limit, reached = f"{bound:.1f}", f"{100 * bound / spent:.0f}%"
        rows.append((kind.name, *_cells(total, trace)[::2], _share(total, trace.busy), limit, reached))
    return rows


def _kernel_rows(trace: Trace) -> Rows:
    rows: Rows = [("kernel", "kind", "calls", "us each", "us/step", "share")]
    return rows + _rows(trace.kernels, trace, trace.busy, with_kind=True)


def _operator_rows(trace: Trace) -> Rows:
    """torch's operators; the rest of the wall time is Python and our native kernels, which torch does not see."""
    rows: Rows = [("operator", "calls", "us each", "us/step", "share")]
    outside = TraceEntry(trace.steps, max(0.0, trace.wall - trace.operators_time))
    rows += _rows(trace.operators, trace, trace.wall)
    return [*rows, ("(native kernels, Python)", *_cells(outside, trace), _share(outside, trace.wall))]


def _rows(entries: dict[str, TraceEntry], trace: Trace, whole: float, with_kind: bool = False) -> Rows:
    ordered = sorted(entries.items(), key=lambda item: -item[1].microseconds)
    shown, others = ordered[:SHOWN], ordered[SHOWN:]
    if others:
        rest = TraceEntry(sum(entry.calls for _, entry in others), sum(entry.microseconds for _, entry in others))
        shown.append((f"({len(others)} others)", rest))
    rows: Rows = []
    for name, entry in shown:
        kind = (kind_of(name).name if not name.startswith("(") else "",) if with_kind else ()
        rows.append((_shorten(name), *kind, *_cells(entry, trace), _share(entry, whole)))
    return rows


def _cells(entry: TraceEntry, trace: Trace) -> tuple[str, str, str]:
    each = entry.microseconds / entry.calls
    return f"{entry.calls / trace.steps:.1f}", f"{each:.1f}", f"{entry.microseconds / trace.steps:.1f}"


def _share(entry: TraceEntry, whole: float) -> str:
    return f"{100 * entry.microseconds / whole:.1f}%" if whole else ""


def _shorten(name: str, width: int = 48) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def _columns(rows: Rows) -> str:
    """Aligned columns: names to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    words = [i == 0 or rows[0][i] == "kind" for i in range(len(widths))]
    return "\n".join(
        "  "
        + "  ".join(
            f"{cell:<{width}}" if word else f"{cell:>{width}}"
            for cell, width, word in zip(row, widths, words, strict=True)
        ).rstrip()
        for row in rows
    )


def metrics(trace: Trace, work: Work, path: str) -> dict[str, Any]:
    """The same for --output-json; times in seconds per step."""
    per_step = 1e-6 / trace.steps
    return {
        "trace": path,
        "steps": trace.steps,
        "work": vars(work),
        "wall": trace.wall * per_step,
        "gpu_busy": trace.busy * per_step,
        "host": {part: trace.parts.get(part, 0.0) * per_step for part in PARTS},
        "kernels": {
            name: {"calls": entry.calls / trace.steps, "seconds": entry.microseconds * per_step}
            for name, entry in (trace.kernels or trace.operators).items()
        },
    }
