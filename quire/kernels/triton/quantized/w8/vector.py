"""GEMM `vector` of 8-bit codes: 1 to 4 rows, activations quantized in the kernel itself.

Like `skinny_gemm/vector.py`: a program owns a few rows of the weight and holds them in registers; a thread loads 16
bytes of a weight row at a time, all of them before `gdc_wait`. Meanwhile every program quantizes the input, with the
residual addition and the norm before it, which spares a kernel between two products. Codes are multiplied by tensor
cores, straight from the registers that loaded them (`_multiply`). If activations stay as they are, weights are
multiplied as values, rounded to the dtype, on the FMA units.

Bytes: one per weight; the input, the residual and the gain once per program, mostly from cache. Instructions: per two
weights a conversion (int8: none), per 8 weights and row (int8: 16) a tensor-core instruction.
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
from quire.kernels.triton.quantized.w8.codes import INTERPRETER, add_max, divide, encode, scale_of
from quire.kernels.triton.skinny_gemm.common import GemmConfig, GemmLaunch
from quire.kernels.triton.skinny_gemm.vector import _join, _output_index, load_chunks, weight_rows

MAX_ROWS = 4
"""Input rows: with more, arithmetic takes longer than the loads."""


@dataclass(slots=True)
class VectorGemm:
    """One GEMM: its inputs as they are before quantization, and what is fused into it."""

    x: torch.Tensor
    """[rows, in]; codes, if `x_scale` is given."""
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
    x_scale: torch.Tensor | None = None
    """Of x as codes: float32 [rows], or in blocks [groups, rows]."""
    dtype: torch.dtype | None = None
    """Of the result; None: x's."""


