"""Quantizes rows of activations to 8-bit codes, with the residual addition and the RMS norm before it fused.

One program per row holds the row in registers: it is read once. Bytes per feature: 2 in and 1 out; with a norm of
residual + x 6 in (x, residual, gain) and 3 out (stream, code).
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.quantized.w8.codes import FP8, divide, encode, scale_of
from quire.kernels.triton.skinny_gemm.common import GemmLaunch

MAX_WIDTH = 32768
"""Widest row that fits the registers of one program."""


class Codes(NamedTuple):
    """Quantized activations."""

    codes: torch.Tensor
    """[rows, in] int8 or float8_e4m3fn."""
    scale: torch.Tensor | None
    """float32 [rows]; in groups [groups, rows]."""


@triton.jit(do_not_specialize=["rows"])
def _quantize(
    x, residual, gain, static, codes, scales, rows, x_stride, residual_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    CODE: tl.constexpr = codes.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if gain is not None:
        gains = tl.load(gain + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    DTYPE: tl.constexpr = value.dtype
    if residual is not None:
        stream = residual + row * residual_stride + columns
        carried = tl.load(stream, mask=inside, other=0.0)
        # The norm is of the sum as stored, which is what the next layer reads.
        value = (value.to(tl.float32) + carried.to(tl.float32)).to(DTYPE)
        tl.store(stream, value, mask=inside)
    wide = value.to(tl.float32)
    if gain is not None:
        inverse_rms = tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
        wide = (wide * gains * inverse_rms).to(DTYPE).to(tl.float32)
    if GROUP:
        grouped = tl.reshape(wide, (BLOCK // GROUP, GROUP))
        scale = scale_of(tl.max(tl.abs(grouped), 1), CODE)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(scales + group.to(tl.int64) * rows + row, scale, mask=group * GROUP < WIDTH)
        inverse = tl.math.div_rn(tl.full((BLOCK // GROUP,), 1.0, tl.float32), scale)
        quotient = tl.reshape(divide(grouped, scale[:, None], inverse[:, None]), (BLOCK,))
    else:
        if static is None:
            scale = scale_of(tl.max(tl.abs(wide), 0), CODE)
        else:
            scale = tl.load(static)
        tl.store(scales + row, scale)
        quotient = divide(wide, scale, tl.math.div_rn(1.0, scale))
    tl.store(codes + row * WIDTH + columns, encode(quotient, CODE), mask=inside)


@functools.cache
def _constants(width: int, group: int) -> dict[str, Any]:
    """Constexpr arguments and launch options. 16 values per thread: two 16-byte loads in flight per 16-bit input."""
    block = triton.next_power_of_2(max(width, group))
    warps = min(max(block // 512, 1), 32)
    return {"WIDTH": width, "BLOCK": block, "GROUP": group, "num_warps": warps, **pdl()}


def quantize_launch(
    x: torch.Tensor,
    code: torch.dtype = FP8,
    static: torch.Tensor | None = None,
    group: int = 0,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
) -> tuple[GemmLaunch, Codes]:
    """The launch of `quantize`, and what it will return."""
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=code, device=x.device)
    count = (-(-width // group), rows) if group else (rows,)
    scale = torch.empty(count, dtype=torch.float32, device=x.device)
    carried = 0 if residual is None else residual.stride(0)
    arguments = (x, residual, gain, static, codes, scale, rows, x.stride(0), carried, eps)
    return GemmLaunch(_quantize, rows, arguments, _constants(width, group), codes), Codes(codes, scale)


def quantize(
    x: torch.Tensor,
    code: torch.dtype = FP8,
    static: torch.Tensor | None = None,
    group: int = 0,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
) -> Codes:
    """Rows x [rows, in] as codes: each row by its largest value, by the scale `static`, or by `group` of its values.

    gain: of an RMS norm that is applied first. residual: residual += x, in place, is what is normed.
    """
    launch, codes = quantize_launch(x, code, static, group, gain=gain, eps=eps, residual=residual)
    launch.kernel[(launch.programs,)](*launch.arguments, **launch.constants)
    return codes
