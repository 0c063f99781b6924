"""Blocks that go from tier to tier: what belongs together, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class Save:
    """Blocks that go out together."""

    to_disk: bool = False
    """…and on from the host to disk, at once."""
    pending: int = 0
    lost: int = 0
    """Blocks there was no room for, or that could not be written."""

    @property
    def is_done(self) -> bool:
        return not self.pending


@dataclass(eq=False)
class Fetch:
    """Blocks that come back for one request, in order."""

    keys: list[bytes]
    blocks: list[int]
    tokens: np.ndarray
    """[blocks, block size] token ids."""
    begun: int = 0
    """The first so many are on their way or there."""
    pending: int = 0
    good: int = 0
    """Leading blocks that are there, once it is done."""
    is_cancelled: bool = False
    _there: set[int] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return not self.pending and (self.begun == len(self.keys) or self.is_cancelled)

    def ended(self, first: int, count: int, ok: bool) -> None:
        """Some of them have come, or never will; those after the first that did not are of no use."""
        self.pending -= count
        if ok:
            self._there.update(range(first, first + count))
        else:
            self.is_cancelled = True
        while self.good in self._there:
            self.good += 1


@dataclass(slots=True)
class Out:
    """A block on its way to a slot of host memory."""

    key: bytes
    block: int
    slot: int
    save: Save
    is_idle: bool
    """Nobody holds the block but its journey."""


@dataclass(slots=True)
class Back:
    """Neighbours among a fetch's blocks that are in host memory."""

    fetch: Fetch
    first: int
    slots: list[int]

    @property
    def keys(self) -> list[bytes]:
        return self.fetch.keys[self.first : self.first + len(self.slots)]

    @property
    def blocks(self) -> list[int]:
        return self.fetch.blocks[self.first : self.first + len(self.slots)]

    @property
    def tokens(self) -> np.ndarray:
        return self.fetch.tokens[self.first : self.first + len(self.slots)]

    def split(self, count: int) -> tuple[Back, Back]:
        """The first `count`, and the others."""
        first, fetch = self.first, self.fetch
        return Back(fetch, first, self.slots[:count]), Back(fetch, first + count, self.slots[count:])


@dataclass
class Journey:
    """What one plan carries."""

    outs: list[Out]
    backs: list[Back]
