"""A scheduling policy that hangs, named by its dotted path."""

from __future__ import annotations

import time

from quire.messages.request import Request
from quire.scheduler.policies.fcfs import FirstComeFirstServed


class HangingPolicy(FirstComeFirstServed):
    """Never returns from choosing a request."""

    def next(self) -> Request | None:
        request = super().next()
        if request is not None:
            time.sleep(10_000)
        return request
