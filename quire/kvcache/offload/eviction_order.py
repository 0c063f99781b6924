"""The order in which blocks of a tier are evicted: unpinned before pinned, and each least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Place = TypeVar("Place")


class EvictionOrder(Generic[Place]):
    """Content key → place of each block in a tier, in two LRU queues: unpinned blocks, and pinned ones.

    Swapped-out rows and sessions pin their blocks. Pins are counted, and may come before the block does.
    """

    def __init__(self) -> None:
        self.unpinned: OrderedDict[bytes, Place] = OrderedDict()
        self.pinned: OrderedDict[bytes, Place] = OrderedDict()
        self.pins: dict[bytes, int] = {}
        """Pins of each block, including blocks that are not here yet."""

    def __len__(self) -> int:
        return len(self.unpinned) + len(self.pinned)

    def __contains__(self, key: object) -> bool:
        return key in self.pinned or key in self.unpinned

    def __iter__(self) -> Iterator[bytes]:
        """Keys in eviction order."""
        yield from self.unpinned
        yield from self.pinned

    def items(self) -> Iterator[tuple[bytes, Place]]:
        """Keys and places in eviction order."""
        yield from self.unpinned.items()
        yield from self.pinned.items()

    def get(self, key: bytes) -> Place | None:
        """The block's place, if it is here."""
        return self._queue_of(key).get(key)

    def put(self, key: bytes, place: Place) -> None:
        """Add a block as the most recently used."""
        self._queue_of(key)[key] = place

    def pop(self, key: bytes) -> Place:
        """Remove a block; its pins stay."""
        return self._queue_of(key).pop(key)

    def touch(self, key: bytes) -> Place:
        """Mark the block as the most recently used; returns its place."""
        queue = self._queue_of(key)
        queue.move_to_end(key)
        return queue[key]

    def pin(self, keys: Iterable[bytes]) -> None:
        """Add one pin to each block."""
        for key in keys:
            self.pins[key] = self.pins.get(key, 0) + 1
            if key in self.unpinned:
                self.pinned[key] = self.unpinned.pop(key)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Remove one pin from each block; a block without pins stays until it is evicted."""
        for key in keys:
            left = self.pins.get(key, 0) - 1
            if left < 0:
                raise RuntimeError(f"block {key.hex()[:16]} is unpinned more often than it was pinned")
            if left:
                self.pins[key] = left
                continue
            del self.pins[key]
            if key in self.pinned:
                self.unpinned[key] = self.pinned.pop(key)

    def _queue_of(self, key: bytes) -> OrderedDict[bytes, Place]:
        return self.pinned if key in self.pins else self.unpinned
