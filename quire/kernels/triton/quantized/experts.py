"""Each token through the experts that the router chose for it, with weights in few bits.

`quantized_experts` serves any number of tokens: up to `MAX_VECTOR_TOKENS` pair by pair (`expert_vectors.py`), more are
sorted by expert into tiles (`expert_tiles.py`). None of the kernels synchronizes with the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, GemmTile
from quire.kernels.triton.moe.layout import LARGE, SMALL, arrange
from quire.kernels.triton.moe.route import MAX_EXPERTS, route
from quire.kernels.triton.moe.tile import combine
from quire.kernels.triton.moe.tuning import BUCKETS
from quire.kernels.triton.quantized.expert_stacks import Stack, stack_of
from quire.kernels.triton.quantized.expert_tiles import encode, tile_down, tile_gate_up
from quire.kernels.triton.quantized.expert_vectors import vector_experts
from quire.kernels.triton.tuning_table import bucket_of
from quire.kernels.weights.base import QuantizedWeight

Task = Callable[[], object]
"""Launches kernels."""

MAX_VECTOR_TOKENS = 8
"""With more, tokens share experts often enough for tiles to pay."""
MAX_VECTOR_BYTES = 4096
"""Of a weight row: a program holds whole rows in registers."""


def tile_experts(
    x: torch.Tensor,
    routing: ChosenExperts,
    gate_up: Stack,
    down: Stack,
    config: ExpertsConfig,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    clamped: bool = False,
) -> torch.Tensor:
    """`Ops.experts` for any number of tokens."""
    layout = arrange(routing.experts, gate_up.experts, config.block_m)
    encoded = gate_up.kind == down.kind == "block"
    features, scales = tile_gate_up(x, layout, gate_up, gate_up_bias, routing.top_k, config, clamped, encoded)
    results = tile_down(features, scales, layout, down, down_bias, routing.top_k, config)
    return combine(results, routing.weights, routing.experts, gate_up.experts)


class Candidates(NamedTuple):
    """Configurations that differ only in the tile shapes of their two GEMMs, the best guesses first."""

    base: ExpertsConfig
    gate_ups: list[GemmTile]
    downs: list[GemmTile]


_VECTORS = (
    [GemmTile(n, warps=warps) for n, warps in ((8, 4), (4, 4), (8, 8), (4, 2), (2, 4), (16, 8))],
    [GemmTile(n, warps=warps) for n, warps in ((8, 8), (4, 4), (8, 4), (16, 8), (4, 8), (2, 4))],
)
"""(gate and up, down)."""
_SCALED = {
    16: ([(128, 128, 4, 3), (128, 128, 4, 2), (128, 128, 8, 3)], [(128, 128, 4, 4), (128, 128, 4, 3), (256, 128, 8, 3)]),
    32: ([(128, 128, 4, 3), (128, 128, 4, 2), (128, 128, 8, 3)], [(128, 128, 4, 4), (128, 128, 4, 3), (256, 128, 8, 3)]),
    64: ([(128, 128, 8, 4), (128, 128, 8, 2), (128, 128, 4, 2)], [(128, 128, 4, 3), (128, 128, 4, 4), (256, 128, 4, 4)]),
    128: ([(128, 128, 8, 3), (128, 128, 8, 4)], [(256, 128, 8, 3), (128, 128, 8, 3), (256, 128, 8, 4)]),
}
"""(block_n, block_k, warps, stages) of (gate and up, down) by block_m, for 8-bit codes."""
_DEQUANTIZED = {
    16: ([(64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 4)], [(64, 128, 4, 4), (128, 128, 4, 4), (128, 256, 4, 3)]),
    32: ([(64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 8, 4)], [(64, 128, 4, 4), (128, 128, 4, 4), (128, 256, 4, 3)]),
    64: ([(64, 128, 4, 3), (128, 128, 8, 3), (64, 320, 4, 3)], [(64, 128, 4, 3), (128, 128, 8, 3), (128, 320, 8, 3)]),
    128: ([(128, 128, 8, 3), (128, 128, 8, 4), (128, 320, 8, 2)], [(128, 128, 8, 3), (256, 128, 8, 3), (128, 320, 8, 2)]),
}
"""The same for weights that are dequantized; block_k are inputs of an iteration."""


def candidates(gate_up: Stack, down: Stack, top_k: int, tokens: int) -> list[Candidates]:
    """What to try for at most `tokens` tokens, the best guess first."""
    found = []
    if tokens <= MAX_VECTOR_TOKENS and _fits_vectors(gate_up) and _fits_vectors(down):
        found.append(Candidates(ExpertsConfig("vector", _VECTORS[0][0], _VECTORS[1][0]), *_VECTORS))
    table = _SCALED if gate_up.quantizes else _DEQUANTIZED
    for block_m in _tile_heights(tokens * top_k / gate_up.experts):
        gate_ups, downs = ([GemmTile(*block) for block in blocks] for blocks in table[block_m])
        tma = gate_up.quantizes and down.quantizes and gate_up.inputs % 16 == down.inputs % 16 == 0
        found.append(Candidates(ExpertsConfig("tile", gate_ups[0], downs[0], block_m, tma), gate_ups, downs))
    return found


def _tile_heights(tokens_an_expert: float) -> list[int]:
    """block_m, the best guess first: most experts should need a single tile, or fill several."""
    if tokens_an_expert <= 8:
        return [16, 32]
    if tokens_an_expert <= 24:
        return [32, 16]
    if tokens_an_expert <= 48:
        return [64, 32]
    return [128, 64]


def _fits_vectors(stack: Stack) -> bool:
    """Whether the vector kernels can read the stack: rows in pieces of 16 bytes, and not too long."""
    size = stack.inputs * stack.bits // 8
    return size % 16 == 0 and size <= MAX_VECTOR_BYTES
