"""Integers of 2, 4 or 8 bits with float scales, re-laid for CPUs, 16 outputs side by side (`StripWeight`); activations
in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.kernels.weights.base import Allocate, QuantizedWeight
from quire.kernels.weights.interleaved import AT_ONCE, SPAN, STRIP, deinterleave, interleave, round_blocks

KINDS = ((2, False), (4, False), (4, True), (8, False), (8, True))
"""(bits, whether groups have zero points), in the order of strips.cpp."""
FIRST_KIND = 16
"""The number of the first of them; lower ones are GGUF's (`interleaved.py`)."""
MIDDLE = {2: 1, 4: 8, 8: 128}
"""The zero point of codes without their own."""
LONGEST = 65536
"""Inputs of a block whose sums fit 32 bits."""
BLOCK = 128
"""Inputs that activations are rounded by where a group is longer and the checkpoint leaves them in 16 bits."""


def can_strip(width: int, group: int) -> bool:
    """Whether a matrix of `width` inputs in groups of `group` can be held so."""
    return width % SPAN == 0 and group % SPAN == 0 and width % group == 0


class StripWeight(QuantizedWeight):
    """value = d * (code - zero), by output and group of inputs; 16 outputs (a strip) side by side.

    codes  uint8 [..., strips, spans, bits, 16, 4] (`interleave`)
    d      float32 [..., strips, groups, 16]
    zero   uint8 [..., strips, groups, 16]; None: `MIDDLE`
    order  int64 [in]; input j of the stored matrix is input order[j] of the layer; None: as they come

    Activations are rounded to 8 bits by blocks of `block` inputs. Sums are exact in integers within a block, scaled in
    float32, and added in the order of blocks. The last strip may have outputs of zeros.
    """

    is_weight_only = False

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        outputs: int,
        dtype: torch.dtype,
        bits: int,
        group: int,
        block: int,
        order: torch.Tensor | None = None,
    ) -> None:
        self._tensors, self.order = tensors, order
        self.dtype, self.bits, self.group, self.block = dtype, bits, group, block
        *lead, groups, _ = tensors["d"].shape
        self.shape = torch.Size((*lead[:-1], outputs, groups * group))

    @classmethod
    def allocate(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        allocate: Allocate,
        bits: int,
        group: int,
        zeros: bool = False,
        block: int | None = None,
        ordered: bool = False,
    ) -> StripWeight:
        """One without values. `block`: inputs that activations are rounded by; None: those of a group, at most
        `BLOCK` of them."""
        *lead, outputs, width = shape
        strips = -(-outputs // STRIP)
        if block is None:
            block = group if group <= BLOCK else next(size for size in (BLOCK, 64, SPAN) if group % size == 0)
        if not can_strip(width, group) or group % block or block > LONGEST:
            raise ValueError(f"{width} inputs in groups of {group}, activations by {block}: multiples of {SPAN}")
        tensors = {
            "codes": allocate((*lead, strips, width // SPAN, bits, STRIP, 4), torch.uint8),
            "d": allocate((*lead, strips, width // group, STRIP), torch.float32),
        }
        if zeros:
            tensors["zero"] = allocate((*lead, strips, width // group, STRIP), torch.uint8)
        order = allocate((width,), torch.int64) if ordered else None
        return cls(tensors, outputs, dtype, bits, group, block, order)

    @property
    def number(self) -> int:
        """Of its kind, as packed.cpp counts them."""
        return FIRST_KIND + KINDS.index((self.bits, "zero" in self._tensors))

    def write(self, rows: slice, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> None:
        """Fill some outputs of a matrix from codes uint8 [rows, in] and scales [rows, groups]."""
        first, last, _ = rows.indices(self.shape[-2])
        index = torch.arange(first, last)
        strips, lanes = index // STRIP, index % STRIP
        some = max(STRIP, AT_ONCE // self.shape[-1])
        for strip, lane, own in zip(strips.split(some), lanes.split(some), codes.split(some), strict=True):
            self._rows("codes")[strip, lane] = interleave(own, self.bits)
        self._rows("d")[strips, lanes] = scale.float()
        if zero is not None:
            self._rows("zero")[strips, lanes] = zero

    def _rows(self, name: str) -> torch.Tensor:
        """A matrix's tensor with its strips' outputs second: [strips, 16, …]."""
        return self._tensors[name].movedim(-2 if name == "codes" else -1, 1)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def with_tensors(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> StripWeight:
        return StripWeight(tensors, shape[-2], self.dtype, self.bits, self.group, self.block, self.order)

    def select(self, index: torch.Tensor | slice | int) -> StripWeight:
        """One matrix of a stack."""
        if self.dim() == 2 or not isinstance(index, int):
            raise NotImplementedError("outputs of an interleaved weight are not selected")
        return super().select(index)

    def values(self, outputs: torch.Tensor) -> torch.Tensor:
        """Some outputs' values of a matrix in float32, inputs in the stored order."""
        strips, lanes = outputs // STRIP, outputs % STRIP
        codes = deinterleave(self._rows("codes")[strips, lanes], self.bits).float()
        zero = float(MIDDLE[self.bits])
        d = self._rows("d")[strips, lanes].repeat_interleave(self.group, -1)
        if "zero" in self._tensors:
            return (codes - self._rows("zero")[strips, lanes].float().repeat_interleave(self.group, -1)) * d
        return (codes - zero) * d

    def dequantize(self) -> torch.Tensor:
        if self.dim() == 3:
            return torch.stack([self.select(index).dequantize() for index in range(self.shape[0])])
        stored = self.values(torch.arange(self.shape[0])).to(self.dtype)
        if self.order is None:
            return stored
        values = torch.empty_like(stored)
        values[:, self.order] = stored
        return values

    def embedding(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.values(tokens).to(self.dtype)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        stored = x if self.order is None else x[..., self.order]
        product = F.linear(self.quantize_input(stored), self.values(torch.arange(self.shape[0])))
        return (product if bias is None else product + bias.float()).to(x.dtype)

    def round_input(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x by blocks: (codes int8 [rows, blocks, block], scales float32 [rows, blocks, 1])."""
        return round_blocks(x, self.block)

    def quantize_input(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = self.round_input(x)
        return (codes.float() * scale).flatten(-2)

    @property
    def layout(self) -> tuple[object, ...]:
        return (*super().layout, self.bits, self.group, self.block)
