"""Integers of 4 or 8 bits with a scale per group of inputs (`GroupedWeight`); activations stay as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.weights.base import Allocate, QuantizedWeight

SPAN = 128
"""Inputs whose 4-bit codes are packed together, at most."""


def span_of(width: int) -> int:
    """Inputs whose 4-bit codes are packed together in a matrix of `width` inputs."""
    return next(span for span in (128, 64, 32, 16, 8, 4, 2) if width % span == 0)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 [..., in] as [..., in / 2]: byte j of a span holds value j (low) and value j + span / 2."""
    span = span_of(codes.shape[-1])
    low, high = codes.unflatten(-1, (-1, 2, span // 2)).unbind(-2)
    return (low | (high << 4)).flatten(-2)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`."""
    half = span_of(2 * packed.shape[-1]) // 2
    pairs = packed.unflatten(-1, (-1, half))
    return torch.stack((pairs & 15, pairs >> 4), -2).flatten(-3)


class GroupedWeight(QuantizedWeight):
    """value = (code - zero) * scale, or code * scale + minimum, by output and group of `group` inputs.

    codes   uint8 [..., out, in] (8 bits) or [..., out, in / 2] (4 bits, `pack_nibbles`); fewer bits are held as 4
    scale   [..., out, groups], in the activations' dtype
    zero    uint8 [..., out, groups]; None: 8 (4 bits) or 128 (8 bits)
    minimum [..., out, groups], like scale; in place of zero
    order   int32 [in]; input j of the stored matrix is input order[j] of the layer; None: as they come
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
    ) -> None:
        self.codes, self.scale, self.zero, self.minimum, self.order = codes, scale, zero, minimum, order
        self.dtype, self.bits, self.group = dtype, bits, group
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
        return cls(codes, allocate(groups, dtype), dtype, bits, group, zero, minimum, order)

    def write(
        self,
        index: slice | int,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        minimum: torch.Tensor | None = None,
    ) -> None:
        """Fill some outputs (of a stack: a matrix) from unpacked codes uint8 [..., in]."""
        self.codes[index] = (pack_nibbles(codes) if self.bits == 4 else codes).to(self.codes.device)
        for into, values in ((self.scale, scale), (self.zero, zero), (self.minimum, minimum)):
            if into is not None and values is not None:
                into[index] = values.to(into.device, into.dtype)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        held = {"codes": self.codes, "scale": self.scale, "zero": self.zero, "minimum": self.minimum}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def with_tensors(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> GroupedWeight:
        return GroupedWeight(
            tensors["codes"], tensors["scale"], self.dtype, self.bits, self.group, tensors.get("zero"),
            tensors.get("minimum"), self.order,
        )  # fmt: skip

    def dequantize(self) -> torch.Tensor:
        stored = self.dequantize_stored()
        if self.order is None:
            return stored
        values = torch.empty_like(stored)
        values[..., self.order.long()] = stored
        return values

    def dequantize_stored(self) -> torch.Tensor:
        """The values with inputs in the stored order."""
        codes = (unpack_nibbles(self.codes) if self.bits == 4 else self.codes).float()
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
        return (*super().layout, self.bits, self.group, self.order is not None)
