"""Send a request to the replica that would start on it first, whatever is cached there."""

from __future__ import annotations

from quire.router.load import RoutedRequest
from quire.router.replica_state import ReplicaState


class LeastLoaded:
    """Waiting time, and that to load an adapter; of idle replicas, the one with the least recent work."""

    def cost(self, request: RoutedRequest, replica: ReplicaState, now: float) -> float:
        load = replica.load
        return load.wait(now) + load.work(now) / load.prefill_speed + replica.loading_seconds(request)
