"""What copies pages between the device's cache and host memory: as they are, or in 8 bits.

The planning half knows only how many bytes a slot of host memory has. Whatever is kept there is written to disk and
read from it as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from quire.errors import ConfigError
from quire.kernels.page_codes import PageCodes
from quire.layers.caches import AttentionCache, LatentCache, SharedCache, StateCache
from quire.worker.geometry import CacheGeometry
from quire.worker.kv import KVCache

STAGING_BYTES = 16 << 20
"""Encoded pages on their way out, and as many on their way back, take about this much of the device's memory."""
Pairs = Sequence[tuple[int, int]]


class PageCopies(Protocol):
    """Copies pages on the current stream."""

    slot_bytes: int
    """Bytes of a page in host memory."""

    def connect(self, kv: KVCache, host: torch.Tensor) -> None:
        """Copy between `kv` and `host` [slots, bytes] uint8 from now on."""
        ...

    def out(self, pairs: Pairs) -> None:
        """Copy (page, slot) pairs to host memory."""
        ...

    def back(self, pairs: Pairs) -> None:
        """Copy (slot, page) pairs to the device."""
        ...


def page_copies(kv_tier_dtype: str, geometry: CacheGeometry) -> PageCopies:
    """The copies of this setting."""
    return WholePages(geometry) if kv_tier_dtype == "auto" else EncodedPages(geometry)


class WholePages:
    """Pages are kept as they are."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self.slot_bytes = geometry.page_bytes

    def connect(self, kv: KVCache, host: torch.Tensor) -> None:
        self._pages = kv.data
        self._host = host.view(kv.data.dtype).view(len(host), *kv.data.shape[1:])
        # Slots that are not contiguous are copied one by one: for several at once torch would make a copy first.
        self._in_runs = self._host.is_contiguous() or not kv.data.is_cuda

    def out(self, pairs: Pairs) -> None:
        for page, slot, count in self._runs(pairs):
            self._host[slot : slot + count].copy_(self._pages[page : page + count], non_blocking=True)

    def back(self, pairs: Pairs) -> None:
        for slot, page, count in self._runs(pairs):
            self._pages[page : page + count].copy_(self._host[slot : slot + count], non_blocking=True)

    def _runs(self, pairs: Pairs) -> Iterable[tuple[int, int, int]]:
        return runs(pairs) if self._in_runs else ((*pair, 1) for pair in pairs)


class EncodedPages:
    """Pages are kept in 8 bits. A GPU encodes them before they are copied out, and decodes them once they are back."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self._codes = _page_codes(geometry)
        self.slot_bytes = self._codes.encoded_bytes

    def connect(self, kv: KVCache, host: torch.Tensor) -> None:
        self._pages = kv.data.flatten(1).view(torch.uint8).view(self._codes.dtype)
        self._host = host
        self._on_gpu = kv.data.is_cuda
        self._in_runs = host.is_contiguous()
        self._at_once = max(1, STAGING_BYTES // self.slot_bytes)
        """Pages that are encoded or decoded at a time."""
        # Each direction has its own: they run at once, on two streams.
        shape = (self._at_once if self._on_gpu else 0, self.slot_bytes)
        self._leaving, self._coming = (torch.empty(shape, dtype=torch.uint8, device=kv.data.device) for _ in range(2))

    def out(self, pairs: Pairs) -> None:
        for part in self._parts(pairs):
            pages, slots = zip(*part, strict=True)
            if not self._on_gpu:
                encoded = torch.empty(len(part), self.slot_bytes, dtype=torch.uint8)
                self._codes.encode(self._pages[list(pages)], encoded)
                self._host[list(slots)] = encoded
                continue
            from quire.kernels.triton.page_codes import encode_pages

            encode_pages(self._codes, self._pages, self._numbers(pages), self._leaving)
            for slot, place, count in self._staged(slots):
                self._host[slot : slot + count].copy_(self._leaving[place : place + count], non_blocking=True)

    def back(self, pairs: Pairs) -> None:
        for part in self._parts(pairs):
            slots, pages = zip(*part, strict=True)
            if not self._on_gpu:
                self._pages[list(pages)] = self._codes.decode(self._host[list(slots)])
                continue
            from quire.kernels.triton.page_codes import decode_pages

            for slot, place, count in self._staged(slots):
                self._coming[place : place + count].copy_(self._host[slot : slot + count], non_blocking=True)
            decode_pages(self._codes, self._coming, self._pages, self._numbers(pages))

    def _parts(self, pairs: Pairs) -> Iterator[Pairs]:
        return (pairs[at : at + self._at_once] for at in range(0, len(pairs), self._at_once))

    def _numbers(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int32).pin_memory().to(self._pages.device, non_blocking=True)

    def _staged(self, slots: Sequence[int]) -> Iterable[tuple[int, int, int]]:
        """(slot, place in the staging memory, count) of copies."""
        pairs = [(slot, place) for place, slot in enumerate(slots)]
        return runs(pairs) if self._in_runs else ((*pair, 1) for pair in pairs)


def _page_codes(geometry: CacheGeometry) -> PageCodes:
    """How the pages of this geometry are encoded; refuses those of which a part must stay as it is."""
    caches = [cache for cache in geometry.caches if not isinstance(cache, SharedCache)]
    if any(group.kind == "state" for group in geometry.groups) or any(isinstance(each, StateCache) for each in caches):
        raise _refusal("recurrent states stay exact, and share the slots of host memory with keys and values")
    if any(isinstance(cache, LatentCache) for cache in caches):
        raise _refusal("latent attention keeps vectors that are not keys and values, and stay exact")
    attention = [cache for cache in caches if isinstance(cache, AttentionCache)]
    if encoded := next((cache.format.name for cache in attention if cache.format.codes is not None), None):
        raise _refusal(f"the KV cache is in 8 bits already ({encoded})")
    dtypes = {cache.format.dtype for cache in attention}
    if len(dtypes) != 1:
        raise _refusal("layers keep keys and values in different dtypes")
    (dtype,) = dtypes
    places = [place // dtype.itemsize for place in geometry.places if isinstance(place, int)]
    numbers = geometry.page_bytes // dtype.itemsize
    # Padding at the end of a page is encoded with the rest.
    return PageCodes(dtype, numbers, math.gcd(numbers, *(cache.head_dim for cache in attention), *places))


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"kv_tier_dtype int8_per_token_head cannot be used with this model: {why}. Use auto",
                       "kv_tier_dtype", "int8_per_token_head")  # fmt: skip


def runs(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Runs that are contiguous on both sides become one copy: (from, to, count)."""
    for _, run in itertools.groupby(enumerate(pairs), lambda item: (item[1][0] - item[0], item[1][1] - item[0])):
        moved = [pair for _, pair in run]
        yield *moved[0], len(moved)
