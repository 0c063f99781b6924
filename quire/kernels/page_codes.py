"""Pages of keys and values in 8 bits, as host memory and disk keep them if `kv_tier_dtype` says so.

A page is cut into vectors: the keys, or the values, of a token and head. A vector is kept as int8 codes and its largest
magnitude m, in the dtype of the page, in which it is exact. A value is code * m / 127, rounded to that dtype.

16-bit pages that were encoded and decoded once are encoded to the same bytes again: m comes back as it was, and other
values are at most 2^-9 of themselves away from their code, which is less than half a code. So a page loses nothing more
however often it moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.kv import ALIGNMENT, INT8_MAX, LEAST_SCALE


@dataclass(frozen=True)
class PageCodes:
    """How a page of so many numbers is encoded: codes of all of it, then the largest magnitudes of its vectors."""

    dtype: torch.dtype
    numbers: int
    """Of a page."""
    vector: int
    """Numbers that share a scale; a divisor of `numbers`."""

    @property
    def vectors(self) -> int:
        """Of a page."""
        return self.numbers // self.vector

    @property
    def largest_at(self) -> int:
        """Where in an encoded page the largest magnitudes begin, in bytes."""
        return _aligned(self.numbers)

    @property
    def encoded_bytes(self) -> int:
        """Of an encoded page."""
        return self.largest_at + _aligned(self.vectors * self.dtype.itemsize)

    def views(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [pages, vectors, vector] int8 and largest magnitudes [pages, vectors] in `encoded` [pages, bytes]."""
        codes = encoded[:, : self.numbers].view(torch.int8).unflatten(1, (self.vectors, self.vector))
        end = self.largest_at + self.vectors * self.dtype.itemsize
        return codes, encoded[:, self.largest_at : end].view(self.dtype)

    def encode(self, pages: torch.Tensor, encoded: torch.Tensor) -> None:
        """Encode pages [n, numbers] into `encoded` [n, bytes] uint8. A vector with NaN or infinities comes back as
        NaN."""
        values = pages.view(-1, self.vectors, self.vector).float()
        largest = values.abs().amax(-1)
        codes, kept = self.views(encoded)
        scaled = values / _scales(largest).unsqueeze(-1)
        codes.copy_(scaled.nan_to_num(0.0).round().to(torch.int8))
        kept.copy_(largest)

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        """The pages [n, numbers] of `encoded` [n, bytes]."""
        codes, largest = self.views(encoded)
        return (codes.float() * _scales(largest.float()).unsqueeze(-1)).to(self.dtype).flatten(1)


def _scales(largest: torch.Tensor) -> torch.Tensor:
    # By a tensor: on a GPU torch multiplies by the reciprocal of a number, which rounds twice.
    return (largest / torch.full_like(largest, INT8_MAX)).clamp(min=LEAST_SCALE)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
