"""What a replica likely still caches: the blocks of prompts that were sent there, forgotten as the replica would."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence


class SentBlocks:
    """Keys of blocks, at most `limit`, least recently used first; of one prompt the last block goes first.

    So a block is never here without those before it, and the longest known prefix is found by bisection.
    """

    def __init__(self, limit: int) -> None:
        self._limit = max(0, limit)
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = max(0, limit)
        self.trim(self._limit)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt are here."""
        known = self._keys
        if not keys or keys[0] not in known:
            return 0
        return bisect_left(keys, True, lo=1, key=lambda key: key not in known)

    def touch(self, keys: Sequence[bytes]) -> None:
        """A prompt with these blocks is used now."""
        known = self._keys
        # The head last: it is the youngest, as in the replica, where tails are evicted before heads.
        for key in reversed(keys[: self._limit]):
            known[key] = None
            known.move_to_end(key)
        self.trim(self._limit)

    def trim(self, room: int) -> None:
        """Forget the oldest until at most `room` blocks are left."""
        known = self._keys
        for _ in range(len(known) - max(0, room)):
            known.popitem(last=False)
