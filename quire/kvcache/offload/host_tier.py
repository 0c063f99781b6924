"""Blocks in host memory, found by content key: offloaded from the device, or loaded from disk on the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

from quire.kvcache.offload.eviction_order import EvictionOrder


class HostTier:
    """Which slot of host memory holds which block. Knows numbers, not bytes.

    A slot is *arriving* until its bytes are there, and *busy* while a copy reads them. Blocks that rows or sessions
    pin are evicted last; among equals the least recently used goes first.
    """

    def __init__(self, num_slots: int, is_backed: Callable[[bytes], bool] = lambda key: False) -> None:
        """`is_backed`: whether the block is also on disk, so that evicting it loses nothing."""
        self.num_slots = num_slots
        self._is_backed = is_backed
        self._empty = list(range(num_slots - 1, -1, -1))
        self._blocks: EvictionOrder[int] = EvictionOrder()
        self._arriving: dict[bytes, int] = {}
        self._busy: dict[bytes, int] = {}
        self.evicted = 0
        """Blocks evicted so far…"""
        self.lost = 0
        """…and those of them that no other tier had."""

    @property
    def free(self) -> int:
        """Empty slots."""
        return len(self._empty)

    @property
    def used(self) -> int:
        return self.num_slots - len(self._empty)

    @property
    def num_pinned(self) -> int:
        """Blocks that rows or sessions pin."""
        return len(self._blocks.pinned)

    def has(self, key: bytes) -> bool:
        """Whether the block's bytes are here."""
        return key in self._blocks

    def is_arriving(self, key: bytes) -> bool:
        """Whether the block's bytes are being copied here."""
        return key in self._arriving

    def slot_of(self, key: bytes) -> int | None:
        """Where the block is, or will be when it has arrived; None if it is not here."""
        slot = self._blocks.get(key)
        return self._arriving.get(key) if slot is None else slot

    def key_at(self, slot: int) -> bytes | None:
        """The block in a slot; None if it is empty. Looks at every block."""
        places = chain(self._blocks.items(), self._arriving.items())
        return next((key for key, place in places if place == slot), None)

    @property
    def content(self) -> bytes:
        """By slot: 0 empty, 1 cached, 2 pinned, 3 arriving."""
        states = np.zeros(self.num_slots, np.uint8)
        for state, slots in ((1, self._blocks.unpinned), (2, self._blocks.pinned), (3, self._arriving)):
            states[np.fromiter(slots.values(), np.int64, len(slots))] = state
        return states.tobytes()

    def reserve(self, key: bytes) -> int | None:
        """A slot for a block that will arrive; None if no slot is empty and no block may be evicted for it."""
        if not self._empty and not self._evict(for_pinned=key in self._blocks.pins):
            return None
        self._arriving[key] = self._empty.pop()
        return self._arriving[key]

    def reserve_all(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Slots for as many of the keys as possible, in rising order: neighbours can be moved in one copy."""
        reserved = [key for key in keys if self.reserve(key) is not None]
        slots = sorted(self._arriving[key] for key in reserved)
        self._arriving.update(zip(reserved, slots, strict=True))
        return list(zip(reserved, slots, strict=True))

    def arrived(self, key: bytes) -> None:
        """The bytes are here: the block can be found."""
        self._blocks.put(key, self._arriving.pop(key))

    def cancel(self, key: bytes) -> None:
        """The bytes will not arrive."""
        self._empty.append(self._arriving.pop(key))

    def acquire(self, keys: Iterable[bytes]) -> list[int]:
        """Slots of these blocks, which do not change before `release`."""
        busy, slots = self._busy, []
        for key in keys:
            slots.append(self._blocks.touch(key))
            busy[key] = busy.get(key, 0) + 1
        return slots

    def release(self, keys: Iterable[bytes]) -> None:
        """A copy has read these blocks."""
        busy = self._busy
        for key in keys:
            if busy[key] == 1:
                del busy[key]
            else:
                busy[key] -= 1

    def pin(self, keys: Iterable[bytes]) -> None:
        """Add one pin to each block, including blocks that arrive later."""
        self._blocks.pin(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Remove one pin from each block; a block without pins stays until it is evicted."""
        self._blocks.unpin(keys)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove these blocks, unless a copy reads them."""
        for key in keys:
            if key in self._blocks and key not in self._busy:
                self._empty.append(self._blocks.pop(key))

    def oldest(self) -> Iterable[bytes]:
        """Blocks in eviction order."""
        return iter(self._blocks)

    def _evict(self, for_pinned: bool) -> bool:
        """Evict an unpinned block, or else a pinned one: for an unpinned block only if the disk has it too."""
        blocks = self._blocks
        pinned = (key for key in blocks.pinned if for_pinned or self._is_backed(key))
        victim = next((key for key in chain(blocks.unpinned, pinned) if key not in self._busy), None)
        if victim is None:
            return False
        self._empty.append(blocks.pop(victim))
        self.evicted += 1
        self.lost += not self._is_backed(victim)
        return True
