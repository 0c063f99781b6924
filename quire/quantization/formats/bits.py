"""Integers and exponents as checkpoints pack them, unpacked on the device that holds them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight nibbles of a word holds column 0, 1, …: AWQ's order within an int32."""


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
    """int32 words [..., n / 8] of 4-bit values in AWQ's order, as uint8 [..., n]."""
    nibbles = unpack_dense(words, 4, words.shape[-1] * 8)
    return nibbles.unflatten(-1, (-1, 8))[..., list(AWQ_PLACES)].flatten(-2)


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
