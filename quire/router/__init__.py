"""Which of several engines gets a request. Knows prompts by their blocks' keys, and engines by what was sent there."""

from quire.router.request import Flight, Lost, RoutedRequest
from quire.router.router import Router

__all__ = ["Flight", "Lost", "RoutedRequest", "Router"]
