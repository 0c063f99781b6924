"""Requests for the router, made of texts."""

from __future__ import annotations

from typing import Any

from quire.kvcache.prefix_cache import ContentKeys
from quire.router import RoutedRequest, Router

BLOCK = 16
KEYS = ContentKeys(BLOCK, b"model")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def words(text: int, tokens: int) -> list[int]:
    """Tokens that no other text contains."""
    return [text * 100_000 + i for i in range(tokens)]


def request(*texts: list[int], tenant: str = "", sequences: int = 1, adapters: bytes = b"") -> RoutedRequest:
    """A request whose prompt is these texts, joined."""
    tokens = [token for text in texts for token in text]
    return RoutedRequest(KEYS.of(tokens, tenant), len(tokens), sequences, tenant, adapters)


def router_of(*names: str, clock: Clock | None = None, blocks: int = 10_000, rows: int = 64, **settings: Any) -> Router:
    """A router with these replicas."""
    router = Router(BLOCK, clock=clock or Clock(), **settings)
    for name in names:
        router.add(name, blocks, rows, prefill_speed=10_000)
    return router
