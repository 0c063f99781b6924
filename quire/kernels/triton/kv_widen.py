"""Copies the cached blocks of prompts from 8 bits to 16, for the prefill kernel.

Every query tile of a prompt reads all keys before it, and converting codes each time costs a third of the kernel's
time. Converted once, into a cache of the step's own, they are read as 16-bit keys and values are. The values are the
same: a code fits 16 bits, and only caches whose scales are all 1 are converted.

Bytes: 1 read and 2 written per value, once for each row and layer. Operations: one conversion per value.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.kv import QuantizedKV
from quire.kernels.triton.kv_codes import decode, read_arguments
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl

MAX_BYTES = 512 << 20
"""Memory of the 16-bit blocks of a layer."""
MIN_QUERIES = 513
"""Queries of the longest row: with fewer, converting once saves little. Captured steps have at most 512, and no bound
of their contexts on the host."""


class WidePlan(NamedTuple):
    """Where the rows' blocks go."""

    tables: torch.Tensor
    """[batch rows, at least width] int32: the blocks of a step's rows in its own cache."""
    first: int
    """The first row that is converted."""
    width: int
    """Blocks of a row, at most."""


def plan_wide(
    kv: QuantizedKV, tables: torch.Tensor, rows: torch.Tensor, first: int, num_rows: int, max_context: int
) -> WidePlan | None:
    """How rows from `first` on are converted; None if they take too much memory."""
    _, halves, heads, block_size, dim = kv.shape
    width = triton.cdiv(max_context, block_size)
    count = num_rows - first
    if count * width * halves * heads * block_size * dim * kv.dtype.itemsize > MAX_BYTES:
        return None
    # As the batch's own tables are: rows on 64-byte lines, for which the prefill kernel is compiled.
    own = torch.zeros(len(tables), triton.cdiv(width, 16) * 16, dtype=torch.int32, device=tables.device)
    numbers = torch.arange(count * width, dtype=torch.int32, device=tables.device)
    own[rows[first:num_rows].long(), :width] = numbers.view(count, width)
    return WidePlan(own, first, width)


@triton.jit(do_not_specialize=["first", "width", "table_stride"])
def _widen(
    codes, wide, tables, rows, context_lens, first, width, block_stride, table_stride,
    CODES: tl.constexpr, FAST: tl.constexpr, VALUES: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = VALUES // CHUNK
    program = tl.program_id(0)
    number = program // CHUNKS
    row = first + number // width
    place = number % width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if place * BLOCK_SIZE < tl.load(context_lens + row):
        block = tl.load(tables + tl.load(rows + row).to(tl.int64) * table_stride + place).to(tl.int64)
        at = program % CHUNKS * CHUNK + tl.arange(0, CHUNK)
        value = decode(tl.load(codes + block * block_stride + at), CODES, wide.dtype.element_ty, FAST)
        tl.store(wide + number.to(tl.int64) * VALUES + at, value)


def widen(kv: QuantizedKV, tables: torch.Tensor, rows: torch.Tensor, context_lens: torch.Tensor, num_rows: int,
          plan: WidePlan) -> torch.Tensor:  # fmt: skip
    """The rows' blocks in 16 bits [blocks, 2, kv_heads, block_size, head_dim]; blocks past a row's end are not set."""
    _, halves, heads, block_size, dim = kv.shape
    count = (num_rows - plan.first) * plan.width
    wide = torch.empty(count, halves, heads, block_size, dim, dtype=kv.dtype, device=kv.device)
    values = halves * heads * block_size * dim
    chunk = min(4096, values & -values)
    arguments = read_arguments(kv)
    _widen[(count * (values // chunk),)](
        kv.codes, wide, tables, rows, context_lens, plan.first, plan.width, kv.stride()[0], tables.stride(0),
        CODES=arguments["CODES"], FAST=arguments["FAST"], VALUES=values, BLOCK_SIZE=block_size, CHUNK=chunk,
        num_warps=4, **pdl(),
    )  # fmt: skip
    return wide
