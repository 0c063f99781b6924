"""A replica as the router sees it: its load, and the blocks that its prefix cache likely holds."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from quire.router.load import ReplicaLoad, RoutedRequest

LOADING_SECONDS = 0.1
"""To read an adapter from disk, about. It also keeps an adapter's requests together, as long as waiting there takes no
longer: each replica has room for few adapters."""


class SentBlocks:
    """Keys of blocks that were sent to a replica, at most `limit`, least recently used first; of one prompt the last
    block is dropped first, as the replica evicts it.

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
        """Drop the oldest until at most `room` blocks are left."""
        known = self._keys
        for _ in range(len(known) - max(0, room)):
            known.popitem(last=False)


class SentAdapters:
    """LoRA adapters that a replica likely has on its device: the last `limit` that were sent there."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, adapters: bytes) -> bool:
        return adapters in self._known

    def touch(self, adapters: bytes) -> None:
        """A request with these adapters is sent now."""
        self._known[adapters] = None
        self._known.move_to_end(adapters)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)


class ReplicaState:
    """What a routing policy may read of a replica. A restarted replica is a new one."""

    def __init__(
        self, name: str, block_size: int, capacity_blocks: int, load: ReplicaLoad, adapter_slots: int = 1
    ) -> None:
        self.name = name
        self.load = load
        self.capacity_blocks = capacity_blocks
        self.sent = SentBlocks(0)
        self.adapters = SentAdapters(adapter_slots)
        self._block_size = block_size

    def uncached_tokens(self, request: RoutedRequest) -> int:
        """Prompt tokens that the replica would compute: at least the last one, whose logits are needed."""
        return max(1, request.prompt_tokens - self._block_size * self.sent.match(request.keys))

    def loading_seconds(self, request: RoutedRequest) -> float:
        """How long the request would wait for its adapters there."""
        return LOADING_SECONDS if request.adapters and request.adapters not in self.adapters else 0.0

    def touch(self, keys: Sequence[bytes]) -> None:
        """A prompt with these blocks is used there now."""
        self.sent.touch(keys)
        # Outputs being generated take blocks too; their keys are known only at the end.
        self.sent.trim(self.capacity_blocks - self.load.generated // self._block_size)
