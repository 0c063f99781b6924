"""MXFP4 experts of up to 8 tokens, each pair (token, chosen expert) by itself, on tensor cores.

Gate and up, with the activation fused: persistent programs take tiles of 8 features of a pair, 8 lines of the gate and
8 of up, and their warps split the inputs. Down: a program takes 16 outputs of a token, and its warps the token's
experts. A warp keeps up to DEPTH pieces of 64 bytes of each of 16 lines in flight, in registers, which a few bit
operations and one multiplication by the scale make operands of. Inputs, normed, are in shared memory, in the order of
the operand of eight columns: one input repeated, or those of all tokens, of which the pair's result is kept. One
exchange at the end of a tile sums over warps.

Bytes: the codes and scales of each pair's expert; the input once per program. Operations: 3 instructions per weight to
make numbers of codes, where the vector kernels take 8; products on tensor cores.
"""

# ruff: noqa: N803, N806  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment, misc, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.gates import gate_mul
from quire.kernels.triton.launch import INTERPRETED, gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, GemmTile
from quire.kernels.triton.quantized.expert_stacks import Stack
from quire.kernels.triton.quantized.layouts import (
    arange,
    expert_layouts,
    in_layout,
    layout_jit,
    multiply,
    open_inputs,
    read_inputs,
    write_inputs,
    zeros,
)
from quire.kernels.triton.quantized.words import EMULATED, MXFP4, split

FEATURES, OUTPUTS = 8, 16
"""Of a tile of gate and up, and of down."""
SPAN = 64
"""Inputs whose codes are packed together: a byte holds input j and j + 32."""
PIECE = 2 * SPAN
"""Inputs of a line that a warp takes at once: 64 bytes."""
# Sign to bit 15; exponent and mantissa to bits 8 to 6, which is 2^126 times too small: products know subnormals.
# Numbers are 2^-32 of the weights: 2^126 times the scale may be too large for bfloat16; so scales up to 2^33 are not.
_SPLIT = tl.constexpr(
    """{ .reg .b32 a, b;
    shl.b32 a, $4, 12;
    shl.b32 b, $4, 6;
    and.b32 b, b, 0x01c001c0;
    lop3.b32 a, a, 0x80008000, b, 0xea;
    mul.rn.bf16x2 $0, a, $5;
    shl.b32 a, $4, 8;
    shl.b32 b, $4, 2;
    and.b32 b, b, 0x01c001c0;
    lop3.b32 a, a, 0x80008000, b, 0xea;
    mul.rn.bf16x2 $1, a, $6;
    shl.b32 a, $4, 4;
    shr.u32 b, $4, 2;
    and.b32 b, b, 0x01c001c0;
    lop3.b32 a, a, 0x80008000, b, 0xea;
    mul.rn.bf16x2 $2, a, $5;
    shr.u32 b, $4, 6;
    and.b32 b, b, 0x01c001c0;
    lop3.b32 a, $4, 0x80008000, b, 0xea;
    mul.rn.bf16x2 $3, a, $6; }"""
)


@triton.jit
def _position(k):
    """The word of a piece at place k of an operand: a thread's eight adjacent words are its two runs of four."""
    return k // 4 % 4 * 8 + k // 16 * 4 + k % 4


@triton.jit
def _input(k, FIELD: tl.constexpr):
    """The input of a piece at place k of an operand made of nibbles FIELD of words.

    A span's byte j holds inputs j and j + 32.
    """
    word = _position(k)
    return word // 16 * 64 + FIELD % 2 * 32 + word % 16 * 2 + FIELD // 2


@layout_jit
def _operand(field, SLICES: tl.constexpr, OUTPUTS: tl.constexpr, A: tl.constexpr):
    runs = tl.permute(tl.reshape(field, (SLICES, OUTPUTS, 4, 2, 4)), (0, 1, 3, 2, 4))
    return in_layout(tl.reshape(runs, (SLICES, OUTPUTS, 32)), A)


