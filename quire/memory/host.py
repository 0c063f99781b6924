"""Blocks in host memory, found by content: what the device has no room for, and what comes back from disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


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
        self._anonymous: OrderedDict[bytes, int] = OrderedDict()
        self._owned: OrderedDict[bytes, int] = OrderedDict()
        self._pins: dict[bytes, int] = {}
        self._arriving: dict[bytes, int] = {}
        self._busy: dict[bytes, int] = {}
        self.evicted = 0
        """Blocks that went to make room."""
        self.lost = 0
        """…and were nowhere else."""

    def __len__(self) -> int:
        return len(self._anonymous) + len(self._owned)

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
        return len(self._owned)

    def has(self, key: bytes) -> bool:
        """Whether the block's bytes are here."""
        return key in self._owned or key in self._anonymous

    def is_coming(self, key: bytes) -> bool:
        """Whether the block's bytes are on their way here."""
        return key in self._arriving

    def reserve(self, key: bytes) -> int | None:
        """A slot for a block that is to arrive; None if everything here is owned by others, busy or arriving."""
        if not self._empty and not self._evict(for_owner=key in self._pins):
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
        self._queue_of(key)[key] = self._arriving.pop(key)

    def cancel(self, key: bytes) -> None:
        """The bytes never came."""
        self._empty.append(self._arriving.pop(key))

    def use(self, key: bytes) -> int:
        """The block's slot, which stays what it is until `let_go`."""
        queue = self._queue_of(key)
        queue.move_to_end(key)
        self._busy[key] = self._busy.get(key, 0) + 1
        return queue[key]

    def let_go(self, key: bytes) -> None:
        """One reader less."""
        if self._busy[key] == 1:
            del self._busy[key]
        else:
            self._busy[key] -= 1

    def pin(self, keys: Iterable[bytes]) -> None:
        """Somebody owns these blocks, those to arrive later too. Counted: to be unpinned as often."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1
            if (slot := self._anonymous.pop(key, None)) is not None:
                self._owned[key] = slot

    def unpin(self, keys: Iterable[bytes]) -> None:
        """One owner less; without any the block stays, as an anonymous one."""
        for key in keys:
            left = self._pins[key] - 1
            if left:
                self._pins[key] = left
                continue
            del self._pins[key]
            if (slot := self._owned.pop(key, None)) is not None:
                self._anonymous[key] = slot

    def discard(self, keys: Iterable[bytes]) -> None:
        """These blocks are to be found no more."""
        for key in keys:
            queue = self._queue_of(key)
            if key in queue and key not in self._busy:
                self._empty.append(queue.pop(key))

    def oldest(self) -> Iterable[bytes]:
        """Blocks in the order in which they would go."""
        yield from self._anonymous
        yield from self._owned

    def _queue_of(self, key: bytes) -> OrderedDict[bytes, int]:
        return self._owned if key in self._pins else self._anonymous

    def _evict(self, for_owner: bool) -> bool:
        for queue in (self._anonymous, self._owned) if for_owner else (self._anonymous,):
            for key in queue:
                if key not in self._busy:
                    self._empty.append(queue.pop(key))
                    self.evicted += 1
                    self.lost += not self._is_backed(key)
                    return True
        if not for_owner:  # what sessions own gives way too where it can be had again
            for key in self._owned:
                if key not in self._busy and self._is_backed(key):
                    self._empty.append(self._owned.pop(key))
                    self.evicted += 1
                    return True
        return False
