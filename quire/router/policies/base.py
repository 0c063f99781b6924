"""What a routing policy is, and the policies by name."""

from __future__ import annotations

from typing import Protocol

from quire.registry import resolve
from quire.router.load import RoutedRequest
from quire.router.replica_state import ReplicaState

ROUTING_POLICIES = {
    "least_loaded": "quire.router.policies.least_loaded.LeastLoaded",
    "prefix": "quire.router.policies.prefix.PrefixAware",
}


class RoutingPolicy(Protocol):
    """The router sends a request to the replica with the lowest cost; the first of equals."""

    def cost(self, request: RoutedRequest, replica: ReplicaState, now: float) -> float:
        """Seconds that the request would take at the replica, or any number that orders replicas as such. `now`: the
        router's clock, which `replica.load` is read at."""


def make_routing_policy(name: str) -> RoutingPolicy:
    """A policy by its name or its dotted path; it is made without arguments."""
    policy: RoutingPolicy = resolve("routing policy", name, ROUTING_POLICIES)()
    return policy
