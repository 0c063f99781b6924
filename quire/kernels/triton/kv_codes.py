"""8-bit codes of keys and values in Triton kernels: from and to floating point, by integer operations on their bits.

Codes are widened to 16 bits in registers before a product: sums of FP8 tensor-core products have fewer bits than
float32 on Hopper. Every code is exact in float16 and in bfloat16, so the products are those of 16-bit values, and
scales are multiplied in float32: those of keys with the scores, those of values with the probabilities or the result.

float16 is cheaper to widen to, so keys are (`as_keys`), and values if probabilities need no scales of tokens. The
conversions go through PTX, because the compiler does not use 32-bit operations on pairs of 16-bit values by itself:

- e4m3 to float16: an instruction for two values, from compute capability 8.9 on. Before, and to bfloat16: exponent and
  mantissa are shifted to their places; the difference of the exponents' biases is a multiplication by 2^8 or 2^120,
  which is exact for subnormal codes too. 2 to 2.5 instructions per value.
- int8 to float16: the byte with its sign bit flipped, as the mantissa of 1024 + n; 1152 is subtracted.
  1 to 1.5 instructions per value, where a conversion instruction would yield 16 values per cycle and SM.
- int8 to bfloat16, which has only seven bits of mantissa: the low seven bits n as 128 + n, and the sign bit as 128 or
  256, which is subtracted.

Codes are never NaN (`encode` writes none), and the bits of NaN would be read as 480.
"""

# RET505: Triton also compiles what follows an `if` that returns, so every branch needs its `else`.
# ruff: noqa: N803, N806, RET505, SIM300

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.kv import LEAST_SCALE, QuantizedKV
from quire.kernels.triton.launch import INTERPRETED, arch

NONE, FP8, INT8 = 0, 1, 2
"""`CODES` of kernels."""

_FP8: tl.constexpr = tl.constexpr(FP8)
_LEAST_SCALE: tl.constexpr = tl.constexpr(LEAST_SCALE)
_PLAIN: tl.constexpr = tl.constexpr(INTERPRETED)


@functools.cache
def has_e4m3() -> bool:
    """Whether the device converts e4m3 in hardware."""
    return arch() >= 89


def code_arguments(kv: torch.Tensor | QuantizedKV) -> dict[str, Any]:
    """Keyword arguments of a kernel that reads or writes a layer's cache."""
    if not isinstance(kv, QuantizedKV):
        return {"scales": None, "CODES": NONE, "TOKEN_SCALES": False}
    codes = INT8 if kv.format.codes == "int8" else FP8
    return {"scales": kv.scales, "CODES": codes, "TOKEN_SCALES": kv.format.per_token}


def read_arguments(kv: torch.Tensor | QuantizedKV) -> dict[str, Any]:
    """Keyword arguments of a kernel that reads a layer's cache: `VALUES` is the dtype of the product with V, if there
    are codes, and `FAST` says whether e4m3 is converted in hardware.

    Probabilities are at most 1, which suits float16. Times the scales of tokens they may be below its range, so that
    product is in bfloat16.
    """
    arguments = code_arguments(kv)
    dtype = tl.float32 if kv.dtype == torch.float32 else tl.float16
    if arguments["TOKEN_SCALES"] and dtype == tl.float16 and not INTERPRETED:  # which has no products of bfloat16
        dtype = tl.bfloat16
    return arguments | {"VALUES": dtype, "FAST": not INTERPRETED and has_e4m3()}


@triton.jit
def as_keys(q):
    """(queries [rows, dim] in the dtype that keys are widened to, factors [rows] of their scores).

    bfloat16 becomes float16: a row is divided by the power of two below its largest value. What is lost of values less
    than 2^-17 of that is below 2^-25 of it, as little as the sum in float32 loses.
    """
    if q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        # At least 2^-20: a factor of 0, for a row of zeros, would undo the mask of its scores.
        exponent = tl.maximum(tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000, 0x35800000)
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        return (wide * inverse[:, None]).to(tl.float16), exponent.to(tl.float32, bitcast=True)
    else:
        return q, tl.full([q.shape[0]], 1.0, tl.float32)


