"""Vectors as bytes, for base64 and binary responses: in several number formats and either byte order."""

from __future__ import annotations

import base64
import functools
import sys
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

NumberFormat = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
ByteOrder = Literal["native", "big", "little"]

_EXPONENT_BITS = {"fp8_e4m3": 4, "fp8_e5m2": 5}
_MOST_FINITE = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}
"""The code of the largest finite number; the next one is NaN in one format and infinity in the other."""


class VectorPlace(msgspec.Struct):
    """Where the vector of one input is in a binary response."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: list[int]


def as_bytes(vector: NDArray[np.float32], kind: NumberFormat = "float32", order: ByteOrder = "native") -> bytes:
    """The vector's numbers, rounded to the nearest."""
    if kind in _EXPONENT_BITS:
        return _eight_bits(vector, kind).tobytes()
    order = sys.byteorder if order == "native" else order
    sign = "<" if order == "little" else ">"
    if kind == "bfloat16":
        return _upper_half(vector).astype(f"{sign}u2").tobytes()
    return vector.astype(f"{sign}f{4 if kind == 'float32' else 2}").tobytes()


def as_base64(vector: NDArray[np.float32], kind: NumberFormat = "float32", order: ByteOrder = "native") -> str:
    """The same as text; by default as OpenAI's clients decode it, on the machines that they run on."""
    return base64.b64encode(as_bytes(vector, kind, order)).decode()


def joined(
    vectors: Sequence[NDArray[np.float32]], kind: NumberFormat, order: ByteOrder
) -> tuple[bytes, list[VectorPlace]]:
    """All vectors one after the other, and where each is."""
    parts, places, start = [], [], 0
    for index, vector in enumerate(vectors):
        parts.append(as_bytes(vector, kind, order))
        end = start + len(parts[-1])
        places.append(VectorPlace(index, kind, order, start, end, list(vector.shape)))
        start = end
    return b"".join(parts), places


def _upper_half(vector: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bfloat16: the upper bits of a float32, ties to even."""
    bits = vector.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(vector), 0x7FC0, rounded).astype(np.uint16)


def _eight_bits(vector: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """The code of the nearest number of a format of 8 bits, ties to even."""
    middles = _middles(kind)
    size = np.abs(vector.astype(np.float64))
    codes = np.searchsorted(middles, size)
    tie = middles[np.minimum(codes, len(middles) - 1)] == size
    codes = codes + (tie & (codes % 2 == 1))
    codes = np.where(np.isnan(vector), 0x7F, codes)
    return (codes + 0x80 * np.signbit(vector)).astype(np.uint8)


@functools.cache
def _middles(kind: str) -> NDArray[np.float64]:
    """Between each two neighbours of the positive numbers, the last of which stands for what is too large."""
    bits, most = _EXPONENT_BITS[kind], _MOST_FINITE[kind]
    fraction_bits = 7 - bits
    codes = np.arange(most + 2)
    exponents, fractions = codes >> fraction_bits, (codes & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    bias = (1 << (bits - 1)) - 1
    values = np.where(exponents == 0, fractions * 2.0 ** (1 - bias), (1 + fractions) * 2.0 ** (exponents - bias))
    return (values[1:] + values[:-1]) / 2
