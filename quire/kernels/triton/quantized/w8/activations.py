"""Quantizes rows of activations to 8-bit codes, with the residual addition and the RMS norm before it fused.

One program per row holds the row in registers: it is read once. Bytes per feature: 2 in and 1 out; with a norm of
residual + x 6 in (x, residual, gain) and 3 out (stream, code).
"""

# ruff: noqa: N803, N806, RUF005  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.quantized.w8.codes import FP8, add_max, divide, encode, scale_of
from quire.kernels.triton.skinny_gemm.common import GemmLaunch

MAX_WIDTH = 32768
"""Widest row that fits the registers of one program."""


FEW_ROWS = 64
"""Up to this many rows, which leave multiprocessors idle, a row has as many threads as it can use."""


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
    CHUNKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    DTYPE: tl.constexpr = x.dtype.element_ty
    gains = ()
    if gain is not None:
        for chunk in tl.static_range(CHUNKS):
            columns = chunk * BLOCK + tl.arange(0, BLOCK)
            gains = gains + (tl.load(gain + columns, mask=columns < WIDTH, other=0.0),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    values = ()
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + columns, mask=columns < WIDTH, other=0.0)
        if residual is not None:
            carried = tl.load(residual + row * residual_stride + columns, mask=columns < WIDTH, other=0.0)
            # The norm is of the sum as stored, which is what the next layer reads.
            value = (value.to(tl.float32) + carried.to(tl.float32)).to(DTYPE)
        values = values + (value,)
    squares = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        wide = values[chunk].to(tl.float32)
        if residual is not None:
            columns = chunk * BLOCK + tl.arange(0, BLOCK)
            tl.store(residual + row * residual_stride + columns, values[chunk], mask=columns < WIDTH)
        if gain is not None:
            squares += wide * wide
            wide = wide * gains[chunk].to(tl.float32)
        largest = tl.maximum(largest, tl.abs(wide))
    inverse_rms = 1.0
    amax = 0.0
    if gain is not None:
        # The gain is multiplied first: then the largest normed value follows from the largest product.
        total, amax = tl.reduce((squares, largest), 0, add_max)
        inverse_rms = tl.rsqrt(total / WIDTH + eps)
        amax = (amax * inverse_rms).to(DTYPE).to(tl.float32)
    elif GROUP == 0 and static is None:
        amax = tl.max(largest, 0)
    scale = 1.0
    inverse = 1.0
    if GROUP == 0:
        scale = scale_of(amax, CODE) if static is None else tl.load(static)
        tl.store(scales + row, scale)
        inverse = tl.math.div_rn(1.0, scale)
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        wide = values[chunk].to(tl.float32)
        if gain is not None:
            wide = (wide * gains[chunk].to(tl.float32) * inverse_rms).to(DTYPE).to(tl.float32)
        if GROUP:
            grouped = tl.reshape(wide, (BLOCK // GROUP, GROUP))
            each = scale_of(tl.max(tl.abs(grouped), 1), CODE)
            group = chunk * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            tl.store(scales + group.to(tl.int64) * rows + row, each, mask=group * GROUP < WIDTH)
            inverses = tl.math.div_rn(tl.full((BLOCK // GROUP,), 1.0, tl.float32), each)
            quotient = tl.reshape(divide(grouped, each[:, None], inverses[:, None]), (BLOCK,))
        else:
            quotient = divide(wide, scale, inverse)
        tl.store(codes + row * WIDTH + columns, encode(quotient, CODE), mask=columns < WIDTH)


@functools.cache
def _constants(width: int, group: int, few: bool) -> dict[str, Any]:
    """Constexpr arguments and launch options.

    16 values per thread: two 16-byte loads in flight per 16-bit input. Many rows that are wide: more values, and fewer
    threads that wait for each other.
    """
    block = triton.next_power_of_2(max(width, group))
    if block > 8192 and not few:
        block = 2048
    warps = min(max(block // (256 if block < width else 512), 1), 32)
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
    multiple: int = 1,
) -> tuple[GemmLaunch, Codes]:
    """The launch of `quantize`, and what it will return: with rows up to a `multiple`, the last ones not written."""
    rows, width = x.shape
    padded = -(-rows // multiple) * multiple
    codes = torch.empty(padded, width, dtype=code, device=x.device)
    count = (-(-width // group), padded) if group else (padded,)
    scale = torch.empty(count, dtype=torch.float32, device=x.device)
    carried = 0 if residual is None else residual.stride(0)
    arguments = (x, residual, gain, static, codes, scale, padded, x.stride(0), carried, eps)
    return GemmLaunch(_quantize, rows, arguments, _constants(width, group, rows <= FEW_ROWS), codes), Codes(
        codes, scale
    )


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
