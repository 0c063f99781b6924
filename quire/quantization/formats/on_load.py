"""Formats of matrices that the checkpoint has in 16 or 32 bits, rounded to few bits while they are loaded.

A matrix is read, rounded and forgotten before the next: a device never holds all of them in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.errors import CheckpointError
from quire.kernels.weights.base import Allocate, QuantizedWeight
from quire.kernels.weights.fp4 import Fp4Weight
from quire.kernels.weights.grouped import GroupedWeight
from quire.kernels.weights.scaled import ScaledWeight
from quire.quantization.formats.base import StoredPart
from quire.quantization.rounding import round_channels, round_groups, round_mxfp4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What a matrix may be stored in."""
GROUPS = (128, 64, 32)
"""Inputs that share a scale: the largest of these that divides the width."""
CHUNK = 1 << 24
"""Values rounded at a time: rounding takes several float32 copies of them."""


def group_of(width: int) -> int:
    """Inputs that share a scale in a matrix of this width."""
    return next((group for group in GROUPS if width % group == 0), GROUPS[-1])


@dataclass(frozen=True)
class OnLoadFormat:
    """One tensor `weight`, rounded by whole rows: what a rank holds does not depend on how many ranks there are."""

    kind: str
    """One of KINDS."""

    def describe(self) -> str:
        return f"{KINDS[self.kind]} (quantized on load)"

    def check_cut(self, shape: tuple[int, int], rows: slice, columns: slice) -> None:
        if self.kind not in ("int4", "mxfp4"):
            return
        least = GROUPS[-1]
        if shape[1] % least:
            raise ValueError(
                f"a matrix {shape[0]}x{shape[1]} cannot be quantized to {self.kind}: the inputs must be a multiple of "
                f"{least}. Use fp8 or int8, or leave it in 16 bits with a file (see --quantization)"
            )
        first, last, _ = columns.indices(shape[1])
        if first % least or last % least:
            raise ValueError(f"each rank needs a multiple of {least} of the {shape[1]} inputs, not {last - first}")

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, starts: Sequence[int] = (0,)
    ) -> QuantizedWeight:
        if self.kind == "int4":
            return GroupedWeight.allocate(shape, dtype, allocate, bits=4, group=group_of(shape[-1]))
        if self.kind == "mxfp4":
            return Fp4Weight.allocate(shape, dtype, allocate)
        code = torch.int8 if self.kind == "int8" else torch.float8_e4m3fn
        return ScaledWeight.allocate(shape, dtype, allocate, code, "token")

    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]:
        return {"weight": StoredPart(shape, DTYPES, (rows,))}

    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight, rows: slice) -> None:
        self.round(read["weight"], weight, rows, slice(None))

    def round(self, values: torch.Tensor, weight: QuantizedWeight, rows: slice, columns: slice) -> None:
        """Fill outputs `rows` of `weight` with `columns` of these rows, which are whole."""
        step = max(1, CHUNK // max(1, values.shape[1]))
        for start in range(0, len(values), step):
            part = values[start : start + step]
            first = rows.start + start
            self._round(part, weight, slice(first, first + len(part)), columns)

    def _round(self, values: torch.Tensor, weight: QuantizedWeight, rows: slice, columns: slice) -> None:
        if not torch.isfinite(values).all():
            raise CheckpointError("weight has values that are not finite, which cannot be quantized")
        if isinstance(weight, ScaledWeight):
            codes, scale = round_channels(values, weight.codes.dtype)
            weight.codes[rows], weight.scale[rows] = codes[:, columns].to(weight.device), scale.to(weight.device)
        elif isinstance(weight, GroupedWeight):
            group = group_of(values.shape[-1])
            rounded = round_groups(values, weight.bits, group, scale_dtype=weight.dtype)
            # A rank whose columns are no multiple of the group holds smaller groups: the scale several times.
            scale = rounded.scale.repeat_interleave(group // weight.group, -1)
            weight.write(rows, rounded.codes[:, columns], scale[:, _groups(columns, weight.group)])
        else:
            assert isinstance(weight, Fp4Weight)
            codes, exponents = round_mxfp4(values)
            weight.write(rows, codes[:, columns], exponents[:, _groups(columns, weight.group)])


KINDS = {
    "fp8": "fp8, per output, activations per token",
    "int8": "int8, per output, activations per token",
    "int4": "int4, groups of up to 128",
    "mxfp4": "mxfp4, groups of 32",
}


def _groups(columns: slice, group: int) -> slice:
    return columns if columns == slice(None) else slice(columns.start // group, columns.stop // group)
