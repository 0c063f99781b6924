"""Finds blocks by content: keys of blocks, and the cache from key to block."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
from blake3 import blake3

from quire.messages.adapter_use import identity_start
from quire.messages.media import KeySpan

KEY_BYTES = 32
"""Length of a content key."""


class ContentKeys:
    """Content keys of blocks, over their tokens and all tokens before them: equal key, equal KV.

    A key is a hash over the parent's key and the block's tokens; the chain starts from the model's fingerprint and
    anything else that changes the KV or must separate owners (a tenant's salt; adapters). A block with tokens of an
    image also has the image's whole digest in its key, and which of its rows they are.
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

    def key_after(
        self, parent: bytes, tokens: Sequence[int] | np.ndarray, spans: Sequence[KeySpan] = (), start: int = 0
    ) -> bytes:
        """The key of the block that holds `tokens` after `parent`; `spans` and `start` as in `keys_after`."""
        if spans:
            parent = _marked(parent, spans, start, start + len(tokens))
        return blake3(parent + np.asarray(tokens, dtype=np.int32).tobytes()).digest()

    def of(
        self, tokens: Sequence[int], salt: str = "", spans: Sequence[KeySpan] = (), adapters: bytes = b""
    ) -> list[bytes]:
        """Keys of all full blocks of `tokens`. `adapters`: their `kv_identity`; blocks wholly before they act have the
        keys they have without."""
        if not adapters:
            return self.keys_after(self.root(salt), tokens, spans)
        start = identity_start(adapters)
        cut = start - start % self.block_size
        before = self.keys_after(self.root(salt), tokens[:cut], spans)
        if len(before) < start // self.block_size:
            return before
        parent = self.adapted(before[-1] if before else self.root(salt), adapters)
        return before + self.keys_after(parent, tokens[cut:], spans, cut)

    def adapted(self, parent: bytes, adapters: bytes) -> bytes:
        """The parent of the first block that adapters change, in place of `parent`. `adapters`: their `kv_identity`,
        which says where in the block they begin."""
        return blake3(adapters, key=parent).digest()

    def keys_after(
        self, parent: bytes, tokens: Sequence[int] | np.ndarray, spans: Sequence[KeySpan] = (), start: int = 0
    ) -> list[bytes]:
        """Keys of all full blocks of `tokens` that follow the block `parent`.

        `spans`: what the sequence has in place of token ids; `start`: how many tokens it has before `tokens`.
        """
        size = self.block_size
        data = memoryview(np.asarray(tokens, dtype=np.int32).tobytes())
        keys = []
        for block in range(len(tokens) // size):
            if spans:
                parent = _marked(parent, spans, start + size * block, start + size * (block + 1))
            parent = blake3(parent + data[4 * size * block : 4 * size * (block + 1)]).digest()
            keys.append(parent)
        return keys


def _marked(parent: bytes, spans: Sequence[KeySpan], start: int, stop: int) -> bytes:
    """The parent of a block of positions `start` to `stop`, with the parts of spans in it folded in."""
    parts = []
    for span in spans:
        first, last = max(start, span.start), min(stop, span.stop)
        if first < last:
            # All of the span, too: where its tokens see each other both ways, the first depend on how many there are.
            at = (first - start, last - start, span.start - start, span.stop - start, span.offset)
            parts.append(span.digest + _PART.pack(*at))
    # A keyed hash, so that no digest can collide with the tokens of a block.
    return blake3(b"".join(parts), key=parent).digest() if parts else parent


_PART = struct.Struct("<5q")
"""Which tokens of a block a span covers; where the whole span begins and ends, from there; its first row."""


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
