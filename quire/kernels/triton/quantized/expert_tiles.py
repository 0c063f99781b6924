"""Experts in few bits, of many tokens: grouped GEMMs over the tokens of each expert, on tensor-core tiles.

As `moe/tile.py`, whose sorting and weighted sum are used, with two kernels in place of its GEMM:

- `_scaled`: activations and weights are 8-bit codes, multiplied as such. With a scale per 128 x 128 block the tensor
  cores' sum over 128 inputs is multiplied by both scales and added in float32. A program of the first GEMM owns 128
  features, a whole group: it writes them as codes for the second.
- `_dequantized`: activations as they are, weight tiles dequantized in registers. Computed transposed, weight @ x.T:
  Hopper's WGMMA takes its left operand from registers. A byte holds inputs j and j + half a span, so that low and high
  nibbles are multiplied apart, each with a contiguous tile of x, and nothing is interleaved.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.gates import gate_mul
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.moe.common import ExpertsConfig, GemmTile
from quire.kernels.triton.moe.layout import SPAN, ExpertLayout
from quire.kernels.triton.moe.tile import GROUP, SWAPPED, WIDE
from quire.kernels.triton.quantized.expert_codes import (
    affine,
    power_of_two,
    raw_power_of_two,
    scale_of,
    split_fp4,
    split_fp4_pairs,
    split_int4,
    times,
    to_codes,
)
from quire.kernels.triton.quantized.expert_stacks import Stack

BLOCK = 128
"""Inputs that share a scale of activations, where weights are scaled by block."""
PART = 128
"""Outputs of one product on tensor cores, at most: wider programs compute two, whose partial sums take turns in the
same registers."""


@triton.jit
def _encode(
    x, given, codes, scales, stride,
    K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, INT8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    group = tl.arange(0, BLOCK // GROUP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * stride + column, mask=column < K, other=0.0).to(tl.float32)
    value = tl.reshape(value, (BLOCK // GROUP, GROUP))
    if given is not None:
        scale = tl.load(given) + tl.zeros((BLOCK // GROUP,), tl.float32)
    else:
        scale = scale_of(tl.max(tl.abs(value), 1), INT8)
    tl.store(scales + row * GROUPS + group, scale, mask=group < GROUPS)
    code = tl.reshape(to_codes(value, scale[:, None], INT8), (BLOCK,))
    tl.store(codes + row * K + column, code, mask=column < K)


@triton.jit
def _place(spans, PDL: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr):
    """(tile, first output) of this program; see `moe/tile.py`."""
    program = tl.program_id(0)
    if GROUP == 1:
        at = spans + program // WIDTH * SPAN
        column = program % WIDTH * EACH
    else:
        group = program // (WIDTH * GROUP) * GROUP
        size = tl.minimum(tl.num_programs(0) // WIDTH - group, GROUP)
        within = program % (WIDTH * GROUP)
        at = spans + (group + within % size) * SPAN
        column = within // size * EACH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    return at, column


@triton.jit
def _code_tile(
    weight, view, line, column, k, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Codes [BLOCK_N, BLOCK_K] from output `column` of the expert whose matrix begins at row `line` of the stack."""
    if view is not None:
        tile = view.load([line + column, k])
    else:
        # Outputs past the end repeat the last and are not stored.
        lines = line.to(tl.int64) + tl.minimum(column + tl.arange(0, BLOCK_N), N - 1)
        depth = k + tl.arange(0, BLOCK_K)[None, :]
        at = weight + lines[:, None] * K + depth
        if K % BLOCK_K == 0:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=depth < K, other=0.0)
    return tile


