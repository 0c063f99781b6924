"""GEMM `vector` of 8-bit codes: 1 to 4 rows without tensor cores, activations quantized in the kernel itself.

Like `skinny_gemm/vector.py`: a program owns a few rows of the weight and holds them in registers; a thread loads 16
bytes of a weight row at a time, all of them before `gdc_wait`. Meanwhile every program quantizes the input, with the
residual addition and the norm before it, which spares a kernel between two products. A float8 code is multiplied as
float32, int8 codes four at a time by DP4A. If activations stay as they are, weights are values, rounded to the dtype.

Bytes: one per weight; the input, the residual and the gain once per program, mostly from cache. Operations: one
conversion per weight (int8: none), and one multiply-add (int8: a quarter) per weight and row.
"""

# ruff: noqa: N803, N806, RUF005  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.quantized.w8.codes import INTERPRETER, divide, encode, scale_of
from quire.kernels.triton.skinny_gemm.common import GemmConfig, GemmLaunch
from quire.kernels.triton.skinny_gemm.vector import _join, _output_index, load_chunks, weight_rows

MAX_ROWS = 4
"""Input rows: with more, arithmetic takes longer than the loads."""


@dataclass(slots=True)
class VectorGemm:
    """One GEMM: its inputs as they are before quantization, and what is fused into it."""

    x: torch.Tensor
    """[rows, in]."""
    weight: torch.Tensor
    """Codes [out, in]; under `silu` [gate and up, in]."""
    scale: torch.Tensor
    """float32 [out]; in blocks [block rows, block columns]."""
    quantized: bool = True
    """Whether activations are."""
    static: torch.Tensor | None = None
    """The scale of activations; None: by row, or by row and block."""
    bias: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    """The norm's weight [in]; None: no norm."""
    residual: torch.Tensor | None = None
    """Added to x before the norm."""
    eps: float = 0.0
    silu: bool = False
    stream: torch.Tensor | None = None
    """Output of residual + x."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a scale's block; None: a scale per output."""


@triton.jit
def _dot4(weights, inputs):
    """Dot products of four int8 pairs each, packed in int32."""
    if INTERPRETER:
        out = ((weights << 24) >> 24) * ((inputs << 24) >> 24)
        for shift in tl.static_range(8, 32, 8):
            out += ((weights << (24 - shift)) >> 24) * ((inputs << (24 - shift)) >> 24)
    else:
        out = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [weights, inputs], dtype=tl.int32, is_pure=True, pack=1
        )
    return out


