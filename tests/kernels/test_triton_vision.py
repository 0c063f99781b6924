"""Kernels of vision transformers against plain torch: attention over packed runs, layer norm, rotation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from quire.kernels.reference import TorchOps
from quire.kernels.segments import FLASH, WAYS, WINDOWS, SegmentBuffers, Segments, attention_ways, tile_list
from quire.kernels.triton import vision
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.packed_attention import PackedTile, packed_attention, parts_of
from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

RUNS = [[32, 16, 4, 32], [37, 60, 3], [1]] + ([[5476, 1, 640]] if ON_GPU else [])


def packed(lengths: list[int], heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Views of one product, as an encoder has them; NaN after the last token."""
    whole = torch.randn(sum(lengths) + 3, 3 * heads, dim, device=DEVICE, dtype=torch.float32).to(dtype)
    whole[sum(lengths) :] = torch.nan
    return whole[: sum(lengths)].chunk(3, dim=1)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    """Run by run, in float32."""
    parts = []
    for own in zip(*(x.float().split(lengths) for x in (q, k, v)), strict=True):
        queries, keys, values = (x.transpose(0, 1) for x in own)
        weights = (queries @ keys.transpose(-1, -2) * scale).softmax(-1)
        parts.append((weights @ values).transpose(0, 1).flatten(1))
    return torch.cat(parts)


@pytest.mark.parametrize("dim", [12, 72, 80] + ([16, 40, 64, 88, 128] if ON_GPU else []))
@pytest.mark.parametrize("lengths", RUNS, ids=str)
def test_attention_of_packed_runs(lengths: list[int], dim: int) -> None:
    q, k, v = packed(lengths, 2, dim, HALF)
    segments = Segments(lengths, torch.device(DEVICE))
    tiles = [None, PackedTile(128, 128, 8, 2)] if ON_GPU else [PackedTile(32, 32, 4, 1)]
    for tile in tiles:
        out = packed_attention(q, k, v, segments, 0.7 * dim**-0.5, tile)
        torch.testing.assert_close(out.float(), exact(q, k, v, lengths, 0.7 * dim**-0.5), atol=0.02, rtol=0.02)


def test_attention_of_runs_in_buffers() -> None:
    """As in a graph: the same buffers, other runs, and tokens of no run after them."""
    device = torch.device(DEVICE)
    buffers = SegmentBuffers(WINDOWS, 6, 100, 32, device)
    tiles: set[int] = set()
    for lengths in ([32, 7, 1], [20], [32, 32, 32, 4]):
        q, k, v = packed([100], 2, 24, HALF)
        buffers.fill(Segments(lengths, device, windows=True))
        out = packed_attention(q, k, v, buffers, 0.2)
        used = sum(lengths)
        expected = exact(q[:used], k[:used], v[:used], lengths, 0.2)
        torch.testing.assert_close(out[:used].float(), expected, atol=0.02, rtol=0.02)
        tiles.add(buffers.tiles(32).data_ptr())
    assert ON_GPU or len(tiles) == 1


@pytest.mark.parametrize("way", WAYS)
def test_every_way_computes_the_same(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [64, 16, 64, 4]
    q, k, v = packed(lengths, 2, 80, HALF)
    expected = exact(q, k, v, lengths, 0.1)
    for windows in (False, True):
        segments = Segments(lengths, torch.device(DEVICE), windows)
        monkeypatch.setitem(attention_ways, segments.kind, way)
        out = TritonOps().attend_segments(q, k, v, segments, 0.1)
        torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)
    assert way in WAYS and FLASH in WAYS


def test_float32_stays_float32() -> None:
    lengths = [33, 7]
    q, k, v = packed(lengths, 2, 80, torch.float32)
    out = TritonOps().attend_segments(q, k, v, Segments(lengths, torch.device(DEVICE)), 0.1)
    torch.testing.assert_close(out, exact(q, k, v, lengths, 0.1), atol=1e-5, rtol=1e-5)


def test_tiles_cover_every_token_once() -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 50)
    owner = np.repeat(np.arange(50), lengths)
    seen = np.zeros(lengths.sum(), int)
    for first, begin, end, _ in tile_list(lengths, 64).tolist():
        own = slice(first, min(first + 64, end))
        seen[own] += 1
        assert len(set(owner[own])) == 1 and (owner[begin:end] == owner[first]).all()
        assert (owner == owner[first]).sum() == end - begin
    assert (seen == 1).all()


@pytest.mark.parametrize("dim", [16, 32, 40, 64, 72, 80, 96, 112, 128])
def test_parts_of_a_head(dim: int) -> None:
    main, rest = parts_of(dim)
    assert main + rest >= dim and main & (main - 1) == 0 and rest & (rest - 1) == 0 and rest < main
    assert parts_of(80) == (64, 16) and parts_of(72) == (64, 16) and parts_of(128) == (128, 0)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("width", [16, 100, 1280])
def test_layer_norm(width: int, adds: bool) -> None:
    wide = torch.randn(5, width + 7, device=DEVICE).to(HALF)
    x, weight, bias = wide[:, :width], torch.randn(width, device=DEVICE).to(HALF), torch.randn(width, device=DEVICE)
    bias = bias.to(HALF)
    stream = torch.randn(5, width, device=DEVICE).to(HALF) if adds else None
    total = x if stream is None else stream + x
    out, left = TritonOps().layer_norm(x, stream, weight, bias, 1e-6)
    expected = F.layer_norm(total.float(), (width,), weight.float(), bias.float(), 1e-6)
    torch.testing.assert_close(out.float(), expected, atol=0.01, rtol=0.01)
    assert left is (x if stream is None else stream)
    torch.testing.assert_close(left, total)
    again, _ = TorchOps().layer_norm(total.clone(), None, weight, bias, 1e-6)
    torch.testing.assert_close(out, again, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("dim", [8, 72, 80])
def test_rotation(dim: int) -> None:
    qkv = torch.randn(37, 6, dim, device=DEVICE).to(HALF)
    angles = torch.randn(37, dim // 2, device=DEVICE)
    expected, before = qkv.clone(), qkv[:, 4:].clone()
    TorchOps().rotate(expected[:, :4], angles.cos(), angles.sin())
    TritonOps().rotate(qkv[:, :4], angles.cos(), angles.sin())
    torch.testing.assert_close(qkv, expected)
    assert torch.equal(qkv[:, 4:], before)
    pairs = torch.view_as_complex(torch.stack(before.float().chunk(2, -1), -1).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None])
    vision.rotate(qkv[:, 4:], angles.cos(), angles.sin())
    torch.testing.assert_close(qkv[:, 4:].float(), torch.cat(turned.unbind(-1), -1), atol=0.01, rtol=0.01)
