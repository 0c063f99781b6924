"""Priorities that age, so that no request starves."""

from __future__ import annotations

from typing import Any

from quire.messages.request import Request
from quire.scheduler.policies.base import RankedPolicy

AGEING_SECONDS = 10.0
"""Waiting this long is worth one level of priority."""


class PriorityWithAgeing(RankedPolicy):
    """Lower `priority` first, then arrival; every AGEING_SECONDS of waiting lift a request by one level.

    All requests age alike, so the order of two never changes while they wait: the effective priority
    p - (now - arrival) / AGEING sorts as p + arrival / AGEING, and a heap will do.
    """

    def rank(self, request: Request) -> Any:
        return (request.priority + request.source.arrival / AGEING_SECONDS, request.arrival_order, request.index)
