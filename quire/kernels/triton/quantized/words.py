"""Inside kernels: words of 4- or 8-bit codes (`kernels/weights/packing.py`) into numbers of the activations' dtype.

A weight matrix at memory speed is 37 4-bit weights a clock and multiprocessor on an H200, and 128 instructions are
issued in that time: a weight may take three. Conversion of integers runs at 16 a clock. So numbers are made of bits.
A bfloat16 whose upper byte is 0 is its lower byte times 2^-133: subnormal up to 127, and the first normal ones continue
the line. So the fields of a register's two words are masked, and one multiply-add, exact, makes (code - zero) / 128 of
two: 2 operations for the fields in lower bytes, one shift more for those in upper bytes. The product with the scale
rounds once. Numbers are 1 / 128 of the weights then, which is made good in the sum (`UNIT`). In float16 0x6400 | code
is 1024 + code, and subtracting 1024 + zero is exact.

The interpreter knows no assembly; there the same numbers are computed in float32.
"""

# ruff: noqa: N803, N806, SIM109, SIM300  # Triton's names; constexprs are upper-case

# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.launch import INTERPRETED

EMULATED = tl.constexpr(INTERPRETED)

INT4 = tl.constexpr("int4")
INT8 = tl.constexpr("int8")
MXFP4 = tl.constexpr("mxfp4")
NVFP4 = tl.constexpr("nvfp4")

