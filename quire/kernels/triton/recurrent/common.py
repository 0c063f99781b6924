"""What the kernels of recurrent layers share: places of states in pages, the ring of inputs, gates."""

# ruff: noqa: N803

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.states import RING, STATE, States, StepRows


class Places(NamedTuple):
    """Tensors and strides that a kernel finds states by. Memory is passed once for each dtype it is read in."""

    state: torch.Tensor
    state_pages: torch.Tensor
    state_offsets: torch.Tensor
    state_stride: int
    """Elements of a page."""
    ring: torch.Tensor
    ring_pages: torch.Tensor
    ring_offsets: torch.Tensor
    ring_stride: int
    slots: int
    piece: int


def places_of(states: States) -> Places:
    """Where the kernels find the states of a layer."""
    memory, (state, ring) = states.memory, states.parts
    size = memory.shape[1]
    return Places(
        memory.view(state.dtype),
        states.pages[STATE],
        states.offsets[STATE],
        size // state.dtype.itemsize,
        memory.view(ring.dtype),
        states.pages[RING],
        states.offsets[RING],
        size // ring.dtype.itemsize,
        *ring.shape,
    )


def tables_of(step: StepRows) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """(tables, their row stride, which of them each row has)."""
    return step.block_tables, step.block_tables.stride(0), step.rows


def held(x: torch.Tensor, step: StepRows) -> torch.Tensor:
    """The rows of x [tokens, ...] of rows that verify drafts, to be read after the step; not the memory of prompts."""
    return x if len(x) == step.num_verified else x[: step.num_verified].clone()


@triton.jit
def table_of(tables, table_stride, rows, row):
    """Pointer to the page table of a row of the step."""
    if rows is not None:
        number = tl.load(rows + row).to(tl.int64)
    else:
        number = row.to(tl.int64)
    return tables + number * table_stride


@triton.jit
def state_at(state, pages, offsets, page_stride, table, head):
    """Pointer to the state of a head; pages and pieces begin at multiples of 16 bytes."""
    page = tl.load(table + tl.load(pages + head)).to(tl.int64)
    return state + tl.multiple_of(page * page_stride + tl.load(offsets + head) // 4, 4)


@triton.jit
def ring_at(ring, pages, offsets, page_stride, table, channel, inside, PIECE: tl.constexpr, SIZE: tl.constexpr):
    """Pointers to slot 0 of channels in the ring; `SIZE`: bytes of a value."""
    piece = channel // PIECE
    page = tl.load(table + tl.load(pages + piece, mask=inside, other=0), mask=inside, other=0).to(tl.int64)
    return ring + page * page_stride + tl.load(offsets + piece, mask=inside, other=0) // SIZE + channel % PIECE


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def from_ring(
    at, conv, bias, channel, channels, inside, position, SLOTS: tl.constexpr, PIECE: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """The part of a row's first token's convolution that is of earlier steps."""
    total = tl.zeros(channel.shape, tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        back = TAPS - 1 - tap
        weight = tl.load(conv + tap * channels + channel, mask=inside, other=0.0).to(tl.float32)
        slot = tl.maximum(position - back, 0) % SLOTS
        value = tl.load(at + slot * PIECE, mask=inside & (position >= back), other=0.0)
        total += value.to(tl.float32) * weight
    return total


@triton.jit
def with_token(earlier, inputs, own, channel, inside):
    """silu of the convolution of a row's first token, given `from_ring` and the last tap's weights."""
    return silu(earlier + tl.load(inputs + channel, mask=inside, other=0.0).to(tl.float32) * own)


MAX_TAPS = 4
"""The most taps that rows of several tokens are convolved with: their inputs are in registers."""


@triton.jit
def past(
    at, conv, channel, channels, inside, position, BACK: tl.constexpr,
    SLOTS: tl.constexpr, PIECE: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """(the input `BACK` positions before `position`, from the ring; the weight of its tap); zeros without that tap."""
    exists = inside & (TAPS > BACK)
    slot = tl.maximum(position - BACK, 0) % SLOTS
    value = tl.load(at + slot * PIECE, mask=exists & (position >= BACK), other=0.0).to(tl.float32)
    weight = tl.load(conv + (TAPS - 1 - BACK) * channels + channel, mask=exists, other=0.0).to(tl.float32)
    return value, weight


@triton.jit
def convolved(bias, x3, w3, x2, w2, x1, w1, x, own, TAPS: tl.constexpr):
    """silu of the convolution of a token with input x, after inputs x3, x2, x1; sums in the order of `from_ring`."""
    total = bias
    if TAPS > 3:
        total += x3 * w3
    if TAPS > 2:
        total += x2 * w2
    if TAPS > 1:
        total += x1 * w1
    return silu(total + x * own)


@triton.jit
def keep_inputs(
    inputs, input_stride, at, channel, inside, begin, count, SLOTS: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """Write the row's last inputs to the ring: each slot gets the last position that falls on it."""
    for slot in tl.static_range(SLOTS):
        end = begin + count
        position = end - 1 - (end - 1 - slot + SLOTS) % SLOTS
        fresh = inside & (position >= begin)
        value = tl.load(inputs + (position - begin) * input_stride + channel, mask=fresh, other=0.0)
        tl.store(at + slot * PIECE, value, mask=fresh)


def power_of_two(size: int) -> int:
    """The next power of two: the width of a block that holds `size` values."""
    return triton.next_power_of_2(size)


def input_precision(dtype: torch.dtype) -> Any:
    """How tensor cores multiply activations of this dtype: float32 is not rounded to fewer bits."""
    return "ieee" if dtype == torch.float32 else "tf32"
