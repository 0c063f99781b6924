"""What happened to recent requests, step by step: small tuples at events that exist anyway, in bounded memory.

A step is noted once, with the arrays of its plan; a request only when it changes its state. Which steps a request was
in follows from its row and the steps between taking and leaving it, when someone asks.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.messages.engine_view import RequestTimeline, StepFigures, TimelineEvent, TimelineStep
from quire.messages.plan import Ints, StepPlan, StepResult
from quire.messages.request import Request

MOST_STEPS = 8192
MOST_STEP_ROWS = 1 << 20
"""Rows of all kept steps together: 8 bytes each."""
MOST_REQUESTS = 2048
MOST_EVENTS = 256
"""Of one request; a request that is preempted more often keeps its first ones."""
MOST_LATENCIES = 256

ENDS_ROW = frozenset(("preempted", "restarted", "awaits mask", "finished"))


class LaunchedStep(NamedTuple):
    """A step whose result is not collected."""

    launched: float
    rows: Ints
    counts: Ints
    num_decodes: int
    prompt_tokens: int
    num_drafts: int


class KeptStep(NamedTuple):
    """A step that has ended."""

    step: int
    launched: float
    ended: float
    rows: Ints
    """Of the plan, decodes first…"""
    counts: Ints
    """…and the tokens that each computed."""
    num_decodes: int
    prompt_tokens: int
    num_drafts: int
    yielded: Ints | None
    """Tokens that each decode drew, with drafts; None: one each."""


@dataclass
class RequestEvents:
    """The events of one request: (time, next step, kind, sequence, row, value)."""

    tenant: str
    prompt_tokens: int
    arrival: float
    events: list[tuple[float, int, str, int, int, int]] = field(default_factory=list)
    reason: str = ""
    """Why it ended."""


class NoTimelines:
    """Nothing is noted: the methods of `Timelines`."""

    is_on = False

    def note(self, request: Request, kind: str, value: int = 0) -> None: ...

    def finished(self, request: Request, reason: str) -> None: ...

    def launched(self, plan: StepPlan, now: float) -> None: ...

    def collected(self, step: int, result: StepResult, drawn: Iterable[Request], now: float) -> None: ...

    def forget_in_flight(self) -> None: ...

    def recent_steps(self, count: int) -> list[StepFigures]:
        return []

    def latencies(self) -> tuple[list[float], list[float]]:
        return [], []

    def of(self, request_id: str) -> RequestTimeline | None:
        return None


class Timelines:
    """The events of the last requests and the last steps."""

    is_on = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = 0
        """The number of the next plan."""
        self._launched: dict[int, LaunchedStep] = {}
        self._steps: deque[KeptStep] = deque()
        self._num_rows = 0
        self._requests: OrderedDict[str, RequestEvents] = OrderedDict()
        self._first_tokens: deque[float] = deque(maxlen=MOST_LATENCIES)
        """Seconds from arrival to the first token."""
        self._token_times: deque[float] = deque(maxlen=MOST_LATENCIES)
        """Seconds a token after the first, of requests that have ended."""

    # Noting

    def note(self, request: Request, kind: str, value: int = 0) -> None:
        """Something happened to a sequence; `value` is what the kind says."""
        record = self._requests.get(request.id)
        if record is None:
            source = request.source
            record = RequestEvents(source.tenant, len(source.prompt), source.arrival)
            self._requests[request.id] = record
            if len(self._requests) > MOST_REQUESTS:
                self._requests.popitem(last=False)
        if len(record.events) < MOST_EVENTS:
            record.events.append((self._clock(), self._step, kind, request.index, request.row, value))

    def finished(self, request: Request, reason: str) -> None:
        """A sequence has ended with so many output tokens."""
        self.note(request, "finished", len(request.output))
        record = self._requests[request.id]
        record.reason = reason
        first = next((event[0] for event in record.events if event[2] == "drawn"), None)
        if first is not None and len(request.output) > 1:
            self._token_times.append((record.events[-1][0] - first) / (len(request.output) - 1))

    def launched(self, plan: StepPlan, now: float) -> None:
        """A step was launched."""
        self._step = plan.step + 1
        self._launched[plan.step] = LaunchedStep(
            now, plan.rows, plan.counts, plan.num_decodes, len(plan.tokens), plan.num_drafts
        )

    def collected(self, step: int, result: StepResult, drawn: Iterable[Request], now: float) -> None:
        """Its result was collected; `drawn`: requests with their first draw since they have their row."""
        found = self._launched.pop(step, None)
        if found is None:
            return
        yielded = result.counts[: found.num_decodes] if found.num_drafts else None
        self._steps.append(
            KeptStep(
                step, found.launched, now, found.rows, found.counts, found.num_decodes, found.prompt_tokens,
                found.num_drafts, yielded,
            )
        )  # fmt: skip
        self._num_rows += len(found.rows)
        while len(self._steps) > MOST_STEPS or self._num_rows > MOST_STEP_ROWS:
            self._num_rows -= len(self._steps.popleft().rows)
        for request in drawn:
            if request.is_finished:
                continue
            if not request.output and request.source.arrival:
                self._first_tokens.append(now - request.source.arrival)
            self.note(request, "drawn")

    def forget_in_flight(self) -> None:
        """The steps in flight have failed."""
        self._launched.clear()

    # Looking

    def recent_steps(self, count: int) -> list[StepFigures]:
        """The last steps that have ended, oldest first."""
        recent = [self._steps[at] for at in range(max(0, len(self._steps) - count), len(self._steps))]
        return [
            (one.step, one.launched, one.ended, one.num_decodes, len(one.rows) - one.num_decodes, one.prompt_tokens,
             one.num_drafts)
            for one in recent
        ]  # fmt: skip

    def latencies(self) -> tuple[list[float], list[float]]:
        """Of recent requests: seconds to the first token, and seconds a token after it."""
        return list(self._first_tokens), list(self._token_times)

    def of(self, request_id: str) -> RequestTimeline | None:
        """The timeline of the latest request with this id, or whose id the engine has made from this one."""
        found = next((one for one in reversed(self._requests) if _is_named(one, request_id)), None)
        if found is None:
            return None
        record = self._requests[found]
        events = [
            TimelineEvent(at=at, step=step, kind=kind, sequence=sequence, row=row, value=value)
            for at, step, kind, sequence, row, value in record.events
        ]
        first = self._steps[0].step if self._steps else self._step
        begun = next((event.step for event in events if event.kind == "admitted"), None)
        return RequestTimeline(
            id=found, tenant=record.tenant, prompt_tokens=record.prompt_tokens, arrival=record.arrival,
            now=self._clock(), offset=time.time() - self._clock(), finish_reason=record.reason, events=events,
            steps=[step for sequence in {event.sequence for event in events} for step in self._of(events, sequence)],
            is_whole=begun is None or begun >= first,
        )  # fmt: skip

    def _of(self, events: list[TimelineEvent], sequence: int) -> Iterator[TimelineStep]:
        """The steps that a sequence was in."""
        events = [event for event in events if event.sequence == sequence]
        left = next((event.value for event in events if event.kind == "finished"), None)
        if left is not None:
            left -= sum(event.kind == "drawn" for event in events)
        for row, start, stop in _stays(events):
            for one in self._between(start, stop):
                places = np.flatnonzero(one.rows == row)
                if not len(places):
                    continue
                place = int(places[0])
                is_decode = place < one.num_decodes
                drew = int(one.yielded[place]) if is_decode and one.yielded is not None else int(is_decode)
                if left is not None and is_decode:
                    drew = max(0, min(drew, left))  # what was in flight at the end is dropped
                    left -= drew
                yield TimelineStep(
                    step=one.step, start=one.launched, end=one.ended, sequence=sequence, row=row,
                    is_prompt=not is_decode, computed=int(one.counts[place]), drew=drew, decodes=one.num_decodes,
                    prompts=len(one.rows) - one.num_decodes, prompt_tokens=one.prompt_tokens, drafts=one.num_drafts,
                )  # fmt: skip

    def _between(self, start: int, stop: int | None) -> Iterator[KeptStep]:
        """Kept steps from number `start` up to `stop`."""
        for at in range(bisect_left(self._steps, start, key=lambda one: one.step), len(self._steps)):
            if stop is not None and self._steps[at].step >= stop:
                return
            yield self._steps[at]


def _is_named(known: str, given: str) -> bool:
    """Engines add a number to the caller's id."""
    return known == given or (known.startswith(given + "-") and known[len(given) + 1 :].isdecimal())


def _stays(events: list[TimelineEvent]) -> Iterator[tuple[int, int, int | None]]:
    """(row, first step, step after the last) of each stay in a row; None: it has not ended."""
    open_at: tuple[int, int] | None = None
    for event in events:
        if event.kind == "admitted":
            open_at = (event.row, event.step)
        elif event.kind in ENDS_ROW and open_at is not None:
            yield (*open_at, event.step)
            open_at = None
    if open_at is not None:
        yield (*open_at, None)
