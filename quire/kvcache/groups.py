"""Cache groups in the planning half: an owner's table in each group, and what a group needs of a prefix.

The pages of a *full* group are kept as long as their owner. A *window* group's are given back once no later query can
reach them. A *state* group has a fixed number of pages for an owner: its live state, which every step changes; cached
are copies of it at block boundaries, *snapshots*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.kvcache.block_pool import NULL_BLOCK
from quire.messages.caches import CacheGroup


class GroupTable:
    """An owner's pages in one group, other than the full group whose table is the owner's `blocks`."""

    __slots__ = ("blocks", "first", "published")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        """Full and window groups: the page of each block. State groups: the pages of the live state."""
        self.first = 0
        """Window groups: pages before this index were given back; their entries are NULL_BLOCK."""
        self.published = 0
        """Blocks before this index are in the prefix cache, if they were kept."""

    @property
    def held(self) -> list[int]:
        """The pages the owner has."""
        return self.blocks[self.first :]

    def clear(self) -> None:
        """The owner has no pages."""
        self.blocks, self.first, self.published = [], 0, 0


@dataclass(slots=True)
class Hit:
    """Cached pages that hold the first tokens of a sequence in every group."""

    blocks: list[int]
    """The table it starts with: as many entries as there are blocks of tokens."""
    pages: list[list[int]] = field(default_factory=list)
    """For each other group: the pages it needs, the last blocks of a window or the pages of a snapshot."""
    reach: int = 0
    """Blocks that the full groups have; more than `blocks` if other groups lack what the longer prefix needs. Without
    full groups: blocks that were computed before."""


def first_needed(group: CacheGroup, position: int, block_size: int) -> int:
    """The first block that a window group's query at `position` reaches."""
    return max(0, position - group.window + 1) // block_size


def most_window_blocks(group: CacheGroup, block_size: int) -> int:
    """Blocks of a window group that an owner needs to compute up to a block of tokens at a time."""
    return -(-(group.window - 1 + block_size) // block_size) + 1


def hole(count: int) -> list[int]:
    """Entries of a table without pages."""
    return [NULL_BLOCK] * count


def is_snapshot_worth(tokens: int, pages: int, pages_per_block: int, block_size: int, empty: int, free: int) -> bool:
    """Whether to keep a snapshot of `pages` pages that saves computing `tokens` tokens.

    Pages without content cost nothing: they are used for any snapshot that saves a block or more. Otherwise cached
    content is evicted, the least recently used. The same pages hold the keys and values of `held` tokens, so a
    snapshot that saves much less than computing these is not worth them. It may save less: what was used last is more
    likely to be used again, and in such a model keys and values are of no use without a snapshot.
    """
    if tokens < block_size or pages > free:
        return False
    held = pages * block_size // max(1, pages_per_block)
    return pages <= empty or EVICTING_WORTH * tokens >= held


EVICTING_WORTH = 4
"""A snapshot may evict cached content of up to this many times the tokens it saves."""


def rolling_interval(pages: int, pages_per_block: int, block_size: int) -> int:
    """Tokens between two snapshots of a row that decodes.

    A snapshot copies as many bytes as the keys and values of `held` tokens. A row that resumes recomputes half an
    interval on average. Both are small if the interval is a small share of `held`.
    """
    held = pages * block_size // max(1, pages_per_block)
    return max(1, held // ROLLING_SHARE // block_size) * block_size


ROLLING_SHARE = 16
"""Snapshots of a decoding row are copied after this share of the tokens that would take the same memory."""


def groups_of(groups: Sequence[CacheGroup], kind: str) -> list[tuple[int, CacheGroup]]:
    """The groups of a kind, with their numbers."""
    return [(number, group) for number, group in enumerate(groups) if group.kind == kind]
