"""Ternary matrices as transformers stores those of BitNet b1.58: four codes a byte, one scale a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.errors import CheckpointError
from quire.kernels.weights.base import Allocate, QuantizedWeight
from quire.kernels.weights.scaled import ScaledWeight
from quire.quantization.formats import checks
from quire.quantization.formats.base import StoredPart
from quire.quantization.formats.scaled import SCALAR_SHAPES, WHOLE

ROWS = 4
"""Outputs whose codes share a byte: output r of a matrix of 4 n is in row r mod n, at bit 2 (r div n)."""


@dataclass(frozen=True)
class BitNetFormat:
    """`weight` uint8 [out / 4, in] of codes 0, 1, 2 (-1, 0, 1) and `weight_scale`; activations in 8 bits by token.

    Held as 8-bit codes, whose products every device has.
    """

    divides: bool = True
    """Whether results are divided by the scale (`bitlinear`), not multiplied with it (`autobitlinear`)."""

    def describe(self) -> str:
        return "ternary, one scale, activations quantized by token (BitNet)"

    def check_cut(self, shape: tuple[int, int], rows: slice, columns: slice) -> None:
        if shape[0] % ROWS:
            raise ValueError(f"{shape[0]} outputs: their number must be a multiple of {ROWS}")
        if checks.span(rows, shape[0]) != (0, shape[0]):
            raise ValueError(
                "the outputs of a BitNet matrix cannot be cut: each byte has codes of four distant ones; use one "
                "tensor-parallel rank"
            )

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, starts: Sequence[int] = (0,)
    ) -> ScaledWeight:
        return ScaledWeight.allocate(shape, dtype, allocate, torch.int8)

    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]:
        packed = (shape[0] // ROWS, shape[1])
        typical = 0.02 * 1.2247  # of -1, 0 and 1, each as often, the root mean square is 0.816
        return {
            "weight": StoredPart(packed, (torch.uint8,), (WHOLE, columns), exact=lambda: _random(packed)),
            "weight_scale": StoredPart(
                (1,), checks.FLOATS, sample=1 / typical if self.divides else typical, also=SCALAR_SHAPES
            ),
        }

    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight, rows: slice) -> None:
        assert isinstance(weight, ScaledWeight)
        read = checks.on(weight.device, read)
        packed = checks.need(read, "weight")
        scale = checks.check_scale("weight_scale", checks.need(read, "weight_scale")).float().reshape(())
        codes = torch.cat([(packed >> shift) & 3 for shift in range(0, 8, 2)])
        if bool((codes == 3).any()):
            raise CheckpointError("weight: has the code 3, and ternary codes are 0, 1 and 2")
        weight.codes[rows] = codes.to(torch.int8) - 1
        weight.scale[rows] = 1 / scale if self.divides else scale


def _random(shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 65537 + shape[1])
    codes = torch.randint(0, 3, (ROWS, *shape), dtype=torch.uint8, generator=generator)
    return codes[0] | (codes[1] << 2) | (codes[2] << 4) | (codes[3] << 6)
