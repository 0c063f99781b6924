"""Where each layer's cache lies: the cache groups of a model, the bytes of a page, and each layer's place in its pages.

All groups draw pages of one size from one pool. A page of an attention group holds `block_size` tokens of each of the
group's layers; a recurrent state is cut into pieces, each within one page, and takes a fixed number of pages.

Groups are made from what all layers of the whole model keep, so that every rank and pipeline stage makes the same. A
stage's pages hold only its own layers: their bytes differ from stage to stage, their numbers do not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from quire.errors import ConfigError
from quire.kernels.kv import ALIGNMENT, KVFormat
from quire.layers.attention.base import KVSpec
from quire.layers.caches import AttentionCache, LatentCache, LayerCache, SharedCache, StateCache
from quire.messages.caches import FULL, CacheGroup

FULL_WEIGHT = 4
"""Padding in pages of full groups counts as much as if contexts were this many windows long."""
GROUP_COST = 1 / 32
"""What another group (a table, a slot per token, a plan of attention) costs, as a share of the bytes of all layers."""


@dataclass(frozen=True)
class StatePlaces:
    """Where the pieces of a layer's state lie: for each part and piece, the page's index in the row's table, and the
    byte in that page."""

    pages: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CacheGeometry:
    """The caches of one pipeline stage's layers on one rank."""

    block_size: int
    groups: tuple[CacheGroup, ...]
    """Of the whole model: those with blocks first, full ones before windows, then states."""
    caches: tuple[LayerCache, ...]
    """What each layer of this stage keeps."""
    layer_groups: tuple[int, ...]
    """The group of each layer of this stage."""
    places: tuple[int | StatePlaces, ...]
    """For each layer of this stage: bytes into a page of its group; where its state lies; or, if it shares the cache of
    another layer, which one of this stage."""
    page_bytes: int
    """Without token ids. The largest group fills them."""
    num_draft_layers: int = 0
    """The last of `caches` that belong to a proposer's layers, not to the model's."""

    @property
    def num_block_groups(self) -> int:
        """Groups whose pages are blocks of tokens: the first ones."""
        return sum(group.kind != "state" for group in self.groups)

    @property
    def has_full_group(self) -> bool:
        """Whether group 0 keeps every token."""
        return self.groups[0].kind == "full"

    @property
    def is_uniform(self) -> bool:
        """Whether the layers are alike and fill the pages of one group: a cache is one tensor then."""
        first = self.caches[0] if self.caches else None
        if len(self.groups) > 1 or not isinstance(first, AttentionCache) or len(set(self.caches)) > 1:
            return False
        each = first.format.layer_bytes(first.kv_heads, self.block_size, first.head_dim)
        return self.page_bytes == each * len(self.caches)

    @property
    def block_bytes(self) -> int:
        """Bytes of a page, with the token ids of a block if they are kept in pages."""
        return self.page_bytes + (4 * self.block_size if self.has_full_group else 0)

    def most_pages(self, tokens: int, states: int = 1) -> int:
        """Pages of a row of this many tokens that gives none back, and of `states` states."""
        blocks = -(-tokens // self.block_size)
        return sum(states * group.pages if group.kind == "state" else blocks for group in self.groups)

    def most_blocks(self, rows: int, longest: int) -> int:
        """Every row at full length, with snapshots of its states: more blocks are hardly ever of use."""
        return rows * self.most_pages(longest, SNAPSHOTS) + 1

    @property
    def identity(self) -> str:
        """Names the layout of pages if it does not follow from the shape of a plain model; empty if it does."""
        if self.is_uniform and self.has_full_group and not self.num_draft_layers:
            return ""
        layout = (self.groups, self.layer_groups, self.caches, self.places, self.page_bytes)
        return hashlib.sha256(repr(layout).encode()).hexdigest()[:32]


SNAPSHOTS = 4
"""States a row may have at once, its live one included, in the estimate of what a cache can use."""


def plain_geometry(spec: KVSpec, block_size: int, format: KVFormat) -> CacheGeometry:
    """Layers that all keep the same, in one group."""
    cache: LayerCache = AttentionCache(spec.num_kv_heads, spec.head_dim, format)
    each = format.layer_bytes(spec.num_kv_heads, block_size, spec.head_dim)
    return CacheGeometry(
        block_size, (FULL,), (cache,) * spec.num_layers, (0,) * spec.num_layers,
        tuple(each * layer for layer in range(spec.num_layers)), each * spec.num_layers,
    )  # fmt: skip


def model_geometry(
    model: Any, block_size: int, format: KVFormat | None = None, drafts: Sequence[LayerCache] = ()
) -> CacheGeometry:
    """The geometry of a model (`models/base.py`), which says what its layers keep in `caches`, or in `kv_shape` if all
    keep the same.

    `caches` has an entry for each layer of the whole model that keeps something. Which of them are this pipeline
    stage's: as many as `Ranks.layers` says, or `cache_stages` (a range for each stage) if the model has that. `format`:
    if not the model's own, for one that has only `kv_shape`. `drafts`: what the layers of a proposer keep, as long as
    layers of the model without a window do.
    """
    caches: Sequence[LayerCache] | None = getattr(model, "caches", None)
    if caches is None and not drafts:
        return plain_geometry(model.kv_shape, block_size, format or model.build.kv_format)
    if caches is None:
        spec = model.kv_shape
        caches = [AttentionCache(spec.num_kv_heads, spec.head_dim, format or model.build.kv_format)] * spec.num_layers
    ranks, longest = model.build.ranks, model.build.max_model_len
    # A window that no sequence outgrows keeps every token.
    caches = [_kept_whole(cache) if _window(cache) >= longest else cache for cache in caches]
    stages: Sequence[range] | None = getattr(model, "cache_stages", None)
    if stages is None:
        stages = [replace(ranks, pp_rank=stage).layers(len(caches)) for stage in range(ranks.pp_size)]
    if drafts:
        caches = [*caches, *_joining(caches, drafts, ranks.pp_size)]
        return replace(make_geometry(caches, block_size), num_draft_layers=len(drafts))
    return make_geometry(caches, block_size, stages, ranks.pp_rank)


def _joining(caches: Sequence[LayerCache], drafts: Sequence[LayerCache], stages: int) -> list[LayerCache]:
    """The caches of a proposer's layers as they join those of a model."""
    if stages > 1:
        raise ConfigError(
            "a draft with layers of its own needs all layers of the model on one pipeline stage: use tensor "
            "parallelism, or a draft without layers (ngram, suffix)",
            "pipeline_parallel_size",
            stages,
        )
    if not any(_kind(cache) == ("full", 0) for cache in caches if not isinstance(cache, SharedCache)):
        raise ConfigError(
            "a draft with layers of its own needs a model with layers that keep every token, whose blocks it shares; "
            "this one has none: use a draft without layers (ngram, suffix)",
            "speculative_config",
        )
    joined: list[LayerCache] = []
    for cache in drafts:
        if isinstance(cache, StateCache):
            raise ConfigError(
                "a draft with recurrent layers is not implemented: its states could not follow the drafts that are "
                "accepted; use one with attention in every layer",
                "speculative_config",
            )
        is_shared = isinstance(cache, SharedCache)
        joined.append(SharedCache(len(caches) + cache.layer) if is_shared else _kept_whole(cache))  # type: ignore[union-attr]
    return joined


def _window(cache: LayerCache) -> int:
    """The window of a layer, 0 if it has none."""
    return cache.window or 0 if isinstance(cache, AttentionCache) else 0


def _kept_whole(cache: LayerCache) -> LayerCache:
    return replace(cache, window=None) if isinstance(cache, AttentionCache) else cache


def assign_groups(model: nn.Module, geometry: CacheGeometry, proposer: Any = None) -> None:
    """Tell each layer that reads a cache its group; `proposer`: with layers of its own, or not."""
    modules = cache_layers(model)
    if geometry.num_draft_layers:
        modules += cache_layers(proposer)
    if len(geometry.groups) == 1:
        return
    if len(modules) != len(geometry.layer_groups):
        raise RuntimeError(
            f"{type(model).__name__} declares {len(geometry.layer_groups)} caches for {len(modules)} layers"
        )
    for module, group in zip(modules, geometry.layer_groups, strict=True):
        module.group = group  # type: ignore[assignment]


def cache_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that read a cache: the modules with a `group`, in the order of the stage's caches."""
    return [module for module in model.modules() if isinstance(getattr(module, "group", None), int)]


def make_geometry(
    caches: Sequence[LayerCache], block_size: int, stages: Sequence[range] | None = None, stage: int = 0
) -> CacheGeometry:
    """The geometry of stage `stage`. `caches`: of all layers of the model; `stages`: the layers of each stage."""
    stages = stages or [range(len(caches))]
    owners = [_owner(caches, layer) for layer in range(len(caches))]
    groups = _groups(caches, block_size)
    group_of = {layer: number for number, group in enumerate(groups) for layer in group}
    kinds = [_kind(caches[group[0]]) for group in groups]
    pages = _state_pages(caches, groups, stages, block_size)
    own = stages[stage]
    page_bytes = _page_bytes(caches, groups, own, block_size, pages)
    placed, _ = _place_states(caches, own, page_bytes)
    filled = [0] * len(groups)
    places: list[int | StatePlaces] = []
    for layer in own:
        cache = caches[layer]
        if isinstance(cache, SharedCache):
            if owners[layer] not in own:
                raise ConfigError(
                    f"layer {layer} reads the cache of layer {owners[layer]}, which is on another pipeline stage: "
                    "set pipeline_layers so that both are on the same, or use tensor parallelism",
                    "pipeline_layers",
                )
            places.append(owners[layer] - own.start)
        elif isinstance(cache, StateCache):
            places.append(placed[layer])
        else:
            places.append(filled[group_of[layer]])
            filled[group_of[layer]] += _block_bytes(cache, block_size)
    found = tuple(
        CacheGroup(kind, tuple(group), window, pages if kind == "state" else 0)
        for (kind, window), group in zip(kinds, groups, strict=True)
    )
    return CacheGeometry(
        block_size, found, tuple(caches[layer] for layer in own), tuple(group_of[owners[layer]] for layer in own),
        tuple(places), page_bytes,
    )  # fmt: skip


def _owner(caches: Sequence[LayerCache], layer: int) -> int:
    """The layer whose cache this one reads: itself, unless it shares another's."""
    cache = caches[layer]
    while isinstance(cache, SharedCache):
        layer, cache = cache.layer, caches[cache.layer]
    return layer


Lifetime = tuple[Literal["full", "window", "state"], int]
"""What decides how long a layer's cache lives: the kind of its group, and its window (0: it has none)."""


def _kind(cache: LayerCache) -> Lifetime:
    if isinstance(cache, StateCache):
        return "state", 0
    return ("window", window) if (window := _window(cache)) else ("full", 0)


def _block_bytes(cache: LayerCache, block_size: int) -> int:
    """Bytes of a layer's part of a page."""
    match cache:
        case AttentionCache(kv_heads=heads, head_dim=dim, format=format):
            return _aligned(format.layer_bytes(heads, block_size, dim))
        case LatentCache(width=width, format=format):
            return _aligned(block_size * width * format.stored_dtype.itemsize)
    return 0


def _groups(caches: Sequence[LayerCache], block_size: int) -> list[list[int]]:
    """The layers of each group: full ones, windows (wide ones first), states."""
    lifetimes: dict[Lifetime, list[int]] = {}
    for layer, cache in enumerate(caches):
        if not isinstance(cache, SharedCache):
            lifetimes.setdefault(_kind(cache), []).append(layer)
    order = sorted(lifetimes, key=lambda kind: (("full", "window", "state").index(kind[0]), -kind[1]))
    sizes = [_block_bytes(cache, block_size) for cache in caches]
    blocks = [lifetimes[kind] for kind in order if kind[0] != "state"]
    weights = [FULL_WEIGHT if kind[0] == "full" else 1 for kind in order if kind[0] != "state"]
    largest = max((_largest_piece(cache) for cache in caches), default=0)
    counts = _counts([[sizes[layer] for layer in layers] for layers in blocks], weights, largest)
    groups = [group for layers, count in zip(blocks, counts, strict=True) for group in _deal(layers, sizes, count)]
    return groups + [lifetimes[kind] for kind in order if kind[0] == "state"]


def _counts(sizes: list[list[int]], weights: list[int], least: int) -> list[int]:
    """Into how many groups to deal the layers of each lifetime, of these sizes, so that little of the pages is padding.

    `weights`: how much a byte of each lifetime counts. `least`: bytes that a page has at least.
    """
    deals = [[_largest_share(layers, count) for count in range(1, len(layers) + 1)] for layers in sizes]
    price = GROUP_COST * sum(weight * sum(layers) for weight, layers in zip(weights, sizes, strict=True))
    best: tuple[float, int, list[int]] | None = None
    for page in sorted({max(share, least) for shares in deals for share in shares}):
        if any(shares[-1] > page for shares in deals):
            continue  # smaller than a layer
        counts = [1 + next(i for i, share in enumerate(shares) if share <= page) for shares in deals]
        cost = sum(weight * count * page for weight, count in zip(weights, counts, strict=True)) + price * sum(counts)
        best = min(best or (math.inf, 0, []), (cost, sum(counts), counts))
    return [] if best is None else best[2]


def _largest_share(sizes: list[int], count: int) -> int:
    return max(sum(sizes[layer] for layer in group) for group in _deal(range(len(sizes)), sizes, count))


def _deal(layers: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    """Deal layers to groups of near-equal bytes: the largest first, each to the group with the fewest bytes. Equal ones
    go around, so that every pipeline stage has about as many of each group."""
    groups: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for layer in sorted(layers, key=lambda layer: -sizes[layer]):
        lightest = filled.index(min(filled))
        groups[lightest].append(layer)
        filled[lightest] += sizes[layer]
    return [sorted(group) for group in groups]


def _largest_piece(cache: LayerCache) -> int:
    parts = cache.parts if isinstance(cache, StateCache) else ()
    return max((_aligned(part.piece_bytes) for part in parts), default=0)


def _state_pages(
    caches: Sequence[LayerCache], groups: Sequence[Sequence[int]], stages: Sequence[range], block_size: int
) -> int:
    """Pages of a state: those of the stage that needs the most. Stages without attention adapt their pages, and if all
    are without, a state is one page."""
    sizes = {layers: _page_bytes(caches, groups, layers, block_size, 0) for layers in stages}
    return max([1, *(_place_states(caches, layers, size)[1] for layers, size in sizes.items() if size)])


def _page_bytes(
    caches: Sequence[LayerCache], groups: Sequence[Sequence[int]], layers: range, block_size: int, pages: int
) -> int:
    """Bytes of a page of the stage with these layers. A stage without attention: the fewest bytes with which a state
    fits into `pages`; with `pages` 0 they are 0."""
    own = [sum(_block_bytes(caches[layer], block_size) for layer in group if layer in layers) for group in groups]
    largest = max((_largest_piece(caches[layer]) for layer in layers), default=0)
    if any(own) or not pages:
        return max([*own, largest]) if any(own) else 0
    total = sum(
        part.count * _aligned(part.piece_bytes) for layer in layers for part in getattr(caches[layer], "parts", ())
    )
    size = max(largest, _aligned(-(-total // pages)), ALIGNMENT)
    while _place_states(caches, layers, size)[1] > pages:
        size += _aligned(size // 64)
    return size


def _place_states(caches: Sequence[LayerCache], layers: range, page_bytes: int) -> tuple[dict[int, StatePlaces], int]:
    """Where the pieces of all states of a stage lie, and how many pages they take: the largest pieces first, each into
    the first page with room for it."""
    pieces = [
        (_aligned(part.piece_bytes), layer, number, part.count)
        for layer in layers
        if isinstance(cache := caches[layer], StateCache)
        for number, part in enumerate(cache.parts)
    ]
    left: list[int] = []
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    size_before, page = 0, 0
    for size, layer, number, count in sorted(pieces, key=lambda piece: -piece[0]):
        if size != size_before:  # pages before `page` have no room for a piece of this size
            size_before, page = size, 0
        for _ in range(count):
            while page < len(left) and left[page] < size:
                page += 1
            if page == len(left):
                left.append(page_bytes)
            found.setdefault((layer, number), []).append((page, page_bytes - left[page]))
            left[page] -= size
    places = {}
    for layer in {piece[1] for piece in pieces}:
        parts = [found[layer, number] for number in range(len(caches[layer].parts))]  # type: ignore[union-attr]
        places[layer] = StatePlaces(
            tuple(tuple(page for page, _ in part) for part in parts),
            tuple(tuple(offset for _, offset in part) for part in parts),
        )
    return places, len(left)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
