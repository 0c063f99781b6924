"""Blocks in transfer between tiers: which belong together, and how far they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class SaveTransfer:
    """Blocks that leave the device together."""

    to_disk: bool = False
    """Write them from host memory to disk as soon as they are copied."""
    pending: int = 0
    """Copies and writes not finished yet."""
    lost: int = 0
    """Blocks that found no slot or could not be written."""

    @property
    def is_done(self) -> bool:
        return not self.pending


@dataclass(eq=False)
class LoadTransfer:
    """Blocks that one request loads back to the device, in order."""

    keys: list[bytes]
    blocks: list[int]
    tokens: np.ndarray
    """[blocks, block size] token ids."""
    started: int = 0
    """How many leading blocks are in transfer or loaded."""
    pending: int = 0
    """Blocks in transfer."""
    loaded: int = 0
    """How many leading blocks are on the device."""
    is_cancelled: bool = False
    _arrived: set[int] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return not self.pending and (self.started == len(self.keys) or self.is_cancelled)

    def finish(self, first: int, count: int, ok: bool) -> None:
        """`count` blocks from `first` on are loaded, or failed: blocks after a failed one are of no use."""
        self.pending -= count
        if ok:
            self._arrived.update(range(first, first + count))
        else:
            self.is_cancelled = True
        while self.loaded in self._arrived:
            self.loaded += 1


@dataclass(slots=True)
class CopyOut:
    """The copy of a block to a slot of host memory."""

    key: bytes
    block: int
    slot: int
    save: SaveTransfer
    is_idle: bool
    """Only this copy holds the block."""


@dataclass(slots=True)
class CopyIn:
    """The copy of consecutive blocks of a load from host memory to the device."""

    load: LoadTransfer
    first: int
    slots: list[int]

    @property
    def keys(self) -> list[bytes]:
        return self.load.keys[self.first : self.first + len(self.slots)]

    @property
    def blocks(self) -> list[int]:
        return self.load.blocks[self.first : self.first + len(self.slots)]

    @property
    def tokens(self) -> np.ndarray:
        return self.load.tokens[self.first : self.first + len(self.slots)]

    def split(self, count: int) -> tuple[CopyIn, CopyIn]:
        """The first `count` blocks, and the others."""
        first, load = self.first, self.load
        return CopyIn(load, first, self.slots[:count]), CopyIn(load, first + count, self.slots[count:])


@dataclass
class StepCopies:
    """The copies that one plan carries."""

    out: list[CopyOut]
    back: list[CopyIn]
