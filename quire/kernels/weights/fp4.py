"""4-bit floats with a scale per 16 or 32 inputs: NVFP4 and MXFP4; activations stay as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.weights.base import Allocate
from quire.kernels.weights.lines import WordLines
from quire.kernels.weights.packing import pack, unpack, word_span

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What codes 0 to 7 mean; bit 3 is the sign."""


class Fp4Weight(WordLines):
    """value = VALUES[code] * (scale of the group [* factor of the output, in float32]).

    codes  uint8 [..., out, in / 2], packed by `packing.pack`
    scale  [..., out, groups]: uint8, an exponent s that means 2^(s - 127) (MXFP4, groups of 32), or float8_e4m3fn
           (NVFP4, groups of 16)
    factor float32 [..., out]; None: 1

    Of matrices with codes in words, eight outputs lie side by side (`WordLines`).
    """

    bits = 4
    bounded = False
    """MXFP4: whether no scale is above 2, which saves kernels a multiplication."""

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
        factor: torch.Tensor | None = None,
        span: int | None = None,
    ) -> None:
        """`span`: that of codes packed as words; None: they are packed as bytes."""
        self.codes, self.scale, self.factor, self.dtype, self.span = codes, scale, factor, dtype, span
        self.shape = torch.Size((*codes.shape[:-1], codes.shape[-1] * 2))
        self.group = 32 if scale.dtype is torch.uint8 else 16

    @classmethod
    def allocate(cls, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, nvidia: bool = False) -> Fp4Weight:
        """One without values. `nvidia`: NVFP4 rather than MXFP4."""
        *lead, width = shape
        codes = allocate((*lead, width // 2), torch.uint8)
        scale = allocate((*lead, width // (16 if nvidia else 32)), torch.float8_e4m3fn if nvidia else torch.uint8)
        span = word_span(width, 4, 16 if nvidia else 32) if len(lead) == 1 else None
        made = cls(codes, scale, dtype, allocate(tuple(lead), torch.float32) if nvidia else None, span)
        made.side_by_side = cls.lies_side_by_side(shape[-2], span)
        return made

    def write(
        self, index: slice | int, codes: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | float | None = None
    ) -> None:
        """Fill some outputs (of a stack: a matrix) from unpacked codes uint8 [..., in]."""
        self._fill(index, {"codes": pack(codes, 4, self.span), "scale": scale})
        if self.factor is not None and factor is not None:
            self.factor[index] = factor if isinstance(factor, float) else factor.to(self.factor.device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        held = {"codes": self.codes, "scale": self.scale, "factor": self.factor}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def with_tensors(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> Fp4Weight:
        made = Fp4Weight(tensors["codes"], tensors["scale"], self.dtype, tensors.get("factor"), self.span)
        made.bounded, made.side_by_side = self.bounded, self.side_by_side
        return made

    def dequantize(self) -> torch.Tensor:
        if self.side_by_side:
            return self.lined_up().dequantize()
        codes = unpack(self.codes, 4, self.span).long()
        table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=codes.device)
        scale = self.scale.float() if self.scale.dtype is not torch.uint8 else torch.exp2(self.scale.float() - 127)
        scale = scale if self.factor is None else scale * self.factor.unsqueeze(-1)
        return (table[codes] * scale.repeat_interleave(self.group, -1)).to(self.dtype)

    @property
    def layout(self) -> tuple[object, ...]:
        return (*super().layout, self.group, self.span, self.side_by_side)
