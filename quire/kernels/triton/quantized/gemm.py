"""What the weight-only kernels share: the weight as they read it, the description of a GEMM, and its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from quire.kernels.triton.launch import INTERPRETED
from quire.kernels.weights.fp4 import Fp4Weight
from quire.kernels.weights.grouped import GroupedWeight
from quire.kernels.weights.packing import LINES


class WordWeight(NamedTuple):
    """A matrix [outputs, inputs] of codes packed as words, as kernels read it."""

    codes: torch.Tensor
    """int16 [outputs, words]; `lines` of them side by side, as scales, zeros and minimums are."""
    scale: torch.Tensor
    """[outputs, groups]: of the activations' dtype, or bytes (MXFP4: exponents, NVFP4: e4m3)."""
    zero: torch.Tensor | None
    minimum: torch.Tensor | None
    factor: torch.Tensor | None
    """float32 [outputs] (NVFP4)."""
    format: str
    """`int4`, `int8`, `mxfp4` or `nvfp4`."""
    group: int
    span: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    lines: int
    """Outputs that lie side by side: 8, or 1 (`kernels/weights/packing.py`)."""

    @property
    def fields(self) -> int:
        """Codes of a word."""
        return 2 if self.format == "int8" else 4

    @property
    def words(self) -> int:
        """Words of a span."""
        return self.span // self.fields

    @property
    def constants(self) -> dict[str, Any]:
        """Constexpr arguments of every kernel."""
        return {
            "K": self.inputs, "FORMAT": self.format, "FIELDS": self.fields, "WORDS": self.words, "GROUP": self.group,
            "GROUPS": self.scale.shape[1], "LINES": self.lines,
        }  # fmt: skip

    def to_meta(self) -> WordWeight:
        """The same on the `meta` device: enough to compile for."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor, device="meta")

        optional = {
            name: None if tensor is None else moved(tensor)
            for name, tensor in (("zero", self.zero), ("minimum", self.minimum), ("factor", self.factor))
        }
        return self._replace(codes=moved(self.codes), scale=moved(self.scale), **optional)  # type: ignore[arg-type]

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Arguments of every kernel."""
        return self.codes, self.scale, self.zero, self.minimum, self.factor


def as_words(weight: GroupedWeight | Fp4Weight) -> WordWeight | None:
    """The weight as kernels read it; None: they do not support it."""
    if weight.span is None or weight.dim() != 2 or weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    if not all(tensor.is_contiguous() for tensor in weight.tensors.values()):
        return None
    outputs, inputs = weight.shape
    lines = LINES if weight.side_by_side else 1
    codes, scale = weight.codes.view(torch.int16), weight.scale
    if isinstance(weight, GroupedWeight):
        group = min(weight.group, inputs)
        if group % (weight.span * weight.bits // 16):
            return None
        return WordWeight(
            codes, scale, weight.zero, weight.minimum, None, f"int{weight.bits}", group, weight.span, outputs, inputs,
            weight.dtype, lines,
        )  # fmt: skip
    if weight.dtype is not torch.bfloat16 and not INTERPRETED:
        return None  # most scales of MXFP4 are not float16 numbers
    name = "mxfp4" if scale.dtype is torch.uint8 else "nvfp4"
    return WordWeight(
        codes, scale.view(torch.uint8), None, None, weight.factor, name, weight.group, weight.span, outputs, inputs,
        weight.dtype, lines,
    )  # fmt: skip


@dataclass(frozen=True)
class WeightOnlyConfig:
    """A kernel and its tile shape."""

    kernel: str
    """`few`, `tile` or `dequantize`: the whole matrix into 16 bits, and cuBLAS."""
    block_n: int = 16
    """Outputs per program (`few` with a gate: gate and up features)."""
    block_m: int = 8
    """Rows per program."""
    warps: int = 4
    depth: int = 8
    """Loads of a thread in flight (`few`), software-pipeline stages (`tile`)."""
    split: int = 1
    """Split-K: programs that share the inputs of a tile (`tile`)."""
    programs: int = 0
    """Persistent programs per multiprocessor (`tile`: stream-K); 0: one per tile."""
    early: bool = False
    """Whether dependents are launched before `gdc_wait` rather than after (`few`)."""


@dataclass(slots=True)
class WeightOnlyGemm:
    """One GEMM: its inputs, and what is fused into it."""

    x: torch.Tensor
    """[rows, in]."""
    weight: WordWeight
    bias: torch.Tensor | None = None
    silu: bool = False

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    def new_output(self) -> torch.Tensor:
        """An uninitialized tensor for the result [rows, out]."""
        return self.x.new_empty(self.x.shape[0], self.weight.outputs // (2 if self.silu else 1))


class WeightOnlyLaunch(NamedTuple):
    """A kernel about to run, and the tensor it will fill."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    """Its constexpr arguments and launch options."""
    out: torch.Tensor
