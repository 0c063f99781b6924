"""Rounding values to 8-bit codes inside a kernel, as `kernels/weights/scaled.py` defines it, bit for bit."""

# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import INTERPRETED

INTERPRETER = tl.constexpr(INTERPRETED)
SMALLEST_SCALE = tl.constexpr(1e-10)
FP8 = torch.float8_e4m3fn


@triton.jit
def scale_of(amax, CODE: tl.constexpr):
    """The scale of values up to `amax`."""
    bound: tl.constexpr = 127.0 if tl.int8 == CODE else 448.0
    return tl.maximum(tl.math.div_rn(amax, tl.zeros_like(amax) + bound), SMALLEST_SCALE)


@triton.jit
def divide(value, scale, inverse):
    """value / scale, correctly rounded; `inverse` is 1 / scale, correctly rounded, and all broadcast.

    Two multiply-adds after the product (Markstein) instead of the ten instructions of a division.
    """
    if INTERPRETER:  # has no fused multiply-add
        quotient = tl.math.div_rn(value, scale + tl.zeros_like(value))
    else:
        quotient = value * inverse
        remainder = tl.fma(-quotient, scale + tl.zeros_like(value), value)
        quotient = tl.fma(remainder, inverse + tl.zeros_like(value), quotient)
    return quotient


@triton.jit
def encode(value, CODE: tl.constexpr):
    """float32 values as codes: rounded to nearest even, saturated."""
    bound: tl.constexpr = 127.0 if tl.int8 == CODE else 448.0
    value = tl.minimum(tl.maximum(value, -bound), bound)
    if tl.int8 == CODE:
        # In [2^23, 2^24) a float32 holds integers: the addition rounds, and the low byte is the integer.
        codes = (value + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    elif INTERPRETER:  # does not carry when it rounds to float8, so the value is rounded first
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        small = (value + 24576.0) - 24576.0  # below 2^-6 codes are multiples of 2^-9
        value = tl.where(tl.abs(value) < 0.015625, small, bits.to(tl.float32, bitcast=True))
        codes = value.to(tl.float8e4nv)
    else:
        codes = value.to(tl.float8e4nv)
    return codes


@triton.jit
def add_max(total, largest, other_total, other_largest):
    """For `tl.reduce`: a sum and a maximum at once."""
    return total + other_total, tl.maximum(largest, other_largest)
