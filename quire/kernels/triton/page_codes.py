"""Encodes pages of keys and values in 8 bits before they are copied to host memory, and decodes those that come back.

Bytes: 2 read and 1 written per value of 16 bits, or the reverse: at the speed of memory a hundredth of what the copy
over the link takes. Operations: a division or a multiplication, and a conversion, per value.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.kv import LEAST_SCALE
from quire.kernels.page_codes import PageCodes

_LEAST_SCALE: tl.constexpr = tl.constexpr(LEAST_SCALE)
TILE = 4096
"""Numbers of a program."""


@triton.jit
def _scales(largest):
    scale = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    # Also if the largest is NaN, which a maximum would drop.
    return tl.where(scale < _LEAST_SCALE, _LEAST_SCALE, scale)


@triton.jit
def _encode(
    pages, numbers, codes, largest, page_stride, encoded_bytes,
    VECTORS: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    PROGRAMS: tl.constexpr = (VECTORS + ROWS - 1) // ROWS
    place = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    row = tl.program_id(0) % PROGRAMS * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    at = row[:, None] * VECTOR + column[None, :]
    inside = (row < VECTORS)[:, None] & (column < VECTOR)[None, :]
    page = tl.load(numbers + place).to(tl.int64)
    x = tl.load(pages + page * page_stride + at, mask=inside, other=0.0).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), 1) > 0
    most = tl.where(broken, float("nan"), tl.max(tl.abs(x), 1))
    scaled = tl.div_rn(x, _scales(most)[:, None] + tl.zeros(x.shape, tl.float32))
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    # 1.5 * 2^23: the unit of float32 is 1 there, ties to even.
    code = (scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    tl.store(codes + place * encoded_bytes + at, code.to(tl.int8), mask=inside)
    kept = largest + place * (encoded_bytes // (largest.dtype.element_ty.primitive_bitwidth // 8)) + row
    tl.store(kept, most.to(largest.dtype.element_ty), mask=row < VECTORS)


@triton.jit
def _decode(
    pages, numbers, codes, largest, page_stride, encoded_bytes,
    VECTORS: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    PROGRAMS: tl.constexpr = (VECTORS + ROWS - 1) // ROWS
    place = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    row = tl.program_id(0) % PROGRAMS * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    at = row[:, None] * VECTOR + column[None, :]
    inside = (row < VECTORS)[:, None] & (column < VECTOR)[None, :]
    kept = largest + place * (encoded_bytes // (largest.dtype.element_ty.primitive_bitwidth // 8)) + row
    scale = _scales(tl.load(kept, mask=row < VECTORS, other=0.0).to(tl.float32))
    code = tl.load(codes + place * encoded_bytes + at, mask=inside, other=0).to(tl.float32)
    page = tl.load(numbers + place).to(tl.int64)
    value = (code * scale[:, None]).to(pages.dtype.element_ty)
    tl.store(pages + page * page_stride + at, value, mask=inside)


def encode_pages(format: PageCodes, pages: torch.Tensor, numbers: torch.Tensor, encoded: torch.Tensor) -> None:
    """Encode the pages with these `numbers` [n] of all `pages` [pages, numbers] into `encoded` [at least n, bytes]."""
    _launch(_encode, format, pages, numbers, encoded)


def decode_pages(format: PageCodes, encoded: torch.Tensor, pages: torch.Tensor, numbers: torch.Tensor) -> None:
    """Decode `encoded` into the pages with these `numbers`."""
    _launch(_decode, format, pages, numbers, encoded)


def _launch(
    kernel: triton.JITFunction, format: PageCodes, pages: torch.Tensor, numbers: torch.Tensor, encoded: torch.Tensor
) -> None:
    width = triton.next_power_of_2(format.vector)
    rows = max(1, min(TILE // width, triton.next_power_of_2(format.vectors)))
    codes, largest = format.views(encoded)
    kernel[(len(numbers) * triton.cdiv(format.vectors, rows),)](
        pages, numbers, codes, largest, pages.stride(0), encoded.stride(0),
        VECTORS=format.vectors, VECTOR=format.vector, ROWS=rows, WIDTH=width, num_warps=4,
    )  # fmt: skip
