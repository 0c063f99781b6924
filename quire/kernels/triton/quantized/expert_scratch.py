"""Experts in few bits, of very many tokens: the stack is dequantized, and multiplied as a 16-bit one.

From about a hundred tokens an expert on, tensor cores wait for the dequantization of tiles longer than it takes to
write the whole stack in 16 bits once and read it again. One buffer serves both stacks of all layers: a layer's kernels
run one after the other on one stream.
"""

# ruff: noqa: N803, N806, RUF005  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig
from quire.kernels.triton.moe.layout import arrange
from quire.kernels.triton.moe.tile import combine, tile_down, tile_gate_up
from quire.kernels.triton.quantized.expert_stacks import Stack
from quire.kernels.triton.quantized.expert_tiles import group_of, numbers, split

BLOCK_N, CHUNKS = 32, 4
"""Rows of a program, and pieces of each: 16 KB of codes of 4 bits in flight on a multiprocessor per 8 programs."""


@triton.jit
def _dequantize_stack(
    codes, scale, zero, minimum, factor, y,
    LINES: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = K // 2 if HALF else K
    BLOCKS: tl.constexpr = (BYTES + BLOCK_B * CHUNKS - 1) // (BLOCK_B * CHUNKS)
    DTYPE: tl.constexpr = y.dtype.element_ty
    program = tl.program_id(0)
    column = program // BLOCKS * BLOCK_N
    first = program % BLOCKS * (BLOCK_B * CHUNKS)
    lines = tl.minimum(column + tl.arange(0, BLOCK_N), LINES - 1).to(tl.int64)
    depth = tl.arange(0, BLOCK_B)
    whole = program * 0  # the stack is read as one matrix
    last: tl.constexpr = (BYTES - 1) // BLOCK_B * BLOCK_B  # pieces past the end repeat the last one
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        byte = tl.minimum(first + chunk * BLOCK_B, last) + depth
        place = codes + lines[:, None] * BYTES + byte[None, :]
        tiles = tiles + (tl.load(place, mask=(byte < BYTES)[None, :], other=0.0, eviction_policy="evict_first"),)
    if PDL:
        # The preceding kernel may still read the buffer.
        gdc_wait()
        gdc_launch_dependents()
    for chunk in tl.static_range(CHUNKS):
        b = tl.multiple_of(tl.minimum(first + chunk * BLOCK_B, last), BLOCK_B)
        inside = (b + depth < BYTES)[None, :]
        if HALF:
            k = tl.multiple_of(b // HALF * (2 * HALF) + b % HALF, BLOCK_B)
            low, high = split(tiles[chunk], KIND, DTYPE)
            group = group_of(
                scale, zero, minimum, factor, whole, 0, column, k, KIND, LINES, K, LINES, G, BLOCK_N, DTYPE
            )  # fmt: skip
            target = y + lines[:, None] * K + k + depth[None, :]
            tl.store(target, numbers(low, group, KIND, DTYPE), mask=inside)
            group = group_of(
                scale, zero, minimum, factor, whole, 0, column, k + HALF, KIND, LINES, K, LINES, G, BLOCK_N, DTYPE
            )  # fmt: skip
            tl.store(target + HALF, numbers(high, group, KIND, DTYPE), mask=inside)
        else:
            group = group_of(
                scale, zero, minimum, factor, whole, 0, column, b, KIND, LINES, K, LINES, G, BLOCK_N, DTYPE
            )  # fmt: skip
            value = numbers(tiles[chunk], group, KIND, DTYPE)
            tl.store(y + lines[:, None] * K + b + depth[None, :], value, mask=inside)


def scratch_experts(
    x: torch.Tensor,
    routing: ChosenExperts,
    gate_up: Stack,
    down: Stack,
    config: ExpertsConfig,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """`Ops.experts` for very many tokens; `config` is that of 16-bit experts."""
    top_k, count = routing.top_k, gate_up.experts
    layout = arrange(routing.experts, count, config.block_m)
    matrices = _values(gate_up, gate_up, down)
    features = tile_gate_up(x, layout, matrices, top_k, config, gate_up_bias, activation)
    matrices = _values(down, gate_up, down)
    results = tile_down(features, layout, matrices, top_k, config, down_bias)
    return combine(results, routing.weights, routing.experts, count)


def _values(stack: Stack, gate_up: Stack, down: Stack) -> torch.Tensor:
    """The numbers of one of the two stacks: its copy, or what is written to the buffer of both."""
    return dequantize_stack(stack, _buffer(gate_up, down)) if stack.copy is None else stack.copy


def dequantize_stack(stack: Stack, buffer: torch.Tensor) -> torch.Tensor:
    """The stack's numbers [experts, outputs, inputs], each rounded once, written to the buffer's beginning.

    Bytes: codes and scales once, 2 per weight written. Operations: 1 to 3 per weight.
    """
    lines = stack.experts * stack.outputs
    out = buffer[: lines * stack.inputs].view(stack.shape)
    constants = _constants(stack.kind, lines, stack.inputs, stack.group, stack.half)
    size = stack.inputs // 2 if stack.half else stack.inputs
    programs = triton.cdiv(lines, BLOCK_N) * triton.cdiv(size, constants["BLOCK_B"] * CHUNKS)
    _dequantize_stack[(programs,)](
        stack.codes, stack.scale, stack.zero, stack.minimum, stack.factor, out, **constants
    )  # fmt: skip
    return out


def scratch_bytes(gate_up: Stack, down: Stack) -> int:
    """Bytes of the buffer that these stacks need."""
    return max(gate_up.experts * stack.outputs * stack.inputs for stack in (gate_up, down)) * gate_up.dtype.itemsize


_buffers: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}


def _buffer(gate_up: Stack, down: Stack) -> torch.Tensor:
    """The buffer. A larger one replaces it; CUDA graphs keep those they were given."""
    held = _buffers.setdefault((gate_up.codes.device, gate_up.dtype), [])
    size = scratch_bytes(gate_up, down) // gate_up.dtype.itemsize
    if not held or held[-1].numel() < size:
        held.append(torch.empty(size, dtype=gate_up.dtype, device=gate_up.codes.device))
    return held[-1]


@functools.cache
def _constants(kind: str, lines: int, depth: int, group: int, half: int) -> dict[str, Any]:
    """Constexpr arguments and launch options: a piece is at most 64 bytes of a row, whose low nibbles have one scale,
    and whose high nibbles have one."""
    step = min(half or 64, 64, group if 0 < group < depth else depth)
    return {
        "LINES": lines,
        "K": depth,
        "KIND": kind,
        "G": group or depth,
        "HALF": half,
        "BLOCK_N": BLOCK_N,
        "BLOCK_B": 1 << (step.bit_length() - 1),
        "CHUNKS": CHUNKS,
        "num_warps": 4,
        **pdl(),
    }
