"""Which of several engines gets a request. Knows prompts by their blocks' keys, and engines by what was sent there."""

from quire.router.request import Lost, RoutedFlight, RoutedRequest
from quire.router.router import Router

__all__ = ["Lost", "RoutedFlight", "RoutedRequest", "Router"]
