"""Why requests wait: found when someone asks, from the state that the scheduler decides by."""

from __future__ import annotations

import time

from quire.messages.memory_map import WaitingRequest, WaitReason
from quire.messages.request import Request, RequestState
from quire.scheduler.scheduler import Scheduler

_OUTSIDE = (RequestState.COMPILING, RequestState.ADAPTING)
"""Requests that are not in the policy's queue."""
MOST_EXPLAINED = 200
"""Waiting requests listed."""


def explain_waiting(scheduler: Scheduler) -> list[WaitingRequest]:
    """The requests without a row, in the order of admission, each with the reason."""
    table = scheduler.requests
    waiting = [
        request
        for request_id in table.ids()
        for request in table.sequences(request_id)
        if request.row < 0 and request.state is not RequestState.LOADING and _waits_itself(request)
    ]
    order = table.sharing.order
    waiting.sort(key=lambda request: (request.state in _OUTSIDE, order(request)))
    now = time.monotonic()
    return [
        WaitingRequest(
            name=request.id if request.source.num_sequences == 1 else f"{request.id}/{request.index}",
            tenant=request.source.tenant,
            tokens=request.known,
            preemptions=request.preemptions,
            seconds=max(0.0, now - request.source.arrival) if request.source.arrival else 0.0,
            reason=reason,
            detail=detail,
        )
        for place, request in enumerate(waiting[:MOST_EXPLAINED])
        for reason, detail in [_explain(scheduler, request, place)]
    ]


def _waits_itself(request: Request) -> bool:
    """Not so a sequence that forks from another once the prompt is computed."""
    return request.index == request.source.open_sequences[0] or request.preemptions > 0 or bool(request.output)


def _explain(scheduler: Scheduler, request: Request, place: int) -> tuple[WaitReason, str]:
    table, pool, pressure = scheduler.requests, scheduler.tables.pool, scheduler.pressure
    if request.state is RequestState.COMPILING:
        return "grammar", "its grammar is being compiled"
    if request.state is RequestState.ADAPTING:
        return "adapter", table.adapters.explain(request.id)
    if (alone := scheduler.quarantined) is not None and alone is not request:
        return "quarantine", f"a step failed: requests run one at a time until the cause is found, now {alone.id}"
    if request.in_flight:
        return "draws", f"{request.in_flight} of its draws are not collected yet"
    if not table.sharing.allows(request):
        return "share", f"tenant {request.source.tenant!r} has as many rows or blocks as it may"
    if place:
        return "order", "1 request is before it" if place == 1 else f"{place} requests are before it"
    rows, loading = table.rows, table.swapper.num_loading
    if rows.free <= loading:
        kept = f", {loading} of them for requests that load" if loading else ""
        return "rows", f"all {rows.size} rows are in use{kept}"
    needed, free = scheduler.tables.pages_for(request.known), pool.free
    if needed > free:
        return "blocks", f"it needs up to {needed} blocks, and {free} of {pool.capacity} are free"
    if (encoding := table.encoding).is_waiting(request):
        size = encoding.limits.cache_rows
        return "encoder", f"{encoding.used_rows} of {size} tokens of encoded images are in use, or others come first"
    if pressure.memory > 1 or pressure.device:
        return "memory", "memory is short: a step admits one request"
    return "budget", f"the {scheduler.budget} tokens of a step go to requests before it"
