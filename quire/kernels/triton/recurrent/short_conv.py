"""Convolutions by themselves (LFM2, Mamba 1): gates, convolution and ring in one kernel, for decodes and for prompts.

A program takes some tokens of one row and a block of channels. Bytes: the inputs once (of the taps' overlap, what is in
cache), the outputs once; the ring is a few values a channel.

Of rows that verify drafts a program takes all tokens, adds the taps in the order of a decode, and leaves the ring as it
is; the inputs are kept, and once it is known which tokens count, stored in the ring.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.states import ShortConv, States, StepRows
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.recurrent.chunks import CHUNK, plan_chunks
from quire.kernels.triton.recurrent.common import keep_inputs, ring_at, silu, table_of, tables_of


@triton.jit
def _input(projected, at, mask, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """x, or B * x rounded as the ring holds it, whether it comes from the ring or not."""
    if not GATED:
        return tl.load(projected + at, mask=mask, other=0.0)
    b = tl.load(projected + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(projected + at + 2 * CHANNELS, mask=mask, other=0.0).to(tl.float32)
    return (b * x).to(projected.dtype.element_ty)


@triton.jit
def _short_conv(
    projected, projected_stride, conv, bias, out, ring, ring_pages, ring_offsets, ring_stride,
    tables, table_stride, rows, query_starts, context_lens, chunk_rows, chunk_begins,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    SLOTS: tl.constexpr, PIECE: tl.constexpr, TAPS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """chunk_rows: None: each row has one token."""
    SIZE: tl.constexpr = projected.dtype.element_ty.primitive_bitwidth // 8
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if chunk_rows is None:
        row, place_begin = program, 0
    else:
        row = tl.load(chunk_rows + program // PARTS)
        place_begin = tl.load(chunk_begins + program // PARTS) + program % PARTS * TOKENS
    if row >= 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < CHANNELS
        first = tl.load(query_starts + row)
        count = tl.load(query_starts + row + 1) - first
        begin = tl.load(context_lens + row) - count
        place = place_begin + tl.arange(0, TOKENS)
        exists = (place < count)[:, None] & inside[None, :]
        real = exists & (begin >= 0)  # a row that is padding has outputs of zero
        line = projected + first.to(tl.int64) * projected_stride
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            weight = tl.load(conv + tap * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
            source = (place + tap - (TAPS - 1))[:, None]
            at = source.to(tl.int64) * projected_stride + channel[None, :]
            value = _input(line, at, real & (source >= 0), CHANNELS, GATED)
            total += value.to(tl.float32) * weight[None, :]
        result = out + (first + place).to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        if place_begin == 0:  # the first tokens' taps reach back to earlier steps; their program keeps the row's ring
            table = table_of(tables, table_stride, rows, row)
            slots = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, channel, inside, PIECE, SIZE)
            for tap in tl.static_range(TAPS - 1):
                earlier = (place + tap - (TAPS - 1))[:, None]
                position = begin + earlier
                factor = tl.load(conv + tap * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
                old = real & (earlier < 0) & (position >= 0)
                kept = tl.load(slots[None, :] + tl.maximum(position, 0) % SLOTS * PIECE, mask=old, other=0.0)
                total += kept.to(tl.float32) * factor[None, :]
            tl.debug_barrier()  # other threads may still read the slots
            for slot in tl.static_range(SLOTS):
                end = begin + count
                last = end - 1 - (end - 1 - slot + SLOTS) % SLOTS  # the last position that falls on the slot
                fresh = inside & (begin >= 0) & (last >= begin)
                newest = (last - begin).to(tl.int64) * projected_stride + channel
                tl.store(slots + slot * PIECE, _input(line, newest, fresh, CHANNELS, GATED), mask=fresh)
        if GATED:
            own = place.to(tl.int64)[:, None] * projected_stride + CHANNELS + channel[None, :]
            total *= tl.load(line + own, mask=real, other=0.0).to(tl.float32)
        else:
            total = tl.where(real, silu(total), 0.0)
        tl.store(result, total, mask=exists)


@triton.jit
def _verify(
    projected, projected_stride, conv, bias, out, raw, ring, ring_pages, ring_offsets, ring_stride,
    tables, table_stride, rows, query_starts, context_lens,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    SLOTS: tl.constexpr, PIECE: tl.constexpr, TAPS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """raw [tokens, CHANNELS]: where the inputs are kept; None: they are not."""
    SIZE: tl.constexpr = projected.dtype.element_ty.primitive_bitwidth // 8
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    first = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first
    begin = tl.load(context_lens + row) - count
    table = table_of(tables, table_stride, rows, row)
    slots = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, channel, inside, PIECE, SIZE)
    place = tl.arange(0, TOKENS)[:, None]
    exists = (place < count) & inside[None, :]
    real = exists & (begin >= 0)
    line = projected + first.to(tl.int64) * projected_stride
    own = place.to(tl.int64) * projected_stride + channel[None, :]
    token = (first + place).to(tl.int64) * CHANNELS + channel[None, :]
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    value = _input(line, own, real, CHANNELS, GATED)
    weight = tl.load(conv + (TAPS - 1) * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    total += value.to(tl.float32) * weight[None, :]
    if raw is not None:
        tl.store(raw + token, value, mask=exists)
    for tap in tl.static_range(TAPS - 1):
        back = TAPS - 1 - tap
        factor = tl.load(conv + tap * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
        position = begin + place - back
        old = real & (place < back) & (position >= 0)
        before = tl.load(slots[None, :] + tl.maximum(position, 0) % SLOTS * PIECE, mask=old, other=0.0)
        fresh = _input(line, own - back * projected_stride, real & (place >= back), CHANNELS, GATED)
        total += tl.where(place >= back, fresh, before).to(tl.float32) * factor[None, :]
    if GATED:
        total *= tl.load(line + CHANNELS + own, mask=real, other=0.0).to(tl.float32)
    else:
        total = tl.where(real, silu(total), 0.0)
    tl.store(out + token, total, mask=exists)
    for start in range(TOKENS, count, TOKENS):  # of padding
        tl.store(out + token + start * CHANNELS, tl.zeros_like(total), mask=(start + place < count) & inside[None, :])


@triton.jit
def _commit(
    accepted, raw, ring, ring_pages, ring_offsets, ring_stride,
    tables, table_stride, rows, query_starts, context_lens,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = raw.dtype.element_ty.primitive_bitwidth // 8
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    first = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first
    begin = tl.load(context_lens + row) - count
    count = tl.minimum(tl.load(accepted + row), count)
    if (count > 0) & (begin >= 0):
        table = table_of(tables, table_stride, rows, row)
        slots = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, channel, inside, PIECE, SIZE)
        keep_inputs(raw + first.to(tl.int64) * CHANNELS, CHANNELS, slots, channel, inside, begin, count, SLOTS, PIECE)


def short_conv(projected: torch.Tensor, layer: ShortConv, states: States, step: StepRows) -> torch.Tensor:
    """[tokens, channels]; see `ShortConv`."""
    out = torch.empty(len(projected), layer.channels, dtype=projected.dtype, device=projected.device)
    if step.num_verifying:
        _launch_verification(projected, layer, states, step, out)
    elif step.num_decodes:
        _launch(projected, layer, states, step, out, step.num_decodes, (None, None), 1)
    if (step.num_verifying or step.num_decodes) < step.num_rows:
        chunks = plan_chunks(step)
        tokens = 16
        programs = len(chunks.rows) * (CHUNK // tokens)
        _launch(projected, layer, states, step, out, programs, (chunks.rows, chunks.begins), tokens)
    return out


def _launch_verification(
    projected: torch.Tensor, layer: ShortConv, states: States, step: StepRows, out: torch.Tensor
) -> None:
    memory, part = states.memory, states.parts[layer.part]
    slots, piece = part.shape
    block = min(256, triton.next_power_of_2(layer.channels))
    grid = (step.num_verifying, triton.cdiv(layer.channels, block))
    ring = (
        memory.view(part.dtype), states.pages[layer.part], states.offsets[layer.part],
        memory.shape[1] // part.dtype.itemsize, *tables_of(step), step.query_starts, step.context_lens,
    )  # fmt: skip
    shape = {"CHANNELS": layer.channels, "BLOCK": block, "SLOTS": slots, "PIECE": piece, "num_warps": 4}
    raw = None if step.replay is None else projected.new_empty(step.num_verified, layer.channels)
    _verify[grid](
        projected, projected.stride(0), layer.conv, layer.bias, out, raw, *ring, **shape,
        TOKENS=triton.next_power_of_2(step.width), TAPS=len(layer.conv), GATED=layer.gated, **pdl(),
    )  # fmt: skip

    def commit(accepted: torch.Tensor) -> None:
        _commit[grid](accepted, raw, *ring, **shape, **pdl())

    if step.replay is not None:
        step.replay.add(commit)


def _launch(
    projected: torch.Tensor,
    layer: ShortConv,
    states: States,
    step: StepRows,
    out: torch.Tensor,
    programs: int,
    chunks: tuple[torch.Tensor | None, torch.Tensor | None],
    tokens: int,
) -> None:
    """`tokens`: of a program."""
    memory, part = states.memory, states.parts[layer.part]
    slots, piece = part.shape
    block = min(128 if tokens > 1 else 256, triton.next_power_of_2(layer.channels))
    _short_conv[(programs, triton.cdiv(layer.channels, block))](
        projected, projected.stride(0), layer.conv, layer.bias, out,
        memory.view(part.dtype), states.pages[layer.part], states.offsets[layer.part],
        memory.shape[1] // part.dtype.itemsize,
        *tables_of(step), step.query_starts, step.context_lens, *chunks,
        CHANNELS=layer.channels, BLOCK=block, PARTS=CHUNK // tokens, TOKENS=tokens, SLOTS=slots, PIECE=piece,
        TAPS=len(layer.conv), GATED=layer.gated, num_warps=4, **pdl(),
    )  # fmt: skip
