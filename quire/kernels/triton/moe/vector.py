"""Experts of up to 8 tokens: each pair (token, chosen expert) by itself, on the float32 FMA units.

With so few tokens two rarely share an expert, and the time is that of reading the weights. Two kernels, without
sorting: gate and up with the activation fused, where a program owns a few features of one pair; and down, where a
program owns a few outputs of one token and loops over all its experts, so that the sum over them needs no exchange and
has a fixed order.

The preceding norm can be fused, as in `skinny_gemm`. Routing stays a kernel of its own (`route.py`): repeated in every
program it cost more than that kernel's launch.

The second kernel reads the routing, and with it its weights, before `gdc_wait`: the kernel that wrote the routing has
ended by then, because the first kernel launches its dependents only after its own wait.
"""

# ruff: noqa: N803, N806, RUF005  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.gates import PLAIN_EXPERTS, ExpertVariant, has_gate
from quire.kernels.triton.gates import gate_mul
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, GemmTile
from quire.kernels.triton.skinny_gemm.vector import apply_gain, load_chunks, partials, weight_rows


@triton.jit
def _gate_up(
    x, gain, experts, weight, bias, y, eps,
    E: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDE: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PAIRED: tl.constexpr = ACTIVATION != "relu2_alone"
    EACH: tl.constexpr = 2 * N if PAIRED else N
    program = tl.program_id(0)
    pair = program // BLOCKS
    first = program % BLOCKS * BLOCK_N
    token = (pair // TOP).to(tl.int64)
    if gain is not None:
        gains = load_chunks(gain, K, BLOCK_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    vector = load_chunks(x + token * K, K, BLOCK_K)
    expert = tl.load(experts + pair)
    if (expert < 0) | (expert >= E):
        return  # on another rank; `_down` does not read what is not written here
    own = weight + expert.to(tl.int64) * (EACH * K)
    tiles = weight_rows(own, first, N, K, BLOCK_N, BLOCK_K)
    if PAIRED:
        tiles = tiles + weight_rows(own + N * K, first, N, K, BLOCK_N, BLOCK_K)
    scale = 1.0
    if gain is not None:
        vector, squares = apply_gain(vector, None, gains, None, False, K, BLOCK_K)
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    part = partials(tiles[:CHUNKS], (vector,), 1, BLOCK_N, BLOCK_K, CHUNKS, WIDE)
    if PAIRED:
        gated = partials(tiles[CHUNKS:], (vector,), 1, BLOCK_N, BLOCK_K, CHUNKS, WIDE)
        gate, up = tl.split(tl.sum(tl.join(part, gated), 1))
        up *= scale
    else:
        gate = tl.sum(part, 1)
        up = gate
    gate *= scale
    column = first + tl.arange(0, BLOCK_N)
    if bias is not None:
        at = bias + expert.to(tl.int64) * EACH + column
        gate += tl.load(at, mask=column < N, other=0.0).to(tl.float32)
        if PAIRED:
            up += tl.load(at + N, mask=column < N, other=0.0).to(tl.float32)
    out = gate_mul(gate, up, ACTIVATION)
    tl.store(y + pair * N + column, out.to(y.dtype.element_ty), mask=column < N)


@triton.jit
def _load_weights(at, ours, first, K: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr):
    """CHUNKS weight tiles [SLOTS, BLOCK_N, BLOCK_K] from input `first`; zeros past the end and for absent experts."""
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        k = first + chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = ours[:, None, None] & (k < K)[None, None, :]
        tiles = tiles + (tl.load(at + k[None, None, :], mask=inside, other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _accumulate(
    part, tiles, source, ours, first,
    K: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Add each thread's partial dot products of these weights with the features to `part`."""
    for chunk in tl.static_range(CHUNKS):
        k = first + chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        value = tl.load(source + k[None, :], mask=ours[:, None] & (k < K)[None, :], other=0.0)
        product = tiles[chunk].to(tl.float32) * value.to(tl.float32)[:, None, :]
        part += tl.sum(tl.reshape(product, (SLOTS, BLOCK_N, BLOCK_K // WIDE, WIDE)), 3)
    return part


@triton.jit
def _down(
    x, weights, experts, weight, bias, y,
    E: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDE: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEP: tl.constexpr = CHUNKS * BLOCK_K
    program = tl.program_id(0)
    token = (program // BLOCKS).to(tl.int64)
    column = program % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.arange(0, SLOTS)
    expert = tl.load(experts + token * TOP + slot, mask=slot < TOP, other=-1)
    ours = (expert >= 0) & (expert < E)
    share = tl.load(weights + token * TOP + slot, mask=ours, other=0.0)
    # Outputs past the end repeat the last and are not stored.
    line = expert.to(tl.int64)[:, None] * N + tl.minimum(column, N - 1)[None, :]
    at = weight + line[:, :, None] * K
    source = x + (token * TOP + tl.arange(0, SLOTS))[:, None] * K
    tiles = _load_weights(at, ours, 0, K, BLOCK_K, CHUNKS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.zeros((SLOTS, BLOCK_N, BLOCK_K // WIDE), tl.float32)
    if STEP >= K:
        part = _accumulate(part, tiles, source, ours, 0, K, SLOTS, BLOCK_N, BLOCK_K, WIDE, CHUNKS)
    else:
        for first in range(0, K, STEP):
            ahead = _load_weights(at, ours, first + STEP, K, BLOCK_K, CHUNKS)
            part = _accumulate(part, tiles, source, ours, first, K, SLOTS, BLOCK_N, BLOCK_K, WIDE, CHUNKS)
            tiles = ahead
    total = tl.sum(part, 2)
    if bias is not None:
        total += tl.load(bias + line, mask=ours[:, None], other=0.0).to(tl.float32)
    out = tl.sum(total * share[:, None], 0)
    tl.store(y + token * N + column, out.to(y.dtype.element_ty), mask=column < N)


def vector_experts(
    x: torch.Tensor,
    routing: ChosenExperts,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    config: ExpertsConfig,
    norm: tuple[torch.Tensor, float] | None = None,
    variant: ExpertVariant = PLAIN_EXPERTS,
) -> torch.Tensor:
    """`Ops.experts` for few tokens; `norm`: x is normed with (gain, eps) first."""
    features = vector_gate_up(x, routing, gate_up, config.gate_up, norm, variant.gate_up_bias, variant.activation)
    return vector_down(features, routing, down, config.down, variant.down_bias)


def vector_gate_up(
    x: torch.Tensor,
    routing: ChosenExperts,
    weight: torch.Tensor,
    block: GemmTile,
    norm: tuple[torch.Tensor, float] | None,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """silu(gate) * up, or another activation, of every pair [tokens * top_k, width]; without gates there is up alone.

    Bytes: the two weights of each pair's expert; the input and the gain once per program, from cache. Operations: one
    conversion and one multiply-add per weight.
    """
    tokens, depth = x.shape
    experts, rows, _ = weight.shape
    pairs, width = tokens * routing.top_k, rows // (1 + has_gate(activation))
    out = x.new_empty((pairs, width))
    gain, eps = norm or (None, 0.0)
    _gate_up[(pairs * triton.cdiv(width, block.n),)](
        x, gain, routing.experts, weight, bias, out, eps, ACTIVATION=activation,
        **_gate_up_constants(experts, routing.top_k, width, depth, block, x.element_size()),
    )  # fmt: skip
    return out


def vector_down(
    features: torch.Tensor,
    routing: ChosenExperts,
    weight: torch.Tensor,
    block: GemmTile,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum over each token's experts [tokens, hidden].

    Bytes: the weight of each pair's expert; the features once per program, from cache. Operations: one conversion and
    one multiply-add per weight.
    """
    experts, hidden, width = weight.shape
    tokens = features.shape[0] // routing.top_k
    out = features.new_empty((tokens, hidden))
    _down[(tokens * triton.cdiv(hidden, block.n),)](
        features, routing.weights, routing.experts, weight, bias, out,
        **_down_constants(experts, routing.top_k, hidden, width, block, features.element_size()),
    )  # fmt: skip
    return out


@functools.cache
def _gate_up_constants(
    experts: int, top_k: int, width: int, depth: int, block: GemmTile, itemsize: int
) -> dict[str, Any]:
    """Constexpr arguments and launch options: a thread loads 16 bytes of each weight row and chunk."""
    wide = 16 // itemsize
    return {
        "E": experts,
        "TOP": top_k,
        "N": width,
        "K": depth,
        "BLOCK_N": block.n,
        "BLOCK_K": 32 * block.warps * wide,
        "WIDE": wide,
        "num_warps": block.warps,
        **pdl(),
    }


@functools.cache
def _down_constants(
    experts: int, top_k: int, hidden: int, width: int, block: GemmTile, itemsize: int
) -> dict[str, Any]:
    """Constexpr arguments and launch options: a warp loads 512 bytes of a weight row at a time; warps are spread over
    rows first, then along a row."""
    wide = 16 // itemsize
    slots = triton.next_power_of_2(top_k)
    block_k = 32 * wide * max(1, block.warps // (slots * block.n))
    chunks = triton.cdiv(width, block_k)
    # 16 bytes are 4 registers. 64 registers hold weights: all chunks, or half of them for this iteration and half
    # for the next.
    held = 16 * 32 * wide * block.warps // (slots * block.n * block_k)
    if chunks > held:
        chunks = max(1, held // 2)
    return {
        "E": experts,
        "TOP": top_k,
        "N": hidden,
        "K": width,
        "SLOTS": slots,
        "BLOCK_N": block.n,
        "BLOCK_K": block_k,
        "WIDE": wide,
        "CHUNKS": chunks,
        "num_warps": block.warps,
        **pdl(),
    }
