"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from quire.messages.request import Request
from quire.scheduler.policies.base import RankedPolicy


class FirstComeFirstServed(RankedPolicy):
    """Arrival order; preempts the request that loses the least work."""

    def victim(self, running: Sequence[Request]) -> Request:
        return min(running, key=lambda request: (len(request.blocks), -request.arrival_order, -request.index))