@triton.jit
def finite(x):
    """x in float32, without NaN and infinities."""
    x = x.to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38)


@triton.jit
def token_scale(largest, CODES: tl.constexpr):
    """The scale of a token and head whose largest magnitude is given."""
    LARGEST: tl.constexpr = 448.0 if CODES == _FP8 else 127.0
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), _LEAST_SCALE)


@triton.jit
def encode(x, scale, CODES: tl.constexpr):
    """The codes nearest to x / scale, ties to even, as int8 or as the bits of e4m3 in uint8."""
    LARGEST: tl.constexpr = 448.0 if CODES == _FP8 else 127.0
    x = tl.div_rn(finite(x), scale + tl.zeros(x.shape, tl.float32))
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if CODES == _FP8:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Three bits of mantissa, rounded; the exponent's bias becomes 7.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        # Below 2^-6, multiples of 2^-9: the unit of float32 at 2^14.
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8)
    else:
        # 1.5 * 2^23: the unit of float32 is 1 there.
        return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def _plain(code, CODES: tl.constexpr):
    """float32 of codes: the low byte of an integer, extended with its sign or not."""
    wide = code.to(tl.int32)
    if CODES == _FP8:
        bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        return ((wide << 24) >> 24).to(tl.float32)


@triton.jit
def decode(code, CODES: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Codes (uint8 or int8, four adjacent ones in a thread) in 16 or 32 bits, not scaled."""
    if _PLAIN or DTYPE == tl.float32:
        return _plain(code, CODES).to(DTYPE)
    elif CODES == _FP8:
        if DTYPE == tl.bfloat16:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 w, t, c0, c1;
                mov.b32 c0, 0x7b807b80;
                mov.b32 c1, 0x80008000;
                prmt.b32 w, $2, 0, 0x1404;
                shr.u32 t, w, 4;
                and.b32 t, t, 0x07f007f0;
                lop3.b32 t, w, 0x80008000, t, 0xea;
                fma.rn.bf16x2 $0, t, c0, c1;
                prmt.b32 w, $2, 0, 0x3424;
                shr.u32 t, w, 4;
                and.b32 t, t, 0x07f007f0;
                lop3.b32 t, w, 0x80008000, t, 0xea;
                fma.rn.bf16x2 $1, t, c0, c1;
                }""",
                "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4,
            )  # fmt: skip
        elif FAST:
            return tl.inline_asm_elementwise(
                """{
                .reg .b16 a, b;
                mov.b32 {a, b}, $2;
                cvt.rn.f16x2.e4m3x2 $0, a;
                cvt.rn.f16x2.e4m3x2 $1, b;
                }""",
                "=r,=r,r", [code], dtype=tl.float16, is_pure=True, pack=4,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 w, t, c0;
                mov.b32 c0, 0x5c005c00;
                prmt.b32 w, $2, 0, 0x1404;
                shr.u32 t, w, 1;
                and.b32 t, t, 0x3f803f80;
                lop3.b32 t, w, 0x80008000, t, 0xea;
                mul.f16x2 $0, t, c0;
                prmt.b32 w, $2, 0, 0x3424;
                shr.u32 t, w, 1;
                and.b32 t, t, 0x3f803f80;
                lop3.b32 t, w, 0x80008000, t, 0xea;
                mul.f16x2 $1, t, c0;
                }""",
                "=r,=r,r", [code], dtype=tl.float16, is_pure=True, pack=4,
            )  # fmt: skip
    elif DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 w, a, b, c0;
            mov.b32 c0, 0xbf80bf80;
            prmt.b32 w, $2, 0, 0x4140;
            lop3.b32 a, w, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 b, w, 0x00800080, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, b, c0, a;
            prmt.b32 w, $2, 0, 0x4342;
            lop3.b32 a, w, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 b, w, 0x00800080, 0x43004300, 0xea;
            fma.rn.bf16x2 $1, b, c0, a;
            }""",
            "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 w, c0;
            mov.b32 c0, 0x64806480;
            prmt.b32 w, $2, 0, 0x4140;
            xor.b32 w, w, 0x64806480;
            sub.f16x2 $0, w, c0;
            prmt.b32 w, $2, 0, 0x4342;
            xor.b32 w, w, 0x64806480;
            sub.f16x2 $1, w, c0;
            }""",
            "=r,=r,r", [code], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def decode_even(pair, CODES: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """The first codes of pairs (int16) in 16 or 32 bits, not scaled."""
    if _PLAIN or DTYPE == tl.float32:
        return _plain(pair, CODES).to(DTYPE)
    elif CODES == _FP8:
        if DTYPE == tl.bfloat16:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 s, t, c0, c1;
                mov.b32 c0, 0x7b807b80;
                mov.b32 c1, 0x80008000;
                shl.b32 s, $1, 8;
                shl.b32 t, $1, 4;
                and.b32 t, t, 0x07f007f0;
                lop3.b32 t, s, 0x80008000, t, 0xea;
                fma.rn.bf16x2 $0, t, c0, c1;
                }""",
                "=r,r", [pair], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif FAST:
            return tl.inline_asm_elementwise(
                """{
                .reg .b16 a, b;
                .reg .b32 w;
                prmt.b32 w, $1, 0, 0x4420;
                mov.b32 {a, b}, w;
                cvt.rn.f16x2.e4m3x2 $0, a;
                }""",
                "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 s, t, c0;
                mov.b32 c0, 0x5c005c00;
                shl.b32 s, $1, 8;
                shl.b32 t, $1, 7;
                and.b32 t, t, 0x3f803f80;
                lop3.b32 t, s, 0x80008000, t, 0xea;
                mul.f16x2 $0, t, c0;
                }""",
                "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
    elif DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c0;
            mov.b32 c0, 0xbf80bf80;
            lop3.b32 a, $1, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 b, $1, 0x00800080, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, b, c0, a;
            }""",
            "=r,r", [pair], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 w, c0;
            mov.b32 c0, 0x64806480;
            lop3.b32 w, $1, 0x00ff00ff, 0x64806480, 0x6a;
            sub.f16x2 $0, w, c0;
            }""",
            "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def decode_odd(pair, CODES: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """The second codes of pairs (int16) in 16 or 32 bits, not scaled."""
    if _PLAIN or DTYPE == tl.float32:
        return _plain(pair >> 8, CODES).to(DTYPE)
    elif CODES == _FP8:
        if DTYPE == tl.bfloat16:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 t, c0, c1;
                mov.b32 c0, 0x7b807b80;
                mov.b32 c1, 0x80008000;
                shr.u32 t, $1, 4;
                and.b32 t, t, 0x07f007f0;
                lop3.b32 t, $1, 0x80008000, t, 0xea;
                fma.rn.bf16x2 $0, t, c0, c1;
                }""",
                "=r,r", [pair], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif FAST:
            return tl.inline_asm_elementwise(
                """{
                .reg .b16 a, b;
                .reg .b32 w;
                prmt.b32 w, $1, 0, 0x4431;
                mov.b32 {a, b}, w;
                cvt.rn.f16x2.e4m3x2 $0, a;
                }""",
                "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 t, c0;
                mov.b32 c0, 0x5c005c00;
                shr.u32 t, $1, 1;
                and.b32 t, t, 0x3f803f80;
                lop3.b32 t, $1, 0x80008000, t, 0xea;
                mul.f16x2 $0, t, c0;
                }""",
                "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
    elif DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 w, a, b, c0;
            mov.b32 c0, 0xbf80bf80;
            shr.u32 w, $1, 8;
            lop3.b32 a, w, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 b, w, 0x00800080, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, b, c0, a;
            }""",
            "=r,r", [pair], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 w, c0;
            mov.b32 c0, 0x64806480;
            shr.u32 w, $1, 8;
            lop3.b32 w, w, 0x00ff00ff, 0x64806480, 0x6a;
            sub.f16x2 $0, w, c0;
            }""",
            "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