@triton.jit
def _block_scale(
    scale, expert, first, column, k,
    N: tl.constexpr, K: tl.constexpr, ALL: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Scales of outputs [column, column + BLOCK_N) of the part that begins at output `first`, for 128 inputs."""
    COLUMNS: tl.constexpr = (K + 127) // 128
    LINES: tl.constexpr = (ALL + ROWS - 1) // ROWS
    own = scale + expert.to(tl.int64) * (LINES * COLUMNS) + k // 128
    if ROWS % BLOCK_N == 0:
        factor = tl.load(own + (first + tl.minimum(column, N - 1)) // ROWS * COLUMNS)
    else:
        output = first + tl.minimum(column + tl.arange(0, BLOCK_N), N - 1)
        factor = tl.load(own + output // ROWS * COLUMNS)
        if SWAP:
            factor = factor[:, None]
        else:
            factor = factor[None, :]
    return factor


@triton.jit
def _product(tile, value, total, SWAP: tl.constexpr):
    """total + value @ tile.T, or its transpose."""
    if SWAP:
        total = tl.dot(tile, value.T, total, out_dtype=total.dtype)
    else:
        total = tl.dot(value, tile.T, total, out_dtype=total.dtype)
    return total


@triton.jit
def _along(vector, axis: tl.constexpr):
    """A vector along axis 0 or 1 of a matrix."""
    if axis == 0:
        out = vector[:, None]
    else:
        out = vector[None, :]
    return out


@triton.jit
def _with_bias(total, bias, expert, first, outputs, N: tl.constexpr, ALL: tl.constexpr, FEATURES: tl.constexpr):
    """total + the expert's bias, in float32."""
    if bias is not None:
        at = bias + expert.to(tl.int64) * ALL + first + outputs
        total += _along(tl.load(at, mask=outputs < N, other=0.0).to(tl.float32), FEATURES)
    return total


@triton.jit
def _finished(
    total, x_scale, source, scale, bias, expert, first, outputs,
    N: tl.constexpr, ALL: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """The product in float32: scaled, if it has not been yet, and with its bias."""
    if ROWS == 0:
        own = tl.load(x_scale + source)
        at = scale + expert.to(tl.int64) * ALL + first + outputs
        factor = tl.load(at, mask=outputs < N, other=0.0)
        total = total.to(tl.float32) * _along(own, TOKENS) * _along(factor, FEATURES)
    return _with_bias(total, bias, expert, first, outputs, N, ALL, FEATURES)


@triton.jit
def _scaled(
    x, x_view, x_scale, weight, view, scale, bias, order, spans, y, y_scale,
    E: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, INT8: tl.constexpr, GATED: tl.constexpr,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, ENCODED: tl.constexpr, SWAP: tl.constexpr,
    GROUP: tl.constexpr, SPAN: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS: outputs that share a scale, per 128 inputs; 0: a scale per output, for all inputs. Two products, if
    PARTS is 2: gate and up, or twice as many outputs. ENCODED: write features as codes of groups of 128, BLOCK_N."""
    ALL: tl.constexpr = 2 * N if GATED else N
    EACH: tl.constexpr = BLOCK_N if GATED else BLOCK_N * PARTS
    NEXT: tl.constexpr = N if GATED else BLOCK_N  # from the first product's outputs to the second's
    WIDTH: tl.constexpr = (N + EACH - 1) // EACH
    FEATURES: tl.constexpr = 0 if SWAP else 1  # the axis of outputs
    TOKENS: tl.constexpr = 1 - FEATURES
    at, column = _place(spans, PDL, WIDTH, EACH, GROUP, SPAN)
    expert = tl.load(at)
    if expert >= E:
        return
    first = tl.load(at + 1)
    end = tl.load(at + 2)
    row = first + tl.arange(0, BLOCK_M)
    # Rows past the end repeat the last and are not stored.
    held = tl.minimum(row, end - 1)
    pair = tl.load(order + held)
    source = (pair // TOP if GATED else held).to(tl.int64)
    target = (row if GATED else pair).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)[None, :]
    lines = x + source[:, None] * K + depth
    line = expert * ALL
    other: tl.constexpr = N if GATED else 0  # the second product's first output, by how the scales count
    if SWAP:
        zeros = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if INT8 else tl.float32)
    else:
        zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INT8 else tl.float32)
    total = zeros
    second = zeros
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if ROWS:
            own = tl.load(x_scale + source * ((K + 127) // 128) + k // 128)
            factor = _block_scale(scale, expert, 0, column, k, N, K, ALL, ROWS, BLOCK_N, SWAP)
            if PARTS == 2:
                beside = column if GATED else column + BLOCK_N
                factor2 = _block_scale(scale, expert, other, beside, k, N, K, ALL, ROWS, BLOCK_N, SWAP)
        if x_view is not None:
            value = x_view.load([first, k])  # rows past the end are the next expert's, and not stored
        elif K % BLOCK_K == 0:
            value = tl.load(lines + k)
        else:
            value = tl.load(lines + k, mask=k + depth < K, other=0.0)
        tile = _code_tile(weight, view, line, column, k, N, K, BLOCK_N, BLOCK_K)
        if PARTS == 2:
            if GATED:
                tile2 = _code_tile(weight, view, line + N, column, k, N, K, BLOCK_N, BLOCK_K)
            else:
                tile2 = _code_tile(weight, view, line, column + BLOCK_N, k, N, K, BLOCK_N, BLOCK_K)
        if ROWS:
            total += _product(tile, value, zeros, SWAP) * (_along(own, TOKENS) * factor)
            if PARTS == 2:
                second += _product(tile2, value, zeros, SWAP) * (_along(own, TOKENS) * factor2)
        else:
            total = _product(tile, value, total, SWAP)
            if PARTS == 2:
                second = _product(tile2, value, second, SWAP)
    outputs = column + tl.arange(0, BLOCK_N)
    total = _finished(total, x_scale, source, scale, bias, expert, 0, outputs, N, ALL, ROWS, TOKENS, FEATURES)
    if PARTS == 2:
        beside = outputs if GATED else outputs + NEXT
        second = _finished(second, x_scale, source, scale, bias, expert, other, beside, N, ALL, ROWS, TOKENS, FEATURES)
        if GATED:
            total = gate_mul(total, second, ACTIVATION)
    inside = _along(row < end, TOKENS)
    place = _along(target * N, TOKENS)
    if ENCODED:
        # Rounded first, as if the features were written as they are; those past the end do not count.
        feature = tl.where(_along(outputs < N, FEATURES), total, 0.0).to(DTYPE).to(tl.float32)
        group = scale_of(tl.max(tl.abs(feature), FEATURES), INT8)
        result = to_codes(feature, _along(group, TOKENS), INT8)
        tl.store(y_scale + target * ((N + 127) // 128) + column // 128, group, mask=row < end)
    else:
        result = total.to(y.dtype.element_ty)
    tl.store(y + place + _along(outputs, FEATURES), result, mask=inside & _along(outputs < N, FEATURES))
    if PARTS == 2 and not GATED:
        beside = outputs + NEXT
        result = second.to(y.dtype.element_ty)
        tl.store(y + place + _along(beside, FEATURES), result, mask=inside & _along(beside < N, FEATURES))


@triton.jit
def _group_values(
    tensor, expert, first, column, k,
    N: tl.constexpr, K: tl.constexpr, ALL: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What `tensor` [experts, ALL, groups] has for the group of input k, of BLOCK_N outputs."""
    GROUPS: tl.constexpr = (K + G - 1) // G
    output = first + tl.minimum(column + tl.arange(0, BLOCK_N), N - 1)
    return tl.load(tensor + (expert.to(tl.int64) * ALL + output) * GROUPS + k // G)


@triton.jit
def group_of(
    scale, zero, minimum, factor, expert, first, column, k,
    KIND: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ALL: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """(scale, zero, minimum) of the group of input k, of BLOCK_N outputs, as `numbers` wants them."""
    OFFSET: tl.constexpr = 128.0 if KIND == "int4" else 0.0  # of codes, by `split_int4`
    base = tl.full((BLOCK_N,), OFFSET, DTYPE)
    least = tl.zeros((BLOCK_N,), DTYPE)
    if KIND == "codes" or KIND == "nvfp4":
        output = first + tl.minimum(column + tl.arange(0, BLOCK_N), N - 1)
        whole = expert.to(tl.int64) * ALL + output
    if KIND == "codes":
        own = tl.load(scale + whole)
    else:
        own = _group_values(scale, expert, first, column, k, N, K, ALL, G, BLOCK_N)
        if KIND == "nvfp4":
            own = own.to(tl.float32) * tl.load(factor + whole)
        elif KIND == "mxfp4":
            own = power_of_two(own, DTYPE)
        elif KIND == "mxfp4-bounded":
            own = raw_power_of_two(own, DTYPE)
        elif minimum is not None:
            least = _group_values(minimum, expert, first, column, k, N, K, ALL, G, BLOCK_N)
        elif zero is not None:
            base = _group_values(zero, expert, first, column, k, N, K, ALL, G, BLOCK_N)
            base = (base.to(tl.float32) + OFFSET).to(DTYPE)
        else:
            base = tl.full((BLOCK_N,), OFFSET + (8.0 if KIND == "int4" else 128.0), DTYPE)
    return own, base, least


@triton.jit
def numbers(code, group, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Codes [outputs, inputs of one group] as numbers, each rounded once to DTYPE."""
    if KIND == "codes" or KIND == "nvfp4":
        value = (code.to(tl.float32) * group[0][:, None]).to(DTYPE)
    elif KIND == "mxfp4" or KIND == "mxfp4-bounded":
        value = times(code, group[0][:, None], DTYPE)
    else:
        if KIND == "int8":
            code = code.to(DTYPE)  # 255 is exact
        value = affine(code, group[1][:, None], group[0][:, None], group[2][:, None], DTYPE)
    return value


@triton.jit
def split(codes, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """(low, high) nibbles as numbers, without scale and zero."""
    if KIND == "int4":
        low, high = split_int4(codes, DTYPE)
    else:
        low, high = split_fp4(codes, DTYPE)
    return low, high


@triton.jit
def _groups_of(
    scale, zero, minimum, factor, expert, first, column, k,
    KIND: tl.constexpr, HALF: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ALL: tl.constexpr, G: tl.constexpr,
    BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The groups of low nibbles (or bytes) and of high ones."""
    low = group_of(scale, zero, minimum, factor, expert, first, column, k, KIND, N, K, ALL, G, BLOCK_N, DTYPE)
    high = low
    if HALF and G % (2 * HALF) != 0:
        high = group_of(
            scale, zero, minimum, factor, expert, first, column, k + HALF, KIND, N, K, ALL, G, BLOCK_N, DTYPE
        )  # fmt: skip
    return low, high


@triton.jit
def _add_product(
    total, low, high, codes, groups, KIND: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """total + dequantized codes @ x.T, where low and high are the tiles of x that low and high nibbles belong to."""
    if HALF:
        a, b = split(codes, KIND, DTYPE)
        total = tl.dot(numbers(a, groups[0], KIND, DTYPE), low.T, total, input_precision="ieee")
        total = tl.dot(numbers(b, groups[1], KIND, DTYPE), high.T, total, input_precision="ieee")
    else:
        total = tl.dot(numbers(codes, groups[0], KIND, DTYPE), low.T, total, input_precision="ieee")
    return total


@triton.jit
def _add_pairs(
    total, even, odd, high_even, high_odd, codes, groups, KIND: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """As `_add_product`, of MXFP4 codes in pairs of bytes: four products, of even and of odd inputs apart."""
    a, b, c, d = split_fp4_pairs(codes, DTYPE, KIND == "mxfp4-bounded")
    total = tl.dot(numbers(a, groups[0], KIND, DTYPE), even.T, total, input_precision="ieee")
    total = tl.dot(numbers(b, groups[0], KIND, DTYPE), odd.T, total, input_precision="ieee")
    total = tl.dot(numbers(c, groups[1], KIND, DTYPE), high_even.T, total, input_precision="ieee")
    return tl.dot(numbers(d, groups[1], KIND, DTYPE), high_odd.T, total, input_precision="ieee")


@triton.jit
def _add_quads(total, value, codes, groups, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The same as one product: even, odd, high even and high odd inputs one after the other, as `value` has them.

    A thread's numbers stay in their registers, and the tensor cores work on them while the next are made.
    """
    a, b, c, d = split_fp4_pairs(codes, DTYPE, KIND == "mxfp4-bounded")
    a = numbers(a, groups[0], KIND, DTYPE)
    b = numbers(b, groups[0], KIND, DTYPE)
    c = numbers(c, groups[1], KIND, DTYPE)
    d = numbers(d, groups[1], KIND, DTYPE)
    joined = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 3, 2, 1))
    weight = tl.reshape(joined, (codes.shape[0], 4 * codes.shape[1]))
    return tl.dot(weight, value.T, total, input_precision="ieee")


@triton.jit
def _dequantized(
    x, weight, scale, zero, minimum, factor, bias, order, spans, y,
    E: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, G: tl.constexpr,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, UNROLL: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    DTYPE: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A product takes BLOCK_B bytes of a weight row, whose low nibbles (or all 8 bits) have one scale, and whose high
    nibbles have one.

    PAIRS: codes are read as int16, two bytes each; x has the even inputs of every 32 before the odd ones, and so have
    the features that the first product writes.
    """
    BYTES: tl.constexpr = K // 2 if HALF else K
    ALL: tl.constexpr = 2 * N if GATED else N
    WIDTH: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    at, column = _place(spans, PDL, WIDTH, BLOCK_N, GROUP, SPAN)
    expert = tl.load(at)
    if expert >= E:
        return
    first = tl.load(at + 1)
    end = tl.load(at + 2)
    row = first + tl.arange(0, BLOCK_M)
    held = tl.minimum(row, end - 1)
    pair = tl.load(order + held)
    source = (pair // TOP if GATED else held).to(tl.int64)
    target = (row if GATED else pair).to(tl.int64)
    depth = tl.arange(0, BLOCK_B // 2 if PAIRS else BLOCK_B)[None, :]
    lines = x + source[:, None] * K + depth
    line = expert * ALL
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    gated = total
    for start in tl.range(0, BYTES, BLOCK_B * UNROLL, num_stages=STAGES):
        for step in tl.static_range(UNROLL):
            b = start + step * BLOCK_B
            k = b
            if HALF:
                k = tl.multiple_of(b // HALF * (2 * HALF) + b % HALF, BLOCK_B)
            # Scales first: these loads are waited for where they are used, the tiles' an iteration ahead.
            groups = _groups_of(
                scale, zero, minimum, factor, expert, 0, column, k, KIND, HALF, N, K, ALL, G, BLOCK_N, DTYPE
            )  # fmt: skip
            if GATED:
                up_groups = _groups_of(
                    scale, zero, minimum, factor, expert, N, column, k, KIND, HALF, N, K, ALL, G, BLOCK_N, DTYPE
                )  # fmt: skip
            if PAIRS and HALF == BLOCK_B:
                value = tl.load(x + source[:, None] * K + k + tl.arange(0, 2 * BLOCK_B)[None, :])
                codes = _code_tile(weight, None, line, column, b // 2, N, BYTES // 2, BLOCK_N, BLOCK_B // 2)
                total = _add_quads(total, value, codes, groups, KIND, DTYPE)
                if GATED:
                    codes = _code_tile(weight, None, line + N, column, b // 2, N, BYTES // 2, BLOCK_N, BLOCK_B // 2)
                    gated = _add_quads(gated, value, codes, up_groups, KIND, DTYPE)
            elif PAIRS:
                even = tl.load(lines + k)
                odd = tl.load(lines + k + BLOCK_B // 2)
                high_even = tl.load(lines + k + HALF)
                high_odd = tl.load(lines + k + HALF + BLOCK_B // 2)
                codes = _code_tile(weight, None, line, column, b // 2, N, BYTES // 2, BLOCK_N, BLOCK_B // 2)
                total = _add_pairs(total, even, odd, high_even, high_odd, codes, groups, KIND, DTYPE)
                if GATED:
                    codes = _code_tile(weight, None, line + N, column, b // 2, N, BYTES // 2, BLOCK_N, BLOCK_B // 2)
                    gated = _add_pairs(gated, even, odd, high_even, high_odd, codes, up_groups, KIND, DTYPE)
            else:
                if HALF or K % BLOCK_B == 0:
                    low = tl.load(lines + k)
                else:
                    low = tl.load(lines + k, mask=k + depth < K, other=0.0)
                high = low
                if HALF:
                    high = tl.load(lines + k + HALF)
                codes = _code_tile(weight, None, line, column, b, N, BYTES, BLOCK_N, BLOCK_B)
                total = _add_product(total, low, high, codes, groups, KIND, HALF, DTYPE)
                if GATED:
                    codes = _code_tile(weight, None, line + N, column, b, N, BYTES, BLOCK_N, BLOCK_B)
                    gated = _add_product(gated, low, high, codes, up_groups, KIND, HALF, DTYPE)
    outputs = column + tl.arange(0, BLOCK_N)
    total = _with_bias(total, bias, expert, 0, outputs, N, ALL, 0)
    if GATED:
        gated = _with_bias(gated, bias, expert, N, outputs, N, ALL, 0)
        total = gate_mul(total, gated, ACTIVATION)
    inside = (outputs < N)[:, None] & (row < end)[None, :]
    if PAIRS and GATED:
        place = outputs // 32 * 32 + outputs % 2 * 16 + outputs % 32 // 2
    else:
        place = outputs
    tl.store(y + (target * N)[None, :] + place[:, None], total.to(y.dtype.element_ty), mask=inside)


def in_pairs(*stacks: Stack) -> bool:
    """Whether the stacks' codes are read two bytes at a time."""
    return USE_PAIRS and all(stack.kind == "mxfp4" and stack.half >= 32 for stack in stacks)


def evens_first(x: torch.Tensor) -> torch.Tensor:
    """x [rows, inputs] with the even inputs of every 32 before the odd ones."""
    return x.unflatten(1, (-1, 16, 2)).transpose(2, 3).flatten(1)


USE_PAIRS = True
"""Off only to compare."""
_REGISTERS = {32: 80, 64: 128}
"""Of a thread at most, by rows: two or three programs of 8 warps on a multiprocessor, without spilling."""


def encode(x: torch.Tensor, stack: Stack) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes like x, scales float32 [rows, groups]) of activations, as `stack` wants them.

    Bytes: x once, half as many written. Operations: about 8 per value.
    """
    rows, depth = x.shape
    group = BLOCK if stack.kind == "block" else 0
    codes = x.new_empty((rows, depth), dtype=stack.codes.dtype)
    scales = x.new_empty((rows, -(-depth // group) if group else 1), dtype=torch.float32)
    _encode[(rows,)](
        x, stack.input_scale, codes, scales, x.stride(0),
        **_encode_constants(depth, group, stack.codes.dtype is torch.int8),
    )  # fmt: skip
    return codes, scales


def tile_gate_up(
    x: torch.Tensor,
    layout: ExpertLayout,
    stack: Stack,
    bias: torch.Tensor | None,
    top_k: int,
    config: ExpertsConfig,
    activation: str = "silu",
    encoded: bool = False,
    pairs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The features of every pair [pairs, width], in the layout's order; `encoded`: as (codes, scales) of groups of 128;
    `pairs`: codes are read in pairs, and features are written even ones first, see `_dequantized`.

    Bytes: the weights of the experts used, once; x once per pair, from L2 after the first read.
    Operations: 4 per weight and pair, on tensor cores.
    """
    count, width = layout.order.shape[0], stack.outputs // 2
    scales = x.new_empty((count, -(-width // BLOCK)), dtype=torch.float32) if encoded else None
    out = x.new_empty((count, width), dtype=torch.float8_e4m3fn if encoded else x.dtype)
    x = evens_first(x) if pairs else x
    _launch(x, None, layout, stack, bias, out, scales, top_k, config, config.gate_up, True, activation, pairs)
    return out, scales


def tile_down(
    features: torch.Tensor,
    scales: torch.Tensor | None,
    layout: ExpertLayout,
    stack: Stack,
    bias: torch.Tensor | None,
    top_k: int,
    config: ExpertsConfig,
    pairs: bool = False,
) -> torch.Tensor:
    """The result of every pair [pairs, hidden], in token order. `scales`: features are codes, with these; `pairs`: as
    in `tile_gate_up`.

    Bytes: the weights of the experts used, once; the features, and the results written. Operations: 2 per weight and
    pair, on tensor cores.
    """
    out = features.new_empty((features.shape[0], stack.outputs), dtype=stack.dtype)
    _launch(features, scales, layout, stack, bias, out, None, top_k, config, config.down, False, "silu", pairs)
    return out


def _launch(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    layout: ExpertLayout,
    stack: Stack,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
    top_k: int,
    config: ExpertsConfig,
    block: GemmTile,
    gated: bool,
    activation: str,
    pairs: bool,
) -> None:
    columns = out.shape[1]
    grid = (layout.tiles * triton.cdiv(columns, block.n),)
    if not stack.quantizes:
        _dequantized[grid](
            x, stack.codes.view(torch.int16) if pairs else stack.codes, stack.scale, stack.zero, stack.minimum,
            stack.factor, bias, layout.order, layout.spans, out,
            **_dequantized_constants(
                "mxfp4-bounded" if pairs and stack.bounded else stack.kind, stack.experts, top_k, columns, stack.inputs,
                stack.group, stack.half, config.block_m, block, gated, activation, stack.dtype, pairs,
            ),
        )  # fmt: skip
        return
    if scales is None:
        x, scales = encode(x, stack)
    x_view = view = None
    if config.tma:
        view = TensorDescriptor.from_tensor(stack.codes.flatten(0, 1), [min(block.n, PART), block.k])
        if not gated:
            x_view = TensorDescriptor.from_tensor(x, [config.block_m, block.k])
    rows = stack.group if stack.kind == "block" else 0
    _scaled[grid](
        x, x_view, scales, stack.codes, view, stack.scale, bias, layout.order, layout.spans, out, out_scales,
        **_scaled_constants(
            stack.experts, top_k, columns, stack.inputs, rows, stack.codes.dtype is torch.int8, config.block_m, block,
            gated, activation, out_scales is not None, stack.dtype,
        ),
    )  # fmt: skip


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@functools.cache
def _encode_constants(depth: int, group: int, int8: bool) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    block = max(triton.next_power_of_2(depth), group)
    warps = min(max(block // 512, 1), 16)
    return {"K": depth, "BLOCK": block, "GROUP": group or block, "INT8": int8, "num_warps": warps, **pdl()}


@functools.cache
def _scaled_constants(
    experts: int,
    top_k: int,
    columns: int,
    depth: int,
    rows: int,
    int8: bool,
    block_m: int,
    block: GemmTile,
    gated: bool,
    activation: str,
    encoded: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    return {
        "E": experts,
        "TOP": top_k,
        "N": columns,
        "K": depth,
        "BLOCK_M": block_m,
        "BLOCK_N": min(block.n, PART),
        "BLOCK_K": BLOCK if rows else block.k,
        "STAGES": block.stages,
        "ROWS": rows,
        "INT8": int8,
        "GATED": gated,
        "PARTS": 2 if gated else triton.cdiv(block.n, PART),
        "ACTIVATION": activation,
        "ENCODED": encoded,
        "SWAP": block_m < SWAPPED,
        "GROUP": GROUP if block_m > SWAPPED and columns >= WIDE * block.n else 1,
        "SPAN": SPAN,
        "DTYPE": _DTYPES[dtype],
        "num_warps": block.warps,
        **pdl(),
    }


@functools.cache
def _dequantized_constants(
    kind: str,
    experts: int,
    top_k: int,
    columns: int,
    depth: int,
    group: int,
    half: int,
    block_m: int,
    block: GemmTile,
    gated: bool,
    activation: str,
    dtype: torch.dtype,
    pairs: bool = False,
) -> dict[str, Any]:
    """Constexpr arguments and launch options. Inputs of one product have one scale, so that it is a number per output;
    an iteration has as many products as `block.k` inputs need, where the whole divides into such iterations."""
    step = min(half or BLOCK // 2, BLOCK // 2, group if 0 < group < depth else depth)
    step = 1 << (step.bit_length() - 1)
    inputs = 2 * step if half else step
    products = -(-depth // inputs)
    unroll = next(count for count in range(max(block.k // inputs, 1), 0, -1) if products % count == 0)
    return {
        "E": experts,
        "TOP": top_k,
        "N": columns,
        "K": depth,
        "KIND": kind,
        "G": group or depth,
        "HALF": half,
        "BLOCK_M": block_m,
        "BLOCK_N": block.n,
        "BLOCK_B": step,
        "UNROLL": unroll,
        "STAGES": block.stages,
        "GATED": gated,
        "ACTIVATION": activation,
        "GROUP": GROUP if block_m > SWAPPED and columns >= WIDE * block.n else 1,
        "SPAN": SPAN,
        "DTYPE": _DTYPES[dtype],
        "PAIRS": pairs,
        "num_warps": block.warps,
        **({"maxnreg": _REGISTERS[block_m]} if pairs and gated and block.warps == 8 and block_m in _REGISTERS else {}),
        **pdl(),
    }
