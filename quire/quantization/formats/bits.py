"""Integers and exponents as checkpoints pack them, unpacked on the device that holds them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def words_of(values: int, bits: int) -> int:
    """int32 words of a dense stream of that many values."""
    return -(-values * bits // 32)


def sparse_words_of(values: int, bits: int) -> int:
    """int32 words if no value straddles two of them."""
    return -(-values // (32 // bits))


def unpack_dense(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 words [..., n] that hold a little-endian stream of `bits`-wide values, low first, as uint8 [..., count].

    Eight values are `bits` bytes, whatever the width, so all widths are read byte by byte.
    """
    data = words.contiguous().view(torch.uint8)
    if bits in (4, 8):
        return (unpack_pairs(data) if bits == 4 else data)[..., :count]
    data = F.pad(data, (0, -data.shape[-1] % bits)).unflatten(-1, (-1, bits))
    values = torch.empty((*data.shape[:-1], 8), dtype=torch.uint8, device=words.device)
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        value = data[..., byte] >> shift
        if shift + bits > 8:
            value = value | (data[..., byte + 1] << (8 - shift))
        values[..., place] = value & ((1 << bits) - 1)
    return values.flatten(-2)[..., :count]


def unpack_sparse(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The same if a word holds 32 // bits whole values and its top bits are unused."""
    shifts = torch.arange(0, 32 - bits + 1, bits, device=words.device, dtype=torch.int32)
    values = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.to(torch.uint8).flatten(-2)[..., :count]


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 words [k, n / 8] of 4-bit values, packed along the columns in AWQ's order, transposed: uint8 [n, k].

    The low half of a word holds columns 0, 2, 4 and 6, the high half 1, 3, 5 and 7.
    """
    columns = words.t().contiguous()  # Words first: a transpose of bytes is slow.
    values = torch.empty((columns.shape[0], 8, columns.shape[1]), dtype=torch.uint8, device=words.device)
    for column in range(8):
        values[:, column] = (columns >> (16 * (column % 2) + 4 * (column // 2))) & 15
    return values.flatten(0, 1)


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n / 2] as 4-bit values [..., n], the first of two in the low half."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def exponents(scale: torch.Tensor) -> torch.Tensor:
    """The bytes of E8M0 exponents (uint8, or float8_e8m0fnu where torch knows it)."""
    return scale if scale.dtype is torch.uint8 else scale.view(torch.uint8)


def powers_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^(exponent - 127) in float32, exactly, of uint8 exponents below 255 (which means NaN)."""
    raw = exponent.to(torch.int32) << 23
    # 2^-127 is subnormal.
    return torch.where(raw == 0, torch.full_like(raw, 1 << 22), raw).view(torch.float32)


def random_exponents(shape: tuple[int, ...], low: int) -> torch.Tensor:
    """Exponents for random weights: `low` and the next, in turn."""
    return (torch.arange(math.prod(shape), dtype=torch.int64) % 2 + low).to(torch.uint8).reshape(shape)
