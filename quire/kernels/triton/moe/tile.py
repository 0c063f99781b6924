"""Experts of many tokens: a grouped GEMM over the tokens of each expert, on tensor-core tiles.

`layout.py` has sorted the pairs (token, chosen expert) by expert. Three kernels follow: gate and up with the activation
fused, which gathers its rows of x in that order; down, which scatters every pair's result back to the pair's place; and
the weighted sum over each token's experts, in the order in which they were chosen. So a result's bits depend only on
its token and the tile shape.

With few rows per tile the GEMM is computed transposed, weight @ x.T: Hopper's WGMMA multiplies 64 rows by any multiple
of 8 columns, so the weights take the side of 64.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.gates import PLAIN_EXPERTS, ExpertVariant, has_gate
from quire.kernels.triton.gates import gate_mul
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.moe.common import ExpertsConfig, GemmTile
from quire.kernels.triton.moe.layout import SPAN, ExpertLayout, arrange

SWAPPED = 64
"""Rows of a tile up to which the GEMM is computed transposed."""
GROUP, WIDE = 16, 64
"""For weights at least WIDE tiles wide, GROUP row tiles visit the weight tiles together: if one row tile visited all of
them alone, the first would have left L2 by the end."""
COMBINE_COLUMNS = 1024
"""Columns of a program that sums over experts."""


@triton.jit
def _weight_tile(
    weight, view, line, column, k, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Weights [BLOCK_N, BLOCK_K] from output `column` of the expert whose matrix begins at row `line` of the stack."""
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
def _multiply(tile, value, total, SWAP: tl.constexpr):
    """total + value @ tile.T, or its transpose."""
    if SWAP:
        total = tl.dot(tile, value.T, total, input_precision="ieee")
    else:
        total = tl.dot(value, tile.T, total, input_precision="ieee")
    return total


@triton.jit
def _add_bias(total, bias, line, outputs, N: tl.constexpr, SWAP: tl.constexpr):
    """total + the biases of these outputs of the part that begins at row `line` of the stack."""
    if bias is not None:
        own = tl.load(bias + line + outputs, mask=outputs < N, other=0.0).to(tl.float32)
        if SWAP:
            total += own[:, None]
        else:
            total += own[None, :]
    return total


