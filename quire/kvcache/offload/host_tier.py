"""Blocks in host memory, found by content: what the device has no room for, and what comes back from disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from quire.kvcache.offload.eviction_order import EvictionOrder


class HostTier:
    """Which slot of host memory holds which block. Knows numbers, not bytes.

    A slot is *arriving* until its bytes are there, and *busy* while somebody reads them. Blocks that rows or sessions
    own (`pin`) go only when no anonymous one is left to go; among equals the least recently used goes first.
    """

    def __init__(self, num_slots: int, is_backed: Callable[[bytes], bool] = lambda key: False) -> None:
        """`is_backed`: whether a block can be had from elsewhere (disk), so that nothing is lost when it goes."""
        self.num_slots = num_slots
        self._is_backed = is_backed
        self._empty = list(range(num_slots - 1, -1, -1))
        self._here: EvictionOrder[int] = EvictionOrder()
        self._arriving: dict[bytes, int] = {}
        self._busy: dict[bytes, int] = {}
        self.evicted = 0
        """Blocks that went to make room."""
        self.lost = 0
        """…and were nowhere else."""

    def __len__(self) -> int:
        return len(self._here)

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._empty)

    @property
    def used(self) -> int:
        return self.num_slots - len(self._empty)

    @property
    def owned(self) -> int:
        """Blocks that rows or sessions own."""
        return len(self._here.owned)

    def has(self, key: bytes) -> bool:
        """Whether the block's bytes are here."""
        return key in self._here

    def is_coming(self, key: bytes) -> bool:
        """Whether the block's bytes are on their way here."""
        return key in self._arriving

    def reserve(self, key: bytes) -> int | None:
        """A slot for a block that is to arrive; None if everything here is owned by others, busy or arriving."""
        if not self._empty and not self._evict(for_owner=key in self._here.pins):
            return None
        self._arriving[key] = self._empty.pop()
        return self._arriving[key]

    def reserve_all(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Slots for as many of the keys as there is room for, in rising order: neighbours can be moved in one copy."""
        reserved = [key for key in keys if self.reserve(key) is not None]
        slots = sorted(self._arriving[key] for key in reserved)
        self._arriving.update(zip(reserved, slots, strict=True))
        return list(zip(reserved, slots, strict=True))

    def arrived(self, key: bytes) -> None:
        """The bytes are there: the block can be found."""
        self._here.put(key, self._arriving.pop(key))

    def cancel(self, key: bytes) -> None:
        """The bytes never came."""
        self._empty.append(self._arriving.pop(key))

    def use(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks' slots, which stay what they are until `let_go`."""
        busy, slots = self._busy, []
        for key in keys:
            slots.append(self._here.touch(key))
            busy[key] = busy.get(key, 0) + 1
        return slots

    def let_go(self, keys: Iterable[bytes]) -> None:
        """One reader less."""
        busy = self._busy
        for key in keys:
            if busy[key] == 1:
                del busy[key]
            else:
                busy[key] -= 1

    def pin(self, keys: Iterable[bytes]) -> None:
        """Somebody owns these blocks, those to arrive later too. Counted: to be unpinned as often."""
        self._here.pin(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """One owner less; without any the block stays, as an anonymous one."""
        self._here.unpin(keys)

    def discard(self, keys: Iterable[bytes]) -> None:
        """These blocks are to be found no more."""
        for key in keys:
            if key in self._here and key not in self._busy:
                self._empty.append(self._here.pop(key))

    def oldest(self) -> Iterable[bytes]:
        """Blocks in the order in which they would go."""
        return iter(self._here)

    def _evict(self, for_owner: bool) -> bool:
        """Make room: anonymous blocks go first, then owned ones; for strangers only those that can be had again."""
        here = self._here
        owned = (key for key in here.owned if for_owner or self._is_backed(key))
        victim = next((key for key in chain(here.anonymous, owned) if key not in self._busy), None)
        if victim is None:
            return False
        self._empty.append(here.pop(victim))
        self.evicted += 1
        self.lost += not self._is_backed(victim)
        return True
