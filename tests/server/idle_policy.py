"""A scheduling policy that never admits a request, to be named by its dotted path."""

from __future__ import annotations

import time

from quire.messages.request import Request
from quire.scheduler.policies.fcfs import FirstComeFirstServed


class IdlePolicy(FirstComeFirstServed):
    """Waiting requests keep waiting."""

    def next(self) -> Request | None:
        time.sleep(0.01)
        return None
