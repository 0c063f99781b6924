"""Which products a kind of quantized weight has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.base import CompilableKernel
from quire.kernels.triton.quantized.base import QuantizedProducts
from quire.kernels.weights.base import QuantizedWeight, SplitWeight
from quire.registry import resolve

_KNOWN: dict[str, str] = {
    "SuperblockWeight": "quire.kernels.triton.quantized.superblock.SuperblockProducts",
    "ScaledWeight": "quire.kernels.triton.quantized.scaled.ScaledProducts",
    "BlockScaledWeight": "quire.kernels.triton.quantized.scaled.ScaledProducts",
    "GroupedWeight": "quire.kernels.triton.quantized.weight_only.WeightOnlyProducts",
    "Fp4Weight": "quire.kernels.triton.quantized.weight_only.WeightOnlyProducts",
}
"""Dotted paths of the products, by the name of the layout's class."""


class ReferenceProducts(QuantizedProducts):
    """Products in plain torch, for layouts without kernels."""

    def linear(self, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return weight.linear(x, bias)


class SplitProducts(QuantizedProducts):
    """Products with the parts of a mixed weight, one after the other."""

    def linear(self, x: torch.Tensor, weight: SplitWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        biases = [None] * len(weight.parts) if bias is None else bias.split([part.shape[0] for part in weight.parts])
        return torch.cat([self.ops.linear(x, part, own) for part, own in zip(weight.parts, biases, strict=True)], -1)

    def kernels_of(
        self, weight: SplitWeight, normed: bool, gated: bool, bias: bool, max_rows: int
    ) -> Sequence[CompilableKernel]:
        return [job for part in weight.parts for job in self.ops.kernels_of(part, False, False, bias, max_rows)]


def products_of(weight: QuantizedWeight) -> type[QuantizedProducts]:
    """The class of the products with this weight."""
    if isinstance(weight, SplitWeight):
        return SplitProducts
    path = _KNOWN.get(type(weight).__name__)
    return ReferenceProducts if path is None else resolve("quantized products", path, {})
