"""Inside kernels: words of 4- or 8-bit codes (`kernels/weights/packing.py`) into numbers of the activations' dtype.

A weight matrix at memory speed is 37 4-bit weights a clock and multiprocessor on an H200, and 128 instructions are
issued in that time: a weight may take three. Conversion of integers runs at 16 a clock. So numbers are made of bits:
0x4300 is 128 in bfloat16, whose last mantissa bit counts 1, and 0x4300 | q is 128 + q. Subtracting 128 + zero is exact,
and the product with the scale rounds once. A register holds two words and becomes two numbers of each field: 4 LOP, 3
shifts, 4 subtractions and 4 products for 8 weights.

The interpreter knows no assembly; there the same numbers are computed in float32.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.launch import INTERPRETED

EMULATED = tl.constexpr(INTERPRETED)

INT4 = tl.constexpr("int4")
INT8 = tl.constexpr("int8")
MXFP4 = tl.constexpr("mxfp4")
NVFP4 = tl.constexpr("nvfp4")

_SPLIT_INT4 = tl.constexpr(
    """{ .reg .b32 w, m;
    mov.b32 m, MAGIC;
    lop3.b32 $0, $4, 0x000f000f, m, 0xea;
    shr.u32 w, $4, 4;
    lop3.b32 $1, w, 0x000f000f, m, 0xea;
    shr.u32 w, $4, 8;
    lop3.b32 $2, w, 0x000f000f, m, 0xea;
    shr.u32 w, $4, 12;
    lop3.b32 $3, w, 0x000f000f, m, 0xea; }"""
)
_SPLIT_INT4_BF16 = tl.constexpr(_SPLIT_INT4.value.replace("MAGIC", "0x43004300"))
_SPLIT_INT4_F16 = tl.constexpr(_SPLIT_INT4.value.replace("MAGIC", "0x64006400"))
_SPLIT_INT8 = tl.constexpr(
    """{ .reg .b32 m;
    mov.b32 m, 0x4b000000;
    prmt.b32 $0, $4, m, 0x7540;
    prmt.b32 $1, $4, m, 0x7542;
    prmt.b32 $2, $4, m, 0x7541;
    prmt.b32 $3, $4, m, 0x7543; }"""
)
# Sign to bit 15; exponent and mantissa to bits 8 to 6, which is 2^126 times too small: bfloat16 products know subnormals.
_SPLIT_FP4 = tl.constexpr(
    """{ .reg .b32 a, b, c;
    mov.b32 c, 0x7e807e80;
    shl.b32 a, $4, 12;
    shl.b32 b, $4, 6;
    and.b32 a, a, 0x80008000;
    lop3.b32 a, b, 0x01c001c0, a, 0xea;
    mul.rn.bf16x2 $0, a, c;
    shl.b32 a, $4, 8;
    shl.b32 b, $4, 2;
    and.b32 a, a, 0x80008000;
    lop3.b32 a, b, 0x01c001c0, a, 0xea;
    mul.rn.bf16x2 $1, a, c;
    shl.b32 a, $4, 4;
    shr.u32 b, $4, 2;
    and.b32 a, a, 0x80008000;
    lop3.b32 a, b, 0x01c001c0, a, 0xea;
    mul.rn.bf16x2 $2, a, c;
    shr.u32 b, $4, 6;
    and.b32 a, $4, 0x80008000;
    lop3.b32 a, b, 0x01c001c0, a, 0xea;
    mul.rn.bf16x2 $3, a, c; }"""
)


@triton.jit
def split(words, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The fields of words, as tiles like `words`: what `value` makes weights of.

    INT4: magic + code in DTYPE, INT8: 2^23 + code in float32, FP4: the numbers, in bfloat16.
    """
    if EMULATED:
        bits = words.to(tl.int32)
        if FORMAT == INT8:
            fields = (bits & 255).to(tl.float32) + 8388608.0, ((bits >> 8) & 255).to(tl.float32) + 8388608.0
        elif FORMAT == INT4:
            magic = 128.0 if tl.bfloat16 == DTYPE else 1024.0
            fields = (
                ((bits & 15).to(tl.float32) + magic).to(DTYPE),
                (((bits >> 4) & 15).to(tl.float32) + magic).to(DTYPE),
                (((bits >> 8) & 15).to(tl.float32) + magic).to(DTYPE),
                (((bits >> 12) & 15).to(tl.float32) + magic).to(DTYPE),
            )
        else:
            fields = _fp4(bits, DTYPE), _fp4(bits >> 4, DTYPE), _fp4(bits >> 8, DTYPE), _fp4(bits >> 12, DTYPE)
    elif FORMAT == INT8:
        fields = tl.inline_asm_elementwise(_SPLIT_INT8, "=&r,=&r,=&r,=&r,r", [words], (tl.float32, tl.float32), True, 2)
    elif FORMAT != INT4:
        fields = tl.inline_asm_elementwise(
            _SPLIT_FP4, "=&r,=&r,=&r,=&r,r", [words],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
        )  # fmt: skip
    elif tl.bfloat16 == DTYPE:
        fields = tl.inline_asm_elementwise(
            _SPLIT_INT4_BF16, "=&r,=&r,=&r,=&r,r", [words],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
        )  # fmt: skip
    else:
        fields = tl.inline_asm_elementwise(
            _SPLIT_INT4_F16, "=&r,=&r,=&r,=&r,r", [words],
            (tl.float16, tl.float16, tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    return fields


@triton.jit
def _fp4(bits, DTYPE: tl.constexpr):
    """The e2m1 number in the lowest bits, in DTYPE."""
    exponent = (bits >> 1) & 3
    wide = (((exponent + 126) << 23) | ((bits & 1) << 22)).to(tl.float32, bitcast=True)
    # 0 and 0.5 have exponent 0 and no leading one.
    size = tl.where(exponent == 0, 0.5 * (bits & 1).to(tl.float32), wide)
    return tl.where((bits & 8) != 0, -size, size).to(DTYPE)


@triton.jit
def offset_of(scale, zero, minimum, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """What `value` takes as offset, from a group's loaded zero or minimum (or neither), like `scale`."""
    if FORMAT == INT4:
        if minimum is not None:
            offset = minimum
        else:
            # As bits: an integer that is put into the mantissa, like the codes.
            MAGIC: tl.constexpr = 0x4300 if tl.bfloat16 == DTYPE else 0x6400
            code = scale.to(tl.int16, bitcast=True) * 0 + 8 if zero is None else zero.to(tl.int16)
            offset = (code | MAGIC).to(DTYPE, bitcast=True)
    elif FORMAT == INT8:
        if minimum is not None:
            offset = minimum.to(tl.float32)
        else:
            code = scale.to(tl.float32) * 0 + 128 if zero is None else zero.to(tl.float32)
            offset = code + 8388608.0
    else:
        offset = None
    return offset


@triton.jit
def scale_of(loaded, factor, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """What `value` takes as scale, from a group's loaded scale and an output's factor."""
    if FORMAT == MXFP4:
        # 2^(s - 127); 2^-127 is subnormal.
        if EMULATED:
            bits = loaded.to(tl.int32)
            scale = tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)
        else:
            bits = loaded.to(tl.int16)
            scale = tl.where(bits == 0, 0x40, bits << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif FORMAT == NVFP4:
        scale = e4m3(loaded) * factor
    elif FORMAT == INT8:
        scale = loaded.to(tl.float32)
    else:
        scale = loaded
    return scale


@triton.jit
def e4m3(bits):
    """The e4m3 numbers of bytes, in float32."""
    wide = bits.to(tl.int32)
    shifted = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    # The exponent's bias is 7, float32's 127; subnormals are made normal by the product.
    return shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def value(field, scale, offset, MINIMUM: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Weights of one field, in DTYPE, each rounded once: (code - zero) * scale, code * scale + minimum or number * scale.

    `scale` and `offset` are what `scale_of` and `offset_of` returned, broadcast to the field's shape.
    """
    if FORMAT == INT8:
        if MINIMUM:
            out = ((field - 8388608.0) * scale + offset).to(DTYPE)
        else:
            out = ((field - offset) * scale).to(DTYPE)
    elif FORMAT == NVFP4:
        out = (field.to(tl.float32) * scale).to(DTYPE)
    elif EMULATED:
        if FORMAT == MXFP4:
            out = (field.to(tl.float32) * scale.to(tl.float32)).to(DTYPE)
        elif MINIMUM:
            magic = 128.0 if tl.bfloat16 == DTYPE else 1024.0
            out = ((field.to(tl.float32) - magic) * scale.to(tl.float32) + offset.to(tl.float32)).to(DTYPE)
        else:
            out = ((field.to(tl.float32) - offset.to(tl.float32)) * scale.to(tl.float32)).to(DTYPE)
    elif FORMAT == MXFP4:
        out = tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [field, scale], tl.bfloat16, True, 2)
    elif MINIMUM:
        if tl.bfloat16 == DTYPE:
            out = tl.inline_asm_elementwise(
                "{ .reg .b32 a, m; mov.b32 m, 0x43004300; sub.rn.bf16x2 a, $1, m; fma.rn.bf16x2 $0, a, $2, $3; }",
                "=r,r,r,r", [field, scale, offset], tl.bfloat16, True, 2,
            )  # fmt: skip
        else:
            out = tl.inline_asm_elementwise(
                "{ .reg .b32 a, m; mov.b32 m, 0x64006400; sub.rn.f16x2 a, $1, m; fma.rn.f16x2 $0, a, $2, $3; }",
                "=r,r,r,r", [field, scale, offset], tl.float16, True, 2,
            )  # fmt: skip
    elif tl.bfloat16 == DTYPE:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 a; sub.rn.bf16x2 a, $1, $3; mul.rn.bf16x2 $0, a, $2; }",
            "=r,r,r,r", [field, scale, offset], tl.bfloat16, True, 2,
        )  # fmt: skip
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 a; sub.rn.f16x2 a, $1, $3; mul.rn.f16x2 $0, a, $2; }",
            "=r,r,r,r", [field, scale, offset], tl.float16, True, 2,
        )  # fmt: skip
    return out