@triton.jit
def _pack4(codes, COUNT: tl.constexpr):
    """int8 codes [COUNT] packed in int32 [COUNT / 4], the first in the low byte."""
    bytes = tl.reshape(codes.to(tl.int32) & 255, (COUNT // 4, 4))
    return tl.sum(bytes << (8 * tl.arange(0, 4))[None, :], 1)


@triton.jit
def _add_max(total, largest, other_total, other_largest):
    return total + other_total, tl.maximum(largest, other_largest)


@triton.jit
def _prepared(
    row, carried, gains, static, stream, writes, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, CODE: tl.constexpr, QUANTIZED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """(the row in chunks as its product takes it, scales): normed, and quantized to codes.

    The norm multiplies by the gain first: then the largest normed value follows from the largest product, and one
    reduction over the threads finds both.
    """
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    DTYPE: tl.constexpr = row[0].dtype
    values = ()
    squares = tl.zeros((BLOCK_K,), tl.float32)
    largest = tl.zeros((BLOCK_K,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        value = row[chunk]
        if carried is not None:
            columns = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
            value = (value.to(tl.float32) + carried[chunk].to(tl.float32)).to(DTYPE)
            tl.store(stream + columns, value, mask=(columns < K) & writes)
        wide = value.to(tl.float32)
        if gains is not None:
            squares += wide * wide
            wide = wide * gains[chunk].to(tl.float32)
            values = values + (wide,)
        else:
            values = values + (value,)
        largest = tl.maximum(largest, tl.abs(wide))
    inverse_rms = None
    if gains is not None:
        total, amax = tl.reduce((squares, largest), 0, _add_max)
        inverse_rms = tl.rsqrt(total / K + eps)
        amax = (amax * inverse_rms).to(DTYPE).to(tl.float32)
    elif QUANTIZED and GROUP == 0 and static is None:
        amax = tl.max(largest, 0)
    chunks = ()
    scales = ()
    if QUANTIZED and GROUP == 0:
        scale = scale_of(amax, CODE) if static is None else tl.load(static)
        inverse = tl.math.div_rn(1.0, scale)
        scales = scale
    for chunk in tl.static_range(CHUNKS):
        wide = values[chunk].to(tl.float32)
        if gains is not None:
            wide = (wide * inverse_rms).to(DTYPE).to(tl.float32)
        if QUANTIZED:
            if GROUP:
                grouped = tl.reshape(wide, (BLOCK_K // GROUP, GROUP))
                scale = scale_of(tl.max(tl.abs(grouped), 1), CODE)
                inverse = tl.math.div_rn(tl.full((BLOCK_K // GROUP,), 1.0, tl.float32), scale)
                wide = tl.reshape(divide(grouped, scale[:, None], inverse[:, None]), (BLOCK_K,))
                scales = scales + (scale,)
            else:
                wide = divide(wide, scale, inverse)
            codes = encode(wide, CODE)
            if tl.int8 == CODE:
                chunks = chunks + (_pack4(codes, BLOCK_K),)
            else:
                chunks = chunks + (codes,)
        else:
            chunks = chunks + (wide,)
    return chunks, scales


@triton.jit
def _partials(
    tiles, vectors, x_scales, weight_scale, scale, first, skip, N, dtype,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    QUANTIZED: tl.constexpr, BLOCK_ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Each thread's partial dot products of weight tiles with every row: [BLOCK_N, threads] joined over rows."""
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WORDS: tl.constexpr = tiles[0].shape[1]
    PACKED: tl.constexpr = tiles[0].dtype == tl.int32
    EACH: tl.constexpr = WORDS * WIDE // BLOCK_K
    LANES: tl.constexpr = BLOCK_K // WIDE
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP else 0
    parts = ()
    for row in tl.static_range(ROWS):
        part = tl.zeros((BLOCK_N, LANES), tl.int32 if PACKED else tl.float32)
        for chunk in tl.static_range(CHUNKS):
            if PACKED:
                product = _dot4(tiles[chunk], vectors[row][chunk][None, :])
            elif QUANTIZED:
                product = tiles[chunk].to(tl.float32) * vectors[row][chunk].to(tl.float32)[None, :]
            else:
                value = (tiles[chunk].to(tl.float32) * weight_scale[:, None]).to(dtype)
                product = value.to(tl.float32) * vectors[row][chunk][None, :]
            terms = tl.sum(tl.reshape(product, (BLOCK_N, LANES, EACH)), 2)
            if GROUP:
                spread = tl.broadcast_to(x_scales[row][chunk][:, None], (BLOCK_K // GROUP, GROUP // WIDE))
                terms *= tl.reshape(spread, (LANES,))[None, :]
                outputs = skip + tl.minimum(first + tl.arange(0, BLOCK_N), N - 1)
                group = (chunk * BLOCK_K + tl.arange(0, LANES) * WIDE) // GROUP
                at = scale + (outputs // BLOCK_ROWS * GROUPS)[:, None] + group[None, :]
                terms *= tl.load(at, mask=group[None, :] < GROUPS, other=0.0)
            part += terms
        parts = parts + (part,)
    return _join(parts, ROWS)


@triton.jit
def _write(
    tiles, vectors, x_scales, scale, bias, y, first, rows, N, dtype,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    SILU: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK_ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store outputs [first, first + BLOCK_N) of every row."""
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    outputs = first + tl.arange(0, BLOCK_N)
    column, row = _output_index(outputs, ROWS)
    inside = column < N
    weight_scale = None
    if not QUANTIZED:
        weight_scale = tl.load(scale + outputs, mask=outputs < N, other=0.0)
    out = _partials(
        tiles[:CHUNKS], vectors, x_scales, weight_scale, scale, first, 0, N, dtype,
        K, ROWS, BLOCK_N, BLOCK_K, WIDE, QUANTIZED, BLOCK_ROWS, GROUP,
    )  # fmt: skip
    if SILU:
        if not QUANTIZED:
            weight_scale = tl.load(scale + N + outputs, mask=outputs < N, other=0.0)
        up = _partials(
            tiles[CHUNKS:], vectors, x_scales, weight_scale, scale, first, N, N, dtype,
            K, ROWS, BLOCK_N, BLOCK_K, WIDE, QUANTIZED, BLOCK_ROWS, GROUP,
        )  # fmt: skip
        out, up = tl.split(tl.sum(tl.join(out, up), 1))
        up = up.to(tl.float32)
    else:
        out = tl.sum(out, 1)
    out = out.to(tl.float32)
    if QUANTIZED and GROUP == 0:
        joined = _join(x_scales, ROWS)
        if ROWS > 1:
            joined = joined[None]
        out = out * joined * tl.load(scale + column, mask=inside, other=0.0)
        if SILU:
            up = up * joined * tl.load(scale + N + column, mask=inside, other=0.0)
    if bias is not None:
        out += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            up += tl.load(bias + N + column, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        out = out / (1 + tl.exp(-out)) * up
    tl.store(y + row * N + column, out.to(y.dtype.element_ty), mask=inside & (row < rows))


@triton.jit
def _tiles(weight, first, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SILU: tl.constexpr):
    """The weight tiles of outputs [first, first + BLOCK_N); with SILU those of the gate, then those of up."""
    tiles = weight_rows(weight, first, N, K, BLOCK_N, BLOCK_K)
    if SILU:
        tiles = tiles + weight_rows(weight + N.to(tl.int64) * K, first, N, K, BLOCK_N, BLOCK_K)
    return tiles


@triton.jit(do_not_specialize=["rows"])
def _vector(
    x, residual, gain, static, weight, scale, bias, stream, y, rows, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    SILU: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK_ROWS: tl.constexpr, GROUP: tl.constexpr, LOOP: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    CODE: tl.constexpr = weight.dtype.element_ty
    # Under DP4A the codes are read as words of four.
    PACK: tl.constexpr = 4 if QUANTIZED and tl.int8 == CODE else 1
    if PACK == 4:
        weight = weight.to(tl.pointer_type(tl.int32))
    program = tl.program_id(0)
    tiles = _tiles(weight, program * BLOCK_N, N, K // PACK, BLOCK_N, BLOCK_K // PACK, SILU)
    gains = None
    if gain is not None:
        gains = load_chunks(gain, K, BLOCK_K)
    if PDL:
        # EARLY: the next kernel's weight loads queue behind ours while both wait; it has fewer free registers then.
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    # All loads precede all stores: the compiler may not move a load over a store.
    read = ()
    carried = ()
    for row in tl.static_range(ROWS):
        at = tl.minimum(row, rows - 1) * K
        read = read + (load_chunks(x + at, K, BLOCK_K),)
        if residual is not None:
            carried = carried + (load_chunks(residual + at, K, BLOCK_K),)
    vectors = ()
    x_scales = ()
    for row in tl.static_range(ROWS):
        if residual is not None:
            # One program writes the new stream, to another tensor: the others may still read the old one.
            writes = (program == 0) & (row < rows)
            chunks, scales = _prepared(read[row], carried[row], gains, static, stream + row * K, writes, eps,
                                       K, BLOCK_K, CODE, QUANTIZED, GROUP)  # fmt: skip
        else:
            chunks, scales = _prepared(read[row], None, gains, static, None, False, eps,
                                       K, BLOCK_K, CODE, QUANTIZED, GROUP)  # fmt: skip
        vectors = vectors + (chunks,)
        x_scales = x_scales + (scales,)
    if LOOP:
        step = tl.num_programs(0) * BLOCK_N
        for first in range(program * BLOCK_N, N, step):
            ahead = _tiles(weight, first + step, N, K // PACK, BLOCK_N, BLOCK_K // PACK, SILU)
            _write(tiles, vectors, x_scales, scale, bias, y, first, rows, N, x.dtype.element_ty,
                   K, ROWS, BLOCK_N, BLOCK_K, WIDE, SILU, QUANTIZED, BLOCK_ROWS, GROUP)  # fmt: skip
            tiles = ahead
    else:
        _write(tiles, vectors, x_scales, scale, bias, y, program * BLOCK_N, rows, N, x.dtype.element_ty,
               K, ROWS, BLOCK_N, BLOCK_K, WIDE, SILU, QUANTIZED, BLOCK_ROWS, GROUP)  # fmt: skip


def vector_launch(gemm: VectorGemm, config: GemmConfig) -> GemmLaunch:
    """The launch of a GEMM of at most MAX_ROWS rows."""
    rows, depth = gemm.x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{config} is for at most {MAX_ROWS} rows, not {rows}")
    outputs = gemm.weight.shape[0] // (2 if gemm.silu else 1)
    out = gemm.x.new_empty(rows, outputs)
    programs = triton.cdiv(outputs, config.block_n)
    if config.programs:
        programs = min(programs, config.programs * num_sms())
    arguments = (
        gemm.x, gemm.residual, gemm.gain, gemm.static, gemm.weight, gemm.scale, gemm.bias, gemm.stream, out,
        rows, outputs, gemm.eps,
    )  # fmt: skip
    constants = _constants(config, rows, depth, gemm.silu, gemm.quantized, gemm.block or (0, 0))
    return GemmLaunch(_vector, programs, arguments, constants, out)


@functools.cache
def _constants(
    config: GemmConfig, rows: int, depth: int, silu: bool, quantized: bool, block: tuple[int, int]
) -> dict[str, Any]:
    """Constexpr arguments and launch options: a thread loads 16 bytes of each weight row and chunk."""
    return {
        "K": depth,
        "ROWS": triton.next_power_of_2(rows),
        "BLOCK_N": config.block_n,
        "BLOCK_K": 32 * config.warps * 16,
        "WIDE": 16,
        "SILU": silu,
        "QUANTIZED": quantized,
        "BLOCK_ROWS": block[0],
        "GROUP": block[1],
        "LOOP": config.programs > 0,
        "EARLY": config.early,
        "num_warps": config.warps,
        **pdl(),
    }
