"""A request's timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from typing import Any

from quire.messages.engine_view import RequestTimeline


def trace_of(timeline: RequestTimeline) -> dict[str, Any]:
    """One track for the states of each sequence, one for the steps it was in."""
    start = timeline.arrival or (timeline.events[0].at if timeline.events else 0.0)
    events: list[dict[str, Any]] = [_named("process_name", 0, f"request {timeline.id}")]
    for sequence in sorted({event.sequence for event in timeline.events}):
        own = [event for event in timeline.events if event.sequence == sequence]
        states, steps = 2 * sequence, 2 * sequence + 1
        events += [_named("thread_name", states, f"sequence {sequence}"), _named("thread_name", steps, "its steps")]
        for event in own:
            if event.kind == "drawn":
                continue
            until = next((one.at for one in own if one.at > event.at and one.kind != "drawn"), None)
            name = "running" if event.kind == "admitted" else event.kind
            if event.kind == "finished":
                events.append({"name": name, "ph": "i", "s": "t", "ts": _us(event.at, start), "pid": 0, "tid": states})
            else:
                end = until or (event.at if timeline.finish_reason else timeline.now)
                events.append(_span(name, event.at, end, start, states, {"row": event.row, "value": event.value}))
        for step in timeline.steps:
            if step.sequence == sequence:
                name = f"chunk of {step.computed}" if step.is_prompt else "decode"
                figures = {
                    "step": step.step, "computed": step.computed, "drew": step.drew, "decodes": step.decodes,
                    "prompts": step.prompts, "prompt tokens": step.prompt_tokens, "drafts": step.drafts,
                }  # fmt: skip
                events.append(_span(name, step.start, step.end, start, steps, figures))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(kind: str, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}


def _span(name: str, begin: float, end: float, start: float, tid: int, figures: dict[str, Any]) -> dict[str, Any]:
    ts = _us(begin, start)
    duration = round(_us(end, start) - ts, 3)
    return {"name": name, "ph": "X", "ts": ts, "dur": duration, "pid": 0, "tid": tid, "args": figures}


def _us(at: float, start: float) -> float:
    return round(1e6 * (at - start), 3)
