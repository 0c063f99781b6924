"""Each token through the experts that the router chose for it, with weights in few bits.

`quantized_experts` serves any number of tokens. Up to `MAX_VECTOR_TOKENS` go pair by pair (`expert_vectors.py`), more
are sorted by expert into tiles (`expert_tiles.py`). None of the kernels synchronizes with the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, ExpertsShape
from quire.kernels.triton.moe.layout import LARGE, SMALL, arrange
from quire.kernels.triton.moe.route import MAX_EXPERTS, route
from quire.kernels.triton.moe.tile import combine
from quire.kernels.triton.quantized.expert_stacks import Stack, stack_of
from quire.kernels.triton.quantized.expert_tiles import encode, tile_down, tile_gate_up

Task = Callable[[], object]
"""Launches kernels."""


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
