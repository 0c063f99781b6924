"""Random recurrent layers, and steps over states in pages, for tests and benchmarks of their kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from quire.kernels.states import DeltaNet, Mamba, Mamba2, ShortConv
from quire.layers.attention.base import AttentionInputs
from quire.layers.caches import StatePart, StateView


def random_delta_net(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: str, taps: int = 4
) -> DeltaNet:
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return DeltaNet(
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        torch.randn(taps, channels, device=device).to(dtype),
        -torch.rand(value_heads, device=device).mul_(2).exp_(),
        torch.randn(value_heads, device=device) - 2,
        (1 + 0.3 * torch.randn(value_dim, device=device)).to(dtype),
        1e-6,
    )


def random_mamba2(
    heads: int, groups: int, head_dim: int, state_dim: int, dtype: torch.dtype, device: str, taps: int = 4
) -> Mamba2:
    channels = heads * head_dim + 2 * groups * state_dim
    return Mamba2(
        heads,
        groups,
        head_dim,
        state_dim,
        torch.randn(taps, channels, device=device).to(dtype),
        torch.randn(channels, device=device).to(dtype),
        -torch.rand(heads, device=device).mul_(2).exp_(),
        torch.randn(heads, device=device) - 2,
        torch.randn(heads, device=device),
        (0.001, float("inf")),
    )


def random_short_conv(channels: int, dtype: torch.dtype, device: str, taps: int = 3, bias: bool = True) -> ShortConv:
    weights = torch.randn(taps + 1, channels, device=device).to(dtype)
    return ShortConv(weights[:taps], weights[taps] if bias else None)


def random_mamba(channels: int, state_dim: int, device: str) -> Mamba:
    decay = -torch.rand(state_dim, channels, device=device).mul_(2).exp_()
    return Mamba(decay, torch.randn(channels, device=device) - 2, torch.randn(channels, device=device))


def random_inputs(layer: DeltaNet | Mamba2 | ShortConv, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """What the input product gives."""
    return torch.randn(tokens, layer.in_width, device=layer.conv.device).to(dtype)


def state_parts(layer: DeltaNet | Mamba2, dtype: torch.dtype) -> tuple[StatePart, StatePart]:
    if isinstance(layer, DeltaNet):
        heads, shape = layer.value_heads, (layer.key_dim, layer.value_dim)
    else:
        heads, shape = layer.heads, (layer.state_dim, layer.head_dim)
    piece = math.gcd(*shape)
    ring = (len(layer.conv), piece)
    return StatePart(heads, shape, torch.float32), StatePart(layer.channels // piece, ring, dtype)


def random_states(
    parts: Sequence[StatePart], rows: int, page_bytes: int, device: str
) -> tuple[StateView, torch.Tensor]:
    """States of `rows` rows with random values, in pages in random order; and the rows' tables."""
    page, used, pages, offsets = 0, 0, [], []
    for part in parts:
        places = []
        for _ in range(part.count):
            size = -(-part.piece_bytes // 16) * 16
            if used + size > page_bytes:
                page, used = page + 1, 0
            places.append((page, used))
            used += size
        numbers = torch.tensor(places, dtype=torch.int32, device=device)
        pages.append(numbers[:, 0].contiguous())
        offsets.append(numbers[:, 1].contiguous())
    count = page + 1
    memory = torch.zeros(rows * count + 1, page_bytes, dtype=torch.uint8, device=device)
    tables = (torch.randperm(rows * count, device=device) + 1).view(rows, count).int()
    view = StateView(memory, tuple(parts), tuple(pages), tuple(offsets))
    for i, part in enumerate(parts):
        view.write(i, tables, torch.randn(rows, part.count, *part.shape, device=device))
    return view, tables


def copied(view: StateView) -> StateView:
    return replace(view, memory=view.memory.clone())


def step_of(
    tables: torch.Tensor, counts: Sequence[int], contexts: Sequence[int], in_batch: bool = False
) -> AttentionInputs:
    """A step of rows with `counts` tokens that end at `contexts`. `in_batch`: tables are indexed by row numbers."""
    device = tables.device
    rows, block_tables = None, tables
    if in_batch:
        order = torch.randperm(len(tables), device=device)
        block_tables = torch.empty_like(tables)
        block_tables[order] = tables
        rows = order.int()
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    return AttentionInputs(
        slots=torch.ones(sum(counts), dtype=torch.int64, device=device),
        query_starts=starts,
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=block_tables,
        num_rows=len(counts),
        num_tokens=sum(counts),
        num_decodes=next((i for i, count in enumerate(counts) if count != 1), len(counts)),
        max_query_len=max(counts),
        max_context_len=max(contexts),
        rows=rows,
    )
