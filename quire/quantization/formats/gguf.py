"""Matrices as GGUF's blocks: rows of bytes, in which codes and scales of 32 or 256 inputs lie together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.kernels.weights.base import Allocate, QuantizedWeight
from quire.kernels.weights.fp4 import Fp4Weight
from quire.kernels.weights.interleaved import InterleavedWeight
from quire.kernels.weights.strips import StripWeight
from quire.kernels.weights.superblock import KINDS, Plane, SuperblockWeight, set_halves
from quire.quantization.formats.base import StoredPart

BLOCKS = {name: (kind.block, kind.nbytes) for name, kind in KINDS.items()} | {"MXFP4": (32, 17)}
"""The encodings that stay packed: inputs and bytes of a block."""
TERNARY = {"TQ1_0": (256, 54), "TQ2_0": (256, 66)}
"""Those that stay packed on a CPU only, both in 2 bits a value."""
PACKED_ON_CPU = (*KINDS, *TERNARY)


@dataclass(frozen=True)
class GGUFFormat:
    """One of GGUF's encodings, by its name in the file ("Q4_K")."""

    encoding: str
    interleaved: bool = False
    """Re-laid for a CPU's products, with activations in 8 bits."""

    def describe(self) -> str:
        return f"{self.encoding} (GGUF)"

    def check_cut(self, shape: tuple[int, int], rows: slice, columns: slice) -> None:
        block = _block(self.encoding)[0]
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
        if self.encoding in TERNARY:
            return StripWeight.allocate(shape, dtype, allocate, 2, TERNARY[self.encoding][0], block=256)
        layout = InterleavedWeight if self.interleaved else SuperblockWeight
        return layout.allocate(shape, dtype, allocate, KINDS[self.encoding])

    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]:
        block, nbytes = _block(self.encoding)
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
        if isinstance(weight, StripWeight):
            weight.write(rows, *_ternary(self.encoding, blocks))
            return
        assert isinstance(weight, Fp4Weight)
        raw = blocks.unflatten(-1, (-1, BLOCKS["MXFP4"][1]))
        weight.write(rows, Plane(4, 16).unpack(raw[..., 1:]).flatten(-2), raw[..., 0])

    def _random(self, shape: tuple[int, int]) -> torch.Tensor:
        """Codes of the full range and scales for values of about 0.02."""
        block, nbytes = _block(self.encoding)
        generator = torch.Generator().manual_seed(shape[0] * 65537 + shape[1])
        raw = torch.randint(
            0, 256, (shape[0], shape[1] // block, nbytes), dtype=torch.uint8, generator=generator
        )  # fmt: skip
        if self.encoding == "MXFP4":
            raw[..., 0] = 119  # 2^-8
        elif self.encoding in TERNARY:
            if self.encoding == "TQ2_0":  # no code 3; every byte of TQ1_0 is five codes
                raw &= ~((raw & (raw >> 1) & 0x55) << 1)
            raw[..., nbytes - 2 :] = torch.tensor([0.02]).half().view(torch.uint8)
        else:
            set_halves(KINDS[self.encoding], raw, 0.02)
        return raw.flatten(1)


def _block(encoding: str) -> tuple[int, int]:
    """(inputs, bytes) of a block."""
    return TERNARY[encoding] if encoding in TERNARY else BLOCKS[encoding]


def _ternary(encoding: str, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes 0, 1, 2 [rows, in], scales [rows, blocks]) of rows of TQ1_0 or TQ2_0, uint8 [rows, bytes]."""
    raw = blocks.unflatten(-1, (-1, TERNARY[encoding][1]))
    d = raw[..., -2:].contiguous().view(torch.float16).squeeze(-1)
    if encoding == "TQ2_0":
        return Plane(2, 32).unpack(raw[..., :64]).flatten(-2), d
    runs = [_digits(part, count) for part, count in zip(raw[..., :52].split((32, 16, 4), -1), (5, 5, 4), strict=True)]
    return torch.cat(runs, -1).flatten(-2), d


def _digits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` digits to base 3 of bytes that are fractions of 256: byte m has values m, m + run, …"""
    return torch.cat([((packed * 3**place).int() * 3 >> 8).to(torch.uint8) for place in range(count)], -1)
