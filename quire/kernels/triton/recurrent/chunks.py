"""Prompts: the rows' tokens in chunks, and the causal convolution over them.

All kernels for prompts work on chunks of a row's tokens. How many chunks a row has is known only on the device, so
kernels are launched for as many as there can be; those past the end do nothing.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.states import DeltaNet, Mamba2, States, StepRows
from quire.kernels.triton.launch import INTERPRETED, gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.recurrent.common import places_of, power_of_two, ring_at, silu, table_of, tables_of

CHUNK = 16 if INTERPRETED else 64
"""Tokens of a chunk. The matrix products within a chunk grow with it, the steps of the scan shrink."""


class Chunks(NamedTuple):
    """The chunks of a step's prompts."""

    rows: torch.Tensor
    """[chunks] int32: the row of the step that a chunk is of; -1: there is no such chunk."""
    begins: torch.Tensor
    """[chunks] int32: the chunk's first token, counted from the row's first in the step."""
    first_row: int
    """Rows before it are decodes, or verify drafts…"""
    skipped: int
    """…and have this many tokens."""
    num_rows: int
    """Rows with chunks."""


def plan_chunks(step: StepRows) -> Chunks:
    """The chunks of all rows after the decodes; computed once a step, on the device."""
    key = "state chunks"
    if key not in step.plans:
        first = step.num_verifying or step.num_decodes
        skipped = step.num_verified if step.num_verifying else first
        rows = step.num_rows - first
        limit = (step.num_tokens - skipped) // CHUNK + rows
        counts = step.query_starts[first:].diff()
        chunks = (counts + CHUNK - 1) // CHUNK
        ends = chunks.cumsum(0)
        index = torch.arange(limit, device=ends.device)
        row = torch.searchsorted(ends, index, right=True)
        within = row.clamp(max=rows - 1)
        begins = ((index - (ends - chunks)[within]) * CHUNK).int()
        numbers = torch.where(row < rows, row + first, -1).int()
        step.plans[key] = Chunks(numbers, begins, first, skipped, rows)
    return step.plans[key]


@triton.jit(do_not_specialize=["skipped"])
def _convolve(
    projected, projected_stride, conv, bias, out, out_stride, ring, ring_pages, ring_offsets, ring_stride,
    tables, table_stride, rows, query_starts, context_lens, chunk_rows, chunk_begins, skipped, scale,
    FIRST: tl.constexpr, CHANNELS: tl.constexpr, NORMED: tl.constexpr, WIDTH: tl.constexpr, LAST_WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr,
    PIECE: tl.constexpr, TAPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """NORMED blocks of WIDTH channels, l2-normalized, the first half of them times `scale`; then of LAST_WIDTH."""
    SIZE: tl.constexpr = projected.dtype.element_ty.primitive_bitwidth // 8
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    PARTS: tl.constexpr = CHUNK // TOKENS
    chunk, block = tl.program_id(0) // PARTS, tl.program_id(1)
    row = tl.load(chunk_rows + chunk)
    if row >= 0:
        lane = tl.arange(0, BLOCK)
        is_normed = block < NORMED
        begin_channel = tl.where(is_normed, block * WIDTH, NORMED * WIDTH + (block - NORMED) * LAST_WIDTH)
        channel = tl.multiple_of(begin_channel, ALIGN) + lane
        inside = lane < tl.where(is_normed, WIDTH, tl.minimum(LAST_WIDTH, CHANNELS - begin_channel))
        first = tl.load(query_starts + row)
        count = tl.load(query_starts + row + 1) - first
        begin = tl.load(context_lens + row) - count
        place_begin = tl.load(chunk_begins + chunk) + tl.program_id(0) % PARTS * TOKENS
        place = place_begin + tl.arange(0, TOKENS)
        exists = (place < count)[:, None] & inside[None, :]
        inputs = projected + first.to(tl.int64) * projected_stride + FIRST + channel[None, :]
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            back = TAPS - 1 - tap
            weight = tl.load(conv + tap * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
            source = (place - back)[:, None]
            here = exists & (source >= 0)
            value = tl.load(inputs + source.to(tl.int64) * projected_stride, mask=here, other=0.0).to(tl.float32)
            total += value * weight[None, :]
        if place_begin == 0:  # the first tokens' taps reach back to earlier steps
            table = table_of(tables, table_stride, rows, row)
            at = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, channel, inside, PIECE, SIZE)
            for tap in tl.static_range(TAPS - 1):
                earlier = (place + tap - (TAPS - 1))[:, None]
                position = begin + earlier
                old = exists & (earlier < 0) & (position >= 0)
                factor = tl.load(conv + tap * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
                kept = tl.load(at[None, :] + tl.maximum(position, 0) % SLOTS * PIECE, mask=old, other=0.0)
                total += kept.to(tl.float32) * factor[None, :]
        total = silu(total)
        if is_normed:
            total *= tl.rsqrt(tl.sum(total * total, axis=1) + 1e-6)[:, None]
            if block < NORMED // 2:
                total *= scale
        token = (first - skipped + place).to(tl.int64)
        tl.store(out + token[:, None] * out_stride + channel[None, :], total, mask=exists)


def convolve(
    projected: torch.Tensor, layer: DeltaNet | Mamba2, states: States, step: StepRows, tokens: int = 16, warps: int = 4
) -> torch.Tensor:
    """silu of the convolution of the prompts' tokens [prompt tokens, channels]; of a delta net with q and k normed.

    Bytes: the inputs once from memory (the taps' overlap is in cache), the outputs once. `tokens`: those of a program.
    """
    chunks, places = plan_chunks(step), places_of(states)
    if isinstance(layer, DeltaNet):
        normed, width, last, scale = 2 * layer.key_heads, layer.key_dim, layer.value_dim, layer.key_dim**-0.5
    else:
        normed, width, last, scale = 0, 1, 128, 1.0
    blocks = normed + -(-(layer.channels - normed * width) // last)
    out = projected.new_empty(step.num_tokens - chunks.skipped, layer.channels)
    _convolve[(len(chunks.rows) * (CHUNK // tokens), blocks)](
        projected, projected.stride(0), layer.conv, layer.bias, out, out.stride(0), *places[4:8],
        *tables_of(step), step.query_starts, step.context_lens, chunks.rows, chunks.begins, chunks.skipped, scale,
        FIRST=layer.first_channel, CHANNELS=layer.channels, NORMED=normed, WIDTH=width, LAST_WIDTH=last,
        ALIGN=math.gcd(16, normed * width, last, width if normed else 16),
        BLOCK=power_of_two(max(width, last)), CHUNK=CHUNK, TOKENS=tokens, SLOTS=places.slots, PIECE=places.piece,
        TAPS=len(layer.conv), num_warps=warps, **pdl(),
    )  # fmt: skip
    return out
