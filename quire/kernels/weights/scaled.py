"""8-bit codes with a scale per output (`ScaledWeight`) or block (`BlockScaledWeight`); activations in 8 bits too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.kernels.weights.base import Allocate, QuantizedWeight

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest code of each type. e4m3fn has no infinity: what is larger saturates."""
SMALLEST_SCALE = 1e-10
"""Activations of a row of zeros have this scale, not zero."""


def quantize_rows(x: torch.Tensor, code: torch.dtype, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes like x, scales float32 [..., 1 or groups]): each row of x, or each `group` of its values, by its largest.

    scale = max |x| / LARGEST, at least SMALLEST_SCALE; code = x / scale, rounded to nearest even and saturated.
    """
    wide = x.float()
    grouped = wide.unsqueeze(-2) if group is None else _grouped(wide, group)
    scale = (grouped.abs().amax(-1, keepdim=True) / LARGEST[code]).clamp_min(SMALLEST_SCALE)
    codes = encode(grouped / scale, code).flatten(-2)[..., : x.shape[-1]]
    return codes, scale.squeeze(-1)


def encode(values: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """Values rounded to the nearest code, saturated."""
    bound = LARGEST[code]
    return (values.round() if code is torch.int8 else values).clamp(-bound, bound).to(code)


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """[..., k] as [..., groups, group]; the last group may be filled up with zeros."""
    return F.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))


class ScaledWeight(QuantizedWeight):
    """value = code * scale[out].

    codes [..., out, in] int8 or float8_e4m3fn; scale [..., out] float32. `inputs` says what happens to activations:
    "token": quantized by row to the same code type; "tensor": by the fixed `input_scale`; "none": left as they are.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
        inputs: str = "token",
        input_scale: torch.Tensor | None = None,
    ) -> None:
        """`input_scale`: float32 [1], with inputs "tensor"."""
        self.codes, self.scale, self.input_scale = codes, scale, input_scale
        self.dtype, self.inputs, self.shape = dtype, inputs, codes.shape
        self.is_weight_only = inputs == "none"

    @classmethod
    def allocate(
        cls, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, code: torch.dtype, inputs: str = "token"
    ) -> ScaledWeight:
        """One without values."""
        codes = allocate(tuple(shape), code)
        input_scale = allocate((1,), torch.float32) if inputs == "tensor" else None
        return cls(codes, allocate(tuple(shape[:-1]), torch.float32), dtype, inputs, input_scale)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"codes": self.codes, "scale": self.scale}

    def with_tensors(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> ScaledWeight:
        return ScaledWeight(tensors["codes"], tensors["scale"], self.dtype, self.inputs, self.input_scale)

    def dequantize(self) -> torch.Tensor:
        return (self.codes.float() * self.scale.unsqueeze(-1)).to(self.dtype)

    def encode_input(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scale float32 [..., 1])."""
        if self.input_scale is None:
            return quantize_rows(x, self.codes.dtype)
        scale = self.input_scale.float()
        return encode(x.float() / scale, self.codes.dtype), scale.expand(*x.shape[:-1], 1)

    def quantize_input(self, x: torch.Tensor) -> torch.Tensor:
        if self.inputs == "none":
            return x.float()
        codes, scale = self.encode_input(x)
        return codes.float() * scale

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.inputs == "none":
            return super().linear(x, bias)
        codes, scale = self.encode_input(x)
        # Sums of integers are exact in float64, whatever their order.
        exact = torch.float64 if self.codes.dtype is torch.int8 else torch.float32
        product = F.linear(codes.to(exact), self.codes.to(exact)).float() * scale * self.scale
        return (product if bias is None else product + bias.float()).to(x.dtype)

    @property
    def layout(self) -> tuple[object, ...]:
        return (*super().layout, self.inputs)


class BlockScaledWeight(QuantizedWeight):
    """value = code * scale[out // block rows, in // block columns]; activations are quantized by row and block column.

    codes [..., out, in] float8_e4m3fn; scale [..., block rows, block columns] float32. `block` is (rows, columns): the
    checkpoint's, or with fewer rows if parts of a fused weight begin inside a block. The last block may be smaller.
    """

    is_weight_only = False

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: tuple[int, int]) -> None:
        self.codes, self.scale, self.block = codes, scale, block
        self.dtype, self.shape = dtype, codes.shape

    @classmethod
    def allocate(
        cls, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, block: tuple[int, int] = (128, 128)
    ) -> BlockScaledWeight:
        """One without values."""
        *lead, rows, columns = shape
        blocks = (*lead, -(-rows // block[0]), -(-columns // block[1]))
        return cls(allocate(tuple(shape), torch.float8_e4m3fn), allocate(blocks, torch.float32), dtype, block)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"codes": self.codes, "scale": self.scale}

    def with_tensors(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> BlockScaledWeight:
        return BlockScaledWeight(tensors["codes"], tensors["scale"], self.dtype, self.block)

    def select(self, index: torch.Tensor | slice | int) -> BlockScaledWeight:
        """A stack's matrices; of a matrix, whole blocks of rows."""
        if self.dim() == 3:
            return super().select(index)
        if not isinstance(index, slice) or (index.start or 0) % self.block[0]:
            raise ValueError(f"outputs {index} of a weight in blocks of {self.block[0]} rows")
        start, stop, _ = index.indices(self.shape[0])
        blocks = slice(start // self.block[0], -(-stop // self.block[0]))
        return BlockScaledWeight(self.codes[index], self.scale[blocks], self.dtype, self.block)

    def dequantize(self) -> torch.Tensor:
        rows, columns = self.shape[-2:]
        scale = self.scale.repeat_interleave(self.block[0], -2)[..., :rows, :]
        return (self.codes.float() * scale.repeat_interleave(self.block[1], -1)[..., :columns]).to(self.dtype)

    def quantize_input(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = quantize_rows(x, torch.float8_e4m3fn, self.block[1])
        return codes.float() * scale.repeat_interleave(self.block[1], -1)[..., : x.shape[-1]]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows, columns = self.shape
        scale = self.scale.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[:, :columns]
        product = F.linear(self.quantize_input(x), self.codes.float() * scale)
        return (product if bias is None else product + bias.float()).to(x.dtype)

    @property
    def layout(self) -> tuple[object, ...]:
        return (*super().layout, self.block)
