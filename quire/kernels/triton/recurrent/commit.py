"""States after rows have verified drafts: the updates of the tokens that count, repeated.

The kernels that verify keep, for each token, what its update S <- kept S + key x delta consists of (`decode.py`): no
sums are left, so a program only streams its part of the state through registers. Bytes: each state once in and once
out, as in a plain decode. As there, states are loaded before `gdc_wait`.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.states import DeltaNet, Mamba2, States, StepRows
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.recurrent.common import (
    keep_inputs,
    places_of,
    power_of_two,
    ring_at,
    state_at,
    table_of,
    tables_of,
)

VALUES, WARPS = 32, 4
"""Value dimensions and warps of a program."""


class Kept(NamedTuple):
    """What is kept of the tokens that verify drafts; nothing of it if both are None."""

    updates: torch.Tensor | None
    """[tokens, keys of all key heads | deltas of all heads | kept of all heads] float32"""
    raw: torch.Tensor | None
    """[tokens, channels]: inputs of the convolution."""


@triton.jit
def keep_update(
    update, key, delta, kept, key_at, key_inside, delta_at, delta_inside, kept_at, is_first
):  # fmt: skip
    """Keep a token's update of one head. `is_first`: of the heads that share the key."""
    tl.store(update + delta_at, delta, mask=delta_inside)
    tl.store(update + kept_at, kept)
    if is_first:
        tl.store(update + key_at, key, mask=key_inside)


@triton.jit
def _commit(
    accepted, updates, raw, state, state_pages, state_offsets, state_stride,
    ring, ring_pages, ring_offsets, ring_stride, tables, table_stride, rows, query_starts, context_lens,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KB: tl.constexpr,
    VB: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: VB value dimensions of the state of a head, and BLOCK channels of the ring."""
    SIZE: tl.constexpr = raw.dtype.element_ty.primitive_bitwidth // 8
    WIDTH: tl.constexpr = KEY_HEADS * DK + HEADS * (DV + 1)
    program = tl.program_id(0)
    row, part = program // (HEADS * PARTS), program % (HEADS * PARTS)
    head = part // PARTS
    first = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first
    begin = tl.load(context_lens + row) - count
    table = table_of(tables, table_stride, rows, row)
    k_lane, v_lane = tl.arange(0, KB), part % PARTS * VB + tl.arange(0, VB)
    k_inside, v_inside = k_lane < DK, v_lane < DV
    at = state_at(state, state_pages, state_offsets, state_stride, table, head)
    tile = at + k_lane[:, None] * DV + v_lane[None, :]
    tile_inside = k_inside[:, None] & v_inside[None, :]
    S = tl.load(tile, mask=tile_inside & (begin > 0), other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = tl.minimum(tl.load(accepted + row), count)
    if (count > 0) & (begin >= 0):
        update = updates + first.to(tl.int64) * WIDTH
        for place in range(count):
            token = update + place * WIDTH
            k = tl.load(token + head // (HEADS // KEY_HEADS) * DK + k_lane, mask=k_inside, other=0.0)
            delta = tl.load(token + KEY_HEADS * DK + head * DV + v_lane, mask=v_inside, other=0.0)
            kept = tl.load(token + KEY_HEADS * DK + HEADS * DV + head)
            S = tl.fma(S, kept, k[:, None] * delta[None, :])
        tl.store(tile, S, mask=tile_inside)
        channel = part * BLOCK + tl.arange(0, BLOCK)
        inside = channel < CHANNELS
        slots = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, channel, inside, PIECE, SIZE)
        keep_inputs(raw + first.to(tl.int64) * CHANNELS, CHANNELS, slots, channel, inside, begin, count, SLOTS, PIECE)


def commit_later(projected: torch.Tensor, layer: DeltaNet | Mamba2, states: States, step: StepRows) -> Kept:
    """Where a kernel that verifies drafts keeps its updates; `StateReplay` will commit them."""
    if step.replay is None or not step.num_verifying:
        return Kept(None, None)
    if isinstance(layer, DeltaNet):
        key_heads, heads, key_dim, value_dim = layer.sizes
    else:
        heads, key_heads, value_dim, key_dim = layer.sizes
    tokens = step.num_verified
    updates = projected.new_empty(tokens, key_heads * key_dim + heads * (value_dim + 1), dtype=torch.float32)
    raw = projected.new_empty(tokens, layer.channels)
    places = places_of(states)
    parts = -(-value_dim // VALUES)

    def commit(accepted: torch.Tensor) -> None:
        _commit[(step.num_verifying * heads * parts,)](
            accepted, updates, raw, *places[:8], *tables_of(step), step.query_starts, step.context_lens,
            KEY_HEADS=key_heads, HEADS=heads, DK=key_dim, DV=value_dim, KB=power_of_two(key_dim),
            VB=min(VALUES, power_of_two(value_dim)), PARTS=parts, CHANNELS=layer.channels,
            BLOCK=power_of_two(-(-layer.channels // (heads * parts))), SLOTS=places.slots, PIECE=places.piece,
            num_warps=WARPS, **pdl(),
        )  # fmt: skip

    step.replay.add(commit)
    return Kept(updates, raw)
