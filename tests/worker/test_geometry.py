"""Cache groups and the places of layers in pages: numbers worked out by hand for the shapes of known models, and views
that do not overlap."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.kv import KVFormat, QuantizedKV
from quire.layers.attention.base import KVSpec
from quire.layers.caches import (
    AttentionCache,
    LatentCache,
    LayerCache,
    SharedCache,
    StateCache,
    StatePart,
    StateView,
)
from quire.worker.geometry import CacheGeometry, make_geometry, plain_geometry
from quire.worker.kv import KVCache

BF16 = KVFormat(torch.bfloat16)
F32 = KVFormat(torch.float32)
KIB = 1024


def attention(heads: int, dim: int, window: int | None = None, format: KVFormat = BF16) -> AttentionCache:
    return AttentionCache(heads, dim, format, window)


def kinds(geometry: CacheGeometry) -> list[tuple[str, int, int]]:
    """(kind, window, layers) of each group."""
    return [(group.kind, group.window, len(group.layers)) for group in geometry.groups]


def test_gpt_oss() -> None:
    """24 layers, every other one with a window of 128; 8 KV heads of 64: 2 KiB a token and layer."""
    caches = [attention(8, 64, 128 if layer % 2 == 0 else None) for layer in range(24)]
    found = make_geometry(caches, 16)
    assert kinds(found) == [("full", 0, 12), ("window", 128, 12)]
    assert found.groups[0].layers == tuple(range(1, 24, 2)) and found.groups[1].layers == tuple(range(0, 24, 2))
    assert found.page_bytes == 12 * 16 * 2 * KIB
    assert found.block_bytes == found.page_bytes + 64
    assert found.layer_groups[:4] == (1, 0, 1, 0)
    assert found.places[:4] == (0, 0, 32 * KIB, 32 * KIB)


def test_gemma_3() -> None:
    """62 layers, every sixth full; 16 KV heads of 128. 52 layers with windows in five groups: three layers
    of padding, and one in the pages of the 10 full ones."""
    caches = [attention(16, 128, None if layer % 6 == 5 else 1024) for layer in range(62)]
    found = make_geometry(caches, 16)
    assert kinds(found) == [("full", 0, 10), *[("window", 1024, 11)] * 2, *[("window", 1024, 10)] * 3]
    assert found.page_bytes == 11 * 16 * 8 * KIB
    assert found.groups[1].layers[:3] == (0, 6, 12)  # the 0th, 5th and 10th layer that has a window
    small = make_geometry([attention(4, 256, None if layer % 6 == 5 else 512) for layer in range(31)], 16)
    assert kinds(small) == [("full", 0, 5), *[("window", 512, 5)] * 2, *[("window", 512, 4)] * 4]


def test_qwen_3_5() -> None:
    """40 layers, every fourth attention: 2 KV heads of 256, 2 KiB a token and layer. A state has 32 heads of
    128 x 128 float32 (64 KiB) and 8,192 channels of a convolution of 4 (48 KiB in bf16) in 64 pieces."""
    state = StateCache((StatePart(32, (128, 128), torch.float32), StatePart(64, (3, 128), torch.bfloat16)))
    caches: list[LayerCache] = [attention(2, 256) if layer % 4 == 3 else state for layer in range(40)]
    found = make_geometry(caches, 16)
    assert found.page_bytes == 10 * 16 * 2 * KIB == 5 * 64 * KIB
    pages = 30 * 32 // 5 + -(-30 * 64 // (320 * KIB // 768))  # five heads fill a page
    assert kinds(found) == [("full", 0, 10), ("state", 0, 30)] and found.groups[1].pages == pages == 197
    assert found.layer_groups[:5] == (1, 1, 1, 0, 1)


def test_nemotron_h() -> None:
    """Nemotron-H 8B: 24 Mamba 2 and 4 attention layers that keep something (its MLPs are not listed); 8 KV heads of
    128; states of 128 heads, 64 x 128 float32 (32 KiB)."""
    state = StateCache((StatePart(128, (64, 128), torch.float32), StatePart(8, (3, 1280), torch.bfloat16)))
    caches: list[LayerCache] = [attention(8, 128) if layer % 7 == 6 else state for layer in range(28)]
    found = make_geometry(caches, 16)
    assert found.page_bytes == 4 * 16 * 4 * KIB == 8 * 32 * KIB
    assert found.groups[1].pages == 24 * 128 // 8 + -(-24 * 8 // (256 * KIB // 7680)) == 384 + 6


def test_states_alone_are_one_page_each() -> None:
    state = StateCache((StatePart(4, (8, 16), torch.float32), StatePart(1, (3, 5), torch.bfloat16)))
    found = make_geometry([state] * 3, 16)
    assert kinds(found) == [("state", 0, 3)] and found.groups[0].pages == 1
    assert found.page_bytes == 3 * (4 * 512 + 32)
    assert found.num_block_groups == 0 and found.block_bytes == found.page_bytes


def test_a_few_windows_split_the_full_layers() -> None:
    """28 full layers and 4 with windows: pages of 28 layers would be mostly padding in the window's group."""
    found = make_geometry([attention(1, 64, None if layer < 28 else 512) for layer in range(32)], 16)
    assert kinds(found) == [*[("full", 0, 14)] * 2, ("window", 512, 4)]


