"""Block tables: growth on demand, prefix hits, forks, and copy-on-write."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from quire.kvcache.block_pool import BlockPool
from quire.kvcache.groups import GroupTable, Hit, first_needed, groups_of, hole, most_window_blocks
from quire.kvcache.prefix_cache import PrefixCache, index_key, split_index_key
from quire.messages.caches import FULL, CacheGroup

ENDLESS = 1 << 40
"""Tokens that fit where tokens take no pages."""
MOST_SEEN = 1 << 16
"""Content keys that are remembered without a page."""


class BlockOwner(Protocol):
    """Anything that has a block table: token i is in blocks[i // block_size]."""

    blocks: list[int]
    published: int


class GroupedOwner(BlockOwner, Protocol):
    """An owner in a model of several cache groups."""

    tables: list[GroupTable]
    """Its tables in the other groups, in their order; empty before it has pages."""


class BlockTables:
    """The block tables of all owners, over one pool and one prefix cache.

    `owner.blocks` is the table of group 0. All full and window groups' tables have the same length. In a model without
    a full group `owner.blocks` only counts blocks (its entries are the reserved block), and group 0 is one of the
    others.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        groups: Sequence[CacheGroup] = (FULL,),
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.groups = tuple(groups)
        self.prefix_cache = PrefixCache()
        self.pool = BlockPool(num_blocks, on_evict=self.prefix_cache.remove)
        self.has_full = self.groups[0].kind == "full"
        self.others = list(enumerate(self.groups))[1 if self.has_full else 0 :]
        """Groups with a table in `owner.tables`, and their numbers."""
        self.num_full = len(groups_of(self.groups, "full"))
        self.has_windows = any(group.kind == "window" for group in self.groups)
        self.pages_per_block = len([group for group in self.groups if group.kind != "state"])
        """Pages that a further block of tokens takes."""
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        """In a model without full groups: content keys of blocks that were computed lately."""
        self.state_pages = sum(group.pages for group in self.groups if group.kind == "state")
        """Pages of a live state, or of a snapshot."""

    # Sizes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need; the last may be partial."""
        return -(-tokens // self.block_size)

    def pages_for(self, tokens: int) -> int:
        """Pages that an owner of `tokens` tokens needs, if it computes them a block at a time."""
        blocks = self.blocks_for(tokens)
        if not self.others:
            return blocks
        return self.num_full * blocks + sum(min(blocks, most) for most in self._most_window) + self.state_pages

    @property
    def _most_window(self) -> list[int]:
        return [most_window_blocks(group, self.block_size) for _, group in groups_of(self.groups, "window")]

    def tokens_in(self, pages: int) -> int:
        """Tokens that an owner of `pages` pages can have."""
        if not self.others:
            return pages * self.block_size
        if pages < self.pages_for(1):
            return 0
        low, high = 1, pages + 1 if self.num_full else ENDLESS  # in blocks; `low` fit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.pages_for(middle * self.block_size) <= pages else (low, middle)
        return low * self.block_size

    # Prefixes

    def match(self, keys: Sequence[bytes], tokens: int) -> list[int]:
        """Cached blocks, of group 0, of the longest prefix of a sequence of `tokens` tokens.

        The last token is always left to compute: its logits are what the request needs.
        """
        if not self.prefix_caching:
            return []
        return self.prefix_cache.match(keys[: (tokens - 1) // self.block_size])

    def find(self, keys: Sequence[bytes], tokens: int) -> Hit:
        """The longest prefix that every group has cached."""
        if not self.others:
            blocks = self.match(keys, tokens)
            return Hit(blocks, reach=len(blocks))
        if not self.prefix_caching:
            return Hit([], [[] for _ in self.others])
        keys = keys[: (tokens - 1) // self.block_size]
        reach = len(keys)
        for number, _ in groups_of(self.groups, "full"):
            reach = len(self.prefix_cache.match(index_key(key, number) for key in keys[:reach]))
        end = self.longest_prefix(keys, reach, self.is_cached)
        blocks = self.prefix_cache.match(keys[:end]) if self.has_full else hole(end)
        if not self.num_full:
            reach = next((i for i, key in enumerate(keys) if key not in self._seen), len(keys))
        return Hit(blocks, [self._cached_pages(number, keys[:end]) for number, _ in self.others], reach)

    def is_cached(self, number: int, key: bytes) -> bool:
        """Whether the prefix cache has the group's block, or state, that ends with this content key."""
        return index_key(key, number) in self.prefix_cache

    def _cached_pages(self, number: int, keys: Sequence[bytes]) -> list[int]:
        """What the group needs of a prefix, all of which is cached."""
        cache, group = self.prefix_cache, self.groups[number]
        if group.kind == "state":
            return list(cache.blocks_of(index_key(keys[-1], number))) if keys else []
        first = self.first_needed(number, len(keys) * self.block_size)
        return cache.match(index_key(key, number) for key in keys[first:])

    def first_needed(self, number: int, position: int) -> int:
        """The first block of a full or window group that a query at `position` reaches."""
        group = self.groups[number]
        return first_needed(group, position, self.block_size) if group.kind == "window" else 0

    def reach(self, keys: Sequence[bytes], has: Callable[[int, bytes], bool]) -> int:
        """Leading blocks that all full groups have."""
        full = [number for number, _ in groups_of(self.groups, "full")]
        return next((i for i, key in enumerate(keys) if not all(has(number, key) for number in full)), len(keys))

    def longest_prefix(self, keys: Sequence[bytes], reach: int, has: Callable[[int, bytes], bool]) -> int:
        """The most blocks, at most the full groups' `reach`, after which every group has what the next token needs."""
        end = reach
        while True:
            before = end
            for number, group in self.others:
                if group.kind == "state":
                    while end and not has(number, keys[end - 1]):
                        end -= 1
                elif group.kind == "window":
                    end = self._window_prefix(number, keys, end, has)
            if end == before:
                return end

    def _window_prefix(self, number: int, keys: Sequence[bytes], end: int, has: Callable[[int, bytes], bool]) -> int:
        """The most blocks, at most `end`, whose last window the group has."""
        at = end
        while at > self.first_needed(number, end * self.block_size):
            at -= 1
            if not has(number, keys[at]):
                end = at
        return end

    def cost_of_sharing(self, blocks: Iterable[int]) -> int:
        """How many free blocks sharing `blocks` uses up."""
        return sum(map(self.pool.is_idle, blocks))

    def cost_of_hit(self, hit: Hit, tokens: int) -> int:
        """Free pages it takes to start with a hit and to compute up to `tokens` tokens, a block at a time."""
        if not self.others:
            return self.blocks_for(tokens) - len(hit.blocks) + self.cost_of_sharing(hit.blocks)
        fresh, end, size = 0, len(hit.blocks), self.block_size
        blocks = self.blocks_for(tokens)
        for group in self.groups:
            if group.kind == "full":
                fresh += blocks - end
            elif group.kind == "window":
                first = first_needed(group, end * size, size)
                held = end - first
                fresh += max(0, min(blocks - first, max(held, most_window_blocks(group, size))) - held)
        for (_, group), pages in self._zip(hit):
            idle = self.cost_of_sharing(pages)
            # A snapshot that nothing else uses can become the live state; another is copied.
            is_taken = group.kind == "state" and idle == group.pages
            fresh += idle + (group.pages if group.kind == "state" and not is_taken else 0)
        return fresh + (self.cost_of_sharing(hit.blocks) if self.has_full else 0)

    def _zip(self, hit: Hit) -> Iterable[tuple[tuple[int, CacheGroup], list[int]]]:
        return zip(self.others, hit.pages, strict=True)

    def adopt(self, owner: BlockOwner, hit: Hit | Sequence[int]) -> None:
        """Start the owner's tables with these pages, shared with their other owners."""
        if owner.blocks:
            raise RuntimeError(f"the table already has {len(owner.blocks)} blocks: it cannot start with a prefix")
        if not isinstance(hit, Hit):
            hit = Hit(list(hit))
        if self.has_full:
            self.pool.share(hit.blocks)
        owner.blocks.extend(hit.blocks)
        owner.published = len(hit.blocks)
        if not self.others:
            return
        for ((_, group), pages), table in zip(self._zip(hit), self.tables_of(owner), strict=True):
            self.pool.share(pages)
            table.first = 0 if group.kind == "state" else len(hit.blocks) - len(pages)
            table.blocks = [*hole(table.first), *pages]
            table.published = len(hit.blocks)

    def start_with(self, owner: BlockOwner, groups: Sequence[tuple[int, Sequence[int | None]]], tokens: int) -> None:
        """Start the owner's tables with pages it holds already: for each group the index of the first and the pages,
        which hold `tokens` tokens."""
        pages = iter([(first, [page for page in own if page is not None]) for first, own in groups])
        owner.blocks.extend(next(pages)[1] if self.has_full else hole(self.blocks_for(tokens)))
        for table, (first, own) in zip(self.tables_of(owner), pages, strict=True):
            table.first, table.blocks = first, [*hole(first), *own]

    def tables_of(self, owner: BlockOwner) -> list[GroupTable]:
        """The owner's tables in the other groups; empty tables if it has none."""
        tables: list[GroupTable] = owner.tables  # type: ignore[attr-defined]
        if not tables:
            tables.extend(GroupTable() for _ in self.others)
        return tables

    def states_of(self, owner: BlockOwner) -> list[GroupTable]:
        """The owner's live state, by state group."""
        if not self.state_pages:
            return []
        return [
            table for (_, group), table in zip(self.others, self.tables_of(owner), strict=True) if group.kind == "state"
        ]

    # Growth

    def missing(self, owner: BlockOwner, tokens: int) -> int:
        """Pages the owner lacks to hold `tokens` tokens."""
        blocks = max(0, self.blocks_for(tokens) - len(owner.blocks))
        if not self.others:
            return blocks
        return self.pages_per_block * blocks + self._lacking_state(owner)

    def _lacking_state(self, owner: BlockOwner) -> int:
        """Pages of the live state that the owner lacks, or has to copy because others have them too."""
        refs = self.pool.refs
        return sum(
            group.pages
            for (_, group), table in zip(self.others, self.tables_of(owner), strict=True)
            if group.kind == "state" and (not table.blocks or any(refs[page] > 1 for page in table.blocks))
        )

    def missing_finally(self, owner: BlockOwner, tokens: int) -> int:
        """Pages the owner will lack to compute up to `tokens` tokens a block at a time: windows give pages back."""
        if not self.others:
            return self.missing(owner, tokens)
        blocks, lacking = self.blocks_for(tokens), self._lacking_state(owner)
        lacking += self.num_full * max(0, blocks - len(owner.blocks))
        for (_, group), table in zip(self.others, self.tables_of(owner), strict=True):
            if group.kind == "window":
                most = min(blocks - table.first, most_window_blocks(group, self.block_size))
                lacking += max(0, most - len(table.held))
        return lacking

    def room(self, owner: BlockOwner, pages: int) -> int:
        """Tokens that the owner could hold with `pages` more pages."""
        if self.others:
            pages -= self._lacking_state(owner)
            if pages < 0:
                return 0
            if not self.pages_per_block:
                return ENDLESS
            pages //= self.pages_per_block
        return (len(owner.blocks) + pages) * self.block_size

    def grow(self, owner: BlockOwner, tokens: int) -> list[int]:
        """Append the blocks the owner lacks to hold `tokens` tokens; returns those of its first table."""
        count = max(0, self.blocks_for(tokens) - len(owner.blocks))
        fresh = self.pool.allocate(count) if self.has_full else hole(count)
        owner.blocks.extend(fresh)
        return fresh

    def grow_others(self, owner: BlockOwner) -> list[tuple[int, int, list[int]]]:
        """Make the owner's other tables as long as its first; returns (group, index, pages) of what is new."""
        fresh = []
        for (number, group), table in zip(self.others, self.tables_of(owner), strict=True):
            wanted = group.pages if group.kind == "state" else len(owner.blocks)
            index = len(table.blocks)
            if wanted > index:
                pages = self.pool.allocate(wanted - index)
                table.blocks.extend(pages)
                fresh.append((number, index, pages))
        return fresh

    def assigned(self, owner: BlockOwner) -> list[tuple[int, int, list[int]]]:
        """(group, index, pages) of all that the owner has in the other groups."""
        tables = zip(self.others, self.tables_of(owner), strict=True)
        return [(number, table.first, table.held) for (number, _), table in tables if table.held]

    def trim(self, owner: BlockOwner, position: int) -> None:
        """Give back the pages of window groups that no query from `position` on reaches. The tables of the device keep
        their entries, which are not read again."""
        for (_, group), table in zip(self.others, self.tables_of(owner), strict=True):
            if group.kind == "window":
                first = min(first_needed(group, position, self.block_size), len(table.blocks))
                if first > table.first:
                    self.pool.release(table.blocks[table.first : first])
                    table.blocks[table.first : first] = hole(first - table.first)
                    table.first = first

    def shed(self, owner: BlockOwner, tokens: int) -> None:
        """Release the owner's blocks after its first `tokens` tokens. The tables of the device keep their entries,
        which are not read or written before they are replaced."""
        count = self.blocks_for(tokens)
        if self.has_full:
            self.pool.release(owner.blocks[count:])
        del owner.blocks[count:]
        if self.others:
            for (_, group), table in zip(self.others, self.tables_of(owner), strict=True):
                if group.kind != "state":
                    self.pool.release(table.blocks[max(count, table.first) :])
                    del table.blocks[count:]

    # The prefix cache

    def publish(self, owner: BlockOwner, keys: Sequence[bytes], full_blocks: int) -> list[int]:
        """Add the owner's first `full_blocks` blocks to the prefix cache; returns those that are new to it."""
        first, end = owner.published, min(full_blocks, len(keys))
        if not self.prefix_caching or first >= end:
            return []
        add, fresh = self.prefix_cache.add, []
        if self.has_full:
            added = zip(keys[first:end], owner.blocks[first:end], strict=True)
            fresh = [block for key, block in added if add(key, block)]
        owner.published = end
        if not self.num_full:
            self._see(keys[first:end])
        if self.others:
            for (number, group), table in zip(self.others, self.tables_of(owner), strict=True):
                if group.kind != "state":
                    for i in range(max(table.published, table.first), end):
                        if add(index_key(keys[i], number), table.blocks[i]):
                            fresh.append(table.blocks[i])
                table.published = end
        for block in fresh:
            self.pool.keep(block)
        return fresh

    def _see(self, keys: Sequence[bytes]) -> None:
        """Remember which blocks were computed: where another sequence leaves them, a snapshot is worth keeping."""
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Remove these blocks from the prefix cache: their content was not written."""
        for block in blocks:
            for one in self.prefix_cache.remove(block):
                self.pool.forget(one)

    def withdraw_owner(self, owner: BlockOwner, keys: Sequence[bytes]) -> None:
        """Remove what the owner has, and all that is cached under these keys: its content is wrong."""
        self.withdraw(owner.blocks)
        if self.others:
            for table in self.tables_of(owner):
                self.withdraw(table.held)
            for number, _ in self.others:
                for key in keys:
                    self.withdraw(self.prefix_cache.blocks_of(index_key(key, number))[:1])

    # Sharing

    def fork(self, parent: BlockOwner, child: BlockOwner, count: int | None = None) -> None:
        """Give the child the parent's first `count` blocks, or all; the first of the two to write into a shared block
        gets a copy. It gets no state: that is copied."""
        pages = []
        if self.others:
            tables = zip(self.others, self.tables_of(parent), strict=True)
            pages = [[] if group.kind == "state" else table.blocks[table.first : count] for (_, group), table in tables]
        self.adopt(child, Hit(parent.blocks[:count], pages))
        child.published = parent.published
        if self.others:
            for table, other in zip(self.tables_of(child), self.tables_of(parent), strict=True):
                table.published = other.published

    # Owners that follow each other: a session and the requests that are its turns

    def can_continue(self, owner: BlockOwner, state_at: int, tokens: int) -> bool:
        """Whether the owner, whose state has consumed `state_at` tokens, has all that it takes to continue after its
        first `tokens` tokens."""
        if not self.others:
            return True
        if self.state_pages and state_at != tokens:
            return False
        tables = zip(self.others, self.tables_of(owner), strict=True)
        return all(table.first <= self.first_needed(number, tokens) for (number, _), table in tables)

    def cost_of_continuing(self, owner: BlockOwner, tokens: int, known: int) -> int:
        """Free pages it takes to compute up to `known` tokens, a block at a time, after the owner's first `tokens`."""
        is_partial = tokens % self.block_size
        pages = self.pages_at(owner, tokens // self.block_size) if is_partial else []
        return self.missing_finally(owner, known) + sum(self.pool.refs[page] > 1 for page in pages)

    def shorten(self, owner: BlockOwner, tokens: int) -> None:
        """Release the owner's blocks after its first `tokens` tokens, and those before the window that ends there."""
        count, full = self.blocks_for(tokens), tokens // self.block_size
        if self.has_full:
            self.pool.release(owner.blocks[count:])
        del owner.blocks[count:]
        owner.published = min(owner.published, full)
        if self.others:
            for (_, group), table in zip(self.others, self.tables_of(owner), strict=True):
                if group.kind != "state":
                    self.pool.release(table.blocks[max(count, table.first) :])
                    del table.blocks[count:]
                table.published = min(table.published, full)
            self.trim(owner, tokens)

    def hand_over(self, owner: BlockOwner, heir: BlockOwner, tokens: int) -> None:
        """Move the owner's pages of its first `tokens` tokens to another owner, which has none; release the others."""
        self.shorten(owner, tokens)
        heir.blocks.extend(owner.blocks)
        heir.published = owner.published
        owner.blocks.clear()
        owner.published = 0
        if self.others:
            for table, own in zip(self.tables_of(heir), self.tables_of(owner), strict=True):
                table.blocks, table.first, table.published = own.blocks, own.first, own.published
                own.clear()

    def share(self, owner: BlockOwner, other: BlockOwner, tokens: int) -> None:
        """Give another owner, which has none, the owner's pages of its first `tokens` tokens too."""
        count, pages = self.blocks_for(tokens), list[list[int]]()
        for (number, group), table in zip(self.others, self.tables_of(owner) if self.others else (), strict=True):
            is_state = group.kind == "state"
            pages.append(table.blocks if is_state else table.blocks[self.first_needed(number, tokens) : count])
        self.adopt(other, Hit(owner.blocks[:count], pages))
        other.published = min(owner.published, tokens // self.block_size)
        if self.others:
            for table in self.tables_of(other):
                table.published = other.published

    def is_shared(self, owner: BlockOwner, index: int) -> bool:
        """Whether the owner's block `index` has other owners, so that writing needs a copy."""
        if self.pool.refs[owner.blocks[index]] > 1:
            return True
        return bool(self.others) and any(self.pool.refs[page] > 1 for page in self._others_at(owner, index))

    def pages_at(self, owner: BlockOwner, index: int) -> list[int]:
        """The owner's pages of block `index`, in all groups."""
        own = [owner.blocks[index]] if self.has_full else []
        return [*own, *self._others_at(owner, index)] if self.others else own

    def _others_at(self, owner: BlockOwner, index: int) -> list[int]:
        tables = zip(self.others, self.tables_of(owner), strict=True)
        return [table.blocks[index] for (_, group), table in tables if group.kind != "state"]

    def copy_on_write(self, owner: BlockOwner, index: int) -> tuple[int, int]:
        """Replace the owner's shared block by a block of its own; returns (from, to) of the copy that must follow."""
        shared = owner.blocks[index]
        (own,) = self.pool.allocate(1)
        owner.blocks[index] = own
        self.pool.release([shared])
        return shared, own

    def copy_on_write_all(self, owner: BlockOwner, index: int) -> list[tuple[int, int, int]]:
        """The same in every group where block `index` is shared; returns (group, from, to)."""
        refs, copies = self.pool.refs, []
        if self.has_full and refs[owner.blocks[index]] > 1:
            copies.append((0, *self.copy_on_write(owner, index)))
        if self.others:
            for (number, group), table in zip(self.others, self.tables_of(owner), strict=True):
                if group.kind != "state" and refs[shared := table.blocks[index]] > 1:
                    (table.blocks[index],) = self.pool.allocate(1)
                    self.pool.release([shared])
                    copies.append((number, shared, table.blocks[index]))
        return copies

    # Release

    def group_of(self, block: int) -> int | None:
        """The group of a cached block."""
        key = self.prefix_cache.key_of(block)
        return None if key is None else split_index_key(key)[1]

    def every_page(self, owner: BlockOwner) -> list[int]:
        """The owner's pages in all groups."""
        own = list(owner.blocks) if self.has_full else []
        if self.others:
            own += [page for table in self.tables_of(owner) for page in table.held]
        return own

    def release(self, owner: BlockOwner) -> None:
        """Release all blocks of the owner."""
        if self.has_full:
            self.pool.release(owner.blocks)
        owner.blocks.clear()
        owner.published = 0
        if self.others:
            for table in self.tables_of(owner):
                self.pool.release(table.held)
                table.clear()

    def reset_prefix(self) -> None:
        """Empty the prefix cache; blocks in use stay with their owners."""
        self.withdraw(self.prefix_cache.blocks())
