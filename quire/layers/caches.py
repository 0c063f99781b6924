"""What a layer keeps between steps, as its model declares it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quire.kernels.kv import KVFormat


@dataclass(frozen=True)
class AttentionCache:
    """Keys and values of every token, or of the last `window`."""

    kv_heads: int
    """Of this rank."""
    head_dim: int
    format: KVFormat
    window: int | None = None


@dataclass(frozen=True)
class LatentCache:
    """One vector a token, which keys and values of all heads are computed from (MLA)."""

    width: int
    format: KVFormat


@dataclass(frozen=True)
class StatePart:
    """One tensor of a recurrent state: `count` pieces of a shape, for example one a head.

    A piece lies within one page; pieces of one part may lie in different pages.
    """

    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def piece_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateCache:
    """A recurrent state: a few tensors, whatever the number of tokens."""

    parts: tuple[StatePart, ...]
    """The state of the recurrence, if there is one; then the ring of the convolution's inputs."""

    @property
    def replay_bytes(self) -> int:
        """Bytes that are kept, at most, of a token whose update may have to be repeated (`StateReplay`): an input of
        the convolution, and for each piece of the state two vectors whose product is added to it, and a factor."""
        *states, ring = self.parts
        vectors = sum(part.count * (sum(part.shape) + 1) * 4 for part in states)
        return vectors + ring.count * ring.shape[-1] * ring.dtype.itemsize


@dataclass(frozen=True)
class SharedCache:
    """The cache of another layer, which is read and not written."""

    layer: int
    """Its index in the whole model."""


LayerCache = AttentionCache | LatentCache | StateCache | SharedCache


@dataclass(frozen=True)
class StateView:
    """A layer's recurrent states in the pages of the pool.

    Piece i of a part lies `offsets[i]` bytes into page `table[pages[i]]` of the row's table in the layer's group. A row
    whose chunk begins at position 0 starts from zeros, whatever its pages hold.
    """

    memory: torch.Tensor
    """[pages, page bytes] uint8: the pool."""
    parts: tuple[StatePart, ...]
    pages: tuple[torch.Tensor, ...]
    """For each part: [count] int32 on the device, the index into the row's table."""
    offsets: tuple[torch.Tensor, ...]
    """For each part: [count] int32 on the device, bytes into that page; a multiple of 16."""

    def read(self, part: int, tables: torch.Tensor) -> torch.Tensor:
        """[rows, count, *shape]: a part of the states of rows with these tables [rows, pages of a state]."""
        spec = self.parts[part]
        return self._pieces(part)[self._index(part, tables)].view(len(tables), spec.count, *spec.shape)

    def write(self, part: int, tables: torch.Tensor, values: torch.Tensor) -> None:
        """Store what `read` returns."""
        spec = self.parts[part]
        flat = values.to(spec.dtype).reshape(len(tables), spec.count, -1)
        self._pieces(part)[self._index(part, tables)] = flat

    def _pieces(self, part: int) -> torch.Tensor:
        """[places, elements of a piece]: every piece that could begin at a multiple of 16 bytes, overlapping."""
        spec = self.parts[part]
        flat = self.memory.view(-1).view(spec.dtype)
        step, size = 16 // spec.dtype.itemsize, math.prod(spec.shape)
        return flat.as_strided(((len(flat) - size) // step + 1, size), (step, 1))

    def _index(self, part: int, tables: torch.Tensor) -> torch.Tensor:
        """[rows, count]: which of `_pieces`."""
        numbers = tables.long()[:, self.pages[part].long()]
        return (numbers * self.memory.shape[1] + self.offsets[part].long()) // 16
