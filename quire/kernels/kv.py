"""How keys and values are stored: in the activations' dtype, or as 8-bit codes with scales.

A stored value is code * scale. `reference.py` writes with `QuantizedKV.write` and the torch backend reads with
`decode`: these define what the kernels in `triton/` and the block layout mean.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

E4M3_MAX = 448.0
INT8_MAX = 127.0
LEAST_SCALE = 1e-10
"""Scales of a token and head are at least this: a row of zeros must not divide by zero."""
ALIGNMENT = 16
"""Bytes. Codes and scales of a layer begin at a multiple of this, so that kernels can copy 16 bytes at a time."""


class _Named(NamedTuple):
    codes: str
    per_token: bool


_FORMATS = {
    "fp8": _Named("fp8", False),
    "fp8_e4m3": _Named("fp8", False),
    "fp8_per_token_head": _Named("fp8", True),
    "int8_per_token_head": _Named("int8", True),
}


@dataclass(frozen=True)
class KVFormat:
    """How a cache stores keys and values."""

    dtype: torch.dtype
    """Of the keys and values that are written and read; also how they are stored if there are no codes."""
    codes: str | None = None
    """None: stored as they are; fp8: e4m3; int8: symmetric."""
    per_token: bool = False
    """With codes: whether each token and head has its own scale, computed when it is written. If not, each layer and
    head has one."""

    @classmethod
    def named(cls, name: str, dtype: torch.dtype) -> KVFormat:
        """The format called `name` in `kv_cache_dtype`; `auto` and names of dtypes: stored as they are."""
        named = _FORMATS.get(name)
        return cls(dtype) if named is None else cls(dtype, named.codes, named.per_token)

    @property
    def name(self) -> str:
        """The format's name in `kv_cache_dtype`; of values stored as they are, their dtype's."""
        if self.codes is None:
            return str(self.dtype).removeprefix("torch.")
        return f"{self.codes}_per_token_head" if self.per_token else self.codes

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the tensors in memory. e4m3 codes are bytes there: torch cannot copy blocks of its own e4m3 tensors."""
        return {None: self.dtype, "fp8": torch.uint8, "int8": torch.int8}[self.codes]

    @property
    def largest_code(self) -> float:
        """The largest magnitude of a code."""
        return INT8_MAX if self.codes == "int8" else E4M3_MAX

    def code_bytes(self, kv_heads: int, block_size: int, head_dim: int) -> int:
        """Bytes of a layer's keys and values in a block, without scales."""
        size = 2 * kv_heads * block_size * head_dim * self.stored_dtype.itemsize
        return size if self.codes is None else _aligned(size)

    def layer_bytes(self, kv_heads: int, block_size: int, head_dim: int) -> int:
        """Bytes of a layer's part of a block."""
        scales = _aligned(2 * kv_heads * block_size * 4) if self.per_token else 0
        return self.code_bytes(kv_heads, block_size, head_dim) + scales


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class QuantizedKV:
    """One layer's cache in few bits. Has the shape, dtype and device that the cache would have if it held the values
    themselves: [blocks, 2, kv_heads, block_size, head_dim]."""

    format: KVFormat
    codes: torch.Tensor
    """[blocks, 2, kv_heads, block_size, head_dim] uint8 (the bits of e4m3) or int8."""
    scales: torch.Tensor | None
    """float32; [blocks, 2, kv_heads, block_size] of each token, or [2, kv_heads] of the layer's keys and values. A
    cache does not know the scales of layers (None): the attention layer, whose checkpoint has them, adds them."""
    unit_scales: bool = False
    """Whether the scales are known to be 1: a code is its value."""
    mixed: bool = False
    """Whether blocks may hold other data than codes before they belong to a layer like this: it could read as NaN."""

    @classmethod
    def of_layer(
        cls, blocks: torch.Tensor, layer: int, format: KVFormat, kv_heads: int, block_size: int, head_dim: int
    ) -> QuantizedKV:
        """A layer's part of `blocks` [blocks, bytes] uint8: codes of all its keys, of all its values, then scales."""
        each = format.layer_bytes(kv_heads, block_size, head_dim)
        inner = (kv_heads * block_size * head_dim, block_size * head_dim, head_dim, 1)
        shape = (len(blocks), 2, kv_heads, block_size, head_dim)
        stride, begin = blocks.stride(0), blocks.storage_offset() + layer * each
        codes = blocks.as_strided(shape, (stride, *inner), begin).view(format.stored_dtype)
        if not format.per_token:
            return cls(format, codes, None)
        begin += format.code_bytes(kv_heads, block_size, head_dim)
        words = blocks.as_strided((*shape[:4], 4), (stride, *(4 * step // head_dim for step in inner[:3]), 1), begin)
        return cls(format, codes, words.view(torch.float32).squeeze(-1))

    def scaled(self, scales: torch.Tensor, unit: bool = False) -> QuantizedKV:
        """The same with the layer's scales [2, kv_heads]; `unit`: they are known to be 1."""
        return replace(self, scales=scales, unit_scales=unit)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.format.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def stride(self) -> tuple[int, ...]:
        """Strides of the codes."""
        return self.codes.stride()

    @functools.cached_property
    def pairs(self) -> torch.Tensor:
        """Codes of adjacent dimensions, two as a 16-bit integer: [blocks, 2, kv_heads, block_size, head_dim / 2]."""
        return self.codes.view(torch.int16)

    def write(self, half: int, values: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Store keys (`half` 0) or values (1), [tokens, kv_heads, head_dim], of tokens in these blocks and slots."""
        assert self.scales is not None
        if self.format.per_token:
            scales = token_scales(values, self.format)
            self.scales[blocks, half, :, offsets] = scales
        else:
            scales = self.scales[half]
        self.codes[blocks, half, :, offsets] = encode(values, scales, self.format).view(self.codes.dtype)

    def gather(self, half: int, blocks: torch.Tensor) -> torch.Tensor:
        """Keys or values of `blocks` [rows, n], as [kv_heads, rows, n * block_size, head_dim] float32."""
        assert self.scales is not None
        # Heads lead, so that blocks and their slots are adjacent and flatten without a second copy.
        codes = self.codes[:, half].transpose(0, 1)[:, blocks].flatten(2, 3)
        if self.format.per_token:
            scales = self.scales[:, half].transpose(0, 1)[:, blocks].flatten(2, 3)
        else:
            scales = self.scales[half][:, None, None]
        return decode(codes, scales, self.format)


LayerKV = torch.Tensor | QuantizedKV
"""One layer's cache, [blocks, 2, kv_heads, block_size, head_dim]."""


def format_of(kv: LayerKV) -> KVFormat:
    """How a layer's cache is stored."""
    return kv.format if isinstance(kv, QuantizedKV) else KVFormat(kv.dtype)


def token_scales(values: torch.Tensor, format: KVFormat) -> torch.Tensor:
    """Scales of values [..., head_dim], [...] float32: the largest magnitude becomes the largest code."""
    largest = _finite(values).abs().amax(-1)
    # By a tensor: on a GPU torch multiplies by the reciprocal of a number, which rounds twice.
    return (largest / torch.full_like(largest, format.largest_code)).clamp(min=LEAST_SCALE)


def encode(values: torch.Tensor, scales: torch.Tensor, format: KVFormat) -> torch.Tensor:
    """The nearest codes of values [..., head_dim], given scales [...]; too large values get the largest code."""
    scaled = (_finite(values) / scales.unsqueeze(-1)).clamp(-format.largest_code, format.largest_code)
    if format.codes == "int8":
        return scaled.round().to(torch.int8)
    return scaled.to(torch.float8_e4m3fn)


def decode(codes: torch.Tensor, scales: torch.Tensor, format: KVFormat) -> torch.Tensor:
    """float32 values of codes [..., head_dim] as they are in memory, given scales [...]."""
    if format.codes == "fp8":
        codes = codes.view(torch.float8_e4m3fn)
    return codes.float() * scales.unsqueeze(-1)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """In float32; NaN becomes 0, and infinities the largest numbers: one bad token must not reach others' sums."""
    return values.float().nan_to_num()
