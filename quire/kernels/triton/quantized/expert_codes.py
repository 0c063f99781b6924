"""Inside the experts' kernels: activations into 8-bit codes, and 4-bit codes into numbers.

Activations are quantized as `kernels/weights/scaled.py` does, bit for bit.
"""

# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.launch import INTERPRETED

EMULATED = tl.constexpr(INTERPRETED)
"""The interpreter knows no inline assembly, and rounds wrongly to float8 where the exponent changes."""
LARGEST_FP8 = tl.constexpr(448.0)
LARGEST_INT8 = tl.constexpr(127.0)
SMALLEST_SCALE = tl.constexpr(1e-10)


@triton.jit
def scale_of(largest, INT8: tl.constexpr):
    """The scale of activations whose largest magnitude this is."""
    return tl.maximum(tl.div_rn(largest, LARGEST_INT8 if INT8 else LARGEST_FP8), SMALLEST_SCALE)


@triton.jit
def to_fp8_grid(value):
    """Rounded to the nearest e4m3 number, in float32."""
    if EMULATED:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        magic = 1.5 * 2.0**23 * 2.0**-9  # adding it leaves multiples of 2^-9, the subnormals' step
        rounded = tl.where(tl.abs(value) < 2.0**-6, value + magic - magic, bits.to(tl.float32, bitcast=True))
    else:
        rounded = value.to(tl.float8e4nv).to(tl.float32)
    return rounded


@triton.jit
def to_int8_grid(value):
    """Rounded to the nearest integer, ties to even, in float32; |value| is at most 127 or so."""
    magic = 1.5 * 2.0**23
    return value + magic - magic


@triton.jit
def _divided(value, scale):
    """value / scale, correctly rounded: two multiply-adds after the product with 1 / scale, which few values share."""
    if EMULATED:  # has no fused multiply-add
        quotient = tl.div_rn(value, scale + tl.zeros_like(value))
    else:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        inverse += tl.zeros_like(value)
        quotient = value * inverse
        remainder = tl.fma(-quotient, scale + tl.zeros_like(value), value)
        quotient = tl.fma(remainder, inverse, quotient)
    return quotient


@triton.jit
def quantized(value, scale, INT8: tl.constexpr):
    """float32 values divided by their scale and rounded to codes, still in float32."""
    bound: tl.constexpr = LARGEST_INT8 if INT8 else LARGEST_FP8
    value = _divided(value, scale)
    value = tl.minimum(tl.maximum(value, -bound), bound)
    if INT8:
        value = to_int8_grid(value)
    else:
        value = to_fp8_grid(value)
    return value


@triton.jit
def to_codes(value, scale, INT8: tl.constexpr):
    """float32 values as codes, int8 or e4m3."""
    value = quantized(value, scale, INT8)
    if INT8:
        codes = value.to(tl.int8)
    else:
        codes = value.to(tl.float8e4nv)
    return codes


@triton.jit
def split_int4(codes, DTYPE: tl.constexpr):
    """(low, high) nibbles of bytes, each + 128, in DTYPE: exact in bfloat16 and float16.

    0x4300 is 128 in bfloat16, whose last mantissa bit counts 1: a nibble is put into it by bit operations, since
    integers are converted at a rate of 16 a clock only.
    """
    if tl.bfloat16 == DTYPE and not EMULATED:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            lop3.b32 $0, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $1, b, 0x000f000f, 0x43004300, 0xea;
            shr.b32 a, a, 4;
            shr.b32 b, b, 4;
            lop3.b32 $2, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $3, b, 0x000f000f, 0x43004300, 0xea; }""",
            "=&r,=&r,=&r,=&r,r", [codes], (tl.bfloat16, tl.bfloat16), True, 4,
        )  # fmt: skip
    else:
        low, high = ((codes & 15).to(tl.float32) + 128).to(DTYPE), ((codes >> 4).to(tl.float32) + 128).to(DTYPE)
    return low, high


@triton.jit
def _fp4(code):
    """The number of an e2m1 code, in float32."""
    code = code.to(tl.int32)
    exponent = (code >> 1) & 3
    bits = ((code & 8) << 28) | (((exponent + 126) << 23) | ((code & 1) << 22))
    # 0 and 0.5 have exponent 0 and no leading one.
    small = tl.where((code & 8) != 0, -0.5, 0.5) * (code & 1).to(tl.float32)
    return tl.where(exponent == 0, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def split_fp4(codes, DTYPE: tl.constexpr):
    """(low, high) nibbles of bytes as the e2m1 numbers they are, in DTYPE.

    Sign, exponent and mantissa are put into those of a bfloat16, which is 2^126 times too small then: bfloat16
    multiplication knows subnormals.
    """
    if tl.bfloat16 == DTYPE and not EMULATED:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d;
            prmt.b32 a, $4, 0, 0x1404;
            prmt.b32 b, $4, 0, 0x3424;
            shr.b32 c, a, 6;
            shr.b32 d, b, 6;
            and.b32 c, c, 0x01c001c0;
            and.b32 d, d, 0x01c001c0;
            lop3.b32 $2, a, 0x80008000, c, 0xea;
            lop3.b32 $3, b, 0x80008000, d, 0xea;
            shr.b32 c, a, 2;
            shr.b32 d, b, 2;
            and.b32 c, c, 0x01c001c0;
            and.b32 d, d, 0x01c001c0;
            shl.b32 a, a, 4;
            shl.b32 b, b, 4;
            lop3.b32 $0, a, 0x80008000, c, 0xea;
            lop3.b32 $1, b, 0x80008000, d, 0xea;
            mov.b32 c, 0x7e807e80;
            mul.rn.bf16x2 $0, $0, c;
            mul.rn.bf16x2 $1, $1, c;
            mul.rn.bf16x2 $2, $2, c;
            mul.rn.bf16x2 $3, $3, c; }""",
            "=&r,=&r,=&r,=&r,r", [codes], (tl.bfloat16, tl.bfloat16), True, 4,
        )  # fmt: skip
    else:
        low, high = _fp4(codes & 15).to(DTYPE), _fp4(codes >> 4).to(DTYPE)
    return low, high


