"""Finds blocks by content: keys of blocks, and the cache from key to block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from blake3 import blake3


class ContentKeys:
    """Content keys of blocks, over their tokens and all tokens before them: equal key, equal KV.

    A key is a hash over the parent's key and the block's tokens; the chain starts from the model's fingerprint and
    anything else that changes the KV or must separate owners (a tenant's salt).
    """

    def __init__(self, block_size: int, fingerprint: bytes = b"") -> None:
        self.block_size = block_size
        self._root = blake3(fingerprint).digest()

    @classmethod
    def rooted(cls, block_size: int, root: bytes) -> ContentKeys:
        """The same keys in another process, from the value of `root()` there."""
        keys = cls(block_size)
        keys._root = root
        return keys

    def root(self, salt: str = "") -> bytes:
        """The parent of a first block."""
        # A keyed hash, so that no salt can collide with the tokens of a block.
        return self._root if not salt else blake3(salt.encode(), key=self._root).digest()

    def key_after(self, parent: bytes, tokens: Sequence[int] | np.ndarray) -> bytes:
        """The key of the block that holds `tokens` after `parent`."""
        return blake3(parent + np.asarray(tokens, dtype=np.int32).tobytes()).digest()

    def of(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """Keys of all full blocks of `tokens`."""
        return self.keys_after(self.root(salt), tokens)

    def keys_after(self, parent: bytes, tokens: Sequence[int] | np.ndarray) -> list[bytes]:
        """Keys of all full blocks of `tokens` that follow the block `parent`."""
        size = self.block_size
        data = memoryview(np.asarray(tokens, dtype=np.int32).tobytes())
        keys = []
        for block in range(len(tokens) // size):
            parent = blake3(parent + data[4 * size * block : 4 * size * (block + 1)]).digest()
            keys.append(parent)
        return keys


class PrefixCache:
    """Content key → block, and block → content key."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `keys`."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add(self, key: bytes, block: int) -> bool:
        """Record which block has `key`; False if another block already has the same content."""
        if key in self._block_of:
            return False
        if block in self._key_of:
            raise RuntimeError(f"block {block} is already cached with other content")
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def remove(self, block: int) -> bool:
        """Remove the block; False if it was not cached."""
        key = self._key_of.pop(block, None)
        if key is None:
            return False
        del self._block_of[key]
        return True

    def key_of(self, block: int) -> bytes | None:
        """The block's content key, if it is cached."""
        return self._key_of.get(block)

    def blocks(self) -> list[int]:
        """All cached blocks."""
        return list(self._key_of)
