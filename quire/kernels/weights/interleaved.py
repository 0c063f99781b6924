"""GGUF's blocks re-laid for CPUs, 16 outputs side by side (`InterleavedWeight`); activations in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.kernels.weights.base import Allocate, QuantizedWeight
from quire.kernels.weights.superblock import KINDS, BlockKind, Plane, block_values, split_blocks

STRIP = 16
"""Outputs side by side: the 32-bit lanes of the widest vector, and whole vectors of narrower ones."""
SPAN = 32
"""Inputs whose codes are unpacked at once."""
FOURS = SPAN // 4
AT_ONCE = 1 << 20
"""Values re-laid at a time: enough for vectors, few enough that temporaries stay in cache and raise no peak."""
LARGEST_CODE = 127
SMALLEST = 1e-30
"""A block of activations whose largest number is smaller counts as zeros."""


def interleave(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [rows, in] as bytes [rows, spans, bits, 4]: vector v of a span has its fours v, v + bits, … at bits
    0, bits, … of each byte."""
    fours = codes.unflatten(-1, (-1, 8 // bits, bits, 4))
    packed = fours[..., 0, :, :].clone()
    for place in range(1, 8 // bits):
        packed |= fours[..., place, :, :] << bits * place
    return packed


def deinterleave(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of `interleave`."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], -3).flatten(-4)


def round_blocks(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x in 8 bits by blocks: (codes int8 [rows, blocks, block], scales float32 [rows, blocks, 1])."""
    blocks = x.float().unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1, keepdim=True)
    is_number = blocks.isfinite().all(-1, keepdim=True)
    is_zero = (largest < SMALLEST) | ~is_number
    # By a tensor: torch divides a number by multiplying with the reciprocal, which rounds twice.
    inverse = torch.where(is_zero, 0.0, torch.full_like(largest, LARGEST_CODE) / largest)
    codes = torch.where(is_zero, 0.0, blocks * inverse).round().to(torch.int8)
    scale = torch.where(is_zero, 0.0, largest / torch.full_like(largest, LARGEST_CODE))
    return codes, torch.where(is_number, scale, torch.nan)


class InterleavedWeight(QuantizedWeight):
    """A matrix in one of `KINDS`, or a stack of them; 16 outputs (a strip) side by side.

    codes, high    uint8 [..., strips, spans, bits, 16, 4] (`interleave`)
    scale, minimum int8 or uint8 [..., strips, groups, 16]
    d, m           float16 [..., strips, blocks, 16]

    Activations are rounded to 8 bits by blocks of 32 inputs, or 256 where the weight's blocks are. Sums are exact in
    integers within a block, scaled in float32, and added in the order of blocks. The last strip may have outputs of
    zeros.
    """

    is_weight_only = False

    def __init__(self, kind: BlockKind, tensors: dict[str, torch.Tensor], outputs: int, dtype: torch.dtype) -> None:
        self.kind, self.dtype = kind, dtype
        self._tensors = tensors
        *lead, blocks, _ = tensors["d"].shape
        self.shape = torch.Size((*lead[:-1], outputs, blocks * kind.block))

    @classmethod
    def allocate(
        cls, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, kind: BlockKind
    ) -> InterleavedWeight:
        """One without values."""
        *lead, outputs, width = shape
        strips = -(-outputs // STRIP)
        planes = {"codes": kind.low, "high": kind.high}
        tensors = {}
        for name, (element, ratio) in kind.held.items():
            plane = planes.get(name)
            held = (width // ratio, STRIP) if plane is None else (width // SPAN, plane.bits, STRIP, 4)
            tensors[name] = allocate((*lead, strips, *held), element)
        return cls(kind, tensors, outputs, dtype)

    @property
    def number(self) -> int:
        """Of its kind, as packed.cpp counts them."""
        return list(KINDS).index(self.kind.name)

    def write(self, rows: slice, blocks: torch.Tensor) -> None:
        """Fill some outputs of a matrix from the file's blocks, uint8 [rows, bytes]."""
        first, last, _ = rows.indices(self.shape[-2])
        some = max(STRIP, AT_ONCE // self.shape[-1])
        for index, own in zip(torch.arange(first, last).split(some), blocks.split(some), strict=True):
            for name, part in split_blocks(self.kind, own).items():
                self._rows(name)[index // STRIP, index % STRIP] = self._relaid(name, part)

    def _relaid(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """A field of some outputs, as it lies in a strip."""
        plane = self._plane(name)
        return part if plane is None else interleave(plane.unpack(part), plane.bits)

    def _plane(self, name: str) -> Plane | None:
        return {"codes": self.kind.low, "high": self.kind.high}.get(name)

    def _rows(self, name: str) -> torch.Tensor:
        """A matrix's tensor with its strips' outputs second: [strips, 16, …]."""
        return self._tensors[name].movedim(-2 if self._plane(name) else -1, 1)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def with_tensors(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> InterleavedWeight:
        return InterleavedWeight(self.kind, tensors, shape[-2], self.dtype)

    def select(self, index: torch.Tensor | slice | int) -> InterleavedWeight:
        """One matrix of a stack."""
        if self.dim() == 2 or not isinstance(index, int):
            raise NotImplementedError("outputs of an interleaved weight are not selected")
        return super().select(index)

    def values(self, outputs: torch.Tensor) -> torch.Tensor:
        """Some outputs' values, in float32."""
        fields = {name: self._rows(name)[outputs // STRIP, outputs % STRIP] for name in self._tensors}
        codes = deinterleave(fields["codes"], self.kind.low.bits)
        if self.kind.high is not None:
            codes = codes | (deinterleave(fields["high"], self.kind.high.bits) << self.kind.low.bits)
        return block_values(self.kind, codes, fields)

    def dequantize(self) -> torch.Tensor:
        if self.dim() == 3:
            return torch.stack([self.select(index).dequantize() for index in range(self.shape[0])])
        return self.values(torch.arange(self.shape[0])).to(self.dtype)

    def embedding(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.values(tokens).to(self.dtype)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = F.linear(self.quantize_input(x), self.values(torch.arange(self.shape[0])))
        return (product if bias is None else product + bias.float()).to(x.dtype)

    def round_input(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x by blocks: (codes int8 [rows, blocks, block], scales float32 [rows, blocks, 1])."""
        return round_blocks(x, self.kind.block)

    def quantize_input(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = self.round_input(x)
        return (codes.float() * scale).flatten(-2)

    @property
    def layout(self) -> tuple[object, ...]:
        return (*super().layout, self.kind.name)
