"""Products with GGUF's blocks (`SuperblockWeight`).

Few rows: the codes go to the tensor cores as they are, small integers, which 16-bit floats hold exactly; each group's
sum is scaled in float32. The minimums are multiplied with the sum of the group's inputs, for which the tensor cores add
them up. So a weight is never rounded, and decoding it takes about four instructions, as many as there are in the time
that memory needs for 4 bits. A program owns `block_n` outputs; its warps split the inputs among them and are summed at
the end, within the program, so that few outputs still occupy every multiprocessor.

Many rows: the matrix is dequantized, some outputs at a time, into 16-bit memory for cuBLAS: values are rounded once.

Bytes: the weight once for up to block_m rows; the input once per program, from cache. Operations on tensor cores: 2 per
weight and row of block_m, with minimums 4.
"""

# ruff: noqa: N803, N806, RUF005  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton import constexpr_function

from quire.kernels.base import CompilableKernel
from quire.kernels.triton.launch import INTERPRETED, gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.moe.tile import combine
from quire.kernels.triton.quantized.base import QuantizedProducts
from quire.kernels.triton.skinny_gemm.common import finish, prefetch_rows, prefetch_shape
from quire.kernels.weights.superblock import BlockKind, SuperblockWeight

MAX_ROWS = 64
"""With more rows the matrix is dequantized for cuBLAS."""
MAX_PAIRS = 512
"""Pairs of tokens and experts that are multiplied one by one: each reads its expert's weights."""
SCRATCH_VALUES = 16 << 20
"""Values dequantized at a time: few enough to be read back from L2."""


@dataclass(frozen=True)
class SuperblockConfig:
    """The tile shape of a product."""

    block_n: int
    """Outputs of a program."""
    block_m: int
    """Rows of a program."""
    slices: int
    """Parts of the inputs, each of a warp of its own; 1: all warps share the inputs, and split the outputs."""
    warps: int = 4
    stages: int = 2


INVARIANT = SuperblockConfig(block_n=64, block_m=64, slices=1)
"""For any number of rows, so that a row's bits do not depend on its batch."""


