"""Finds blocks by content: keys of blocks, and the cache from key to block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from blake3 import blake3

KEY_BYTES = 32
"""Length of a content key."""


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
    """Index key → cached object, and block → index key.

    An object is a block of one cache group, or a snapshot of a recurrent state, which has several blocks. Its index key
    is the content key at its end, followed by its group unless that is the first (`index_key`).
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._blocks_of: dict[bytes, tuple[int, ...]] = {}
        """Objects of several blocks."""

    def __len__(self) -> int:
        """Cached objects."""
        return len(self._block_of)

    def __contains__(self, key: object) -> bool:
        return key in self._block_of

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `keys`."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def get(self, key: bytes) -> int | None:
        """The block with this key; of an object of several blocks, its first."""
        return self._block_of.get(key)

    def blocks_of(self, key: bytes) -> tuple[int, ...]:
        """All blocks of the object with this key; none if it is not cached."""
        if (block := self._block_of.get(key)) is None:
            return ()
        return self._blocks_of.get(key) or (block,)

    def add(self, key: bytes, block: int) -> bool:
        """Record which block has `key`; False if another block already has the same content."""
        if key in self._block_of:
            return False
        if block in self._key_of:
            raise RuntimeError(f"block {block} is already cached with other content")
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def add_object(self, key: bytes, blocks: Sequence[int]) -> bool:
        """The same for an object of several blocks."""
        if not self.add(key, blocks[0]):
            return False
        for block in blocks[1:]:
            if block in self._key_of:
                raise RuntimeError(f"block {block} is already cached with other content")
            self._key_of[block] = key
        if len(blocks) > 1:
            self._blocks_of[key] = tuple(blocks)
        return True

    def remove(self, block: int) -> Sequence[int]:
        """Remove the object that the block belongs to; returns the object's blocks, none if it was not cached."""
        key = self._key_of.pop(block, None)
        if key is None:
            return ()
        del self._block_of[key]
        if not self._blocks_of or (blocks := self._blocks_of.pop(key, None)) is None:
            return (block,)
        for other in blocks:
            self._key_of.pop(other, None)
        return blocks

    def key_of(self, block: int) -> bytes | None:
        """The index key of the object that the block belongs to, if it is cached."""
        return self._key_of.get(block)

    def blocks(self) -> list[int]:
        """All cached blocks."""
        return list(self._key_of)


def index_key(key: bytes, group: int) -> bytes:
    """The key of a group's object in the prefix cache. Groups after the first add their number to the content key."""
    return key if not group else key + bytes((group,))


def split_index_key(key: bytes) -> tuple[bytes, int]:
    """The content key and the group of a key in the prefix cache."""
    return (key, 0) if len(key) == KEY_BYTES else (key[:-1], key[-1])
