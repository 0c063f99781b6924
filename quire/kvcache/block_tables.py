"""Who holds which blocks: growth on demand, prefix hits, forks, and copy-on-write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.kvcache.block_pool import BlockPool
from quire.kvcache.prefix_cache import PrefixCache


class BlockOwner(Protocol):
    """Anything that holds blocks in order: token i lives in blocks[i // block_size]."""

    blocks: list[int]
    published: int


class BlockTables:
    """The block tables of all owners over one pool and one prefix index."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.index = PrefixCache()
        self.pool = BlockPool(num_blocks, on_evict=self.index.remove)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    def match(self, keys: Sequence[bytes], tokens: int) -> list[int]:
        """Blocks that already hold the longest prefix of a sequence of `tokens` tokens, all but its last one.

        The last token is always left to compute: its logits are what the request wants.
        """
        if not self.prefix_caching:
            return []
        return self.index.match(keys[: (tokens - 1) // self.block_size])

    def cost_of_sharing(self, blocks: Sequence[int]) -> int:
        """How many free blocks are used up when `blocks` are shared."""
        return sum(map(self.pool.is_idle, blocks))

    def adopt(self, owner: BlockOwner, blocks: Sequence[int]) -> None:
        """The owner's table starts with these blocks, shared with whoever else holds them."""
        if owner.blocks:
            raise RuntimeError(f"an owner of {len(owner.blocks)} blocks cannot adopt a prefix")
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
        """Let others find the owner's first `full_blocks` blocks; returns those that are new to the index."""
        first, end = owner.published, min(full_blocks, len(keys))
        if not self.prefix_caching or first >= end:
            return []
        add = self.index.add
        fresh = [block for key, block in zip(keys[first:end], owner.blocks[first:end], strict=True) if add(key, block)]
        for block in fresh:
            self.pool.keep(block)
        owner.published = end
        return fresh

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Nobody may find these blocks any more: what was to be written there was not."""
        for block in blocks:
            if self.index.remove(block):
                self.pool.forget(block)

    def fork(self, parent: BlockOwner, child: BlockOwner) -> None:
        """The child holds the same blocks as the parent; whoever writes into a shared one first gets a copy."""
        self.adopt(child, parent.blocks)
        child.published = parent.published

    def is_shared(self, owner: BlockOwner, index: int) -> bool:
        """Whether others hold the owner's block `index` too, so that writing needs a copy."""
        return self.pool.refs[owner.blocks[index]] > 1

    def copy_on_write(self, owner: BlockOwner, index: int) -> tuple[int, int]:
        """Give the owner a block of its own in place of the shared one; returns (from, to) for the bytes to follow."""
        shared = owner.blocks[index]
        (own,) = self.pool.allocate(1)
        owner.blocks[index] = own
        self.pool.release([shared])
        return shared, own

    def release(self, owner: BlockOwner) -> None:
        """Take all of the owner's blocks back."""
        self.pool.release(owner.blocks)
        owner.blocks.clear()
        owner.published = 0

    def reset_prefix(self) -> None:
        """Forget all content; blocks in use stay with their owners."""
        self.withdraw(self.index.blocks())
