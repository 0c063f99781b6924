"""8-bit codes, one a byte, with a scale per tensor or per output, or per block: FP8 and INT8 checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.errors import CheckpointError
from quire.kernels.weights.base import Allocate, QuantizedWeight
from quire.kernels.weights.scaled import BlockScaledWeight, ScaledWeight
from quire.quantization.formats import checks
from quire.quantization.formats.base import StoredPart
from quire.quantization.formats.bits import exponents, powers_of_two, random_exponents

_SPREAD = 0.02
_RMS = {torch.float8_e4m3fn: 100.06, torch.int8: 73.9}
"""Root mean square of all codes, each once; so random weights have a standard deviation of `_SPREAD`."""
_CODES = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
_INPUTS = {"token": "quantized by token", "tensor": "quantized by a static scale", "none": "not quantized"}

WHOLE = slice(None)
SCALAR_SHAPES: tuple[tuple[tuple[int, ...], tuple[slice, ...]], ...] = (((), ()), ((1,), ()), ((1, 1), ()))


@dataclass(frozen=True)
class ScaledFormat:
    """`weight` [out, in] of 8-bit codes and a scale per tensor or per output: value = code * scale."""

    code: torch.dtype = torch.float8_e4m3fn
    per: str = "channel"
    """What has a scale of its own: "tensor" or "channel"."""
    inputs: str = "token"
    """What happens to activations, as `ScaledWeight` says."""
    scale: str = "weight_scale"
    input_scale: str = "input_scale"
    """The names of the tensors."""
    label: str = ""

    def describe(self) -> str:
        scale = "one scale" if self.per == "tensor" else "a scale per output"
        label = f" ({self.label})" if self.label else ""
        return f"{_CODES[self.code]}, {scale}, activations {_INPUTS[self.inputs]}{label}"

    def check_cut(self, shape: tuple[int, int], rows: slice, columns: slice) -> None:
        """Any part can be kept."""

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, starts: Sequence[int] = (0,)
    ) -> ScaledWeight:
        return ScaledWeight.allocate(shape, dtype, allocate, self.code, self.inputs)

    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]:
        typical = _SPREAD / _RMS[self.code]
        if self.per == "tensor":
            scale = StoredPart((), checks.FLOATS, sample=typical, also=SCALAR_SHAPES)
        else:
            flat = ((shape[0],), (rows,))
            scale = StoredPart((shape[0], 1), checks.FLOATS, (rows, WHOLE), typical, also=(flat,))
        parts = {"weight": StoredPart(shape, (self.code,), (rows, columns), direct="codes"), self.scale: scale}
        if self.inputs == "tensor":
            parts[self.input_scale] = StoredPart((), checks.FLOATS, sample=1 / 16, also=SCALAR_SHAPES)
        else:
            # Left behind by tools that calibrate before they choose dynamic scales.
            parts[self.input_scale] = StoredPart((), checks.FLOATS, optional=True, also=SCALAR_SHAPES)
        # Older tools wrote zero points of symmetric codes: all are zero.
        codes = (torch.int8, torch.float8_e4m3fn, *checks.FLOATS)
        each = (((shape[0], 1), ()), ((shape[0],), ()))
        parts["weight_zero_point"] = StoredPart((), codes, optional=True, also=(*SCALAR_SHAPES, *each))
        parts["input_zero_point"] = StoredPart((), codes, optional=True, also=SCALAR_SHAPES)
        return parts

    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight, rows: slice) -> None:
        assert isinstance(weight, ScaledWeight)
        read = checks.on(weight.device, read)
        for name in ("weight_zero_point", "input_zero_point"):
            if name in read and bool(read[name].float().any()):
                raise CheckpointError(f"{name}: is not zero, though the checkpoint's description says symmetric")
        codes = read.get("weight")
        scale = checks.check_scale(self.scale, checks.need(read, self.scale)).float()
        if codes is not None:
            weight.codes[rows] = checks.check_fp8("weight", codes) if self.code is torch.float8_e4m3fn else codes
        weight.scale[rows] = scale.reshape(-1) if self.per == "channel" else scale.reshape(())
        if weight.input_scale is not None:
            given = checks.check_scale(self.input_scale, checks.need(read, self.input_scale))
            checks.check_agreement(weight.input_scale, given, self.input_scale, "one input")


@dataclass(frozen=True)
class BlockFormat:
    """`weight` [out, in] in e4m3 and a scale per block of rows and columns: value = code * scale, despite `_inv`.

    `block` (1, 32) with powers of two is MXFP8.
    """

    block: tuple[int, int] = (128, 128)
    scale: str = "weight_scale_inv"
    """Its tensor's name."""
    powers: bool = False
    """Whether a uint8 scale is an exponent, as it always is as float8_e8m0fnu."""
    label: str = ""

    def describe(self) -> str:
        rows, columns = self.block
        label = f" ({self.label})" if self.label else ""
        return f"fp8, {rows}x{columns} blocks, activations quantized by token and {columns} inputs{label}"

    def check_cut(self, shape: tuple[int, int], rows: slice, columns: slice) -> None:
        checks.check_multiple(columns, shape[1], self.block[1], "inputs", "blocks of")
        start, stop = checks.span(rows, shape[0])
        if start // self.block[0] == (stop - 1) // self.block[0]:
            return  # All in one block, wherever it begins.
        if start % self.block[0]:
            checks.check_multiple(rows, shape[0], self.block[0], "outputs", "blocks of")

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, starts: Sequence[int] = (0,)
    ) -> BlockScaledWeight:
        # A part that begins inside a block of the fused weight needs smaller blocks, which have the same scales.
        height = math.gcd(self.block[0], *starts)
        return BlockScaledWeight.allocate(shape, dtype, allocate, (height, self.block[1]))

    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]:
        height, width = self.block
        blocks = (-(-shape[0] // height), -(-shape[1] // width))
        start, stop = checks.span(rows, shape[0])
        across, down = checks.shrink(columns, shape[1], width), slice(start // height, -(-stop // height))
        squeezed = ((blocks[0], 1, blocks[1], 1), (down, WHOLE, across, WHOLE))
        dtypes = checks.E8M0[::-1] if self.powers else (*checks.FLOATS, *checks.E8M0[:-1])
        exact = (lambda: random_exponents(blocks, 114)) if self.powers else None
        typical = _SPREAD / _RMS[torch.float8_e4m3fn]
        scale = StoredPart(blocks, dtypes, (down, across), typical, also=(squeezed,), exact=exact)
        return {
            "weight": StoredPart(shape, (torch.float8_e4m3fn,), (rows, columns), direct="codes"),
            self.scale: scale,
        }

    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight, rows: slice) -> None:
        assert isinstance(weight, BlockScaledWeight)
        read = checks.on(weight.device, read)
        codes, scale = read.get("weight"), checks.need(read, self.scale)
        if scale.dim() == 4:
            scale = scale[:, 0, :, 0]
        if scale.dtype in checks.E8M0:
            scale = powers_of_two(checks.check_exponents(self.scale, exponents(scale)))
        else:
            scale = checks.check_scale(self.scale, scale).float()
        height = weight.block[0]
        start, stop = checks.span(rows, weight.shape[-2])
        if start % height or self.block[0] % height:
            raise CheckpointError(f"{self.scale}: a part begins at output {start}, inside a block of {height} rows")
        blocks = slice(start // height, -(-stop // height))
        finer = scale.repeat_interleave(self.block[0] // height, 0)[: blocks.stop - blocks.start]
        if codes is not None:
            weight.codes[rows] = checks.check_fp8("weight", codes)
        weight.scale[blocks] = finer
