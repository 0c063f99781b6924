"""The tensors of the cache, and copies of blocks within it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.errors import ConfigError
from quire.kernels.kv import KVFormat, LayerKV, QuantizedKV
from quire.layers.attention.base import KVSpec
from quire.layers.caches import AttentionCache, LatentCache, LayerCache, SharedCache, StateCache, StateView
from quire.platforms.base import MemoryArena
from quire.worker.geometry import CacheGeometry, StatePlaces, plain_geometry

COPY_BYTES = 64 << 20
"""Blocks are copied through a temporary of at most about this size: states have many blocks."""


class KVCache:
    """The caches of all layers, and token ids. `data` is what copies of blocks move; `layers` is what layers see.

    Block-major: one block is contiguous over all layers of its group, so that moving it is one copy. Token ids are in
    pages with the same block numbers, so that sharing or copying a block covers its tokens too; a model that keeps no
    block for as long as its row lives has its token ids in the batch instead.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int, format: KVFormat, device: torch.device) -> None:
        """Layers that all keep the same."""
        self._allocate(plain_geometry(spec, block_size, format), num_blocks, device)

    @classmethod
    def of(cls, geometry: CacheGeometry, num_blocks: int, device: torch.device) -> KVCache:
        """The cache of a model's stage."""
        cache = cls.__new__(cls)
        cache._allocate(geometry, num_blocks, device)
        return cache

    def _allocate(self, geometry: CacheGeometry, num_blocks: int, device: torch.device) -> None:
        self.geometry = geometry
        self.block_size = geometry.block_size
        self.num_blocks = num_blocks
        # Zeros, because a masked slot is still multiplied by zero, and garbage could be NaN.
        memory = MemoryArena(device)
        first = next(iter(geometry.caches), None)
        if geometry.is_uniform and isinstance(first, AttentionCache) and first.format.codes is None:
            shape = (2, first.kv_heads, self.block_size, first.head_dim)
            self.data = memory.zeros((num_blocks, len(geometry.caches), *shape), first.format.dtype)
        else:
            self.data = memory.zeros((num_blocks, geometry.page_bytes), torch.uint8)
        self.layers: list[Any] = []
        """What each layer sees: [blocks, 2, kv_heads, block_size, head_dim] of attention (`LayerKV`), [blocks,
        block_size, width] of latent attention, a `StateView` of a recurrent layer."""
        self.proposer_layers: list[Any] = []
        """The same for the layers of a proposer on the device."""
        pages = self.data.flatten(1).view(torch.uint8)
        # Copies by index move an element at a time: large ones.
        self._words = pages if pages.shape[1] % 8 else pages.view(torch.int64)
        mixed = len({getattr(cache, "format", None) for cache in geometry.caches if not _is_shared(cache)}) > 1
        for cache, place in zip(geometry.caches, geometry.places, strict=True):
            if isinstance(place, StatePlaces):
                assert isinstance(cache, StateCache)
                self.layers.append(_state_view(pages, cache, place))
            elif isinstance(cache, AttentionCache | LatentCache):
                view = _layer_view(pages, place, cache, self.block_size)
                self.layers.append(replace(view, mixed=mixed) if isinstance(view, QuantizedKV) else view)
            else:
                self.layers.append(self.layers[place])
        own = len(self.layers) - geometry.num_draft_layers
        self.layers, self.proposer_layers = self.layers[:own], self.layers[own:]
        self.has_tokens = geometry.has_full_group
        self.tokens = memory.zeros((num_blocks if self.has_tokens else 0, self.block_size), torch.int32)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks: (from, to) each; all are read before any is written."""
        if not pairs:
            return
        most = max(1, COPY_BYTES // (self.data[0].nbytes or 1))
        chained = len(pairs) > most and not {source for source, _ in pairs}.isdisjoint(target for _, target in pairs)
        numbers = torch.tensor(pairs, pin_memory=self.data.is_cuda)
        numbers = numbers.to(self.data.device, non_blocking=True)
        for part in [numbers] if chained else numbers.split(most):
            sources, targets = part.unbind(1)
            self._words[targets] = self._words[sources]
            if self.has_tokens:
                self.tokens[targets] = self.tokens[sources]


def _is_shared(cache: LayerCache) -> bool:
    return isinstance(cache, SharedCache)


def _layer_view(pages: torch.Tensor, offset: int, cache: AttentionCache | LatentCache, block_size: int) -> LayerKV:
    """A layer's part of every page [pages, bytes], `offset` bytes into it."""
    format = cache.format
    if isinstance(cache, AttentionCache):
        if format.codes is not None:
            return QuantizedKV.of_layer(pages[:, offset:], 0, format, cache.kv_heads, block_size, cache.head_dim)
        shape: tuple[int, ...] = (2, cache.kv_heads, block_size, cache.head_dim)
    else:
        if format.codes is not None:
            raise ConfigError(
                f"kv_cache_dtype {format.name} is not implemented for latent attention: use auto", "kv_cache_dtype"
            )
        shape = (block_size, cache.width)
    size = format.dtype.itemsize
    inner = [*itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)]
    flat = pages.view(-1).view(format.dtype)
    return flat.as_strided(
        (len(pages), *shape), (pages.shape[1] // size, *reversed(inner)), flat.storage_offset() + offset // size
    )


def _state_view(pages: torch.Tensor, cache: StateCache, places: StatePlaces) -> StateView:
    def ints(parts: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.tensor(part, dtype=torch.int32, device=pages.device) for part in parts)

    return StateView(pages, cache.parts, ints(places.pages), ints(places.offsets))
