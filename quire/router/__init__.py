"""Which of several engines gets a request. Knows prompts by their blocks' keys, and engines by what was sent there."""

from quire.router.load import OpenRequest, RoutedRequest
from quire.router.policies.base import RoutingPolicy, make_routing_policy
from quire.router.router import Router

__all__ = ["OpenRequest", "RoutedRequest", "Router", "RoutingPolicy", "make_routing_policy"]