@triton.jit
def split_fp4_pairs(codes, DTYPE: tl.constexpr, RAW: tl.constexpr):
    """Two bytes of codes as one int16: (low nibble of the first, of the second, high nibble of the first, of the
    second) as e2m1 numbers in DTYPE. A thread's elements stay where they are: nothing is packed or unpacked.

    RAW: bfloat16 is left 2^126 times too small, to be multiplied by `raw_power_of_two`.
    """
    if tl.bfloat16 == DTYPE and not EMULATED and RAW:
        a, b, c, d = tl.inline_asm_elementwise(
            """{ .reg .b32 s, t;
            shl.b32 s, $4, 12;
            shl.b32 t, $4, 6;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 $0, s, 0x80008000, t, 0xea;
            shl.b32 s, $4, 4;
            shr.b32 t, $4, 2;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 $1, s, 0x80008000, t, 0xea;
            shl.b32 s, $4, 8;
            shl.b32 t, $4, 2;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 $2, s, 0x80008000, t, 0xea;
            shr.b32 t, $4, 6;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 $3, $4, 0x80008000, t, 0xea; }""",
            "=&r,=&r,=&r,=&r,r", [codes], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
        )  # fmt: skip
    elif tl.bfloat16 == DTYPE and not EMULATED:
        a, b, c, d = tl.inline_asm_elementwise(
            """{ .reg .b32 s, t, m;
            mov.b32 m, 0x7e807e80;
            shl.b32 s, $4, 12;
            shl.b32 t, $4, 6;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 $0, s, 0x80008000, t, 0xea;
            shl.b32 s, $4, 4;
            shr.b32 t, $4, 2;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 $1, s, 0x80008000, t, 0xea;
            shl.b32 s, $4, 8;
            shl.b32 t, $4, 2;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 $2, s, 0x80008000, t, 0xea;
            shr.b32 t, $4, 6;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 $3, $4, 0x80008000, t, 0xea;
            mul.rn.bf16x2 $0, $0, m;
            mul.rn.bf16x2 $1, $1, m;
            mul.rn.bf16x2 $2, $2, m;
            mul.rn.bf16x2 $3, $3, m; }""",
            "=&r,=&r,=&r,=&r,r", [codes], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
        )  # fmt: skip
    else:
        wide = codes.to(tl.int32)
        a, b = _fp4(wide & 15).to(DTYPE), _fp4((wide >> 8) & 15).to(DTYPE)
        c, d = _fp4((wide >> 4) & 15).to(DTYPE), _fp4((wide >> 12) & 15).to(DTYPE)
    return a, b, c, d


@triton.jit
def affine(value, zero, scale, minimum, DTYPE: tl.constexpr):
    """(value - zero) * scale + minimum, where value - zero is exact: rounded once, to DTYPE. All are in DTYPE."""
    if tl.bfloat16 == DTYPE and not EMULATED:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 a; sub.rn.bf16x2 a, $1, $2; fma.rn.bf16x2 $0, a, $3, $4; }",
            "=r,r,r,r,r", [value, zero, scale, minimum], tl.bfloat16, True, 2,
        )  # fmt: skip
    else:
        exact = value.to(tl.float32) - zero.to(tl.float32)
        out = (exact * scale.to(tl.float32) + minimum.to(tl.float32)).to(DTYPE)
    return out


@triton.jit
def times(value, scale, DTYPE: tl.constexpr):
    """value * scale, rounded once, to DTYPE. Both are in DTYPE."""
    if tl.bfloat16 == DTYPE and not EMULATED:
        out = tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [value, scale], tl.bfloat16, True, 2)
    else:
        out = (value.to(tl.float32) * scale.to(tl.float32)).to(DTYPE)
    return out


@triton.jit
def raw_power_of_two(exponent, DTYPE: tl.constexpr):
    """2^(exponent - 127) of uint8 exponents up to 128, times what `split_fp4_pairs` has left out."""
    if tl.bfloat16 == DTYPE and not EMULATED:
        scale = ((exponent.to(tl.int16) + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        scale = power_of_two(exponent, DTYPE)
    return scale


@triton.jit
def power_of_two(exponent, DTYPE: tl.constexpr):
    """2^(exponent - 127) of uint8 exponents, in DTYPE."""
    if tl.bfloat16 == DTYPE and not EMULATED:
        wide = exponent.to(tl.int16)
        scale = tl.where(wide == 0, 0x40, wide << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        wide = exponent.to(tl.int32)
        scale = tl.where(wide == 0, 0x400000, wide << 23).to(tl.float32, bitcast=True).to(DTYPE)
    return scale
