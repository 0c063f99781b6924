"""Integers of 4 or 8 bits with a scale per group of inputs (`GroupedWeight`); activations stay as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.weights.base import Allocate
from quire.kernels.weights.lines import WordLines
from quire.kernels.weights.packing import pack, unpack, word_span


class GroupedWeight(WordLines):
    """value = (code - zero) * scale, or code * scale + minimum, by output and group of `group` inputs.

    codes   uint8 [..., out, in] (8 bits) or [..., out, in / 2] (4 bits), packed by `packing.pack`; fewer bits are held
            as 4
    scale   [..., out, groups], in the activations' dtype
    zero    uint8 [..., out, groups]; None: 8 (4 bits) or 128 (8 bits)
    minimum [..., out, groups], like scale; in place of zero
    order   int32 [in]; input j of the stored matrix is input order[j] of the layer; None: as they come

    Of matrices with codes in words, eight outputs lie side by side (`WordLines`).
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
        bits: int,
        group: int,
        zero: torch.Tensor | None = None,
        minimum: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        span: int | None = None,
    ) -> None:
        """`span`: that of codes packed as words; None: they are packed as bytes."""
        self.codes, self.scale, self.zero, self.minimum, self.order = codes, scale, zero, minimum, order
        self.dtype, self.bits, self.group, self.span = dtype, bits, group, span
        self.shape = torch.Size((*codes.shape[:-1], codes.shape[-1] * (8 // bits)))

    @classmethod
    def allocate(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        allocate: Allocate,
        bits: int,
        group: int,
        zeros: bool = False,
        minimums: bool = False,
        ordered: bool = False,
    ) -> GroupedWeight:
        """One without values. `zeros`, `minimums`, `ordered`: which of the optional tensors it has."""
        *lead, width = shape
        codes = allocate((*lead, width * bits // 8), torch.uint8)
        groups = (*lead, -(-width // group))
        zero = allocate(groups, torch.uint8) if zeros else None
        minimum = allocate(groups, dtype) if minimums else None
        order = allocate((width,), torch.int32) if ordered else None
        span = word_span(width, bits, group) if len(lead) == 1 else None
        made = cls(codes, allocate(groups, dtype), dtype, bits, group, zero, minimum, order, span)
        made.side_by_side = cls.lies_side_by_side(shape[-2], span)
        return made

    def write(
        self,
        index: slice | int,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        minimum: torch.Tensor | None = None,
    ) -> None:
        """Fill some outputs (of a stack: a matrix) from unpacked codes uint8 [..., in]."""
        values = {"codes": pack(codes, self.bits, self.span), "scale": scale, "zero": zero, "minimum": minimum}
        self._fill(index, {name: each for name, each in values.items() if each is not None and name in self.tensors})

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        held = {"codes": self.codes, "scale": self.scale, "zero": self.zero, "minimum": self.minimum}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def with_tensors(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> GroupedWeight:
        made = GroupedWeight(
            tensors["codes"], tensors["scale"], self.dtype, self.bits, self.group, tensors.get("zero"),
            tensors.get("minimum"), self.order, self.span,
        )  # fmt: skip
        made.side_by_side = self.side_by_side
        return made

    def dequantize(self) -> torch.Tensor:
        stored = self.dequantize_stored()
        if self.order is None:
            return stored
        values = torch.empty_like(stored)
        values[..., self.order.long()] = stored
        return values

    def dequantize_stored(self) -> torch.Tensor:
        """The values with inputs in the stored order."""
        if self.side_by_side:
            return self.lined_up().dequantize_stored()
        codes = unpack(self.codes, self.bits, self.span).float()
        width = self.shape[-1]

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.float().repeat_interleave(self.group, -1)[..., :width]

        if self.minimum is not None:
            # The product of a code and a 16-bit scale is exact in float32.
            return (codes * spread(self.scale) + spread(self.minimum)).to(self.dtype)
        zero = float(1 << (self.bits - 1)) if self.zero is None else spread(self.zero)
        return ((codes - zero) * spread(self.scale)).to(self.dtype)

    @property
    def layout(self) -> tuple[object, ...]:
        return (*super().layout, self.bits, self.group, self.order is not None, self.span, self.side_by_side)
