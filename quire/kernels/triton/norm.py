"""RMS norm, alone and with the residual stream's addition folded in: one program a row.

A row is held in registers between the two passes over it (sum of squares, then scaling), so memory is touched once.
The weight is read before `gdc_wait`: no kernel writes it, and the read overlaps the end of the kernel before.
"""

# ruff: noqa: N803

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl

MAX_WIDTH = 32768
"""Widest row that fits the registers of one program."""


@triton.jit
def _normed(values, weight, eps, WIDTH: tl.constexpr):
    """values / rms(values) * weight in float32; lanes past WIDTH hold zeros."""
    inverse = tl.rsqrt(tl.sum(values * values) / WIDTH + eps)
    return values * inverse * weight.to(tl.float32)


@triton.jit
def _rms_norm(x, weight, out, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, _normed(values, scale, eps, WIDTH), mask=inside)


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    stream = residual + row * residual_stride + columns
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(stream, mask=inside, other=0.0).to(tl.float32)
    # The norm is of what the next layer will read, that is of the sum as it was stored.
    total = values.to(residual.dtype.element_ty)
    tl.store(stream, total, mask=inside)
    tl.store(out + row * WIDTH + columns, _normed(total.to(tl.float32), scale, eps, WIDTH), mask=inside)


@functools.cache
def _meta(width: int) -> dict[str, Any]:
    """What a launch is compiled with. 16 values a thread: two loads of 16 bytes in flight from each 16-bit input."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(max(block // 512, 1), 32), **pdl()}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over rows x [rows, width], contiguous in the last dimension; rows may lie apart.

    Bytes: 2 values a feature (x in, out), and the weight once. Operations: 4 a feature.
    """
    rows, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rms_norm[(rows,)](x, weight, out, x.stride(0), eps, **_meta(width))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x in place; returns (rms_norm(residual), residual). Rows as in `rms_norm`.

    Bytes: 4 values a feature (x and residual in, residual and out), and the weight once. Operations: 5 a feature.
    """
    rows, width = residual.shape
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    _add_rms_norm[(rows,)](x, residual, weight, out, x.stride(0), residual.stride(0), eps, **_meta(width))
    return out, residual
