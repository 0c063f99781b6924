"""Prompts of Mamba 2 mixers, in chunks (arXiv 2405.21060): the convolution (`chunks.py`), then a scan.

For each row and head the chunks go in order, with the state in registers. Within a chunk the outputs are those of
attention without softmax: C B^T, weighted by the decay between two tokens. It is recomputed by each head of a group:
storing and loading it would take longer. Operations for a chunk of L tokens, of each head: 2 L (L (n + p) + 2 n p).
"""

# ruff: noqa: N803, N806

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.states import Mamba2, States, StepRows
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.recurrent.chunks import CHUNK, convolve, plan_chunks
from quire.kernels.triton.recurrent.common import (
    MAX_TAPS,
    input_precision,
    keep_inputs,
    places_of,
    ring_at,
    softplus,
    state_at,
    table_of,
    tables_of,
)


@dataclass(frozen=True)
class Mamba2Config:
    """Shapes of the scan."""

    warps: int = 4
    stages: int = 2


@triton.jit(do_not_specialize=["first_row", "skipped"])
def _scan(
    mixed, projected, projected_stride, decay, dt_bias, skip, out,
    state, state_pages, state_offsets, state_stride, ring, ring_pages, ring_offsets, ring_stride,
    tables, table_stride, rows, query_starts, context_lens, dt_low, dt_high, first_row, skipped,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, CHUNK: tl.constexpr,
    SLOTS: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = HEADS // GROUPS
    INNER: tl.constexpr = HEADS * DIM
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * STATE
    SIZE: tl.constexpr = projected.dtype.element_ty.primitive_bitwidth // 8
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    row, head = first_row + program // HEADS, program % HEADS
    group = head // SHARE
    first = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first
    if count > 0:
        begin = tl.load(context_lens + row) - count
        table = table_of(tables, table_stride, rows, row)
        s_lane, d_lane, lane = tl.arange(0, STATE), tl.arange(0, DIM), tl.arange(0, CHUNK)
        at = state_at(state, state_pages, state_offsets, state_stride, table, head)
        tile = at + s_lane[:, None] * DIM + d_lane[None, :]
        S = tl.load(tile, mask=(begin > 0) & (s_lane[:, None] < STATE), other=0.0)  # [state, head_dim]
        rate, step_bias, through = tl.load(decay + head), tl.load(dt_bias + head), tl.load(skip + head)
        line = mixed + (first - skipped).to(tl.int64) * CHANNELS
        gates = projected + first.to(tl.int64) * projected_stride + INNER + CHANNELS + head
        result = out + first.to(tl.int64) * INNER + head * DIM
        lower = lane[:, None] >= lane[None, :]
        for chunk_begin in tl.range(0, count, CHUNK, num_stages=STAGES):
            place = chunk_begin + lane
            exists = place < count
            at_token = place.to(tl.int64)[:, None]
            inside = exists[:, None]
            b_at = line + at_token * CHANNELS + INNER + group * STATE + s_lane[None, :]
            b = tl.load(b_at, mask=inside, other=0.0)
            c = tl.load(b_at + GROUPS * STATE, mask=inside, other=0.0)
            x = tl.load(line + at_token * CHANNELS + head * DIM + d_lane[None, :], mask=inside, other=0.0)
            raw = tl.load(gates + place.to(tl.int64) * projected_stride, mask=exists, other=0.0).to(tl.float32)
            dt = tl.minimum(tl.maximum(softplus(raw + step_bias), dt_low), dt_high)
            dt = tl.where(exists, dt, 0.0)
            total = tl.cumsum(rate * dt, axis=0)
            last = tl.sum(rate * dt)
            wide = x.to(tl.float32)
            v = (wide * dt[:, None]).to(x.dtype)
            between = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0)
            p = (tl.dot(c, tl.trans(b), input_precision=PRECISION) * between).to(x.dtype)
            y = tl.dot(c, S.to(c.dtype), input_precision=PRECISION) * tl.exp(total)[:, None]
            y += tl.dot(p, v, input_precision=PRECISION) + wide * through
            tl.store(result + at_token * INNER + d_lane[None, :], y, mask=inside)
            weighted = (b.to(tl.float32) * tl.exp(last - total)[:, None]).to(b.dtype)
            S = S * tl.exp(last) + tl.dot(tl.trans(weighted), v, input_precision=PRECISION)
        tl.store(tile, S)

        # The convolution, which read the ring, has ended.
        begin = tl.maximum(begin, 0)
        inputs = projected + first.to(tl.int64) * projected_stride + INNER
        every_d, every_s = d_lane < DIM, s_lane < STATE
        x_channel = head * DIM + d_lane
        x_at = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, x_channel, every_d, PIECE, SIZE)
        keep_inputs(inputs, projected_stride, x_at, x_channel, every_d, begin, count, SLOTS, PIECE)
        if head % SHARE == 0:
            b_channel = INNER + group * STATE + s_lane
            b_ring = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, b_channel, every_s, PIECE, SIZE)
            keep_inputs(inputs, projected_stride, b_ring, b_channel, every_s, begin, count, SLOTS, PIECE)
            c_channel = b_channel + GROUPS * STATE
            c_ring = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, c_channel, every_s, PIECE, SIZE)
            keep_inputs(inputs, projected_stride, c_ring, c_channel, every_s, begin, count, SLOTS, PIECE)


def mamba2_prompts(
    projected: torch.Tensor,
    layer: Mamba2,
    states: States,
    step: StepRows,
    out: torch.Tensor,
    config: Mamba2Config | None = None,
) -> None:
    """The rows of a step after its decodes, into their tokens' rows of `out`."""
    chunks, places = plan_chunks(step), places_of(states)
    config = config or choose(chunks.num_rows * layer.heads)
    mixed = convolve(projected, layer, states, step)
    _scan[(chunks.num_rows * layer.heads,)](
        mixed, projected, projected.stride(0), layer.decay, layer.dt_bias, layer.skip, out, *places[:8],
        *tables_of(step), step.query_starts, step.context_lens, *layer.dt_limit, chunks.first_row, chunks.skipped,
        HEADS=layer.heads, GROUPS=layer.groups, DIM=layer.head_dim, STATE=layer.state_dim, CHUNK=CHUNK,
        SLOTS=places.slots, PIECE=places.piece, STAGES=config.stages, PRECISION=input_precision(projected.dtype),
        num_warps=config.warps, **pdl(),
    )  # fmt: skip


def choose(programs: int) -> Mamba2Config:
    """The shapes for this many pairs of row and head."""
    return Mamba2Config(warps=8, stages=3) if programs < 4 * num_sms() else Mamba2Config(warps=4, stages=1)


def is_supported(layer: Mamba2) -> bool:
    """Whether these kernels take the layer's shapes."""
    sizes = (layer.head_dim, layer.state_dim)
    return all(size >= 16 and size & (size - 1) == 0 for size in sizes) and len(layer.conv) <= MAX_TAPS