@triton.jit
def _float(byte):
    """Integers below 2^23 as float32, plus 2^23: the conversion instruction runs at an eighth of the rate."""
    return (byte.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _fields(
    scale, minimum, d, m, row, k, blocks, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What scales WIDTH inputs from k on: (words of scales, words of minimums, d of every block, m of every block)."""
    K = blocks * BLOCK
    scales = ()
    minimums = ()
    ds = ()
    ms = ()
    WORDS: tl.constexpr = WIDTH // GROUP // 4
    for word in tl.static_range(WORDS if scale is not None else 0):
        at = row * (blocks * (BLOCK // GROUP // 4)) + k // GROUP // 4 + word
        scales = scales + (tl.load(scale + at, mask=k < K, other=0),)
        if minimum is not None:
            minimums = minimums + (tl.load(minimum + at, mask=k < K, other=0),)
    for block in tl.static_range(WIDTH // BLOCK):
        at = row * blocks + k // BLOCK + block
        inside = k + block * BLOCK < K
        ds = ds + (tl.load(d + at, mask=inside, other=0.0).to(tl.float32),)
        if m is not None:
            ms = ms + (tl.load(m + at, mask=inside, other=0.0).to(tl.float32),)
    return scales, minimums, ds, ms


@triton.jit
def _factor(fields, group: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, NIBBLES: tl.constexpr):
    """What the codes of a group are multiplied with."""
    scales, _, ds, _ = fields
    factor = ds[group * GROUP // BLOCK]
    if len(scales) > 0:
        byte = scales[group // 4] >> (group % 4 * 8)
        if NIBBLES:
            factor *= _float(byte & 15) - 8388608.0
        else:
            factor *= _float((byte & 255) ^ 128) - 8388736.0
    return factor


@triton.jit
def _offset(fields, group: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, NIBBLES: tl.constexpr):
    """What is subtracted from the products of a group, whose encoding has minimums."""
    scales, minimums, _, ms = fields
    if len(minimums) > 0:
        offset = ms[0] * (_float((minimums[group // 4] >> (group % 4 * 8)) & 255) - 8388608.0)
    elif NIBBLES:
        offset = ms[0] * (_float((scales[group // 4] >> (group % 4 * 8 + 4)) & 15) - 8388608.0)
    else:
        offset = -ms[group * GROUP // BLOCK]
    return offset


@triton.jit
def _load(plane, row, lane, k, K, first: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr,
          EVEN: tl.constexpr):  # fmt: skip
    """The bytes of a plane that hold bits of TILE values from input k + first on."""
    SPAN: tl.constexpr = RUN * (8 // BITS)
    if RUN < TILE:  # bit i of a byte belongs to its i-th value
        lane = lane // 8
    at = plane + row * (K * BITS // 8) + k * BITS // 8 + (first // SPAN * RUN + first % RUN) + lane
    if EVEN:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=k + first < K, other=0)
    return found


@triton.jit
def _codes(
    codes, high, row, lane, k, K, first: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr,
    HIGH_BITS: tl.constexpr, HIGH_RUN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """TILE codes from input k + first on, as integers."""
    code = _load(codes, row, lane, k, K, first, TILE, BITS, RUN, EVEN).to(tl.int32)
    if BITS < 8:
        code = (code >> (first // RUN % (8 // BITS) * BITS)) & ((1 << BITS) - 1)
    if high is not None:
        top = _load(high, row, lane, k, K, first, TILE, HIGH_BITS, HIGH_RUN, EVEN).to(tl.int32)
        if HIGH_RUN >= TILE:
            top = top >> (first // HIGH_RUN % (8 // HIGH_BITS) * HIGH_BITS)
        else:
            top = top >> (lane % 8)
        code |= (top & ((1 << HIGH_BITS) - 1)) << BITS
    return code


@constexpr_function
def _expand_asm(bits, shift, high_bits, high_shift, zero, half):
    """PTX that makes four codes minus `zero`, as 16-bit floats ($0, $1), from four bytes ($2) and those of their high
    bits ($3). `half`: float16 rather than bfloat16.

    A byte becomes the low mantissa bits of 1024 (float16) or 128 (bfloat16), from which 1024 or 128 and the zero are
    subtracted: exact, and two values at a time. bfloat16 has too few bits for bytes, which go by way of float32.
    """
    mask = ((1 << bits) - 1) * 0x01010101
    lines = [".reg .b32 q, t;", f"shr.u32 q, $2, {shift};" if shift else "mov.b32 q, $2;"]
    if bits < 8:
        lines.append(f"and.b32 q, q, {mask};")
    if high_bits:
        above = bits - high_shift
        lines.append(f"shl.b32 t, $3, {above};" if above >= 0 else f"shr.u32 t, $3, {-above};")
        lines += [f"and.b32 t, t, {((1 << high_bits) - 1 << bits) * 0x01010101};", "or.b32 q, q, t;"]
    if bits + high_bits == 8 and not half:
        lines.append(".reg .f32 f<4>;")
        for i in range(4):
            lines += [f"prmt.b32 t, q, 0x4B000000, {0x7440 + i};", f"mov.b32 f{i}, t;"]
            lines.append(f"sub.f32 f{i}, f{i}, {8388608.0 + zero:.1f};")
        lines += ["cvt.rn.bf16x2.f32 $0, f1, f0;", "cvt.rn.bf16x2.f32 $1, f3, f2;"]
        return "{" + " ".join(lines) + "}"
    top, one, kind = (0x64, 0x3C003C00, "f16x2") if half else (0x43, 0x3F803F80, "bf16x2")
    # -(1024 + zero) or -(128 + zero): both have at least as many mantissa bits as the zero needs.
    least = (0xE400 + zero if half else 0xC300 + zero) * 0x00010001
    lines.append(f".reg .b32 one, least; mov.b32 one, {one}; mov.b32 least, {least};")
    for i, selector in enumerate((0x4140, 0x4342)):
        lines += [f"prmt.b32 t, q, {top}, {selector};", f"fma.rn.{kind} ${i}, t, one, least;"]
    return "{" + " ".join(lines) + "}"


@triton.jit
def _expanded(
    x, codes, high, row, lane, k, K, first: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr,
    HIGH_BITS: tl.constexpr, HIGH_RUN: tl.constexpr, ZERO: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """TILE codes minus the zero, from input k + first on, as 16-bit floats of x's dtype."""
    SHIFT: tl.constexpr = first // RUN % (8 // BITS) * BITS
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    if ASM and high is None:
        code = tl.inline_asm_elementwise(
            _expand_asm(BITS, SHIFT, 0, 0, ZERO, HALF), "=r,=r,r",
            [_load(codes, row, lane, k, K, first, TILE, BITS, RUN, EVEN)],
            dtype=x.dtype.element_ty, is_pure=True, pack=4,
        )  # fmt: skip
    elif ASM and HIGH_RUN >= TILE:
        HIGH_SHIFT: tl.constexpr = first // HIGH_RUN % (8 // HIGH_BITS) * HIGH_BITS
        code = tl.inline_asm_elementwise(
            _expand_asm(BITS, SHIFT, HIGH_BITS, HIGH_SHIFT, ZERO, HALF), "=r,=r,r,r",
            [
                _load(codes, row, lane, k, K, first, TILE, BITS, RUN, EVEN),
                _load(high, row, lane, k, K, first, TILE, HIGH_BITS, HIGH_RUN, EVEN),
            ],
            dtype=x.dtype.element_ty, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        code = _codes(codes, high, row, lane, k, K, first, TILE, BITS, RUN, HIGH_BITS, HIGH_RUN, EVEN)
        code = (_float(code) - (8388608.0 + ZERO)).to(x.dtype.element_ty)
    return code


@triton.jit
def _ones_like(code, ASM: tl.constexpr):
    """Ones in the shape of `code`. The compiler must not know: it would lay out constants, and with them the other
    factor of the product, in another way than codes that come from bytes."""
    if ASM:
        pair: tl.constexpr = "mov.b32 $0, 0x3C003C00;" if code.dtype == tl.float16 else "mov.b32 $0, 0x3F803F80;"
        ones = tl.inline_asm_elementwise(pair, "=r,r", [code], dtype=code.dtype, is_pure=True, pack=2)
    else:
        ones = tl.full(code.shape, 1.0, code.dtype)
    return ones


@triton.jit(do_not_specialize=["rows", "blocks"])
def _linear(
    x, codes, high, scale, minimum, d, m, bias, experts, y, rows, N, blocks, E: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr, HIGH_BITS: tl.constexpr, HIGH_RUN: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, ZERO: tl.constexpr, NIBBLES: tl.constexpr, EVEN: tl.constexpr,
    SPANS: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = SLICES * WIDTH
    K = blocks * BLOCK  # so that the compiler knows that it is a multiple
    end = K
    program = tl.program_id(0)
    # Consecutive programs share weights: same outputs, next rows.
    row_tiles = tl.cdiv(rows, BLOCK_M) if experts is None else rows
    line = program % row_tiles * (BLOCK_M if experts is None else 1)
    output = program // row_tiles * BLOCK_N
    # Outputs past the end repeat the last and are not stored.
    outputs = tl.minimum(output + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    origin = line
    if experts is not None:  # a program has one pair of a token and an expert
        if PDL:
            gdc_wait()
        expert = tl.load(experts + line)
        ours = (expert >= 0) & (expert < E)
        end = tl.where(ours, K, 0)
        outputs += tl.where(ours, expert, 0).to(tl.int64) * N
        origin = line // TOP_K
        rows = line + 1
    if PDL:
        prefetch_rows(codes + outputs * (K * BITS // 8), K * BITS // 8, SPANS, SPAN)
    if SLICES > 1:
        row = outputs[None, :, None]
        lane = tl.arange(0, TILE)[None, None, :]
        slot = tl.arange(0, SLICES)[:, None, None] * WIDTH
        lines = line + tl.arange(0, BLOCK_M)[None, :, None]
        none = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    else:
        row = outputs[:, None]
        lane = tl.arange(0, TILE)[None, :]
        slot = tl.zeros((1, 1), tl.int32)
        lines = line + tl.arange(0, BLOCK_M)[:, None]
        none = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    fields = _fields(scale, minimum, d, m, row, slot, blocks, WIDTH, GROUP, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = x + (lines - line + origin).to(tl.int64) * K + lane
    total = none
    for base in tl.range(0, end, STEP, num_stages=STAGES):
        k = base + slot
        for first in tl.static_range(0, WIDTH, TILE):
            code = _expanded(
                x, codes, high, row, lane, k, K, first, TILE, BITS, RUN, HIGH_BITS, HIGH_RUN, ZERO, EVEN, ASM
            )
            inside = lines < rows
            if not EVEN:
                inside = inside & (k + first < K)
            value = tl.load(source + k + first, mask=inside, other=0.0)
            value = tl.permute(value, (0, 2, 1) if SLICES > 1 else (1, 0))
            factor = _factor(fields, first // GROUP, GROUP, BLOCK, NIBBLES)
            total += tl.dot(code, value, none, input_precision="ieee") * factor
            if m is not None:
                inputs = tl.dot(_ones_like(code, ASM), value, none, input_precision="ieee")
                total -= inputs * _offset(fields, first // GROUP, GROUP, BLOCK, NIBBLES)
        # One iteration ahead: the compiler does not pipeline loads this narrow.
        fields = _fields(scale, minimum, d, m, row, k + STEP, blocks, WIDTH, GROUP, BLOCK)
    out = tl.sum(total, 0) if SLICES > 1 else total
    columns = output + tl.arange(0, BLOCK_N)[:, None]
    finish(out, out, bias, y, line + tl.arange(0, BLOCK_M)[None, :], columns, rows, N, False)


@triton.jit(do_not_specialize=["N", "blocks"])
def _dequantize(
    codes, high, scale, minimum, d, m, tokens, y, N, blocks,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr,
    HIGH_BITS: tl.constexpr, HIGH_RUN: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ZERO: tl.constexpr,
    NIBBLES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Values of WIDTH inputs of BLOCK_N rows; with `tokens` of these rows of the matrix."""
    if PDL:
        # What is overwritten may still be read by the preceding kernel.
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :, None]
    row = tl.minimum(line, N - 1).to(tl.int64)
    K = blocks * BLOCK
    lane = tl.arange(0, TILE)[None, None, :]
    into = y + row * K + lane
    if tokens is not None:
        row = tl.load(tokens + row)
    k = tl.program_id(1) * WIDTH + tl.zeros((1, 1, 1), tl.int32)
    fields = _fields(scale, minimum, d, m, row, k, blocks, WIDTH, GROUP, BLOCK)
    for first in tl.static_range(0, WIDTH, TILE):
        code = _codes(codes, high, row, lane, k, K, first, TILE, BITS, RUN, HIGH_BITS, HIGH_RUN, True)
        value = (_float(code) - (8388608.0 + ZERO)) * _factor(fields, first // GROUP, GROUP, BLOCK, NIBBLES)
        if m is not None:
            value -= _offset(fields, first // GROUP, GROUP, BLOCK, NIBBLES)
        tl.store(into + k + first, value.to(y.dtype.element_ty), mask=line < N)


@functools.cache
def _kind_constants(kind: BlockKind, width: int) -> dict[str, Any]:
    """The constexpr arguments that describe an encoding; a program decodes `WIDTH` inputs at a time."""
    group, run = kind.group, kind.low.run if kind.low.bits < 8 else 32
    spans = [group, run] + ([kind.high.run] if kind.high is not None and kind.high.run > 1 else [])
    at_once = kind.block if kind.block > 32 else next(size for size in (128, 64, 32) if width % size == 0)
    return {
        "WIDTH": at_once,
        "TILE": min(spans),
        "BITS": kind.low.bits,
        "RUN": run,
        "HIGH_BITS": kind.high.bits if kind.high is not None else 0,
        "HIGH_RUN": kind.high.run if kind.high is not None else 0,
        "GROUP": group,
        "BLOCK": kind.block,
        "ZERO": kind.zero,
        "NIBBLES": kind.scales == "nibbles",
    }


def _planes(weight: SuperblockWeight) -> tuple[torch.Tensor | None, ...]:
    """The tensors a kernel reads; four scales are read as one word."""
    held = weight.tensors
    words = (held[name].view(torch.int32) if name in held else None for name in ("scale", "minimum"))
    return (held["codes"], held.get("high"), *words, held["d"], held.get("m"))


def choose(rows: int) -> SuperblockConfig:
    """The tile shape for a number of rows."""
    if rows <= 16:
        # One warp's 16 outputs: scales of more would take another way through shared memory.
        return SuperblockConfig(block_n=16, block_m=8 if rows <= 8 else 16, slices=4)
    return SuperblockConfig(block_n=64, block_m=32 if rows <= 32 else 64, slices=1)


@dataclass(frozen=True, eq=False)
class _Launch:
    """The kernel of a product, to be run or compiled."""

    x: torch.Tensor
    weight: SuperblockWeight
    bias: torch.Tensor | None
    config: SuperblockConfig
    experts: torch.Tensor | None = None
    """Of every pair: the weight is a stack, and row i of the result is x's row i // top_k times matrix experts[i]."""
    top_k: int = 1

    @property
    def rows(self) -> int:
        """Of the result."""
        return len(self.x) if self.experts is None else self.experts.numel()

    def arguments(self, out: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any], tuple[int]]:
        """(arguments, constexpr arguments and launch options, grid)."""
        rows, (outputs, width), config = self.rows, self.weight.shape[-2:], self.config
        constants = _kind_constants(self.weight.kind, width)
        spans, span = prefetch_shape(config.block_n, width * constants["BITS"] // 8, 1, config.warps)
        options = {
            **constants,
            "E": 1 if self.experts is None else self.weight.shape[0],
            "TOP_K": self.top_k,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "SLICES": config.slices,
            "STAGES": config.stages,
            "EVEN": width % (constants["WIDTH"] * config.slices) == 0,
            "SPANS": spans,
            "SPAN": span,
            "ASM": not INTERPRETED,
            "num_warps": config.warps,
            **pdl(),
        }
        tiles = triton.cdiv(rows, config.block_m) if self.experts is None else rows
        blocks = width // self.weight.kind.block
        arguments = (self.x, *_planes(self.weight), self.bias, self.experts, out, rows, outputs, blocks)
        return arguments, options, (triton.cdiv(outputs, config.block_n) * tiles,)

    def run(self) -> torch.Tensor:
        out = self.x.new_empty(self.rows, self.weight.shape[-2])
        arguments, options, grid = self.arguments(out)
        _linear[grid](*arguments, **options)
        return out

    def compile(self) -> None:
        """Compile without running; the tensors may be on the `meta` device."""
        out = self.x.new_empty(self.rows, self.weight.shape[-2])
        arguments, options, grid = self.arguments(out)
        _linear.warmup(*arguments, grid=grid, **options)


def superblock_linear(
    x: torch.Tensor, weight: SuperblockWeight, bias: torch.Tensor | None = None, config: SuperblockConfig | None = None
) -> torch.Tensor:
    """x @ weight.T (+ bias), decoded in registers, for x [rows, in] of 16 bits."""
    return _Launch(x.contiguous(), weight, bias, config or choose(len(x))).run()


def superblock_values(
    weight: SuperblockWeight, dtype: torch.dtype, rows: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The matrix, or these rows [n] int64 of it, dequantized."""
    width = weight.shape[1]
    count = weight.shape[0] if rows is None else len(rows)
    if out is None:
        out = torch.empty(count, width, dtype=dtype, device=weight.device)
    if count:
        constants = _kind_constants(weight.kind, width)
        block_n = 32 if rows is None else 1
        grid = (triton.cdiv(count, block_n), triton.cdiv(width, constants["WIDTH"]))
        _dequantize[grid](
            *_planes(weight), rows, out, count, width // weight.kind.block,
            BLOCK_N=block_n, **constants, num_warps=4 if rows is None else 1, **pdl(),
        )  # fmt: skip
    return out


def pair_linear(x: torch.Tensor, weight: SuperblockWeight, experts: torch.Tensor, top_k: int = 1) -> torch.Tensor:
    """x's row i // top_k times matrix experts[i] of a stack, for every pair i; undefined where there is no such one."""
    return _Launch(x.contiguous(), weight, None, choose(1), experts.contiguous(), top_k).run()


class SuperblockProducts(QuantizedProducts):
    """Products with GGUF's blocks."""

    def linear(self, x: torch.Tensor, weight: SuperblockWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, weight.shape[0])
        config = self._config(len(x), x.dtype)
        return _dequantized_linear(x, weight, bias) if config is None else superblock_linear(x, weight, bias, config)

    def embedding(self, tokens: torch.Tensor, weight: SuperblockWeight) -> torch.Tensor:
        """Rows `tokens` of the matrix."""
        return superblock_values(weight, weight.dtype, tokens)

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: SuperblockWeight,
        down: SuperblockWeight,
        activation: str = "silu",
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Few pairs of tokens and experts: one by one. Many: all experts are dequantized for the 16-bit kernels."""
        if not len(x):
            return torch.empty_like(x)
        plain = activation == "silu" and gate_up_bias is None and down_bias is None
        if plain and not (x.dtype.itemsize == 2 and (self.invariant or experts.numel() <= MAX_PAIRS)):
            first, second = (superblock_values(each.flat, x.dtype).view(each.shape) for each in (gate_up, down))
            return self.ops.experts(x, weights, experts, first, second)
        if x.dtype.itemsize != 2:
            return super().experts(x, weights, experts, gate_up, down, activation, gate_up_bias, down_bias)
        chosen = experts.flatten().clamp(0, gate_up.shape[0] - 1)
        features = pair_linear(x, gate_up, experts, experts.shape[1])
        if gate_up_bias is not None:
            features += gate_up_bias[chosen]
        results = pair_linear(self.ops.gate_mul(features, activation), down, experts)
        if down_bias is not None:
            results += down_bias[chosen]
        return combine(results, weights.contiguous(), experts.contiguous(), gate_up.shape[0])

    def kernels_of(
        self, weight: SuperblockWeight, normed: bool, gated: bool, bias: bool, max_rows: int
    ) -> Sequence[CompilableKernel]:
        added = torch.empty(weight.shape[0], dtype=weight.dtype, device="meta") if bias else None
        planes = {name: tensor.to("meta") for name, tensor in weight.tensors.items()}
        described = SuperblockWeight(weight.kind, planes, weight.dtype)
        found: dict[SuperblockConfig, _Launch] = {}
        for rows in (8, 16, 32, 64):
            config = self._config(rows, weight.dtype)
            if config is not None and rows < 2 * max(max_rows, 8):
                x = torch.empty(rows, weight.shape[1], dtype=weight.dtype, device="meta")
                found.setdefault(config, _Launch(x, described, added, config))
        return list(found.values())

    def expert_kernels_of(
        self,
        gate_up: SuperblockWeight,
        down: SuperblockWeight,
        top_k: int,
        renormalise: bool,
        routed: int,
        max_tokens: int,
        activation: str = "silu",
        biased: bool = False,
    ) -> dict[object, Callable[[], object]]:
        def launch() -> None:
            x = torch.zeros(1, gate_up.shape[2], dtype=gate_up.dtype, device=gate_up.device)
            weights = torch.zeros(1, top_k, device=x.device)
            self.experts(x, weights, torch.zeros(1, top_k, dtype=torch.int32, device=x.device), gate_up, down)

        return {"pairs": launch}

    def _config(self, rows: int, dtype: torch.dtype) -> SuperblockConfig | None:
        """The tile shape; None: the matrix is dequantized."""
        if dtype.itemsize != 2:
            return None
        if self.invariant:
            return INVARIANT
        return choose(rows) if rows <= MAX_ROWS else None


def _dequantized_linear(x: torch.Tensor, weight: SuperblockWeight, bias: torch.Tensor | None) -> torch.Tensor:
    outputs, width = weight.shape
    share = max(SCRATCH_VALUES // width // 128 * 128, 128)
    if outputs <= share:
        return F.linear(x, superblock_values(weight, x.dtype), bias)
    out = x.new_empty(len(x), outputs)
    scratch = x.new_empty(share, width)
    for start in range(0, outputs, share):
        part = weight[start : start + share]
        values = superblock_values(part, x.dtype, out=scratch[: len(range(outputs)[start : start + share])])
        torch.mm(x, values.t(), out=out[:, start : start + share])
    return out if bias is None else out.add_(bias)
