"""Experts in few bits, of up to 8 tokens: each pair (token, chosen expert) by itself, on the float32 FMA units.

As `moe/vector.py`: gate and up with the activation fused, where a program owns a few features of one pair; then down,
where a program owns a few outputs of one token and goes through all its experts. Where the format quantizes
activations, every program quantizes its own: a few instructions per value, used for all outputs that it owns.

Tiles are [outputs, slots, bytes], so that the threads are spread over bytes and slots first and each of them uses the
activations it holds for several outputs. A thread loads 16 bytes of a row at a time, all of which have one scale.
"""

# ruff: noqa: N803, N806, RUF005  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.gates import gate_mul
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, GemmTile
from quire.kernels.triton.quantized.expert_codes import (
    affine,
    power_of_two,
    quantized,
    scale_of,
    split_fp4,
    split_int4,
)
from quire.kernels.triton.quantized.expert_stacks import Stack

_BYTES = 16
"""Of a weight row that a thread loads at once."""


@triton.jit
def _input_of(byte, HALF: tl.constexpr):
    """The input whose code is in the low nibble of a byte, or is the byte."""
    if HALF:
        byte = byte // HALF * (2 * HALF) + byte % HALF
    return byte


@triton.jit
def _load_codes(at, ours, BYTES: tl.constexpr, BLOCK_B: tl.constexpr, CHUNKS: tl.constexpr):
    """CHUNKS tiles [BLOCK_N, SLOTS, BLOCK_B] of codes, whose rows begin at `at` [BLOCK_N, SLOTS]; zeros past the end
    and for absent experts."""
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        byte = chunk * BLOCK_B + tl.arange(0, BLOCK_B)
        inside = ours[None, :, None] & (byte < BYTES)[None, None, :]
        # A step reads each weight once: it should not evict what is read again.
        tile = tl.load(at[:, :, None] + byte[None, None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def _load_inputs(
    at, ours, BYTES: tl.constexpr, BLOCK_B: tl.constexpr, CHUNKS: tl.constexpr, HALF: tl.constexpr, HIGH: tl.constexpr
):
    """The activations [SLOTS, BLOCK_B] that belong to the bytes of each chunk (HIGH: to their high nibbles)."""
    values = ()
    for chunk in tl.static_range(CHUNKS):
        byte = chunk * BLOCK_B + tl.arange(0, BLOCK_B)
        inside = ours[:, None] & (byte < BYTES)[None, :]
        k = _input_of(byte, HALF)
        if HIGH:
            k += HALF
        values = values + (tl.load(at[:, None] + k[None, :], mask=inside, other=0.0),)
    return values


@triton.jit
def _squares(values, CHUNKS: tl.constexpr):
    """The sum of squares of a single slot's activations."""
    total = 0.0
    for chunk in tl.static_range(CHUNKS):
        wide = values[chunk].to(tl.float32)
        total += tl.sum(tl.sum(wide * wide, 1), 0)
    return total


@triton.jit
def _normed(values, gains, inverse, CHUNKS: tl.constexpr):
    """x / rms(x) * gain, rounded as the norm's kernel rounds it."""
    out = ()
    for chunk in tl.static_range(CHUNKS):
        value = values[chunk]
        wide = value.to(tl.float32) * inverse * gains[chunk].to(tl.float32)
        out = out + (wide.to(value.dtype),)
    return out


@triton.jit
def _quantize(
    values, given, KIND: tl.constexpr, INT8: tl.constexpr, SLOTS: tl.constexpr, BLOCK_B: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """(activations as the format sees them, in float32, what products of a slot have still to be multiplied with)."""
    out = ()
    rest = tl.full((SLOTS,), 1.0, tl.float32)
    if KIND == "block":
        for chunk in tl.static_range(CHUNKS):
            group = tl.reshape(values[chunk].to(tl.float32), (SLOTS, BLOCK_B // 128, 128))
            scale = scale_of(tl.max(tl.abs(group), 2), False)[:, :, None]
            out = out + (tl.reshape(quantized(group, scale, False) * scale, (SLOTS, BLOCK_B)),)
    elif KIND == "row":
        if given is not None:
            rest = tl.zeros((SLOTS,), tl.float32) + tl.load(given)
        else:
            largest = tl.zeros((SLOTS,), tl.float32)
            for chunk in tl.static_range(CHUNKS):
                largest = tl.maximum(largest, tl.max(tl.abs(values[chunk].to(tl.float32)), 1))
            rest = scale_of(largest, INT8)
        for chunk in tl.static_range(CHUNKS):
            out = out + (quantized(values[chunk].to(tl.float32), rest[:, None], INT8),)
    else:
        for chunk in tl.static_range(CHUNKS):
            out = out + (values[chunk].to(tl.float32),)
    return out, rest


@triton.jit
def _spread(scale, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr, THREADS: tl.constexpr, WIDE: tl.constexpr):
    """A number per thread and row, repeated for the WIDE bytes it belongs to."""
    wide = tl.broadcast_to(scale[:, :, :, None], (BLOCK_N, SLOTS, THREADS, WIDE))
    return tl.reshape(wide, (BLOCK_N, SLOTS, THREADS * WIDE))


@triton.jit
def _dot(
    weight, value, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr, THREADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Each thread's partial dot products [BLOCK_N, SLOTS, THREADS]."""
    product = weight.to(tl.float32) * value[None, :, :]
    return tl.sum(tl.reshape(product, (BLOCK_N, SLOTS, THREADS, WIDE)), 3)


@triton.jit
def _number(
    code, scale, zero, minimum, factor, line, group, inside, chosen,
    KIND: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr, THREADS: tl.constexpr,
    WIDE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Codes of a 4- or 8-bit weight whose activations are not quantized, as numbers rounded once to DTYPE."""
    at = line[:, :, None] * GROUPS + group[None, None, :]
    if KIND == "nvfp4":
        own = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
        whole = tl.load(factor + line, mask=chosen[None, :], other=0.0)[:, :, None]
        value = (code.to(tl.float32) * _spread(own * whole, BLOCK_N, SLOTS, THREADS, WIDE)).to(DTYPE)
    else:
        offset: tl.constexpr = 128.0 if KIND == "int4" else 0.0  # of codes, by `split_int4`
        own = tl.load(scale + at, mask=inside, other=0.0)
        least = tl.zeros((BLOCK_N, SLOTS, THREADS), DTYPE)
        base = tl.full((BLOCK_N, SLOTS, THREADS), offset + (8.0 if KIND == "int4" else 128.0), tl.float32)
        if zero is not None:
            base = tl.load(zero + at, mask=inside, other=0.0).to(tl.float32) + offset
        if minimum is not None:
            least = tl.load(minimum + at, mask=inside, other=0.0)
            base = tl.full((BLOCK_N, SLOTS, THREADS), offset, tl.float32)
        if KIND == "int8":
            code = code.to(DTYPE)
        value = affine(
            code, _spread(base.to(DTYPE), BLOCK_N, SLOTS, THREADS, WIDE), _spread(own, BLOCK_N, SLOTS, THREADS, WIDE),
            _spread(least, BLOCK_N, SLOTS, THREADS, WIDE), DTYPE,
        )  # fmt: skip
    return value


@triton.jit
def _partials(
    tiles, low, high, scale, zero, minimum, factor, line, part, chosen,
    KIND: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_B: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Each thread's partial dot products [BLOCK_N, SLOTS, THREADS], scaled, of all chunks.

    line  [BLOCK_N, SLOTS]: rows of the stack; part, of `block`: rows of its scales
    """
    BYTES: tl.constexpr = K // 2 if HALF else K
    THREADS: tl.constexpr = BLOCK_B // WIDE
    GROUPS: tl.constexpr = (K + 127) // 128 if KIND == "block" else (K + G - 1) // G
    total = tl.zeros((BLOCK_N, SLOTS, THREADS), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        byte = chunk * BLOCK_B + tl.arange(0, THREADS) * WIDE
        k = _input_of(byte, HALF)
        inside = chosen[None, :, None] & (byte < BYTES)[None, None, :]
        codes = tiles[chunk]
        if KIND == "block":
            own = tl.load(scale + part[:, :, None] * GROUPS + (k // 128)[None, None, :], mask=inside, other=0.0)
            total += _dot(codes, low[chunk], BLOCK_N, SLOTS, THREADS, WIDE) * own
        elif KIND == "row":
            total += _dot(codes, low[chunk], BLOCK_N, SLOTS, THREADS, WIDE)
        elif KIND == "codes":
            own = tl.load(scale + line, mask=chosen[None, :], other=0.0)
            value = (codes.to(tl.float32) * own[:, :, None]).to(DTYPE)
            total += _dot(value, low[chunk], BLOCK_N, SLOTS, THREADS, WIDE)
        elif KIND == "mxfp4":
            # Products with powers of two are exact: the sum may be scaled instead of its terms.
            a, b = split_fp4(codes, DTYPE)
            at = scale + line[:, :, None] * GROUPS
            own = tl.load(at + (k // G)[None, None, :], mask=inside, other=0)
            total += _dot(a, low[chunk], BLOCK_N, SLOTS, THREADS, WIDE) * power_of_two(own, tl.float32)
            own = tl.load(at + ((k + HALF) // G)[None, None, :], mask=inside, other=0)
            total += _dot(b, high[chunk], BLOCK_N, SLOTS, THREADS, WIDE) * power_of_two(own, tl.float32)
        elif HALF:
            if KIND == "int4":
                a, b = split_int4(codes, DTYPE)
            else:
                a, b = split_fp4(codes, DTYPE)
            a = _number(
                a, scale, zero, minimum, factor, line, k // G, inside, chosen,
                KIND, GROUPS, BLOCK_N, SLOTS, THREADS, WIDE, DTYPE,
            )  # fmt: skip
            total += _dot(a, low[chunk], BLOCK_N, SLOTS, THREADS, WIDE)
            b = _number(
                b, scale, zero, minimum, factor, line, (k + HALF) // G, inside, chosen,
                KIND, GROUPS, BLOCK_N, SLOTS, THREADS, WIDE, DTYPE,
            )  # fmt: skip
            total += _dot(b, high[chunk], BLOCK_N, SLOTS, THREADS, WIDE)
        else:
            a = _number(
                codes, scale, zero, minimum, factor, line, k // G, inside, chosen,
                KIND, GROUPS, BLOCK_N, SLOTS, THREADS, WIDE, DTYPE,
            )  # fmt: skip
            total += _dot(a, low[chunk], BLOCK_N, SLOTS, THREADS, WIDE)
    return total


@triton.jit
def _rows(expert, output, ALL: tl.constexpr, ROWS: tl.constexpr):
    """(rows of the stack, rows of its scales by block) of outputs [BLOCK_N] of experts [SLOTS]: [BLOCK_N, SLOTS]."""
    LINES: tl.constexpr = (ALL + ROWS - 1) // ROWS
    expert = expert.to(tl.int64)[None, :]
    return expert * ALL + output[:, None], expert * LINES + (output // ROWS)[:, None]


@triton.jit
def _gate_up(
    x, gain, experts, weight, scale, zero, minimum, factor, given, bias, y, eps,
    E: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, G: tl.constexpr,
    HALF: tl.constexpr, INT8: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, CHUNKS: tl.constexpr,
    WIDE: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = K // 2 if HALF else K
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ROWS: tl.constexpr = G if KIND == "block" else 1
    DTYPE: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    pair = program // BLOCKS
    column = program % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (pair // TOP).to(tl.int64)
    one = tl.arange(0, 1)
    always = one == 0
    if gain is not None:
        gains = _load_inputs(gain + one, always, BYTES, BLOCK_B, CHUNKS, HALF, False)
        if HALF:
            high_gains = _load_inputs(gain + one, always, BYTES, BLOCK_B, CHUNKS, HALF, True)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(experts + pair)
    low = _load_inputs(x + token * K + one, always, BYTES, BLOCK_B, CHUNKS, HALF, False)
    high = None
    if HALF:
        high = _load_inputs(x + token * K + one, always, BYTES, BLOCK_B, CHUNKS, HALF, True)
    if (expert < 0) | (expert >= E):
        return  # on another rank; `_down` does not read what is not written here
    # Outputs past the end repeat the last and are not stored.
    held = tl.minimum(column, N - 1)
    line, part = _rows(expert + one, held, 2 * N, ROWS)
    line2, part2 = _rows(expert + one, N + held, 2 * N, ROWS)
    tiles = _load_codes(weight + line * BYTES, always, BYTES, BLOCK_B, CHUNKS)
    tiles2 = _load_codes(weight + line2 * BYTES, always, BYTES, BLOCK_B, CHUNKS)
    if gain is not None:
        squares = _squares(low, CHUNKS)
        if HALF:
            squares += _squares(high, CHUNKS)
        inverse = tl.rsqrt(squares / K + eps)
        low = _normed(low, gains, inverse, CHUNKS)
        if HALF:
            high = _normed(high, high_gains, inverse, CHUNKS)
    low, rest = _quantize(low, given, KIND, INT8, 1, BLOCK_B, CHUNKS)
    if HALF:
        high, _ = _quantize(high, given, KIND, INT8, 1, BLOCK_B, CHUNKS)
    gate = _partials(
        tiles, low, high, scale, zero, minimum, factor, line, part, always,
        KIND, G, HALF, K, BLOCK_N, 1, BLOCK_B, CHUNKS, WIDE, DTYPE,
    )  # fmt: skip
    up = _partials(
        tiles2, low, high, scale, zero, minimum, factor, line2, part2, always,
        KIND, G, HALF, K, BLOCK_N, 1, BLOCK_B, CHUNKS, WIDE, DTYPE,
    )  # fmt: skip
    gate, up = tl.split(tl.sum(tl.sum(tl.join(gate, up), 1), 1))
    inside = column < N
    own = expert.to(tl.int64) * (2 * N) + column
    if KIND == "row":
        token_scale = tl.sum(rest, 0)
        gate *= token_scale * tl.load(scale + own, mask=inside, other=0.0)
        up *= token_scale * tl.load(scale + own + N, mask=inside, other=0.0)
    if bias is not None:
        gate += tl.load(bias + own, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + own + N, mask=inside, other=0.0).to(tl.float32)
    out = gate_mul(gate, up, ACTIVATION)
    tl.store(y + pair * N + column, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _down(
    x, weights, experts, weight, scale, zero, minimum, factor, given, bias, y,
    E: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, G: tl.constexpr,
    HALF: tl.constexpr, INT8: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
    CHUNKS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = K // 2 if HALF else K
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ROWS: tl.constexpr = G if KIND == "block" else 1
    DTYPE: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    token = (program // BLOCKS).to(tl.int64)
    column = program % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.arange(0, SLOTS)
    expert = tl.load(experts + token * TOP + slot, mask=slot < TOP, other=-1)
    ours = (expert >= 0) & (expert < E)
    share = tl.load(weights + token * TOP + slot, mask=ours, other=0.0)
    line, part = _rows(expert, tl.minimum(column, N - 1), N, ROWS)
    tiles = _load_codes(weight + line * BYTES, ours, BYTES, BLOCK_B, CHUNKS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = x + (token * TOP + slot) * K
    low = _load_inputs(source, ours, BYTES, BLOCK_B, CHUNKS, HALF, False)
    low, rest = _quantize(low, given, KIND, INT8, SLOTS, BLOCK_B, CHUNKS)
    high = None
    if HALF:
        high = _load_inputs(source, ours, BYTES, BLOCK_B, CHUNKS, HALF, True)
        high, _ = _quantize(high, given, KIND, INT8, SLOTS, BLOCK_B, CHUNKS)
    total = _partials(
        tiles, low, high, scale, zero, minimum, factor, line, part, ours,
        KIND, G, HALF, K, BLOCK_N, SLOTS, BLOCK_B, CHUNKS, WIDE, DTYPE,
    )  # fmt: skip
    total = tl.sum(total, 2)
    inside = ours[None, :]
    if KIND == "row":
        total *= rest[None, :] * tl.load(scale + line, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + line, mask=inside, other=0.0).to(tl.float32)
    out = tl.sum(total * share[None, :], 1)
    tl.store(y + token * N + column, out.to(y.dtype.element_ty), mask=column < N)


def vector_experts(
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
    """`Ops.experts` for few tokens; `norm`: x is normed with (gain, eps) first."""
    features = vector_gate_up(x, routing, gate_up, gate_up_bias, config.gate_up, activation, norm)
    return vector_down(features, routing, down, down_bias, config.down)


def vector_gate_up(
    x: torch.Tensor,
    routing: ChosenExperts,
    stack: Stack,
    bias: torch.Tensor | None,
    block: GemmTile,
    activation: str = "silu",
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """The features of every pair [tokens * top_k, width].

    Bytes: the two weights of each pair's expert; the input and the gain once per program, from cache. Operations: one
    to three to decode a weight, and one multiply-add.
    """
    pairs, width = x.shape[0] * routing.top_k, stack.outputs // 2
    out = x.new_empty((pairs, width))
    gain, eps = norm or (None, 0.0)
    _gate_up[(pairs * triton.cdiv(width, block.n),)](
        x, gain, routing.experts, stack.codes, stack.scale, stack.zero, stack.minimum, stack.factor, stack.input_scale,
        bias, out, eps, ACTIVATION=activation,
        **_constants(
            stack.kind, stack.codes.dtype, stack.experts, routing.top_k, width, stack.inputs, stack.group, stack.half,
            1, block,
        ),
    )  # fmt: skip
    return out


def vector_down(
    features: torch.Tensor, routing: ChosenExperts, stack: Stack, bias: torch.Tensor | None, block: GemmTile
) -> torch.Tensor:
    """The weighted sum over each token's experts [tokens, hidden].

    Bytes: the weight of each pair's expert; the features once per program, from cache. Operations: one to three to
    decode a weight, and one multiply-add.
    """
    tokens = features.shape[0] // routing.top_k
    out = features.new_empty((tokens, stack.outputs))
    slots = triton.next_power_of_2(routing.top_k)
    _down[(tokens * triton.cdiv(stack.outputs, block.n),)](
        features, routing.weights, routing.experts, stack.codes, stack.scale, stack.zero, stack.minimum, stack.factor,
        stack.input_scale, bias, out, SLOTS=slots,
        **_constants(
            stack.kind, stack.codes.dtype, stack.experts, routing.top_k, stack.outputs, stack.inputs, stack.group,
            stack.half, slots, block,
        ),
    )  # fmt: skip
    return out


@functools.cache
def _constants(
    kind: str,
    codes: torch.dtype,
    experts: int,
    top_k: int,
    columns: int,
    depth: int,
    group: int,
    half: int,
    slots: int,
    block: GemmTile,
) -> dict[str, Any]:
    """Constexpr arguments and launch options: a chunk is as long as the threads of a slot reach, or as the row."""
    size = depth // 2 if half else depth
    wide = min(_BYTES, half or _BYTES, group if kind not in ("block", "row", "codes") else _BYTES)
    reach = max(32 * wide * block.warps // slots, 128)
    # The longest chunk that the threads of a slot reach and that leaves few of them idle at the end of a row.
    chunk = 128
    for longer in (256, 512, 1024, 2048):
        if longer <= min(reach, triton.next_power_of_2(size)) and -(-size // longer) * longer <= size * 9 // 8:
            chunk = longer
    return {
        "E": experts,
        "TOP": top_k,
        "N": columns,
        "K": depth,
        "KIND": kind,
        "G": group or depth,
        "HALF": half,
        "INT8": codes is torch.int8,
        "BLOCK_N": block.n,
        "BLOCK_B": chunk,
        "CHUNKS": -(-size // chunk),
        "WIDE": wide,
        "num_warps": block.warps,
        **pdl(),
    }
