"""Matrices as GGUF's blocks: rows of bytes, in which codes and scales of 32 or 256 inputs lie together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.kernels.weights.base import Allocate, QuantizedWeight
from quire.kernels.weights.fp4 import Fp4Weight
from quire.kernels.weights.interleaved import InterleavedWeight
from quire.kernels.weights.superblock import KINDS, Plane, SuperblockWeight, set_halves
from quire.quantization.formats.base import StoredPart

BLOCKS = {name: (kind.block, kind.nbytes) for name, kind in KINDS.items()} | {"MXFP4": (32, 17)}
"""The encodings that stay packed: inputs and bytes of a block."""


@dataclass(frozen=True)
class GGUFFormat:
    """One of GGUF's encodings, by its name in the file ("Q4_K")."""

    encoding: str
    interleaved: bool = False
    """Re-laid for a CPU's products, with activations in 8 bits."""

    def describe(self) -> str:
        return f"{self.encoding} (GGUF)"

    def check_cut(self, shape: tuple[int, int], rows: slice, columns: slice) -> None:
        block = BLOCKS[self.encoding][0]
        first, last, _ = columns.indices(shape[1])
        if shape[1] % block or first % block or last % block:
            raise ValueError(
                f"inputs {first} to {last} of {shape[1]} begin or end inside a block: {self.encoding} has a scale per "
                f"{block} inputs, so each rank needs a multiple of {block} of them"
            )

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, starts: Sequence[int] = (0,)
    ) -> QuantizedWeight:
        if self.encoding == "MXFP4":
            return Fp4Weight.allocate(shape, dtype, allocate)
        layout = InterleavedWeight if self.interleaved else SuperblockWeight
        return layout.allocate(shape, dtype, allocate, KINDS[self.encoding])

    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]:
        block, nbytes = BLOCKS[self.encoding]
        first, last, _ = columns.indices(shape[1])
        kept = slice(first // block * nbytes, last // block * nbytes)
        return {
            "weight": StoredPart(
                (shape[0], shape[1] // block * nbytes),
                (torch.uint8,),
                (rows, kept),
                exact=lambda: self._random(shape),
            )
        }

    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight, rows: slice) -> None:
        blocks = read["weight"]
        if isinstance(weight, (SuperblockWeight, InterleavedWeight)):
            weight.write(rows, blocks)
            return
        assert isinstance(weight, Fp4Weight)
        raw = blocks.unflatten(-1, (-1, BLOCKS["MXFP4"][1]))
        weight.write(rows, Plane(4, 16).unpack(raw[..., 1:]).flatten(-2), raw[..., 0])

    def _random(self, shape: tuple[int, int]) -> torch.Tensor:
        """Codes of the full range and scales for values of about 0.02."""
        block, nbytes = BLOCKS[self.encoding]
        generator = torch.Generator().manual_seed(shape[0] * 65537 + shape[1])
        raw = torch.randint(
            0, 256, (shape[0], shape[1] // block, nbytes), dtype=torch.uint8, generator=generator
        )  # fmt: skip
        if self.encoding == "MXFP4":
            raw[..., 0] = 119  # 2^-8
        else:
            set_halves(KINDS[self.encoding], raw, 0.02)
        return raw.flatten(1)