def test_pipeline_stages_have_the_same_groups_and_their_own_pages() -> None:
    state = StateCache((StatePart(6, (16, 16), torch.float32),))  # pieces of 1 KiB
    caches: list[LayerCache] = [state, state, attention(1, 16), attention(1, 16), state, attention(1, 16)]
    stages = [range(3), range(3, 6)]
    first, second = (make_geometry(caches, 16, stages, stage) for stage in range(2))
    assert first.groups == second.groups
    assert (first.page_bytes, second.page_bytes) == (KIB, 2 * KIB)
    assert first.groups[1].pages == 12  # of the first stage; the second would need 3
    assert [cache.kv_heads for cache in second.caches if isinstance(cache, AttentionCache)] == [1, 1]
    assert second.places[0] == 0 and second.places[2] == KIB
    lone = [range(2), range(2, 6)]  # no attention in the first stage: its pages are as large as its states need
    first, second = (make_geometry(caches, 16, lone, stage) for stage in range(2))
    assert second.page_bytes == 3 * KIB and first.groups[1].pages == second.groups[1].pages == 2
    assert first.page_bytes == 6 * KIB


def test_shared_caches_take_no_bytes() -> None:
    caches: list[LayerCache] = [attention(1, 16), attention(1, 16, 32), SharedCache(1), SharedCache(0), SharedCache(2)]
    found = make_geometry(caches, 16)
    assert found.layer_groups == (0, 1, 1, 0, 1) and found.page_bytes == KIB
    kv = KVCache.of(found, 3, torch.device("cpu"))
    assert kv.layers[2] is kv.layers[1] and kv.layers[3] is kv.layers[0] and kv.layers[4] is kv.layers[1]
    with pytest.raises(ConfigError, match="another pipeline stage"):
        make_geometry(caches, 16, [range(2), range(2, 5)], 1)


def test_a_model_of_one_group_has_the_tensor_it_always_had() -> None:
    plain = KVCache.of(make_geometry([attention(2, 16)] * 3, 16), 5, torch.device("cpu"))
    assert plain.data.shape == (5, 3, 2, 2, 16, 16) and plain.data.dtype is torch.bfloat16
    spec = KVCache(KVSpec(3, 2, 16), 5, 16, BF16, torch.device("cpu"))
    for ours, theirs, layer in zip(plain.layers, spec.layers, plain.data.unbind(1), strict=True):
        assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        assert ours.stride() == theirs.stride() == layer.stride() and ours.data_ptr() == layer.data_ptr()
    assert plain.geometry.identity == "" == plain_geometry(KVSpec(3, 2, 16), 16, BF16).identity


def test_the_identity_names_a_layout() -> None:
    """Pages of another layout must not be read: other windows, formats, or pieces of a state."""
    fp8 = KVFormat(torch.bfloat16, "fp8")
    models: list[list[LayerCache]] = []
    for window, format in itertools.product((8, 12), (BF16, fp8)):
        models.append([attention(1, 16), attention(1, 16, window, format)])
    models += [[attention(1, 16), StateCache((StatePart(count, (4,), torch.float32),))] for count in (1, 2)]
    names = [make_geometry(caches, 16).identity for caches in models]
    assert len(set(names)) == len(models) and all(names)
    assert names == [make_geometry(caches, 16).identity for caches in models]


MIXED: dict[str, list[LayerCache]] = {
    "windows": [attention(1, 24, None if i % 3 == 2 else 8, F32) for i in range(8)],
    "formats": [
        attention(2, 8, None, KVFormat(torch.bfloat16, "int8", True)),
        attention(2, 8),
        attention(1, 8, 16, KVFormat(torch.bfloat16, "fp8")),
        attention(2, 8, 16),
    ],
    "hybrid": [
        StateCache((StatePart(3, (5, 7), torch.float32), StatePart(5, (3, 3), torch.bfloat16))),
        attention(2, 6),
        StateCache((StatePart(2, (4, 4), torch.float32),)),
        LatentCache(20, BF16),
        attention(1, 10, 8),
    ],
    "states": [StateCache((StatePart(3, (5, 7), torch.float32), StatePart(5, (3, 3), torch.bfloat16)))] * 2,
}


@pytest.mark.parametrize("name", MIXED)
def test_views_do_not_overlap(name: str) -> None:
    """A page of each group, filled through every layer's view with values of its own, holds all of them."""
    geometry = make_geometry(MIXED[name], 4)
    kv = KVCache.of(geometry, 40, torch.device("cpu"))
    tables: list[list[int]] = []
    for group in geometry.groups:
        taken = sum(map(len, tables)) + 1
        tables.append(list(range(taken, taken + (group.pages or 1))))
    for wrote in (False, True):  # write all, then read all
        value = 0.0
        for view, number in zip(kv.layers, geometry.layer_groups, strict=True):
            for tensor in _tensors(view, tables[number]):
                value += 1.0
                if not wrote:
                    tensor(value)
                else:
                    assert (tensor(None) == value).all()
    assert not kv.data[0].any() and not kv.data[sum(map(len, tables)) + 1 :].any()


def _tensors(view: Any, table: list[int]) -> list[Any]:
    """For each tensor of a layer's cache: a function that fills it in these pages, or reads it."""
    if isinstance(view, StateView):
        rows = torch.tensor([table])

        def state(value: float | None, part: int) -> torch.Tensor | None:
            found = view.read(part, rows)
            if value is not None:
                view.write(part, rows, torch.full_like(found, value))
                return None
            return found

        return [lambda value, part=part: state(value, part) for part in range(len(view.parts))]

    def plain(tensor: torch.Tensor) -> Any:
        return lambda value: tensor[table[0]] if value is None else tensor[table[0]].fill_(value)

    if isinstance(view, QuantizedKV):
        return [plain(tensor) for tensor in (view.codes, view.scales) if tensor is not None]
    assert isinstance(view, torch.Tensor)
    return [plain(view)]
