"""Physical KV blocks: allocate, share, release."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from quire.errors import CacheTooSmallError

NULL_BLOCK = 0
"""The reserved block: inactive and padding rows write to it; its content is never read."""


class BlockPool:
    """Reference-counted blocks. Knows numbers, not tensors.

    A block without references is *free*. If it still has cached content it is also *idle*: it can be shared again as
    it is, or evicted and reused, least recently used first.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], Sequence[int] | None] = lambda block: ()) -> None:
        """`on_evict`: called with an evicted block; returns the other blocks that are of no use without it."""
        if num_blocks < 2:
            raise CacheTooSmallError(
                f"the KV cache has room for {num_blocks} blocks; at least 2 are needed (one is reserved). "
                "Give it more memory (kv_cache_memory_bytes), or make blocks smaller (block_size)"
            )
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._on_evict = on_evict
        self._empty = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._content = bytearray(num_blocks)
        self.evicted = 0
        """Idle blocks evicted so far."""

    @property
    def capacity(self) -> int:
        """Blocks that can be allocated at all."""
        return self.num_blocks - 1

    @property
    def free(self) -> int:
        """Blocks that can be allocated now, empty or idle."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks with at least one reference."""
        return self.capacity - self.free

    @property
    def idle(self) -> int:
        """Free blocks with cached content."""
        return len(self._idle)

    @property
    def empty(self) -> int:
        """Free blocks without cached content."""
        return len(self._empty)

    @property
    def content(self) -> bytes:
        """By block: 1 if its content is cached."""
        return bytes(self._content)

    def oldest(self, count: int) -> list[int]:
        """The idle blocks that would be evicted next, at most `count`."""
        return list(itertools.islice(self._idle, count))

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises if fewer are free: check `free` first."""
        if count > self.free:
            raise RuntimeError(f"cannot allocate {count} blocks: {self.free} of {self.capacity} are free")
        blocks = []
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            self.refs[block] = 1
            blocks.append(block)
        blocks.sort()  # neighbours can be moved in one copy
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; an idle block is in use again."""
        for block in blocks:
            if self.refs[block] == 0:
                if not self._content[block]:
                    raise RuntimeError(f"block {block} is empty: nothing to share")
                del self._idle[block]
            self.refs[block] += 1

    def release(self, blocks: Sequence[int], as_oldest: bool = False) -> None:
        """Drop one reference to each block. Tails become evictable before heads: a prefix is useless without its head.

        `as_oldest`: the blocks keep their age, because only a short copy held them.
        """
        for block in reversed(blocks):
            count = self.refs[block] - 1
            if count < 0:
                raise RuntimeError(f"block {block} was released but has no references")
            self.refs[block] = count
            if count == 0:
                if self._content[block]:
                    self._idle[block] = None
                    if as_oldest:
                        self._idle.move_to_end(block, last=False)
                else:
                    self._empty.append(block)

    def keep(self, block: int) -> None:
        """Mark the block's content as cached: it stays when the last reference is dropped."""
        if self.refs[block] == 0:
            raise RuntimeError(f"block {block} has no references: its content cannot be cached")
        self._content[block] = 1

    def forget(self, block: int) -> None:
        """Mark the block's content as not cached."""
        self._content[block] = 0
        if block in self._idle:
            del self._idle[block]
            self._empty.append(block)

    def is_idle(self, block: int) -> bool:
        """Whether the block has no references but cached content."""
        return block in self._idle

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._content[block] = 0
        self.evicted += 1
        for other in self._on_evict(block) or ():
            self.forget(other)
        return block
