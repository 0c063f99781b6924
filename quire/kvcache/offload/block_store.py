"""Block stores, the tier below host memory: their protocol, and the known ones by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from quire.registry import resolve

BLOCK_STORES = {"disk": "quire.kvcache.offload.disk.store.DiskStore"}


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a store holds, and what it has done since it was opened."""

    blocks: int
    pinned_blocks: int = 0
    block_bytes: int
    used_bytes: int
    capacity: int
    """Bytes the store may use."""
    hits: int = 0
    misses: int = 0
    damaged: int = 0
    written: int = 0
    refused: int = 0
    evicted: int = 0
    failed: int = 0
    is_paused: bool = False
    """Writes are refused for a while, after an error."""


class BlockStore(Protocol):
    """KV blocks of one model, found by content key.

    KV can always be computed again, so nothing here raises once the store is open: a block that cannot be written is
    not kept, one that cannot be read is absent. I/O threads call `read` and `write` while the engine's loop calls the
    other methods. Methods with a body here are optional to implement.
    """

    @classmethod
    def open(cls, folder: Path, fingerprint: bytes, block_bytes: int, capacity: int) -> BlockStore:
        """The store of the model with this fingerprint. It may use `folder`, and `capacity` bytes."""
        ...

    def has(self, key: bytes) -> bool:
        """Whether the block is probably there. Called often: must not wait."""
        ...

    def read(self, key: bytes, into: memoryview) -> bool:
        """Fill `into` with the block. False if it is absent or damaged: `into` is then undefined."""
        ...

    def write(self, key: bytes, payload: memoryview) -> bool:
        """Keep the block; False if it was not kept. `payload` is valid until this returns."""
        ...

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove these blocks, also for later runs."""
        ...

    def stats(self) -> StoreStats:
        """What the store holds, and what it has done."""
        ...

    def __len__(self) -> int:
        """Blocks in the store."""
        return self.stats().blocks

    @property
    def headroom(self) -> tuple[int, int]:
        """How many blocks fit without evicting a pinned one, and how many fit in total. Called in every step."""
        stats = self.stats()
        blocks = stats.capacity // stats.block_bytes
        return blocks - stats.pinned_blocks, blocks

    def pin(self, keys: Iterable[bytes]) -> None:
        """A session needs these blocks, including those written later: evict others first. Pins are counted."""

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Remove one pin from each block."""

    def free_space(self, size: int) -> int:
        """Free up to `size` bytes on the disk of `folder` for sessions' tokens; returns how many were freed."""
        return 0

    def close(self) -> None:
        """No further calls. No read or write is in flight."""


def open_block_store(name: str, folder: Path, fingerprint: bytes, block_bytes: int, capacity: int) -> BlockStore:
    """The store of this name or dotted path."""
    kind: type[BlockStore] = resolve("block store", name, BLOCK_STORES)
    return kind.open(folder, fingerprint, block_bytes, capacity)
