"""A scheduling policy that is named by its dotted path."""

from __future__ import annotations

from typing import Any

from quire.messages.request import Request
from quire.scheduler.policies.base import RankedPolicy


class LongestFirst(RankedPolicy):
    """The longest prompt goes first."""

    def rank(self, request: Request) -> Any:
        return (-len(request.prompt), request.arrival_order, request.index)
