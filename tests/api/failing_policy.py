"""A scheduling policy with a bug, named by its dotted path."""

from __future__ import annotations

from quire.messages.request import Request
from quire.scheduler.policies.fcfs import FirstComeFirstServed


class FailingPolicy(FirstComeFirstServed):
    """Fails, and ends the loop, when a request of priority 13 is next; refuses one of priority 14."""

    def add(self, request: Request) -> None:
        if request.priority == 14:
            raise KeyError("not mine")
        super().add(request)

    def next(self) -> Request | None:
        request = super().next()
        if request is not None and request.priority == 13:
            raise ZeroDivisionError("a mistake")
        return request
