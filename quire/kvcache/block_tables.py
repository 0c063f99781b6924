"""Block tables: growth on demand, prefix hits, forks, and copy-on-write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.kvcache.block_pool import BlockPool
from quire.kvcache.prefix_cache import PrefixCache


class BlockOwner(Protocol):
    """Anything that has a block table: token i is in blocks[i // block_size]."""

    blocks: list[int]
    published: int


class BlockTables:
    """The block tables of all owners, over one pool and one prefix cache."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.prefix_cache = PrefixCache()
        self.pool = BlockPool(num_blocks, on_evict=self.prefix_cache.remove)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need; the last may be partial."""
        return -(-tokens // self.block_size)

    def match(self, keys: Sequence[bytes], tokens: int) -> list[int]:
        """Cached blocks of the longest prefix of a sequence of `tokens` tokens.

        The last token is always left to compute: its logits are what the request needs.
        """
        if not self.prefix_caching:
            return []
        return self.prefix_cache.match(keys[: (tokens - 1) // self.block_size])

    def cost_of_sharing(self, blocks: Sequence[int]) -> int:
        """How many free blocks sharing `blocks` uses up."""
        return sum(map(self.pool.is_idle, blocks))

    def adopt(self, owner: BlockOwner, blocks: Sequence[int]) -> None:
        """Start the owner's table with these blocks, shared with their other owners."""
        if owner.blocks:
            raise RuntimeError(f"the table already has {len(owner.blocks)} blocks: it cannot start with a prefix")
        self.pool.share(blocks)
        owner.blocks.extend(blocks)
        owner.published = len(blocks)

    def missing(self, owner: BlockOwner, tokens: int) -> int:
        """Blocks the owner lacks to hold `tokens` tokens."""
        return max(0, self.blocks_for(tokens) - len(owner.blocks))

    def grow(self, owner: BlockOwner, tokens: int) -> list[int]:
        """Append the blocks the owner lacks to hold `tokens` tokens; returns them."""
        fresh = self.pool.allocate(self.missing(owner, tokens))
        owner.blocks.extend(fresh)
        return fresh

    def publish(self, owner: BlockOwner, keys: Sequence[bytes], full_blocks: int) -> list[int]:
        """Add the owner's first `full_blocks` blocks to the prefix cache; returns those that are new to it."""
        first, end = owner.published, min(full_blocks, len(keys))
        if not self.prefix_caching or first >= end:
            return []
        add = self.prefix_cache.add
        fresh = [block for key, block in zip(keys[first:end], owner.blocks[first:end], strict=True) if add(key, block)]
        for block in fresh:
            self.pool.keep(block)
        owner.published = end
        return fresh

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Remove these blocks from the prefix cache: their content was not written."""
        for block in blocks:
            if self.prefix_cache.remove(block):
                self.pool.forget(block)

    def fork(self, parent: BlockOwner, child: BlockOwner) -> None:
        """Give the child the parent's blocks; the first of the two to write into a shared block gets a copy."""
        self.adopt(child, parent.blocks)
        child.published = parent.published

    def is_shared(self, owner: BlockOwner, index: int) -> bool:
        """Whether the owner's block `index` has other owners, so that writing needs a copy."""
        return self.pool.refs[owner.blocks[index]] > 1

    def copy_on_write(self, owner: BlockOwner, index: int) -> tuple[int, int]:
        """Replace the owner's shared block by a block of its own; returns (from, to) of the copy that must follow."""
        shared = owner.blocks[index]
        (own,) = self.pool.allocate(1)
        owner.blocks[index] = own
        self.pool.release([shared])
        return shared, own

    def release(self, owner: BlockOwner) -> None:
        """Release all blocks of the owner."""
        self.pool.release(owner.blocks)
        owner.blocks.clear()
        owner.published = 0

    def reset_prefix(self) -> None:
        """Empty the prefix cache; blocks in use stay with their owners."""
        self.withdraw(self.prefix_cache.blocks())
