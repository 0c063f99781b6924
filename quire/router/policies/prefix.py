"""Send a request where its prompt is cached, unless waiting there takes longer than computing it elsewhere."""

from __future__ import annotations

from quire.router.load import RoutedRequest
from quire.router.replica_state import ReplicaState

EVENNESS = 0.6
"""Seconds of waiting that one second of recent work counts as. Queues alone balance only overloaded replicas; with this
term, replicas below their capacity share the work too."""


class PrefixAware:
    """Waiting time plus the time to compute the part of the prompt that is not cached there, and to load an adapter."""

    def __init__(self, evenness: float = EVENNESS) -> None:
        self._evenness = evenness

    def cost(self, request: RoutedRequest, replica: ReplicaState, now: float) -> float:
        load = replica.load
        tokens = replica.uncached_tokens(request) + self._evenness * load.work(now)
        return load.wait(now) + tokens / load.prefill_speed + replica.loading_seconds(request)