_SPLIT_INT4_BF16 = tl.constexpr(
    """{ .reg .b32 w;
    and.b32 $0, $4, 0x000f000f;
    and.b32 $1, $4, 0x00f000f0;
    shr.u32 w, $4, 8;
    and.b32 $2, w, 0x000f000f;
    and.b32 $3, w, 0x00f000f0; }"""
)
_SPLIT_INT4_F16 = tl.constexpr(
    """{ .reg .b32 w, m;
    mov.b32 m, 0x64006400;
    lop3.b32 $0, $4, 0x000f000f, m, 0xea;
    shr.u32 w, $4, 4;
    lop3.b32 $1, w, 0x000f000f, m, 0xea;
    shr.u32 w, $4, 8;
    lop3.b32 $2, w, 0x000f000f, m, 0xea;
    shr.u32 w, $4, 12;
    lop3.b32 $3, w, 0x000f000f, m, 0xea; }"""
)
_SPLIT_INT8_BF16 = tl.constexpr(
    """{ .reg .b32 w;
    and.b32 $0, $2, 0x00ff00ff;
    shr.u32 w, $2, 8;
    and.b32 $1, w, 0x00ff00ff; }"""
)
_SPLIT_INT8_F16 = tl.constexpr(
    """{ .reg .b32 w, m;
    mov.b32 m, 0x64006400;
    lop3.b32 $0, $2, 0x00ff00ff, m, 0xea;
    shr.u32 w, $2, 8;
    lop3.b32 $1, w, 0x00ff00ff, m, 0xea; }"""
)
# The multiplier is 2^126, or 2^122 for codes in bits 4 to 7.
_ZERO = tl.constexpr("{ .reg .b32 a, m; mov.b32 m, M; fma.rn.bf16x2 a, $1, m, $3; mul.rn.bf16x2 $0, a, $2; }")
_ZERO_LOW = tl.constexpr(_ZERO.value.replace("M;", "0x7e807e80;"))
_ZERO_HIGH = tl.constexpr(_ZERO.value.replace("M;", "0x7c807c80;"))
_MINIMUM = tl.constexpr("{ .reg .b32 a, m; mov.b32 m, M; mul.rn.bf16x2 a, $1, m; fma.rn.bf16x2 $0, a, $2, $3; }")
_MINIMUM_LOW = tl.constexpr(_MINIMUM.value.replace("M;", "0x7e807e80;"))
_MINIMUM_HIGH = tl.constexpr(_MINIMUM.value.replace("M;", "0x7c807c80;"))
# Sign to bit 15; exponent and mantissa to bits 8 to 6, which is 2^126 times too small: products know subnormals.
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
def word_at(
    line, span, column, K: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, LINES: tl.constexpr
):  # fmt: skip
    """Where a weight has word `column` of a span of output `line`."""
    if LINES == 1:
        at = line * (K // FIELDS) + span * WORDS + column
    else:
        RUN: tl.constexpr = WORDS // 2
        beside = line % LINES
        first = (line - beside) * (K // FIELDS) + beside * RUN
        at = first + span * (LINES * WORDS) + (column // RUN * (LINES * RUN) + column % RUN)
    return at


@triton.jit
def group_at(line, group, GROUPS: tl.constexpr, LINES: tl.constexpr):
    """Where it has the scale of a group of output `line`."""
    if LINES == 1:
        at = line * GROUPS + group
    else:
        beside = line % LINES
        at = (line - beside) * GROUPS + beside + group * LINES
    return at


@triton.jit
def unit(FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """What a sum of products with numbers is multiplied by."""
    if EMULATED or DTYPE != tl.bfloat16 or FORMAT == MXFP4 or FORMAT == NVFP4:
        out = 1.0
    else:
        out = 128.0
    return out


@triton.jit
def split(words, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The fields of words, as tiles like `words`: what `value` makes numbers of.

    Integers: the code times a constant, or plus one, in DTYPE; FP4: the numbers.
    """
    if EMULATED:
        bits = words.to(tl.int32)
        if FORMAT == INT8:
            fields = (bits & 255).to(tl.float32), ((bits >> 8) & 255).to(tl.float32)
        elif FORMAT == INT4:
            fields = (
                (bits & 15).to(tl.float32),
                ((bits >> 4) & 15).to(tl.float32),
                ((bits >> 8) & 15).to(tl.float32),
                ((bits >> 12) & 15).to(tl.float32),
            )
        else:
            fields = _fp4(bits, DTYPE), _fp4(bits >> 4, DTYPE), _fp4(bits >> 8, DTYPE), _fp4(bits >> 12, DTYPE)
    elif FORMAT == INT8:
        if DTYPE == tl.bfloat16:
            fields = tl.inline_asm_elementwise(
                _SPLIT_INT8_BF16, "=&r,=&r,r", [words], (tl.bfloat16, tl.bfloat16), True, 2
            )
        else:
            fields = tl.inline_asm_elementwise(_SPLIT_INT8_F16, "=&r,=&r,r", [words], (tl.float16, tl.float16), True, 2)
    elif FORMAT != INT4:
        fields = tl.inline_asm_elementwise(
            _SPLIT_FP4, "=&r,=&r,=&r,=&r,r", [words],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
        )  # fmt: skip
    elif DTYPE == tl.bfloat16:
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
    if FORMAT == MXFP4 or FORMAT == NVFP4:
        offset = None
    elif minimum is not None:
        if EMULATED or DTYPE != tl.bfloat16:
            offset = minimum
        else:
            offset = (minimum.to(tl.float32) * 0.0078125).to(tl.bfloat16)
    else:
        MIDDLE: tl.constexpr = 8 if FORMAT == INT4 else 128
        code = scale.to(tl.int16, bitcast=True).to(tl.int32) * 0 + MIDDLE if zero is None else zero.to(tl.int32)
        # 2^23 + zero, without conversion.
        wide = (code | 0x4B000000).to(tl.float32, bitcast=True)
        if EMULATED:
            offset = wide - 8388608.0
        elif DTYPE == tl.bfloat16:
            offset = (65536.0 - wide * 0.0078125).to(tl.bfloat16)
        else:
            offset = (wide - 8387584.0).to(tl.float16)
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
def value(
    field, scale, offset, FIELD: tl.constexpr, MINIMUM: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Numbers of field FIELD in DTYPE, each rounded once: (code - zero) * scale, code * scale + minimum or FP4 * scale,
    divided by `unit`.

    `scale` and `offset` are what `scale_of` and `offset_of` returned, broadcast to the field's shape.
    """
    HIGH: tl.constexpr = FORMAT == INT4 and FIELD % 2 == 1
    if FORMAT == NVFP4:
        out = (field.to(tl.float32) * scale).to(DTYPE)
    elif EMULATED:
        if FORMAT == MXFP4:
            out = (field.to(tl.float32) * scale).to(DTYPE)
        elif MINIMUM:
            out = (field * scale.to(tl.float32) + offset.to(tl.float32)).to(DTYPE)
        else:
            out = ((field - offset) * scale.to(tl.float32)).to(DTYPE)
    elif FORMAT == MXFP4:
        out = tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [field, scale], tl.bfloat16, True, 2)
    elif DTYPE == tl.bfloat16:
        LOW: tl.constexpr = _MINIMUM_LOW if MINIMUM else _ZERO_LOW
        ASM: tl.constexpr = (_MINIMUM_HIGH if MINIMUM else _ZERO_HIGH) if HIGH else LOW
        out = tl.inline_asm_elementwise(ASM, "=r,r,r,r", [field, scale, offset], tl.bfloat16, True, 2)
    elif MINIMUM:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 a, m; mov.b32 m, 0x64006400; sub.rn.f16x2 a, $1, m; fma.rn.f16x2 $0, a, $2, $3; }",
            "=r,r,r,r", [field, scale, offset], tl.float16, True, 2,
        )  # fmt: skip
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 a; sub.rn.f16x2 a, $1, $3; mul.rn.f16x2 $0, a, $2; }",
            "=r,r,r,r", [field, scale, offset], tl.float16, True, 2,
        )  # fmt: skip
    return out


@triton.jit
def weight_of(number, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The weights of numbers."""
    if EMULATED or DTYPE != tl.bfloat16 or FORMAT == MXFP4 or FORMAT == NVFP4:
        out = number
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 m; mov.b32 m, 0x43004300; mul.rn.bf16x2 $0, $1, m; }",
            "=r,r", [number], tl.bfloat16, True, 2,
        )  # fmt: skip
    return out
