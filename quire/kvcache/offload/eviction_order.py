"""Blocks in the order in which they may go: those that nobody owns first, and among equals the least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Place = TypeVar("Place")


class EvictionOrder(Generic[Place]):
    """Where each block lies, on one of two shelves: anonymous blocks, and those that rows or sessions own (`pin`)."""

    def __init__(self) -> None:
        self.anonymous: OrderedDict[bytes, Place] = OrderedDict()
        self.owned: OrderedDict[bytes, Place] = OrderedDict()
        self.pins: dict[bytes, int] = {}
        """How many own a block, those to arrive later too."""

    def __len__(self) -> int:
        return len(self.anonymous) + len(self.owned)

    def __contains__(self, key: object) -> bool:
        return key in self.owned or key in self.anonymous

    def __iter__(self) -> Iterator[bytes]:
        """Keys in the order in which they would go."""
        yield from self.anonymous
        yield from self.owned

    def items(self) -> Iterator[tuple[bytes, Place]]:
        """The same, with their places."""
        yield from self.anonymous.items()
        yield from self.owned.items()

    def get(self, key: bytes) -> Place | None:
        """Where the block lies, if it is here."""
        return self._shelf_of(key).get(key)

    def put(self, key: bytes, place: Place) -> None:
        """The block is here now, and used last."""
        self._shelf_of(key)[key] = place

    def pop(self, key: bytes) -> Place:
        """Take the block out; who owns it owns it still."""
        return self._shelf_of(key).pop(key)

    def touch(self, key: bytes) -> Place:
        """The block is used now: where it lies."""
        shelf = self.owned if key in self.pins else self.anonymous
        shelf.move_to_end(key)
        return shelf[key]

    def pin(self, keys: Iterable[bytes]) -> None:
        """Somebody owns these blocks, those to arrive later too. Counted: to be unpinned as often."""
        for key in keys:
            self.pins[key] = self.pins.get(key, 0) + 1
            if key in self.anonymous:
                self.owned[key] = self.anonymous.pop(key)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """One owner less; without any a block stays, as an anonymous one."""
        for key in keys:
            left = self.pins.get(key, 0) - 1
            if left < 0:
                raise RuntimeError(f"block {key.hex()[:16]} is unpinned more often than it was pinned")
            if left:
                self.pins[key] = left
                continue
            del self.pins[key]
            if key in self.owned:
                self.anonymous[key] = self.owned.pop(key)

    def _shelf_of(self, key: bytes) -> OrderedDict[bytes, Place]:
        return self.owned if key in self.pins else self.anonymous
