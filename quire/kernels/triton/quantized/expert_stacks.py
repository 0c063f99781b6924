"""What the experts' kernels read of a stack of quantized matrices [experts, out, in]."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.weights.base import QuantizedWeight
from quire.kernels.weights.fp4 import Fp4Weight
from quire.kernels.weights.grouped import GroupedWeight
from quire.kernels.weights.packing import byte_span
from quire.kernels.weights.scaled import BlockScaledWeight, ScaledWeight

BLOCK_INPUTS = 128
"""Inputs of a block of `BlockScaledWeight` that the kernels know."""


@dataclass(frozen=True)
class Stack:
    """A stack's tensors, and how to read them."""

    kind: str
    """`block`: 8-bit floats scaled by block, activations too; `row`: 8-bit codes scaled by output, activations by
    token or by a fixed scale. Activations as they are: `int4`, `int8` (by group), `mxfp4`, `nvfp4`, `codes` (8-bit
    codes scaled by output)."""
    shape: tuple[int, int, int]
    dtype: torch.dtype
    """Of activations and results."""
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    minimum: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    """float32 [1]: the fixed scale of activations."""
    group: int = 0
    """Inputs that share a scale; of `block`: outputs that share one."""
    half: int = 0
    """Half a span: a byte holds inputs j and j + half (4 bits)."""
    bounded: bool = False
    """MXFP4: no scale is above 2."""
    copy: torch.Tensor | None = None
    """The same numbers in `dtype`, if memory is spent on them."""

    @property
    def experts(self) -> int:
        return self.shape[0]

    @property
    def outputs(self) -> int:
        return self.shape[1]

    @property
    def inputs(self) -> int:
        return self.shape[2]

    @property
    def quantizes(self) -> bool:
        """Whether activations are quantized."""
        return self.kind in ("block", "row")

    @property
    def bits(self) -> int:
        return 4 if self.half else 8


def stack_of(weight: QuantizedWeight) -> Stack | None:
    """The stack; None: the kernels cannot read it."""
    if weight.dim() != 3 or weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    count, outputs, inputs = weight.shape
    shape = count, outputs, inputs
    if any(not tensor.is_contiguous() for tensor in weight.tensors.values()):
        return None
    if isinstance(weight, BlockScaledWeight):
        if weight.block[1] != BLOCK_INPUTS or inputs % 16:
            return None
        return Stack("block", shape, weight.dtype, weight.codes, weight.scale, group=weight.block[0])
    if isinstance(weight, ScaledWeight):
        if inputs % 16:
            return None
        kind = "codes" if weight.inputs == "none" else "row"
        return Stack(kind, shape, weight.dtype, weight.codes, weight.scale, input_scale=weight.input_scale)
    if isinstance(weight, GroupedWeight):
        if weight.span is not None or weight.order is not None or not _is_group(weight.group, inputs):
            return None
        half = byte_span(inputs) // 2 if weight.bits == 4 else 0
        if weight.bits == 4 and half < 16:
            return None
        return Stack(
            f"int{weight.bits}", shape, weight.dtype, weight.codes, weight.scale, weight.zero, weight.minimum,
            group=weight.group, half=half, copy=weight.copy,
        )  # fmt: skip
    if isinstance(weight, Fp4Weight):
        half = byte_span(inputs) // 2
        if half < 16 or weight.span is not None:
            return None
        kind = "nvfp4" if weight.factor is not None else "mxfp4"
        return Stack(
            kind, shape, weight.dtype, weight.codes, weight.scale, factor=weight.factor, group=weight.group, half=half,
            bounded=weight.bounded, copy=weight.copy,
        )  # fmt: skip
    return None


def _is_group(group: int, inputs: int) -> bool:
    """Whether a group is a power of two of at least 16 inputs, or a whole row."""
    return group >= inputs or (group >= 16 and group & (group - 1) == 0)
