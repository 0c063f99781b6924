"""Chooses one of several engines for a request, by content keys of blocks and what was sent to each engine."""

from quire.router.load import OpenRequest, RoutedRequest
from quire.router.policies.base import RoutingPolicy, make_routing_policy
from quire.router.router import Router

__all__ = ["OpenRequest", "RoutedRequest", "Router", "RoutingPolicy", "make_routing_policy"]
