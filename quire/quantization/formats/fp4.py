"""4-bit floats: NVFP4 and MXFP4, as compressed-tensors and ModelOpt store them, and gpt-oss's stacks of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.errors import CheckpointError
from quire.kernels.weights.base import Allocate, QuantizedWeight
from quire.kernels.weights.fp4 import Fp4Weight
from quire.quantization.formats import checks
from quire.quantization.formats.base import StoredPart
from quire.quantization.formats.bits import exponents, random_exponents, unpack_pairs
from quire.quantization.formats.scaled import SCALAR_SHAPES

_RANDOM_SCALE = 64.0
_RANDOM_FACTOR = 0.02 / 2.926 / _RANDOM_SCALE
_LARGEST_EXPONENT = 128
_RANDOM_EXPONENT = 119
"""Random codes have a root mean square of 2.926; so random weights have a standard deviation of about 0.02."""


@dataclass(frozen=True)
class Fp4Format:
    """Two codes a byte [out, in / 2], the first in the low half, and a scale per 16 (NVFP4) or 32 (MXFP4) inputs.

    NVFP4 also has a scalar for the whole matrix, by which values are divided or multiplied.
    """

    nvidia: bool
    """NVFP4 rather than MXFP4."""
    packed: str = "weight_packed"
    factor: str = "weight_global_scale"
    """The names of the tensors; `factor` only of NVFP4."""
    divides: bool = True
    """Whether values are divided by the scalar (compressed-tensors) or multiplied (ModelOpt)."""
    inputs: str = "input_global_scale"
    """The calibrated scale of activations in 4 bits, which is not used."""
    activations: str = "none"
    """What the checkpoint says of activations: "fp4", "fp8" or "none"."""
    label: str = ""

    @property
    def group(self) -> int:
        return 16 if self.nvidia else 32

    def describe(self) -> str:
        name = "nvfp4" if self.nvidia else "mxfp4"
        note = "" if self.activations == "none" else f" (the checkpoint allows {self.activations} activations)"
        label = f" ({self.label})" if self.label else ""
        return f"{name}, groups of {self.group}, weight only: activations not quantized{note}{label}"

    def check_cut(self, shape: tuple[int, int], rows: slice, columns: slice) -> None:
        if shape[1] % self.group:
            raise ValueError(f"{shape[1]} inputs are no multiple of the groups of {self.group}")
        checks.check_multiple(columns, shape[1], self.group, "inputs", "groups of")

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, starts: Sequence[int] = (0,)
    ) -> Fp4Weight:
        return Fp4Weight.allocate(shape, dtype, allocate, self.nvidia)

    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]:
        height, width = shape
        halves = checks.shrink(columns, width, 2)
        groups = checks.shrink(columns, width, self.group)
        parts = {self.packed: StoredPart((height, width // 2), (torch.uint8,), (rows, halves))}
        scales = (height, -(-width // self.group))
        if self.nvidia:
            parts["weight_scale"] = StoredPart(scales, (torch.float8_e4m3fn,), (rows, groups), _RANDOM_SCALE)
            typical = 1 / _RANDOM_FACTOR if self.divides else _RANDOM_FACTOR
            parts[self.factor] = StoredPart((), checks.FLOATS, sample=typical, also=SCALAR_SHAPES)
            parts[self.inputs] = StoredPart((), checks.FLOATS, optional=True, also=SCALAR_SHAPES)
        else:
            parts["weight_scale"] = StoredPart(
                scales,
                checks.E8M0[::-1],
                (rows, groups),
                exact=lambda: random_exponents(scales, _RANDOM_EXPONENT),
            )
        return parts

    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight, rows: slice) -> None:
        assert isinstance(weight, Fp4Weight)
        read = checks.on(weight.device, read)
        codes, scale = unpack_pairs(checks.need(read, self.packed)), checks.need(read, "weight_scale")
        if not self.nvidia:
            weight.write(rows, codes, checks.check_exponents("weight_scale", exponents(scale)))
            return
        # A group of tiny values may have a scale that e4m3 rounds to zero.
        scale = checks.check_scale("weight_scale", scale, zeros=True)
        factor = checks.check_scale(self.factor, checks.need(read, self.factor)).float().reshape(())
        weight.write(rows, codes, scale, factor.reciprocal() if self.divides else factor)


@dataclass(frozen=True)
class Mxfp4Experts:
    """MXFP4 of all experts of a layer in one tensor, as gpt-oss stores it.

    `NAME_blocks` uint8 [experts, out, in / 32, 16] and `NAME_scales` uint8 [experts, out, in / 32], named after the
    module that owns them. Its methods take stacks [experts, out, in].
    """

    name: str
    """`gate_up_proj` or `down_proj`."""
    interleaved: bool = False
    """Whether even outputs are the gate's and odd ones up's: they are placed gate first, then up."""

    def describe(self) -> str:
        return "mxfp4, groups of 32, weight only: activations not quantized (gpt-oss)"

    def check_cut(self, shape: tuple[int, int, int], rows: slice, columns: slice) -> None:
        """Raise ValueError if a rank cannot keep this part of every expert's matrix."""
        checks.check_multiple(columns, shape[2], 32, "inputs", "groups of")
        if self.interleaved:
            checks.check_multiple(rows, shape[1], 2, "outputs", "a gate and an up:")

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, starts: Sequence[int] = (0,)
    ) -> Fp4Weight:
        """A stack without values."""
        weight = Fp4Weight.allocate(shape, dtype, allocate)
        weight.bounded = True
        return weight

    def stored(
        self, shape: tuple[int, int, int], experts: slice, rows: slice, columns: slice
    ) -> Mapping[str, StoredPart]:
        """The tensors of a whole stack, and what a rank that keeps these experts, rows and columns reads of each."""
        count, height, width = shape
        groups = checks.shrink(columns, width, 32)
        scales = (count, height, width // 32)
        return {
            f"{self.name}_blocks": StoredPart((*scales, 16), (torch.uint8,), (experts, rows, groups)),
            f"{self.name}_scales": StoredPart(
                scales,
                checks.E8M0[::-1],
                (experts, rows, groups),
                exact=lambda: random_exponents(scales, _RANDOM_EXPONENT),
            ),
        }

    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight) -> None:
        """Fill a stack from the parts that were read, an expert at a time."""
        assert isinstance(weight, Fp4Weight)
        blocks, scales = checks.need(read, f"{self.name}_blocks"), checks.need(read, f"{self.name}_scales")
        found = checks.check_exponents(f"{self.name}_scales", exponents(scales))
        if (found > _LARGEST_EXPONENT).any():
            raise CheckpointError(f"{self.name}_scales has scales above 2, which the kernels do not support")
        for index in range(len(blocks)):
            codes = unpack_pairs(blocks[index].to(weight.device).flatten(-2))
            scale = exponents(scales[index].to(weight.device))
            if self.interleaved:
                codes, scale = (torch.cat((each[0::2], each[1::2])) for each in (codes, scale))
            weight.write(index, codes, scale)