@triton.jit
def _unpack(words):
    """float8 codes, four to a word, as float16 values, two to a word: (the first two, the last two)."""
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high; }""",
        "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _decoded(words, byte: tl.constexpr, CODE: tl.constexpr):
    """One code of every word: in the interpreter, which has no assembler."""
    code = ((words << (24 - 8 * byte)) >> 24).to(tl.int8)
    if tl.int8 == CODE:
        value = code.to(tl.int32)
    else:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _multiply(low, high, next_low, next_high, x, next_x, sums, CODE: tl.constexpr):
    """sums + products of the words of two outputs (low, high), and of their next words, with those of the input.

    A tensor-core instruction takes row i of A from lanes 4i .. 4i + 3 (and row i + 8 too: the other output), and column
    i of B from the same lanes. Each lane gives it a few words of its own, whichever inputs they are, and the input's
    words for them. The diagonal of the result is what is wanted, sums over four lanes: `_diagonal` picks it in the end.
    """
    if INTERPRETER:
        first, second = sums[0], sums[2]
        for byte in tl.static_range(4):
            first += _decoded(low, byte, CODE) * _decoded(x, byte, CODE)
            first += _decoded(next_low, byte, CODE) * _decoded(next_x, byte, CODE)
            second += _decoded(high, byte, CODE) * _decoded(x, byte, CODE)
            second += _decoded(next_high, byte, CODE) * _decoded(next_x, byte, CODE)
        sums = first, sums[1], second, sums[3]
    elif tl.int8 == CODE:
        sums = tl.inline_asm_elementwise(
            """mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
            {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};""",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [low, high, next_low, next_high, x, next_x, sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        sums = _multiply_halves(low, high, x, sums)
        sums = _multiply_halves(next_low, next_high, next_x, sums)
    return sums


@triton.jit
def _multiply_halves(low, high, x, sums):
    """`_multiply` of float8 codes, of one word: as float16 values, since Hopper's `mma` has no float8 of its own."""
    low_first, low_last = _unpack(low)
    high_first, high_last = _unpack(high)
    x_first, x_last = _unpack(x)
    return tl.inline_asm_elementwise(
        """mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
        {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};""",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [low_first, high_first, low_last, high_last, x_first, x_last, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _diagonal(sums):
    """(first output's sums, second output's) of `_multiply`: zeros on lanes that hold none."""
    if INTERPRETER:
        first, second = sums[0], sums[2]
    else:
        lane = tl.inline_asm_elementwise(
            "{ .reg .b32 unused; mov.u32 $0, %laneid; mov.b32 unused, $1; }", "=r,r", [sums[0]], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
        is_odd = (lane >> 2) & 1 == 1
        is_kept = (lane & 3) == (lane >> 3)
        first = tl.where(is_kept, tl.where(is_odd, sums[1], sums[0]), 0)
        second = tl.where(is_kept, tl.where(is_odd, sums[3], sums[2]), 0)
    return first, second


@triton.jit
def _quarters(words, SHAPE: tl.constexpr):
    """The four words of each lane: words [..., 4 * lanes] as four tensors [..., lanes]."""
    even, odd = tl.split(tl.reshape(words, SHAPE + [2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _pack4(codes, COUNT: tl.constexpr):
    """Codes [COUNT] packed in int32 [COUNT / 4], the first in the low byte."""
    bytes = tl.reshape(codes.to(tl.int8, bitcast=True).to(tl.int32) & 255, (COUNT // 4, 4))
    return tl.sum(bytes << (8 * tl.arange(0, 4))[None, :], 1)


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
        total, amax = tl.reduce((squares, largest), 0, add_max)
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
            chunks = chunks + (_pack4(encode(wide, CODE), BLOCK_K),)
        else:
            chunks = chunks + (wide,)
    return chunks, scales


@triton.jit
def _read_codes(
    x, scales, row, rows, K: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """(a row of codes in chunks, as words, and its scales)."""
    words = (x + tl.minimum(row, rows - 1) * K).to(tl.pointer_type(tl.int32))
    chunks = load_chunks(words, K // 4, BLOCK_K // 4)
    if GROUP:
        read = ()
        for chunk in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
            group = chunk * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP)
            at = scales + group * rows + tl.minimum(row, rows - 1)
            read = read + (tl.load(at, mask=group * GROUP < K, other=0.0),)
    else:
        read = tl.load(scales + tl.minimum(row, rows - 1))
    return chunks, read


@triton.jit
def _value_partials(
    tiles, vectors, weight_scale, dtype,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Each thread's partial dot products of weights, as values, with every row: [BLOCK_N, threads] joined over rows."""
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    parts = ()
    for row in tl.static_range(ROWS):
        part = tl.zeros((BLOCK_N, BLOCK_K // WIDE), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            value = (tiles[chunk].to(tl.float32) * weight_scale[:, None]).to(dtype)
            product = value.to(tl.float32) * vectors[row][chunk][None, :]
            part += tl.sum(tl.reshape(product, (BLOCK_N, BLOCK_K // WIDE, WIDE)), 2)
        parts = parts + (part,)
    return _join(parts, ROWS)


@triton.jit
def _code_partials(
    tiles, vectors, x_scales, scale, first, skip, N,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    CODE: tl.constexpr, BLOCK_ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Partial dot products of words of codes with every row: [BLOCK_N, threads] joined over rows.

    With scales per block the products are scaled, four lanes' at a time: their 64 inputs are in one block.
    """
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    LANES: tl.constexpr = BLOCK_K // WIDE
    PAIRS: tl.constexpr = BLOCK_N // 2
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP else 0
    SUM: tl.constexpr = tl.int32 if tl.int8 == CODE else tl.float32
    zeros = tl.zeros((PAIRS, LANES), SUM)
    pairs = ()
    for chunk in tl.static_range(CHUNKS):
        low, high = tl.split(tl.permute(tl.reshape(tiles[chunk], (PAIRS, 2, LANES * 4)), (0, 2, 1)))
        pairs = pairs + ((_quarters(low, [PAIRS, LANES]), _quarters(high, [PAIRS, LANES])),)
    parts = ()
    for row in tl.static_range(ROWS):
        sums = (zeros, zeros, zeros, zeros)
        scaled_low = zeros
        scaled_high = zeros
        for chunk in tl.static_range(CHUNKS):
            low = pairs[chunk][0]
            high = pairs[chunk][1]
            x = _quarters(tl.broadcast_to(vectors[row][chunk][None, :], (PAIRS, LANES * 4)), [PAIRS, LANES])
            sums = _multiply(low[0], high[0], low[1], high[1], x[0], x[1], sums, CODE)
            sums = _multiply(low[2], high[2], low[3], high[3], x[2], x[3], sums, CODE)
            if GROUP:
                spread = tl.broadcast_to(x_scales[row][chunk][:, None], (BLOCK_K // GROUP, GROUP // WIDE))
                factor = tl.reshape(spread, (LANES,))[None, :]
                group = (chunk * BLOCK_K + tl.arange(0, LANES) * WIDE) // GROUP
                outputs = first + 2 * tl.arange(0, PAIRS)
                at = scale + group[None, :]
                inside = group[None, :] < GROUPS
                lower, upper = _diagonal(sums)
                blocks = (skip + tl.minimum(outputs, N - 1)) // BLOCK_ROWS * GROUPS
                scaled_low += lower * factor * tl.load(at + blocks[:, None], mask=inside, other=0.0)
                blocks = (skip + tl.minimum(outputs + 1, N - 1)) // BLOCK_ROWS * GROUPS
                scaled_high += upper * factor * tl.load(at + blocks[:, None], mask=inside, other=0.0)
                sums = (zeros, zeros, zeros, zeros)
        if not GROUP:
            scaled_low, scaled_high = _diagonal(sums)
        joined = tl.permute(tl.join(scaled_low, scaled_high), (0, 2, 1))
        parts = parts + (tl.reshape(joined, (BLOCK_N, LANES)),)
    return _join(parts, ROWS)


@triton.jit
def _write(
    tiles, vectors, x_scales, scale, bias, y, first, rows, N, dtype,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    SILU: tl.constexpr, QUANTIZED: tl.constexpr, CODE: tl.constexpr, BLOCK_ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store outputs [first, first + BLOCK_N) of every row."""
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    outputs = first + tl.arange(0, BLOCK_N)
    column, row = _output_index(outputs, ROWS)
    inside = column < N
    if not QUANTIZED:
        weight_scale = tl.load(scale + outputs, mask=outputs < N, other=0.0)
        out = _value_partials(tiles[:CHUNKS], vectors, weight_scale, dtype, K, ROWS, BLOCK_N, BLOCK_K, WIDE)
    else:
        out = _code_partials(
            tiles[:CHUNKS], vectors, x_scales, scale, first, 0, N,
            K, ROWS, BLOCK_N, BLOCK_K, WIDE, CODE, BLOCK_ROWS, GROUP,
        )  # fmt: skip
    if SILU:
        if not QUANTIZED:
            weight_scale = tl.load(scale + N + outputs, mask=outputs < N, other=0.0)
            up = _value_partials(tiles[CHUNKS:], vectors, weight_scale, dtype, K, ROWS, BLOCK_N, BLOCK_K, WIDE)
        else:
            up = _code_partials(
                tiles[CHUNKS:], vectors, x_scales, scale, first, N, N,
                K, ROWS, BLOCK_N, BLOCK_K, WIDE, CODE, BLOCK_ROWS, GROUP,
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
    x, x_scale, residual, gain, static, weight, scale, bias, stream, y, rows, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    SILU: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK_ROWS: tl.constexpr, GROUP: tl.constexpr, LOOP: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    CODE: tl.constexpr = weight.dtype.element_ty
    # Codes that are multiplied as such are read as words of four.
    PACK: tl.constexpr = 4 if QUANTIZED else 1
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
    vectors = ()
    x_scales = ()
    if x_scale is not None:
        for row in tl.static_range(ROWS):
            chunks, scales = _read_codes(x, x_scale, row, rows, K, BLOCK_K, GROUP)
            vectors = vectors + (chunks,)
            x_scales = x_scales + (scales,)
    else:
        # All loads precede all stores: the compiler may not move a load over a store.
        read = ()
        carried = ()
        for row in tl.static_range(ROWS):
            at = tl.minimum(row, rows - 1) * K
            read = read + (load_chunks(x + at, K, BLOCK_K),)
            if residual is not None:
                carried = carried + (load_chunks(residual + at, K, BLOCK_K),)
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
            _write(tiles, vectors, x_scales, scale, bias, y, first, rows, N, y.dtype.element_ty,
                   K, ROWS, BLOCK_N, BLOCK_K, WIDE, SILU, QUANTIZED, CODE, BLOCK_ROWS, GROUP)  # fmt: skip
            tiles = ahead
    else:
        _write(tiles, vectors, x_scales, scale, bias, y, program * BLOCK_N, rows, N, y.dtype.element_ty,
               K, ROWS, BLOCK_N, BLOCK_K, WIDE, SILU, QUANTIZED, CODE, BLOCK_ROWS, GROUP)  # fmt: skip


def vector_launch(gemm: VectorGemm, config: GemmConfig) -> GemmLaunch:
    """The launch of a GEMM of at most MAX_ROWS rows."""
    rows, depth = gemm.x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{config} is for at most {MAX_ROWS} rows, not {rows}")
    outputs = gemm.weight.shape[0] // (2 if gemm.silu else 1)
    out = gemm.x.new_empty(rows, outputs, dtype=gemm.dtype or gemm.x.dtype)
    programs = triton.cdiv(outputs, config.block_n)
    if config.programs:
        programs = min(programs, config.programs * num_sms())
    arguments = (
        gemm.x, gemm.x_scale, gemm.residual, gemm.gain, gemm.static, gemm.weight, gemm.scale, gemm.bias, gemm.stream,
        out, rows, outputs, gemm.eps,
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