@triton.jit
def _grouped(
    x, x_view, weight, view, bias, order, spans, y,
    E: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, SWAP: tl.constexpr, GROUP: tl.constexpr,
    SPAN: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PAIRED: tl.constexpr = GATED and ACTIVATION != "relu2_alone"
    EACH: tl.constexpr = 2 * N if PAIRED else N
    program = tl.program_id(0)
    # Adjacent programs share rows of x, and an expert's tiles are adjacent: its weights are read from memory once.
    # Where L2 does not hold them, GROUP row tiles visit the weights together.
    if GROUP == 1:
        at = spans + program // WIDTH * SPAN
        column = program % WIDTH * BLOCK_N
    else:
        group = program // (WIDTH * GROUP) * GROUP
        size = tl.minimum(tl.num_programs(0) // WIDTH - group, GROUP)
        within = program % (WIDTH * GROUP)
        at = spans + (group + within % size) * SPAN
        column = within // size * BLOCK_N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(at)
    if expert >= E:
        return
    first = tl.load(at + 1)
    end = tl.load(at + 2)
    row = first + tl.arange(0, BLOCK_M)
    # Rows past the end repeat the last and are not stored.
    held = tl.minimum(row, end - 1)
    pair = tl.load(order + held)
    source = pair // TOP if GATED else held
    target = row if GATED else pair
    depth = tl.arange(0, BLOCK_K)[None, :]
    lines = x + source.to(tl.int64)[:, None] * K + depth
    line = expert * EACH
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gated = total
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        tile = _weight_tile(weight, view, line, column, k, N, K, BLOCK_N, BLOCK_K)
        if x_view is not None:
            value = x_view.load([first, k])  # rows past the end are the next expert's, and not stored
        elif K % BLOCK_K == 0:
            value = tl.load(lines + k)
        else:
            value = tl.load(lines + k, mask=k + depth < K, other=0.0)
        total = _multiply(tile, value, total, SWAP)
        if PAIRED:
            tile = _weight_tile(weight, view, line + N, column, k, N, K, BLOCK_N, BLOCK_K)
            gated = _multiply(tile, value, gated, SWAP)
    outputs = column + tl.arange(0, BLOCK_N)
    total = _add_bias(total, bias, line, outputs, N, SWAP)
    if PAIRED:
        gated = _add_bias(gated, bias, line + N, outputs, N, SWAP)
    if GATED:
        total = gate_mul(total, gated, ACTIVATION)
    result = total.to(y.dtype.element_ty)
    target = target.to(tl.int64) * N
    if SWAP:
        inside = (outputs < N)[:, None] & (row < end)[None, :]
        tl.store(y + target[None, :] + outputs[:, None], result, mask=inside)
    else:
        inside = (outputs < N)[None, :] & (row < end)[:, None]
        tl.store(y + target[:, None] + outputs[None, :], result, mask=inside)


@triton.jit
def _combine(
    x, weights, experts, y,
    E: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    token = (program // BLOCKS).to(tl.int64)
    column = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP):
        pair = token * TOP + slot
        expert = tl.load(experts + pair)
        # Results of experts on other ranks were not written.
        ours = (expert >= 0) & (expert < E)
        part = tl.load(x + pair * N + column, mask=inside & ours, other=0.0).to(tl.float32)
        total += part * tl.where(ours, tl.load(weights + pair), 0.0)
    tl.store(y + token * N + column, total.to(y.dtype.element_ty), mask=inside)


def tile_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    config: ExpertsConfig,
    variant: ExpertVariant = PLAIN_EXPERTS,
) -> torch.Tensor:
    """`Ops.experts` for any number of tokens."""
    top_k = experts.shape[1]
    layout = arrange(experts, gate_up.shape[0], config.block_m)
    features = tile_gate_up(x, layout, gate_up, top_k, config, variant.gate_up_bias, variant.activation)
    results = tile_down(features, layout, down, top_k, config, variant.down_bias)
    return combine(results, weights, experts, gate_up.shape[0])


def tile_gate_up(
    x: torch.Tensor,
    layout: ExpertLayout,
    weight: torch.Tensor,
    top_k: int,
    config: ExpertsConfig,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """The activation of every pair's gate and up [pairs, width], in the layout's order. `bias`: [experts, 2 * width].
    Without gates there is up alone.

    Bytes: the weights of the experts used, once; x once per pair, from L2 after the first read.
    Operations: 4 per weight and pair, on tensor cores.
    """
    out = x.new_empty((layout.order.shape[0], weight.shape[1] // (1 + has_gate(activation))))
    _launch(x, layout, weight, bias, out, top_k, config, config.gate_up, True, activation)
    return out


def tile_down(
    features: torch.Tensor,
    layout: ExpertLayout,
    weight: torch.Tensor,
    top_k: int,
    config: ExpertsConfig,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result of every pair [pairs, hidden], in token order. `bias`: [experts, hidden].

    Bytes: the weights of the experts used, once; the features, and the results written. Operations: 2 per weight and
    pair, on tensor cores.
    """
    out = features.new_empty((features.shape[0], weight.shape[1]))
    _launch(features, layout, weight, bias, out, top_k, config, config.down, False, "silu")
    return out


def combine(results: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, count: int) -> torch.Tensor:
    """The weighted sum over experts of results [tokens * top_k, hidden].

    Bytes: top_k + 1 values per output. Operations: 2 top_k per output.
    """
    tokens, top_k = weights.shape
    hidden = results.shape[1]
    out = results.new_empty((tokens, hidden))
    constants = _combine_constants(count, top_k, hidden)
    _combine[(tokens * triton.cdiv(hidden, constants["BLOCK"]),)](results, weights, experts, out, **constants)
    return out


def _launch(
    x: torch.Tensor,
    layout: ExpertLayout,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    top_k: int,
    config: ExpertsConfig,
    block: GemmTile,
    gated: bool,
    activation: str,
) -> None:
    x_view = view = None
    if config.tma:
        view = TensorDescriptor.from_tensor(weight.flatten(0, 1), [block.n, block.k])
        if not gated:
            x_view = TensorDescriptor.from_tensor(x, [config.block_m, block.k])
    columns = out.shape[1]
    _grouped[(layout.tiles * triton.cdiv(columns, block.n),)](
        x, x_view, weight, view, bias, layout.order, layout.spans, out, ACTIVATION=activation,
        **_constants(weight.shape[0], top_k, columns, x.shape[1], config.block_m, block, gated),
    )  # fmt: skip


@functools.cache
def _constants(
    experts: int, top_k: int, columns: int, depth: int, block_m: int, block: GemmTile, gated: bool
) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    return {
        "E": experts,
        "TOP": top_k,
        "N": columns,
        "K": depth,
        "BLOCK_M": block_m,
        "BLOCK_N": block.n,
        "BLOCK_K": block.k,
        "STAGES": block.stages,
        "GATED": gated,
        "SWAP": block_m <= SWAPPED,
        "GROUP": GROUP if block_m > SWAPPED and columns >= WIDE * block.n else 1,
        "SPAN": SPAN,
        "num_warps": block.warps,
        **pdl(),
    }


@functools.cache
def _combine_constants(experts: int, top_k: int, hidden: int) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    block = min(COMBINE_COLUMNS, triton.next_power_of_2(hidden))
    return {"E": experts, "TOP": top_k, "N": hidden, "BLOCK": block, "num_warps": max(block // 256, 1), **pdl()}