@layout_jit
def _numbers(pairs, scales, SLICES: tl.constexpr, OUTPUTS: tl.constexpr, LAYOUTS: tl.constexpr, DTYPE: tl.constexpr):
    """The four operands of a piece: low and high nibbles of even bytes, then of odd ones."""
    A: tl.constexpr = LAYOUTS.a
    WORDS: tl.constexpr = LAYOUTS.words
    words = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    words = in_layout(tl.reshape(words, (SLICES, OUTPUTS, 2, 16)), WORDS)
    both = scales.to(tl.int32) & 0xFFFF
    low, high = both & 255, both >> 8
    if EMULATED:
        low = tl.where(low == 0, 0x400000, low << 23).to(tl.float32, bitcast=True)[:, :, :, None]
        high = tl.where(high == 0, 0x400000, high << 23).to(tl.float32, bitcast=True)[:, :, :, None]
        fields = split(words, MXFP4, DTYPE)
        fields = (
            (fields[0].to(tl.float32) * low).to(DTYPE), (fields[1].to(tl.float32) * high).to(DTYPE),
            (fields[2].to(tl.float32) * low).to(DTYPE), (fields[3].to(tl.float32) * high).to(DTYPE),
        )  # fmt: skip
    else:
        # 2^(s - 127 + 126 - 32)
        low = ((low + 94) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = ((high + 94) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        fields = tl.inline_asm_elementwise(
            _SPLIT, "=&r,=&r,=&r,=&r,r,r,r", [words, low[:, :, :, None], high[:, :, :, None]],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
        )  # fmt: skip
    return (
        _operand(fields[0], SLICES, OUTPUTS, A), _operand(fields[1], SLICES, OUTPUTS, A),
        _operand(fields[2], SLICES, OUTPUTS, A), _operand(fields[3], SLICES, OUTPUTS, A),
    )  # fmt: skip


@triton.jit
def _load(weight, scale, line, own, group_line, group, first, piece, K: tl.constexpr, SLICES: tl.constexpr):
    """(pairs of words, scales of the two groups of a span) of a piece of each warp; zeros past the end.

    first: the tile's first line.
    """
    start = first.to(tl.int64)
    place = own + piece * (SLICES * 16)
    # A step reads each weight once: it should not evict what is read again.
    codes = tl.load(
        weight + start * (K // 8) + (line * (K // 8) + place), mask=place + line * 0 < K // 8, other=0,
        eviction_policy="evict_first",
    )  # fmt: skip
    span = group + piece * (SLICES * 2)
    at = scale + start * (K // 64) + (group_line * (K // 64) + span)
    return codes, tl.load(at, mask=span + group_line * 0 < K // 64, other=0)


@triton.jit
def _first_line(experts, tile, units, E: tl.constexpr, N: tl.constexpr):
    """The first line of a tile in the stack; of the last tile if there is no such tile."""
    tile = tl.minimum(tile, units - 1)
    expert = tl.minimum(tl.maximum(tl.load(experts + tile // (N // 8)), 0), E - 1)
    return expert * (2 * N) + tile % (N // 8) * 8


@layout_jit
def _hold(
    x, gain, memory, eps, tokens, K: tl.constexpr, PIECES: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
    LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Write x to shared memory, normed as the norm's kernel does (one row), zeros past the end."""
    SLICE_X: tl.constexpr = LAYOUTS.slice_x
    INPUT_X: tl.constexpr = LAYOUTS.input_x
    ROW_X: tl.constexpr = LAYOUTS.row_x
    row = tl.minimum(arange(0, ROWS, ROW_X), tokens - 1)[None, None, :] * K
    part = arange(0, SLICES, SLICE_X)[:, None, None] * 128
    word = arange(0, 32, INPUT_X)
    inverse = 1.0
    if gain is not None:
        squares = (part + row).to(tl.float32) + word[None, :, None].to(tl.float32)
        squares *= 0
        for index in tl.static_range(PIECES * 4):
            at = part + _input(word, index % 4)[None, :, None] + index // 4 * (SLICES * 128)
            wide = tl.load(x + row + at, mask=at < K, other=0.0).to(tl.float32)
            squares += wide * wide
        inverse = tl.rsqrt(tl.sum(tl.sum(tl.sum(squares, 0), 0), 0) / K + eps)
    for index in tl.static_range(PIECES * 4):
        at = part + _input(word, index % 4)[None, :, None] + index // 4 * (SLICES * 128)
        taken = tl.load(x + row + at, mask=at < K, other=0.0)
        if gain is not None:
            own = tl.load(gain + at + row * 0, mask=at < K, other=0.0).to(tl.float32)
            taken = (taken.to(tl.float32) * inverse * own).to(taken.dtype)
        write_inputs(memory[index % 4], index // 4, taken)
    return inverse


@layout_jit(do_not_specialize=["tokens"])
def _gate_up(
    x, gain, experts, weight, scale, bias, y, tokens, eps,
    E: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    SLICES: tl.constexpr, PIECES: tl.constexpr, DEPTH: tl.constexpr, ACTIVATION: tl.constexpr, LAYOUTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    SLICE_P: tl.constexpr = LAYOUTS.slice_p
    OUTPUT_P: tl.constexpr = LAYOUTS.output_p
    SPAN_P: tl.constexpr = LAYOUTS.span_p
    PAIR_P: tl.constexpr = LAYOUTS.pair_p
    SLICE_G: tl.constexpr = LAYOUTS.slice_g
    OUTPUT_G: tl.constexpr = LAYOUTS.output_g
    SPAN_G: tl.constexpr = LAYOUTS.span_g
    B: tl.constexpr = LAYOUTS.b
    SLICE_B: tl.constexpr = LAYOUTS.slice_b
    INPUT_B: tl.constexpr = LAYOUTS.input_b
    ROW_B: tl.constexpr = LAYOUTS.row_b
    SHARED: tl.constexpr = LAYOUTS.shared
    TOTAL: tl.constexpr = LAYOUTS.total
    HALVES: tl.constexpr = LAYOUTS.halves
    Y: tl.constexpr = LAYOUTS.y
    OUTPUT_Y: tl.constexpr = LAYOUTS.output_y
    ROW_Y: tl.constexpr = LAYOUTS.row_y
    DTYPE: tl.constexpr = x.dtype.element_ty
    TILES: tl.constexpr = N // 8
    UNIT: tl.constexpr = 1.0 if EMULATED else 4294967296.0
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    units = tokens * (TOP * TILES)
    weight = weight.to(tl.pointer_type(tl.int32))
    scale = scale.to(tl.pointer_type(tl.int16))
    line = arange(0, 16, OUTPUT_P)[None, :, None, None]
    line = line // 8 * N + line % 8
    own = (
        arange(0, SLICES, SLICE_P)[:, None, None, None] * 16 + arange(0, 2, SPAN_P)[None, None, :, None] * 8
        + arange(0, 8, PAIR_P)[None, None, None, :]
    )  # fmt: skip
    group_line = arange(0, 16, OUTPUT_G)[None, :, None]
    group_line = group_line // 8 * N + group_line % 8
    group = arange(0, SLICES, SLICE_G)[:, None, None] * 2 + arange(0, 2, SPAN_G)[None, None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = _first_line(experts, program, units, E, N)
    held = ()
    for index in tl.static_range(DEPTH):
        held = held + _load(weight, scale, line, own, group_line, group, first, index, K, SLICES)
    # One for each field: the compiler separates two writes to the same memory by a barrier.
    memory = (
        open_inputs(PIECES, SLICES, 32, ROWS, DTYPE, SHARED), open_inputs(PIECES, SLICES, 32, ROWS, DTYPE, SHARED),
        open_inputs(PIECES, SLICES, 32, ROWS, DTYPE, SHARED), open_inputs(PIECES, SLICES, 32, ROWS, DTYPE, SHARED),
    )  # fmt: skip
    inverse = 1.0
    if not EMULATED or gain is not None:
        inverse = _hold(x, gain, memory, eps, tokens, K, PIECES, SLICES, ROWS, LAYOUTS)
    # For the interpreter, which has no shared memory.
    part = arange(0, SLICES, SLICE_B)[:, None, None] * 128
    word = arange(0, 32, INPUT_B)
    row = tl.minimum(arange(0, BLOCK_M, ROW_B)[None, None, :], tokens - 1) * K
    for unit in range(program, units, programs):
        following = _first_line(experts, unit + programs, units, E, N)
        # Two sums: a product waits for the one before it.
        total = zeros([SLICES, 16, BLOCK_M], TOTAL)
        other = zeros([SLICES, 16, BLOCK_M], TOTAL)
        for turn in range(PIECES // DEPTH):
            for slot in tl.static_range(DEPTH):
                number = turn * DEPTH + slot
                operands = _numbers(held[0], held[1], SLICES, 16, LAYOUTS, DTYPE)
                for field in tl.static_range(4):
                    if EMULATED:
                        at = part + _input(word, field)[None, :, None] + number * (SLICES * 128)
                        taken = tl.load(x + row + at, mask=at + row * 0 < K, other=0.0)
                        if gain is not None:
                            own_gain = tl.load(gain + at + row * 0, mask=at + row * 0 < K, other=0.0).to(tl.float32)
                            taken = (taken.to(tl.float32) * inverse * own_gain).to(DTYPE)
                    else:
                        taken = read_inputs(memory[field], number, SLICES, 32, BLOCK_M, B)
                    if field % 2 == 0:
                        total = multiply(operands[field], taken, total)
                    else:
                        other = multiply(operands[field], taken, other)
                # Into the same registers, once they have been used: no value is moved.
                loaded = held[:2]
                later = number + DEPTH
                is_next = later >= PIECES
                if (later < PIECES) | (unit + programs < units):
                    loaded = _load(
                        weight, scale, line, own, group_line, group, tl.where(is_next, following, first),
                        later - PIECES * is_next.to(tl.int32), K, SLICES,
                    )  # fmt: skip
                held = held[2:] + loaded
        first = following
        pair = unit // TILES
        chosen = tl.load(experts + pair)
        parts = in_layout(tl.reshape((total + other) * UNIT, (SLICES, 2, 8, BLOCK_M)), HALVES)
        gate, up = tl.split(tl.permute(tl.sum(parts, 0), (1, 2, 0)))
        gate = in_layout(gate, Y)
        up = in_layout(up, Y)
        column = unit % TILES * 8 + arange(0, 8, OUTPUT_Y)[:, None]
        # Experts of another rank: what is not written here is not read.
        ours = (arange(0, BLOCK_M, ROW_Y)[None, :] == pair // TOP) & (column >= 0) & (chosen >= 0) & (chosen < E)
        if bias is not None:
            at_bias = bias + tl.maximum(chosen, 0).to(tl.int64) * (2 * N) + column
            gate += tl.load(at_bias, mask=column < N, other=0.0).to(tl.float32)
            up += tl.load(at_bias + N, mask=column < N, other=0.0).to(tl.float32)
        out = gate_mul(gate, up, ACTIVATION)
        tl.store(y + pair.to(tl.int64) * N + column + out.to(tl.int32) * 0, out.to(y.dtype.element_ty), mask=ours)


def stream_gate_up(
    x: torch.Tensor,
    routing: ChosenExperts,
    stack: Stack,
    bias: torch.Tensor | None,
    block: GemmTile,
    activation: str = "silu",
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """The features of every pair [tokens * top_k, width], as `vector_gate_up`; a norm: of one token.

    block: warps, pieces in flight (stages) and programs a multiprocessor (k).
    """
    tokens, width = len(x), stack.outputs // 2
    out = x.new_empty((tokens * routing.top_k, width))
    gain, eps = norm or (None, 0.0)
    pieces = -(-stack.inputs // (PIECE * block.warps))
    units = tokens * routing.top_k * (width // FEATURES)
    _gate_up[(min(units, block.k * num_sms()),)](
        x, gain, routing.experts, stack.codes, stack.scale, bias, out, tokens, eps, E=stack.experts, TOP=routing.top_k,
        N=width, K=stack.inputs, ROWS=1 if tokens == 1 else 8, BLOCK_M=8, SLICES=block.warps, PIECES=pieces,
        DEPTH=block.stages if pieces % block.stages == 0 else pieces, ACTIVATION=activation,
        LAYOUTS=expert_layouts(block.warps, 16, 8, tokens == 1), num_warps=block.warps, **pdl(),
    )  # fmt: skip
    return out


@triton.jit
def _load_slots(
    weight, scale, line, own, group_line, group, piece, K: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """As `_load`, of lines of each warp's own expert."""
    place = own + piece * (PARTS * 16)
    codes = tl.load(weight + line * (K // 8) + place, mask=place + line * 0 < K // 8, other=0,
                    eviction_policy="evict_first")  # fmt: skip
    span = group + piece * (PARTS * 2)
    at = scale + group_line * (K // 64) + span
    return codes, tl.load(at, mask=span + group_line * 0 < K // 64, other=0)


@triton.jit
def _expert_of(experts, token, slot, E: tl.constexpr, TOP: tl.constexpr):
    """(the expert in a token's slot, or 0; whether there is one here)."""
    expert = tl.load(experts + token * TOP + slot, mask=slot < TOP, other=-1)
    ours = (expert >= 0) & (expert < E)
    return tl.where(ours, expert, 0).to(tl.int64), ours


@layout_jit
def _down(
    x, weights, experts, weight, scale, bias, y,
    E: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SLICES: tl.constexpr,
    PIECES: tl.constexpr, DEPTH: tl.constexpr, LAYOUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SLICE_P: tl.constexpr = LAYOUTS.slice_p
    OUTPUT_P: tl.constexpr = LAYOUTS.output_p
    SPAN_P: tl.constexpr = LAYOUTS.span_p
    PAIR_P: tl.constexpr = LAYOUTS.pair_p
    SLICE_G: tl.constexpr = LAYOUTS.slice_g
    OUTPUT_G: tl.constexpr = LAYOUTS.output_g
    SPAN_G: tl.constexpr = LAYOUTS.span_g
    B: tl.constexpr = LAYOUTS.b
    SLICE_B: tl.constexpr = LAYOUTS.slice_b
    INPUT_B: tl.constexpr = LAYOUTS.input_b
    SLICE_X: tl.constexpr = LAYOUTS.slice_x
    INPUT_X: tl.constexpr = LAYOUTS.input_x
    ROW_X: tl.constexpr = LAYOUTS.row_x
    SHARED: tl.constexpr = LAYOUTS.shared
    TOTAL: tl.constexpr = LAYOUTS.total
    SUMMED: tl.constexpr = LAYOUTS.parts
    SLICE_S: tl.constexpr = LAYOUTS.slice_s
    Y: tl.constexpr = LAYOUTS.y
    OUTPUT_Y: tl.constexpr = LAYOUTS.output_y
    ROW_Y: tl.constexpr = LAYOUTS.row_y
    DTYPE: tl.constexpr = x.dtype.element_ty
    TILES: tl.constexpr = N // 16
    PARTS: tl.constexpr = SLICES // SLOTS
    UNIT: tl.constexpr = 1.0 if EMULATED else 4294967296.0
    program = tl.program_id(0)
    token = program // TILES
    output = program % TILES * 16
    weight = weight.to(tl.pointer_type(tl.int32))
    scale = scale.to(tl.pointer_type(tl.int16))
    warp = arange(0, SLICES, SLICE_P)
    expert, _ = _expert_of(experts, token, warp // PARTS, E, TOP)
    line = (expert * N + output)[:, None, None, None] + arange(0, 16, OUTPUT_P)[None, :, None, None]
    own = (
        (warp % PARTS * 16)[:, None, None, None] + arange(0, 2, SPAN_P)[None, None, :, None] * 8
        + arange(0, 8, PAIR_P)[None, None, None, :]
    )  # fmt: skip
    warp_g = arange(0, SLICES, SLICE_G)
    expert_g, _ = _expert_of(experts, token, warp_g // PARTS, E, TOP)
    group_line = (expert_g * N + output)[:, None, None] + arange(0, 16, OUTPUT_G)[None, :, None]
    group = (warp_g % PARTS * 2)[:, None, None] + arange(0, 2, SPAN_G)[None, None, :]
    held = ()
    for index in tl.static_range(DEPTH):
        held = held + _load_slots(weight, scale, line, own, group_line, group, index, K, PARTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    memory = (
        open_inputs(PIECES, SLICES, 32, 1, DTYPE, SHARED), open_inputs(PIECES, SLICES, 32, 1, DTYPE, SHARED),
        open_inputs(PIECES, SLICES, 32, 1, DTYPE, SHARED), open_inputs(PIECES, SLICES, 32, 1, DTYPE, SHARED),
    )  # fmt: skip
    if not EMULATED:
        warp_x = arange(0, SLICES, SLICE_X)
        _, ours_x = _expert_of(experts, token, warp_x // PARTS, E, TOP)
        row = ((token * TOP + warp_x // PARTS) * K)[:, None, None] + arange(0, 1, ROW_X)[None, None, :]
        for index in tl.static_range(PIECES * 4):
            at = (warp_x % PARTS * 128)[:, None, None] + _input(arange(0, 32, INPUT_X), index % 4)[None, :, None]
            at += index // 4 * (PARTS * 128)
            # What was not written for an expert of another rank may be anything.
            write_inputs(
                memory[index % 4], index // 4, tl.load(x + row + at, mask=ours_x[:, None, None] & (at < K), other=0.0)
            )
    # For the interpreter, which has no shared memory.
    warp_b = arange(0, SLICES, SLICE_B)
    _, ours_b = _expert_of(experts, token, warp_b // PARTS, E, TOP)
    row_b = ((token * TOP + warp_b // PARTS) * K)[:, None, None]
    # Two sums: a product waits for the one before it.
    total = zeros([SLICES, 16, 8], TOTAL)
    other = zeros([SLICES, 16, 8], TOTAL)
    for turn in range(PIECES // DEPTH):
        for slot in tl.static_range(DEPTH):
            number = turn * DEPTH + slot
            operands = _numbers(held[0], held[1], SLICES, 16, LAYOUTS, DTYPE)
            for field in tl.static_range(4):
                if EMULATED:
                    at = (warp_b % PARTS * 128)[:, None, None] + _input(arange(0, 32, INPUT_B), field)[None, :, None]
                    at += number * (PARTS * 128)
                    taken = tl.load(x + row_b + at, mask=ours_b[:, None, None] & (at < K), other=0.0)
                    taken = tl.broadcast_to(taken, (SLICES, 32, 8))
                else:
                    taken = read_inputs(memory[field], number, SLICES, 32, 8, B)
                if field % 2 == 0:
                    total = multiply(operands[field], taken, total)
                else:
                    other = multiply(operands[field], taken, other)
            # Into the same registers, once they have been used: no value is moved.
            loaded = held[:2]
            if number + DEPTH < PIECES:
                loaded = _load_slots(weight, scale, line, own, group_line, group, number + DEPTH, K, PARTS)
            held = held[2:] + loaded
    warp_s = arange(0, SLICES, SLICE_S)
    _, ours_s = _expert_of(experts, token, warp_s // PARTS, E, TOP)
    share = tl.load(weights + token * TOP + warp_s // PARTS, mask=ours_s, other=0.0)
    column = output + arange(0, 16, OUTPUT_Y)[:, None]
    out = in_layout(tl.sum(in_layout((total + other) * UNIT, SUMMED) * share[:, None, None], 0), Y)
    if bias is not None:
        for slot in tl.static_range(TOP):
            chosen, is_ours = _expert_of(experts, token, slot + column * 0, E, TOP)
            part = tl.load(weights + token * TOP + slot + column * 0, mask=is_ours, other=0.0)
            out += part * tl.load(bias + chosen * N + column, mask=is_ours, other=0.0).to(tl.float32)
    first = arange(0, 8, ROW_Y)[None, :] == 0
    tl.store(y + token.to(tl.int64) * N + column + arange(0, 8, ROW_Y)[None, :], out.to(y.dtype.element_ty), mask=first)


def stream_down(
    features: torch.Tensor, routing: ChosenExperts, stack: Stack, bias: torch.Tensor | None, block: GemmTile
) -> torch.Tensor:
    """The weighted sum over each token's experts [tokens, hidden], as `vector_down`.

    block: warps, at least one for each of a token's experts, and pieces in flight (stages).
    """
    tokens = features.shape[0] // routing.top_k
    out = features.new_empty((tokens, stack.outputs))
    slots = triton.next_power_of_2(routing.top_k)
    parts = block.warps // slots
    pieces = triton.cdiv(triton.cdiv(stack.inputs, PIECE * parts), block.stages) * block.stages
    _down[(tokens * (stack.outputs // OUTPUTS),)](
        features, routing.weights, routing.experts, stack.codes, stack.scale, bias, out, E=stack.experts,
        TOP=routing.top_k, N=stack.outputs, K=stack.inputs, SLOTS=slots, SLICES=block.warps, PIECES=pieces,
        DEPTH=block.stages, LAYOUTS=expert_layouts(block.warps, 16, 8, True), num_warps=block.warps, **pdl(),
    )  # fmt: skip
    return out


def stream_experts(
    x: torch.Tensor,
    routing: ChosenExperts,
    gate_up: Stack,
    down: Stack,
    config: ExpertsConfig,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """`Ops.experts` for few tokens; `norm`: x, one token, is normed with (gain, eps) first."""
    features = stream_gate_up(x, routing, gate_up, gate_up_bias, config.gate_up, activation, norm)
    return stream_down(features, routing, down, down_bias, config.down)


def fits(gate_up: Stack, down: Stack, top_k: int, warps: int) -> bool:
    """Whether these kernels can read the stacks, with `warps` warps for `down`."""
    return (
        all(stack.kind == "mxfp4" and stack.half == SPAN // 2 and _is_known(stack.dtype) for stack in (gate_up, down))
        and gate_up.outputs % (2 * FEATURES) == 0
        and down.outputs % OUTPUTS == 0
        and triton.next_power_of_2(top_k) <= warps
    )


def _is_known(dtype: torch.dtype) -> bool:
    """Whether numbers are made of codes in this dtype; most scales of MXFP4 are not float16 numbers."""
    return dtype is torch.bfloat16 or INTERPRETED
